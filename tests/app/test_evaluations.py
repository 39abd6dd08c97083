"""Evaluations during a run come when they are due, once for each model, and never after a request to stop."""

from __future__ import annotations

import pytest

from ms_accum.app.evaluations import Evaluations
from ms_accum.app.tasks import Accuracy
from ms_accum.saving.checkpointer import Stopped
from ms_accum.training.callbacks import Callbacks, Facts
from update_records import record

pytestmark = pytest.mark.host


class Model:
    ema = None
    updates = 0


class Log:
    def __init__(self):
        self.lines = []

    def evaluated(self, updates, results):
        self.lines.append((updates, results["correct"]))


class Run:
    """A run of epochs of 3 updates, in which the model has as many right answers as updates."""

    def __init__(self, every, epochs=3, updates=9, stops=()):
        self.model, self.log, self.calls, self.stops = Model(), Log(), [], stops
        ends = {"updates": updates, "stop": lambda: self.model.updates in self.stops}
        self.evaluations = Evaluations(self.evaluate, self.model, [self.log], every=every, **ends)
        self.epochs, self.updates = epochs, updates

    def evaluate(self, stop):
        self.calls.append(self.model.updates)
        if stop():
            raise Stopped("on request")
        return Accuracy(self.model.updates, 9)

    def train(self, skipped=(), resumed_at=0):
        self.model.updates = resumed_at
        with Callbacks([self.evaluations], Facts(epoch_num=self.epochs, cur_step_num=resumed_at)) as calls:
            calls("on_train_begin")
            for step in range(resumed_at + 1, self.updates + 1):
                self.model.updates += step not in skipped
                calls.step_end(record(self.model.updates, epoch=(step + 2) // 3, skipped=step in skipped))
                if step % 3 == 0:
                    calls("on_train_epoch_end", cur_epoch_num=step // 3)
        return self.calls


@pytest.mark.parametrize(
    ("every", "moments"), [("epoch", [3, 6]), ("end", []), (1, [*range(1, 9)]), (2, [2, 4, 6, 8]), (100, [])]
)
def test_evaluations_come_when_they_are_due(every, moments, capsys):
    run = Run(every)
    assert run.train() == moments
    assert run.log.lines == [(updates, updates) for updates in moments]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(moments)
    if every == "epoch":
        assert lines[0] == "epoch: 1 evaluation: accuracy 33.33 % (3/9) after 3 updates"


def test_last_model_is_evaluated_once_after_the_run():
    run = Run("epoch")
    run.train()
    assert run.evaluations.result() == run.evaluations.result() == Accuracy(9, 9)
    assert run.calls == [3, 6, 9] and run.log.lines[-1] == (9, 9)


def test_best_model_and_curve_share_an_evaluation():
    run = Run(3)
    run.train(resumed_at=2)
    run.model.updates = 6
    run.evaluations.result()
    assert run.calls == [3, 6]


def test_skipped_window_is_not_evaluated_again():
    assert Run(2, updates=9).train(skipped=(3,)) == [2, 4, 6, 8]


@pytest.mark.parametrize(("at", "moments"), [(2, [2, 4, 6, 8]), (3, [4, 6, 8])])
def test_resumed_run_repeats_an_evaluation_that_was_due(at, moments):
    assert Run(2).train(resumed_at=at) == moments


def test_request_to_stop_ends_an_evaluation_without_a_result(capsys):
    run = Run(2, stops=(4,))
    run.train()
    assert run.log.lines == [(2, 2), (6, 6), (8, 8)]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_end_of_a_run_of_updates_is_left_to_the_last_evaluation():
    """It may end inside an epoch, or with one that is not the last planned."""
    assert Run("epoch", epochs=9, updates=6).train() == [3]
