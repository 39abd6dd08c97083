"""train.py writes its evaluations to its logs, also when it is resumed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from event_files import curves
from ms_accum.app.process import OK
from ms_accum.saving.model_file import read_record
from programs import QUICK, lines_of, train_in

FLAGS = (*QUICK, "--save_every=2", "--keep_best")
HAS_TENSORBOARD = find_spec("tensorboardX") is not None
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two epochs, stopped after the first and resumed: the lines at the stop, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    flags = (*FLAGS, *(["--tensorboard"] if HAS_TENSORBOARD else []))
    assert train_in(folder, *flags) == OK
    first = lines_of(folder / "out")
    assert train_in(folder, *flags, "--epochs=2", "--resume") == OK
    return first, folder / "out"


def places(lines):
    return [line["update"] if "update" in line else str(line["updates"]) for line in lines]


def test_evaluations_follow_their_updates(run):
    first, folder = run
    assert places(first) == [1, 2, "2", 3, "3"]  # an epoch has three updates; at the end there is one evaluation
    assert places(lines_of(folder)) == [1, 2, "2", 3, "3", 4, "4", 5, 6, "6"] and lines_of(folder)[:5] == first


def test_logged_evaluation_is_that_of_the_model(run):
    _, folder = run
    *_, last = lines_of(folder)
    record = read_record(folder / "gradient_accumulation.ckpt")
    counts = {name: record[name] for name in ("updates", "correct", "total")}
    assert last == {"epoch": 2, "accuracy": counts["correct"] / counts["total"], **counts}


@pytest.mark.skipif(not HAS_TENSORBOARD, reason="needs tensorboardX")
def test_tensorboard_has_the_same_values(run):
    _, folder = run
    written, lines = curves(Path(folder, "tensorboard")), lines_of(folder)
    updates = [line for line in lines if "update" in line]
    for tag, name in (("loss", "loss"), ("lr", "lr"), ("grad_norm", "grad_norm")):
        expected = [(line["update"], pytest.approx(line[name], rel=1e-6)) for line in updates]
        assert written[f"train/{tag}"] == expected
    evaluations = [(line["updates"], pytest.approx(line["accuracy"])) for line in lines if "updates" in line]
    assert written["test/accuracy"] == evaluations
