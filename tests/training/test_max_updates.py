"""Does a run with a maximum number of updates end with that update, and nowhere else?"""

from __future__ import annotations

import pytest

from conftest import running_in
from helpers import micro_batch, run, slope_driver
from ms_accum import Checkpointer
from runs import Run, adam_with_schedule, check_same, even, numbers

pytestmark = pytest.mark.usefixtures("eager")
UPDATES = 6  # of two epochs of 7 micro-batches, in windows of 3


@pytest.fixture(scope="module")
def uninterrupted(mode):
    with running_in(mode):
        return [Run().train(numbers(), 3, max_updates=count).left for count in range(1, UPDATES + 1)]


def test_run_ends_with_the_update_also_inside_an_epoch(uninterrupted):
    complete = Run().train(numbers(), 3).left
    assert [len(left[1]) for left in uninterrupted] == [*range(1, UPDATES + 1)]
    assert all(left[1] == complete[1][: len(left[1])] for left in uninterrupted)
    check_same(uninterrupted[-1], complete)
    assert uninterrupted[-2][0] != complete[0]  # the mutant: one update less is another model


def test_larger_number_changes_nothing(uninterrupted):
    check_same(Run().train(numbers(), 3, max_updates=100).left, uninterrupted[-1])


@pytest.mark.parametrize("first", [1, 3, 4])  # inside an epoch, at its end, in the next one
def test_run_resumes_with_a_larger_number(tmp_path, uninterrupted, first):
    begun = Run().train(numbers(), 3, max_updates=first, states=Checkpointer(tmp_path))
    resumed = Run()
    resumed.recorder.records = begun.recorder.records
    resumed.train(numbers(), 3, max_updates=5, states=Checkpointer(tmp_path, resume="auto"))
    check_same(resumed.left, uninterrupted[4])
    assert begun.recorder.planned == first and resumed.recorder.planned == 5 - first


def test_skipped_windows_do_not_count():
    micro_batches = even()
    micro_batches[0][0][0, 0] = float("nan")
    run = Run().train(micro_batches, 1, max_updates=3)
    assert [record.skipped for record in run.recorder.records] == [True, False, False, False]


def test_updates_of_earlier_runs_count():
    run = Run().train(numbers(), 3, epochs=1, max_updates=2)
    run.train(numbers(), 3, max_updates=4)
    assert run.model.updates == 4
    run.train(numbers(), 3, max_updates=4)
    assert run.model.updates == 4  # nothing is left to train


def test_tail_that_is_carried_is_not_lost():
    """With a window over the end of the epoch, the run ends with the window, not with the epoch."""
    run = Run(make_optimizer=adam_with_schedule, tail="carry").train(numbers(), 3, max_updates=3)
    assert run.model.updates == 3 and run.model.micro_batches == 0


@pytest.mark.parametrize("number", [0, -1, 1.5, "3", True])
def test_wrong_numbers_are_rejected(number):
    with pytest.raises((TypeError, ValueError), match=r"For 'train_process', 'max_updates' must be an int >= 1"):
        Run().train(numbers(), 3, max_updates=number)


def test_run_that_has_all_updates_is_none_without_windows():
    model = slope_driver(tail="drop")
    for _ in range(2):
        run(model, [micro_batch(1.0)] * 2, 2, max_updates=1)
    assert model.updates == 1
