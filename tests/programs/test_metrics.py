"""What a run writes into metrics.jsonl, also if it is killed and resumed."""

from __future__ import annotations

import json
import shutil

import pytest
from mindspore.train import Accuracy, Callback, Recall

from ms_accum import Checkpointer
from programs.metrics import MetricsFile
from runs import Run, even

pytestmark = pytest.mark.usefixtures("eager")


class Copies(Callback):
    """Copies the folder of a run whenever something may have been written: what a kill would leave."""

    def __init__(self, folder, copies):
        self.folder, self.copies, self.made = folder, copies, []

    def _copy(self, run_context):
        self.made.append(shutil.copytree(self.folder, self.copies / str(len(self.made))))

    on_train_step_begin = on_train_step_end = on_eval_begin = on_eval_end = on_train_epoch_end = _copy


def test_results_by_class_are_lists(tmp_path):
    data, metrics = even(), MetricsFile(str(tmp_path / "metrics.jsonl"))
    Run().train(data, 2, callbacks=[metrics], valid_dataset=data[:2], metrics={"recall": Recall(), "acc": Accuracy()})
    *_, last = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert len(last["recall"]) == 10 and 0 <= last["acc"] <= 1


def train(folder, *callbacks, **options):
    """Train, and return the lines of the metrics without what is measured."""
    data, states = even(), Checkpointer(folder / "states", every=1, resume="auto")
    metrics = MetricsFile(str(folder / "metrics.jsonl"))
    Run().train(data, 2, states=states, callbacks=[metrics, *callbacks], valid_dataset=data[:2], **options)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "loss")} for line in lines]


@pytest.mark.parametrize(("eval_every", "evaluations"), [(None, [4, 8]), (3, [3, 6, 8])])
def test_run_that_is_killed_anywhere_and_resumed_writes_each_line_once(tmp_path, eval_every, evaluations):
    (tmp_path / "whole").mkdir()
    copies = Copies(tmp_path / "whole", tmp_path)
    lines = train(tmp_path / "whole", copies, eval_every=eval_every)
    assert [line["updates"] for line in lines if "updates" in line] == evaluations
    assert [line["update"] for line in lines if "update" in line] == [1, 2, 3, 4, 5, 6, 7, 8]
    for folder in [*copies.made, tmp_path / "whole"]:  # the last one is complete
        assert train(folder, eval_every=eval_every) == lines, folder.name
        assert train(folder, eval_every=eval_every) == lines, folder.name
