"""The file of metrics has the updates and evaluations of a run, also of a resumed one."""

from __future__ import annotations

import gc
import json
import os
import warnings

import numpy as np
import pytest

from ms_accum.app import metrics
from ms_accum.app.metrics import MetricsFile, ends_with_evaluation, numbers_of
from ms_accum.app.tasks import Accuracy
from ms_accum.training.callbacks import Callbacks, Facts
from update_records import record, tell

pytestmark = pytest.mark.host
NAN = float("nan")


def rows_of(path):
    def raise_invalid(constant):
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=raise_invalid) for line in path.read_text(encoding="utf-8").splitlines()]


def shown(path):
    """Return the updates of the lines of windows, and those of evaluations as texts."""
    return [row.get("update", str(row.get("updates"))) for row in rows_of(path)]


# Updates


def test_each_window_is_one_json_object(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tell(MetricsFile(str(path)), record(1), record(2, loss=0.25))
    first = {"epoch": 1, "update": 1, "loss": 0.5, "lr": 0.25, "grad_norm": 1.5, "samples": 128}
    first.update(seconds=0.125, skipped=False)
    assert rows_of(path) == [first, {**first, "update": 2, "loss": 0.25}]


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_json_has_no_nan(tmp_path, value):
    tell(MetricsFile(str(tmp_path / "m")), record(loss=value, grad_norm=value, skipped=True))
    (row,) = rows_of(tmp_path / "m")
    assert row["loss"] is row["grad_norm"] is None and row["skipped"] is True and row["lr"] == 0.25


def test_metrics_can_be_read_during_run(tmp_path):
    with Callbacks([MetricsFile(str(tmp_path / "m"))], Facts()) as calls:
        calls("on_train_begin", planned=None)
        calls.step_end(record(1))
        assert [row["update"] for row in rows_of(tmp_path / "m")] == [1]


def test_hard_link_is_broken_before_writing(tmp_path):
    for resumed in (0, 1):
        tell(MetricsFile(str(tmp_path / "m")), record(1), record(2))
        os.link(tmp_path / "m", tmp_path / f"kept {resumed}")
        tell(MetricsFile(str(tmp_path / "m")), record(3), cur_step_num=resumed)
        assert shown(tmp_path / "m") == [1, 3][1 - resumed :] and shown(tmp_path / f"kept {resumed}") == [1, 2]


def test_file_of_earlier_run_is_replaced(tmp_path):
    for update in (1, 2):
        tell(MetricsFile(str(tmp_path / "m")), record(update))
    assert [row["update"] for row in rows_of(tmp_path / "m")] == [2]


# Evaluations


def test_evaluation_is_one_json_object(tmp_path):
    file = MetricsFile(str(tmp_path / "m"))
    with Callbacks([file], Facts()) as calls:
        calls("on_train_begin", planned=None)
        calls("on_train_epoch_begin", cur_epoch_num=3)
        calls.step_end(record(2, epoch=3))
        file.evaluated(2, Accuracy(75, 300).numbers)
    assert rows_of(tmp_path / "m")[1] == {"epoch": 3, "updates": 2, "accuracy": 0.25, "correct": 75, "total": 300}


def test_evaluation_after_run_is_appended(tmp_path):
    file = MetricsFile(str(tmp_path / "m"))
    tell(file, record(1), record(2))
    file.evaluated(2, {"accuracy": 0.5})
    assert shown(tmp_path / "m") == [1, 2, "2"] and rows_of(tmp_path / "m")[2]["epoch"] == 1


def test_evaluation_that_a_resumed_run_repeats_is_written_once(tmp_path):
    file = MetricsFile(str(tmp_path / "m"))
    tell(file, record(1), record(2))
    file.evaluated(2, {"accuracy": 0.5})
    resumed = MetricsFile(str(tmp_path / "m"))
    with Callbacks([resumed], Facts(cur_step_num=2)) as calls:
        calls("on_train_begin", planned=None)
        resumed.evaluated(2, {"accuracy": 0.5})
        calls.step_end(record(3))
        resumed.evaluated(3, {"accuracy": 0.5})
    assert shown(tmp_path / "m") == [1, 2, "2", 3, "3"]


def test_evaluation_before_run_is_not_written(tmp_path):
    """On the other ranks, and where nothing was left to train."""
    MetricsFile(str(tmp_path / "m")).evaluated(2, {"accuracy": 0.5})
    assert not (tmp_path / "m").exists()


def test_results_for_callbacks_are_written(tmp_path):
    with Callbacks([MetricsFile(str(tmp_path / "m"))], Facts()) as calls:
        calls("on_train_begin", planned=None)
        for epoch, results in ((1, {"acc": np.float64(0.5), "confused": [1, 2], "eval_loss": 0.125}), (2, None)):
            calls("on_train_epoch_begin", cur_epoch_num=epoch)
            calls.step_end(record(epoch, epoch=epoch))
            calls.epoch_end(results)
    assert shown(tmp_path / "m") == [1, "1", 2]
    assert rows_of(tmp_path / "m")[1] == {"epoch": 1, "updates": 1, "accuracy": 0.5, "eval_loss": 0.125}


def test_results_that_are_not_finite_are_left_out():
    results = {"acc": 1, "loss": NAN, "f1": np.float32(0.5), "table": np.ones(2), "name": "x", "top5": float("inf")}
    assert numbers_of(results) == {"accuracy": 1, "f1": 0.5}


# Resumed runs


def test_resumed_run_keeps_lines_of_earlier_windows(tmp_path):
    path = tmp_path / "m"
    tell(MetricsFile(str(path)), *(record(update) for update in (1, 2, 3)))
    lines = path.read_text().splitlines()
    tell(MetricsFile(str(path)), record(7), cur_step_num=2)
    assert path.read_text().splitlines()[:2] == lines[:2]
    assert shown(path) == [1, 2, 7]


def evaluated_run(path):
    """Write three windows, each with an evaluation, of which the second was skipped."""
    file = MetricsFile(str(path))
    with Callbacks([file], Facts()) as calls:
        calls("on_train_begin", planned=None)
        for update, skipped in ((1, False), (1, True), (2, False)):
            calls.step_end(record(update, skipped=skipped))
            file.evaluated(update, {"accuracy": update / 10})


KEPT = {0: [7], 1: [1, "1", 7], 2: [1, "1", 1, "1", 7], 3: [1, "1", 1, "1", 2, "2", 7], 9: [1, "1", 1, "1", 2, "2", 7]}


def check_kept(folder):
    for windows, expected in KEPT.items():
        evaluated_run(folder / "m")
        tell(MetricsFile(str(folder / "m")), record(7), cur_step_num=windows)
        assert shown(folder / "m") == expected, windows


def test_resumed_run_counts_only_windows(tmp_path):
    check_kept(tmp_path)


@pytest.mark.parametrize("marker", [b'"no such": ', b'"epoch": '])
def test_wrong_line_count_is_detected(tmp_path, monkeypatch, marker):
    """Evaluations as windows, or windows as evaluations."""
    monkeypatch.setattr(metrics, "_EVALUATION", marker)
    with pytest.raises(AssertionError):
        check_kept(tmp_path)


def test_truncated_line_is_not_continued(tmp_path):
    tell(MetricsFile(str(tmp_path / "m")), record(1), record(2))
    text = (tmp_path / "m").read_text()
    (tmp_path / "m").write_text(text[:-20])
    tell(MetricsFile(str(tmp_path / "m")), record(3), cur_step_num=2)
    assert shown(tmp_path / "m") == [1, 3]


def test_binary_file_is_given_up_with_warning(tmp_path):
    (tmp_path / "m").write_bytes(b"\xff\xfe\n" * 3)
    with pytest.warns(RuntimeWarning, match="metrics are no longer written"):
        tell(MetricsFile(str(tmp_path / "m")), record(1), cur_step_num=2)


# What can't be written


@pytest.mark.parametrize("windows", [0, 2])
def test_pipe_is_not_waited_for(tmp_path, windows):
    os.mkfifo(tmp_path / "m")
    with pytest.warns(RuntimeWarning, match="metrics are no longer written to .*: it is a pipe"):
        tell(MetricsFile(str(tmp_path / "m")), record(1), cur_step_num=windows)
    assert not ends_with_evaluation(str(tmp_path / "m"))


def test_unopenable_file_gives_one_warning(tmp_path):
    file = MetricsFile(str(tmp_path / "none" / "m"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tell(file, record(1), record(2))
        file.evaluated(2, {"accuracy": 0.5})
    (warning,) = seen
    assert warning.category is RuntimeWarning and "metrics are no longer written to" in str(warning.message)
    assert os.path.join("none", "m") in str(warning.message)


@pytest.fixture
def full(tmp_path):
    """A file on a disk that is full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    os.symlink("/dev/full", tmp_path / "m")
    return str(tmp_path / "m")


def test_full_disk_gives_one_warning(full):
    with pytest.warns(RuntimeWarning, match="no longer written to '.*m': .*No space left") as seen:
        tell(MetricsFile(full), record(1), record(2))
    assert sum(warning.category is RuntimeWarning for warning in seen) == 1


def test_full_disk_after_run_gives_one_warning(full):
    file = MetricsFile(full)
    tell(file)
    with pytest.warns(RuntimeWarning, match="No space left") as seen:
        for accuracy in (0.25, 0.5):
            file.evaluated(1, {"accuracy": accuracy})
    assert len(seen) == 1


def test_full_disk_leaves_no_open_file(full):
    before = set(os.listdir("/proc/self/fd"))
    with Callbacks([MetricsFile(full)], Facts()) as calls, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        calls("on_train_begin", planned=None)
        calls.step_end(record(1))
        gc.collect()
    assert [str(w.message) for w in seen if w.category is ResourceWarning] == []
    assert set(os.listdir("/proc/self/fd")) == before
