"""TensorBoard gets each update of a run once."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

from event_files import curves
from helpers import micro_batch, slope_driver
from ms_accum import Checkpointer, Group
from ms_accum.app import settings, tensorboard
from ms_accum.app.process import USAGE
from ms_accum.app.tensorboard import TensorBoardLog
from ms_accum.training.callbacks import Callbacks, Facts
from programs import one_line, train
from update_records import record, tell

pytestmark = pytest.mark.host
INSTALLED = tensorboard.find_spec("tensorboardX") is not None
needs_writer = pytest.mark.skipif(not INSTALLED, reason="needs tensorboardX")
NAN = float("nan")


# Readers: one written from the format (`curves`), and that of TensorBoard


def curves_of_tensorboard(folder):
    module = "tensorboard.backend.event_processing.event_accumulator"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it imports
        reader = pytest.importorskip(module, reason="needs tensorboard").EventAccumulator(str(folder))
        reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.fixture(params=[curves, curves_of_tensorboard], ids=["format", "tensorboard"])
def read(request):
    return request.param


def steps(curves, tag="train/loss"):
    return [step for step, _ in curves.get(tag, [])]


# What is written


@needs_writer
def test_each_update_is_a_step(tmp_path, read):
    log = TensorBoardLog(tmp_path / "new" / "tb")
    tell(log, record(1), record(2, loss=0.25, lr=0.125, seconds=0.5))
    assert read(tmp_path / "new" / "tb") == {
        "train/loss": [(1, 0.5), (2, 0.25)],
        "train/lr": [(1, 0.25), (2, 0.125)],
        "train/grad_norm": [(1, 1.5), (2, 1.5)],
        "train/images_per_second": [(1, 1024), (2, 256)],
        "train/skipped": [(1, 0), (2, 0)],
    }


@needs_writer
def test_values_that_are_not_finite_are_left_out(tmp_path, read):
    tell(TensorBoardLog(tmp_path / "tb"), record(1, lr=NAN, loss=float("inf"), seconds=0.0), record(2))
    curves = read(tmp_path / "tb")
    assert {tag: steps(curves, tag) for tag in curves} == {
        "train/grad_norm": [1, 2],
        "train/skipped": [1, 2],
        **dict.fromkeys(("train/loss", "train/lr", "train/images_per_second"), [2]),
    }


@needs_writer
def test_terms_of_the_loss_have_curves(tmp_path, read):
    tell(TensorBoardLog(tmp_path / "tb"), record(1, terms={"ce": 0.25}), record(2, terms={"ce": 0.5, "kl": 2.0}))
    curves = read(tmp_path / "tb")
    assert curves["train/loss_ce"] == [(1, 0.25), (2, 0.5)] and curves["train/loss_kl"] == [(2, 2.0)]


@needs_writer
def test_skipped_window_is_counted_at_next_update(tmp_path, read):
    skipped = record(1, skipped=True, loss=NAN)
    tell(TensorBoardLog(tmp_path / "tb"), record(0, skipped=True), record(1), skipped, skipped, record(2))
    curves = read(tmp_path / "tb")
    assert curves["train/skipped"] == [(1, 1), (2, 3)] and steps(curves) == [1, 2]


@needs_writer
def test_windows_skipped_at_end_are_written(tmp_path, read):
    log = TensorBoardLog(tmp_path / "tb")
    tell(log, record(1), record(1, skipped=True))
    assert read(tmp_path / "tb")["train/skipped"] == [(1, 0), (2, 1)]
    tell(log, record(2), cur_step_num=2)
    assert read(tmp_path / "tb")["train/skipped"] == [(1, 0), (2, 1)] and steps(read(tmp_path / "tb")) == [1, 2]


@needs_writer
def test_evaluations_are_written_during_and_after_run(tmp_path, read):
    log = TensorBoardLog(tmp_path / "tb")
    with Callbacks([log], Facts(cur_epoch_num=1)) as calls:
        calls("on_train_begin", planned=None)
        calls.step_end(record(1))
        calls.epoch_end({"acc": np.float64(0.25), "eval_loss": 2.0, "table": [1]})
        calls.step_end(record(2))
        log.evaluated(2, {"accuracy": 0.5, "correct": 1, "total": 2})
        calls.step_end(record(3))
    log.evaluated(3, {"accuracy": 0.75})
    curves = read(tmp_path / "tb")
    assert curves["test/accuracy"] == [(1, 0.25), (2, 0.5), (3, 0.75)] and curves["test/loss"] == [(1, 2.0)]
    assert steps(curves) == [1, 2, 3] and not any(tag.endswith(("correct", "total", "table")) for tag in curves)


@needs_writer
def test_first_update_is_flushed_at_once_others_each_second(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tensorboard.time, "monotonic", lambda: now[0])
    seen = []
    with Callbacks([TensorBoardLog(tmp_path / "tb")], Facts()) as calls:
        calls("on_train_begin", planned=None)
        for update, now[0] in enumerate((100.0, 100.5, 101.5, 101.75), 1):
            calls.step_end(record(update))
            seen.append(steps(curves(tmp_path / "tb")))
    assert seen == [[1], [1], [1, 2, 3], [1, 2, 3]] and steps(curves(tmp_path / "tb")) == [1, 2, 3, 4]


@needs_writer
def test_run_that_has_not_begun_writes_nothing(tmp_path):
    """On the other ranks of train.py, and where nothing was left to train."""
    log = TensorBoardLog(tmp_path / "tb")
    log.evaluated(3, {"accuracy": 0.75})
    tell(log)
    assert not (tmp_path / "tb").exists()


# Resumed runs


def resumed(folder):
    """Train for three updates, and continue from the first with a new log; the run had skipped a window before."""
    log = TensorBoardLog(folder)
    tell(log, record(0, skipped=True), record(1), record(2), record(3))
    log.evaluated(3, {"accuracy": 0.25})
    tell(TensorBoardLog(folder), record(2, loss=9.0), record(3, loss=9.0), cur_step_num=2)


def check_resumed(curves):
    assert curves["train/loss"] == [(1, 0.5), (2, 9.0), (3, 9.0)]
    assert curves["train/skipped"] == [(1, 1), (2, 1), (3, 1)] and not curves.get("test/accuracy")


@needs_writer
def test_resumed_run_repeats_no_step(tmp_path, read):
    resumed(tmp_path / "tb")
    check_resumed(read(tmp_path / "tb"))


@needs_writer
@pytest.mark.parametrize("by", [None, 1, -1], ids=["not at all", "too late", "too early"])
def test_wrongly_replaced_steps_are_detected(tmp_path, monkeypatch, by):
    real = tensorboard._new_file
    monkeypatch.setattr(
        tensorboard, "_new_file", lambda folder, first: real(folder, first + by if by and first is not None else None)
    )
    resumed(tmp_path / "tb")
    with pytest.raises(AssertionError):
        check_resumed(curves(tmp_path / "tb"))


@needs_writer
def test_new_run_replaces_old_run(tmp_path, read):
    for loss in (1.0, 2.0):
        tell(TensorBoardLog(tmp_path / "tb"), record(1, loss=loss))
    assert read(tmp_path / "tb")["train/loss"] == [(1, 2.0)]


@needs_writer
def test_evaluation_before_first_window_keeps_earlier_steps(tmp_path, read):
    log = TensorBoardLog(tmp_path / "tb")
    tell(log, record(1), record(2))
    with Callbacks([log], Facts(cur_step_num=2)) as calls:
        calls("on_train_begin", planned=None)
        log.evaluated(2, {"accuracy": 0.5})
    curves = read(tmp_path / "tb")
    assert steps(curves) == [1, 2] and curves["test/accuracy"] == [(2, 0.5)]


@needs_writer
def test_resumed_driver_repeats_no_step(tmp_path):
    losses = []
    for epochs in (2, 3):
        model = slope_driver(lr=0.5)
        states = Checkpointer(tmp_path / "states", resume="auto")
        rows = [micro_batch(value) for value in (1.0, 2.0, NAN, 3.0)]
        arguments = {
            "report": (),
            "ckpt_path": None,
            "callbacks": TensorBoardLog(tmp_path / "tb"),
            "checkpointer": states,
        }
        model.train_process(epochs, rows, 1, valid_dataset=[micro_batch(1.0)], **arguments)
        losses.append(curves(tmp_path / "tb"))
    assert [steps(run_curves) for run_curves in losses] == [list(range(1, 7)), list(range(1, 10))]
    assert [run_curves["train/skipped"][-1] for run_curves in losses] == [(6, 2), (9, 3)]
    assert steps(losses[1], "test/loss") == [3, 6, 9]
    assert losses[1]["train/loss"][:6] == losses[0]["train/loss"]


# Ranks


@needs_writer
@pytest.mark.parametrize(("rank", "size", "writes"), [(0, 2, True), (1, 2, False), (1, 1, True)])
def test_only_rank_0_writes(tmp_path, monkeypatch, rank, size, writes):
    monkeypatch.setattr(tensorboard, "own_group", lambda: Group(rank, 2))
    log = TensorBoardLog(tmp_path / "tb")
    tell(log, record(1), device_number=size)
    log.evaluated(1, {"accuracy": 0.5})
    assert (tmp_path / "tb").exists() == writes


# Errors


@needs_writer
def test_unwritable_folder_gives_one_warning(tmp_path):
    (tmp_path / "tb").touch()
    with pytest.warns(RuntimeWarning, match="nothing more is written to '.*tb' for TensorBoard") as seen:
        tell(TensorBoardLog(tmp_path / "tb"), record(1), record(2))
    assert len(seen) == 1


class Full:
    """A file on a disk that is full at this call."""

    def __init__(self, call):
        self.call, self.calls = call, []

    def _called(self, name):
        self.calls.append(name)
        if self.call in (name, len(self.calls)):
            raise OSError(28, "No space left on device")

    def write(self, data):
        self._called("write")

    def flush(self):
        self._called("flush")

    def close(self):
        self._called("close")
        raise OSError(28, "No space left on device")


@needs_writer
@pytest.mark.parametrize("call", ["write", "flush", 3, 4])  # the last two: the second update, and the end
def test_full_disk_gives_one_warning(tmp_path, monkeypatch, call):
    file = Full(call)
    monkeypatch.setattr(tensorboard, "_new_file", lambda folder, first: file)
    with pytest.warns(RuntimeWarning, match="nothing more is written .*No space left on device") as seen:
        tell(TensorBoardLog(tmp_path / "tb"), record(1), record(2))
    assert len(seen) == 1 and file.calls[-1] == "close" and file.calls.count("close") == 1


def test_missing_package_is_an_error_before_training(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^'TensorBoardLog' needs tensorboardX. Run: pip install tensorboardX$"):
        TensorBoardLog("tb")


def test_missing_package_is_one_line_error(monkeypatch, capfd):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    assert train("--tensorboard", "--output_dir=out") == USAGE
    out, err = capfd.readouterr()
    assert (out, one_line(err)) == ("", "argument --tensorboard: needs tensorboardX. Run: pip install tensorboardX")
    assert not os.path.exists("out")


def test_invalid_folder_is_an_error():
    with pytest.raises(TypeError, match="For 'TensorBoardLog', 'folder' must be a path, but got int"):
        TensorBoardLog(3)
