"""Does a run that was stopped resume as if it had not been stopped?"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim as nn_experimental
from mindspore.train import Callback
from safetensors.numpy import save_file

from cifar_files import write_cifar10
from conftest import running_in
from helpers import Recorder
from model_zoo import create_dataset
from ms_accum import Checkpointer, CheckpointError, GradientAccumulation, Stopped, evaluate
from ms_accum.programs.metrics import MetricsFile
from ms_accum.saving import training_state
from reference import digest
from runs import (
    ROWS,
    Run,
    adam_with_schedule,
    check_same,
    even,
    numbers,
    stop_after,
    stopped_and_resumed,
)

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def uninterrupted(mode):
    """The result of a run with windows of 3."""
    with running_in(mode):
        return Run().train(numbers(), 3).left


@pytest.mark.graph
@pytest.mark.parametrize(
    ("stop", "reduction", "tail"), [(7, "mean", "flush"), pytest.param(8, "sum", "carry", marks=pytest.mark.slow)]
)
def test_stopping_compiled_changes_no_byte(tmp_path, stop, reduction, tail):
    def make():
        return Run(reduction=reduction, tail=tail)

    expected = make().train(even(), 3).left
    check_same(stopped_and_resumed(tmp_path / "states", [stop], make, even, 3), expected)


@pytest.mark.modes
@pytest.mark.parametrize(
    ("window", "tail"),
    [
        (1, "flush"),
        (4, "carry"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in ((1, "carry"), (4, "flush"))),
    ],
)
def test_stopping_at_every_position_changes_no_byte(tmp_path, window, tail):
    """One run stops after each of its micro-batches; another resumes from each of these states to the end."""

    def make():
        return Run(adam_with_schedule, tail=tail, clip_norm=0.5)

    bytes_left, records, counts, losses = make().train(numbers(), window).left
    stopping, resuming, positions = make(), make(), range(1, 2 * len(ROWS))
    for stop in positions:
        states = Checkpointer(tmp_path, keep=99, resume=None if stop == 1 else "auto", stop=stop_after(1))
        with pytest.raises(Stopped):
            stopping.train(numbers(), window, states=states)
    for stop in positions:
        resuming.spoil()
        state = tmp_path / f"state-{stop:08}.safetensors"
        states = Checkpointer(tmp_path / "more", resume=state)
        result = resuming.train(numbers(), window, states=states).left
        done = training_state.read(str(state)).facts["updates"]
        check_same(result, (bytes_left, records[done:], counts, losses[done:]))


@pytest.mark.modes
def test_stopping_several_times(tmp_path):
    expected = Run(adam_with_schedule).train(numbers(), 4).left
    result = stopped_and_resumed(tmp_path, [2, 1, 4], lambda: Run(adam_with_schedule), numbers, 4)
    check_same(result, expected)


@pytest.mark.modes
def test_stopping_inside_a_split_batch(tmp_path):
    def data():
        return numbers([20, 20, 9])

    expected = Run().train(data(), micro_batch_size=6).left
    check_same(stopped_and_resumed(tmp_path, [6], Run, data, micro_batch_size=6), expected)


@pytest.mark.host
@pytest.mark.parametrize("stop", [12, 16])
def test_stopping_with_shuffled_digits(tmp_path, stop):
    def make():
        return Run(features=64)

    def digits():
        return create_dataset(batch_size=128, image_size=8, seed=5)

    expected = make().train(digits(), 1).left
    check_same(stopped_and_resumed(tmp_path, [stop], make, digits, 1), expected)


@pytest.mark.slow
@pytest.mark.graph
def test_stopping_with_random_augmentation(tmp_path):
    write_cifar10(tmp_path / "data", train=8)

    def make():
        return Run(features=3072)

    def data():
        return create_dataset(tmp_path / "data", 10, dataset="cifar10", seed=5)

    expected = make().train(data(), 3).left
    check_same(stopped_and_resumed(tmp_path / "states", [6], make, data, 3), expected)
    another = create_dataset(tmp_path / "data", 10, dataset="cifar10", seed=6)
    assert make().train(another, 3).left[0] != expected[0]


def test_stopping_with_a_shuffling_mindspore_dataset(tmp_path):
    def data():
        ms.dataset.config.set_seed(7)
        rng = np.random.RandomState(3)
        rows = (rng.randn(40, 6).astype(np.float32), rng.randint(0, 3, 40).astype(np.int32))
        return NumpySlicesDataset(rows, ["x", "y"], shuffle=True).batch(8)

    expected = Run().train(data(), 3).left
    check_same(stopped_and_resumed(tmp_path, [7], Run, data, 3), expected)


def test_random_number_generators_are_restored(tmp_path):
    drawn = []

    def data():
        for batch in even():
            drawn.append((np.random.rand(), random.random()))
            yield batch

    class Data:
        def __iter__(self):
            return data()

    np.random.seed(1), random.seed(1)
    Run().train(Data(), 1, epochs=1)
    expected = drawn.copy()
    drawn.clear()
    np.random.seed(1), random.seed(1)
    states = Checkpointer(tmp_path, stop=stop_after(3))
    with pytest.raises(Stopped):
        Run().train(Data(), 1, epochs=1, states=states)
    np.random.seed(9), random.seed(9)
    Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path, resume="auto"))
    assert drawn == expected[:3]
    assert (np.random.rand(), random.random()) == expected[3]


class Shuffled:
    """An iterable that draws its order from NumPy's generator, or from one of its own."""

    def __init__(self, own):
        self.rng = np.random.RandomState(5) if own else np.random

    def __iter__(self):
        data = even()
        return iter([data[number] for number in self.rng.permutation(len(data))])


@pytest.mark.parametrize("own", [False, True])
def test_stopping_with_a_shuffling_iterable(tmp_path, own):
    def data():
        return Shuffled(own)

    np.random.seed(4)
    expected = Run().train(data(), 1).left
    np.random.seed(4)
    check_same(stopped_and_resumed(tmp_path, [9], Run, data, 1), expected)


@pytest.mark.parametrize("stop", [None, 24])
def test_resuming_a_finished_run_trains_nothing(tmp_path, stop):
    def digits():
        return create_dataset(batch_size=128, image_size=8, seed=5)

    def train(resume):
        states = Checkpointer(tmp_path, resume=resume, stop=None if resume or stop is None else stop_after(stop))
        run = Run(features=64)
        try:
            return run.train(digits(), 4, states=states)
        except Stopped:
            return run

    expected = Run(features=64).train(digits(), 4).left
    first, resumed = train(None), train("auto")
    assert resumed.left[0] == expected[0]
    assert resumed.model.updates == 6 and first.recorder.records[-1].update + len(resumed.recorder.records) == 6


def test_states_of_another_run_are_kept(tmp_path):
    Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path))
    before = (tmp_path / "state-00000001.safetensors").read_bytes()
    Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path, every=1))
    assert names(tmp_path)[0] == "state-00000001.safetensors" and len(names(tmp_path)) == 2
    assert (tmp_path / "state-00000001.safetensors").read_bytes() == before


def test_used_driver_resumes_with_the_unit_of_the_state(saved, tmp_path, uninterrupted):
    """Its own unit is that of 16 rows, the state's that of 8. The open window's weights are in the state's unit."""
    used = Run().train(numbers([16, 8, 5, 3]), 4, epochs=1)
    used.train(numbers(), 3, states=Checkpointer(tmp_path / "more", resume=saved))
    assert used.left[0] == uninterrupted[0]


@pytest.mark.both
def test_rates_of_experimental_optimizers_are_saved(tmp_path):
    def make():
        return Run(lambda network: nn_experimental.SGD(network.trainable_params(), 0.1))

    first = make()
    first.train(even(), 1, epochs=1)
    ops.assign(first.optimizer.param_groups[0]["lr"], Tensor(0.025, ms.float32))
    first.train(even(), 1, epochs=1, states=Checkpointer(tmp_path))
    second = make().train(even(), 1, epochs=2, states=Checkpointer(tmp_path, resume="auto"))
    assert [record.lr for record in second.recorder.records] == pytest.approx([0.025] * 7)


def test_state_of_a_later_epoch_is_rejected_and_nothing_is_changed(tmp_path):
    Run().train(even(), 1, epochs=3, states=Checkpointer(tmp_path))
    run = Run()
    before = digest(run.optimizer.get_parameters())
    with pytest.raises(
        CheckpointError, match="'epoch' must be at least 3, but got 2: '.*state-00000001.safetensors' has begun epoch 3"
    ):
        run.train(even(), 1, epochs=2, states=Checkpointer(tmp_path, resume="auto"))
    assert digest(run.optimizer.get_parameters()) == before and run.model.updates == 0
    assert Run().train(even(), 1, epochs=3, states=Checkpointer(tmp_path, resume="auto")).model.updates == 21


def test_end_of_a_run_is_scored_and_saved_once(tmp_path):
    """A state is due at the last update, which is also the end of the run."""
    calls = []
    Run().train(
        even(), 1, epochs=1, states=Checkpointer(tmp_path, every=1, keep=99, score=lambda: calls.append(1) or 0.0)
    )
    assert len(calls) == len(names(tmp_path)) == 7


@pytest.mark.modes
def test_carried_window_does_not_leak_into_a_resumed_run(tmp_path):
    expected = Run(tail="carry").train(numbers(), 3, epochs=1, states=Checkpointer(tmp_path, every=1, keep=9))
    run = Run(tail="carry").train(numbers()[:2], 3, epochs=1)
    assert run.model.micro_batches == 2
    states = Checkpointer(tmp_path / "more", resume=tmp_path / "state-00000001.safetensors")
    run.train(numbers(), 3, epochs=1, states=states)
    assert run.left[0] == expected.left[0]


@pytest.mark.slow
@pytest.mark.graph
def test_finished_run_resumes_for_more_epochs(tmp_path):
    expected = Run().train(even(), 1, epochs=3).left
    first = Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path))
    more = Run().train(even(), 1, epochs=3, states=Checkpointer(tmp_path, resume="auto"))
    more.recorder.records = first.recorder.records + more.recorder.records
    check_same(more.left, expected)


@pytest.mark.parametrize("lost", ["window.grad_sum.1.weight", "optimizer.moments.1.weight"])
def test_incomplete_state_changes_the_result(tmp_path, lost, monkeypatch, uninterrupted):
    """A planted fault: one of the state's arrays is not saved."""

    def incomplete(parameters, facts, **options):
        state = training_state.capture(parameters, facts, **options)
        if lost in state.arrays:
            state.arrays[lost] = np.zeros_like(state.arrays[lost])
        return state

    monkeypatch.setattr("ms_accum.training.state.capture", incomplete)
    assert stopped_and_resumed(tmp_path, [5], Run, numbers, 3)[0] != uninterrupted[0]


# Errors that end a run


class Broken(Recorder):
    """A reporter that fails at its third window."""

    def update(self, record):
        super().update(record)
        if len(self.records) == 3:
            raise ZeroDivisionError("not mine")


@pytest.mark.modes
def test_state_is_saved_if_a_callback_raises(tmp_path):
    expected = Run().train(even(), 1).left
    first = Run()
    first.recorder = Broken()
    with pytest.raises(ZeroDivisionError, match="not mine"):
        first.train(even(), 1, states=Checkpointer(tmp_path))
    second = Run().train(even(), 1, states=Checkpointer(tmp_path, resume="auto"))
    second.recorder.records = first.recorder.records + second.recorder.records
    check_same(second.left, expected)


def test_state_is_saved_if_the_data_raise(tmp_path):
    class Data:
        def __iter__(self):
            yield from numbers()[:4]
            raise OSError("the disk is gone")

    expected = Run().train(numbers(), 3, epochs=1).left
    first = Run()
    with pytest.raises(OSError, match="the disk is gone"):
        first.train(Data(), 3, epochs=1, states=Checkpointer(tmp_path))
    second = Run().train(numbers(), 3, epochs=1, states=Checkpointer(tmp_path, resume="auto"))
    second.recorder.records = first.recorder.records + second.recorder.records
    check_same(second.left, expected)


def test_no_state_is_saved_if_a_micro_batch_fails(tmp_path):
    states = Checkpointer(tmp_path, every=1, keep=9)
    bad = [*numbers()[:3], (*numbers()[3][:1], ms.Tensor([0, 1], ms.int32))]
    with pytest.raises(Exception, match="."):
        Run().train(bad, 2, epochs=1, states=states)
    assert len(list(tmp_path.glob("state-*"))) == 1


@pytest.mark.host
def test_random_layers_warn(tmp_path):
    def make():
        ms.set_seed(1)
        network = nn.SequentialCell(nn.Dense(6, 3), nn.Dropout(p=0.5), nn.Dropout(keep_prob=0.9), nn.Dropout(p=0.0))
        return GradientAccumulation(network, nn.CrossEntropyLoss(), nn.SGD(network.trainable_params(), 0.1))

    options = {"mini_steps": 2, "report": (), "ckpt_path": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().train_process(1, numbers(), checkpointer=Checkpointer(tmp_path), **options)
    with pytest.warns(RuntimeWarning, match=r"Random layers restart in a resumed run \(1, 2\)"):
        make().train_process(2, numbers(), checkpointer=Checkpointer(tmp_path, resume="auto"), **options)


# When states are saved, and which are kept


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, mode):
    """The state of a run that was stopped inside a window."""
    folder = tmp_path_factory.mktemp("stopped")
    with running_in(mode), pytest.raises(Stopped, match="state-00000001"):
        Run().train(numbers(), 3, states=Checkpointer(folder, stop=stop_after(2)))
    return folder / "state-00000001.safetensors"


@pytest.fixture
def saved(stopped, tmp_path):
    """A copy of this state in the test's folder."""
    return Path(shutil.copy(stopped, tmp_path))


def names(folder):
    return sorted(path.name for path in folder.glob("*") if path.name != ".lock")


def test_every_and_keep(tmp_path):
    Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path, every=2, keep=2))
    assert names(tmp_path) == ["state-00000003.safetensors", "state-00000004.safetensors"]
    updates = [training_state.read(str(path)).facts["updates"] for path in sorted(tmp_path.glob("state-*"))]
    assert updates == [6, 7]


def test_resumed_run_removes_old_states_of_its_run(tmp_path):
    """It removes neither the states of another run nor those that are newer than the resumed one."""
    other = tmp_path / "state-00000001.safetensors"
    Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path / "other", every=9))
    other.write_bytes(max((tmp_path / "other").glob("state-*")).read_bytes())
    for epochs in (1, 2, 3):
        Run().train(
            even(),
            1,
            epochs=epochs,
            states=Checkpointer(tmp_path, every=2, keep=2, resume=None if epochs == 1 else "auto"),
        )
        assert len(list(tmp_path.glob("state-*"))) == 3 and other.exists()


def test_state_that_can_not_be_removed_does_not_end_the_run(tmp_path):
    """The user has removed a state, and created a folder under the name of another one."""

    def meddle():
        newest = max(tmp_path.glob("state-*"))
        newest.unlink()
        if newest.name.endswith("2.safetensors"):
            (newest / "full").mkdir(parents=True)
        return 0.0

    Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path, every=1))
    before = names(tmp_path)
    states = Checkpointer(tmp_path, every=1, score=meddle, resume="auto")
    Run().train(even(), 1, epochs=2, states=states)
    assert before and (tmp_path / names(tmp_path)[-1]).is_file()


def test_files_that_the_run_has_not_written_are_kept(tmp_path):
    """These are states of an earlier run, of another version, and damaged ones, older or newer."""
    Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path, every=2, keep=9))
    older, newer = sorted(tmp_path.glob("state-*"))[1:3]
    (tmp_path / "state-00000077.safetensors").write_bytes(b"of a version to come")
    old_names = names(tmp_path)
    Run().train(even(), 1, states=Checkpointer(tmp_path, every=1, resume=str(older)))
    new_names = names(tmp_path)
    assert set(old_names) - set(new_names) == {older.name} and newer.name in new_names
    assert len(new_names) == len(old_names)  # one more, one less
    resumed = Checkpointer(tmp_path, resume="auto")
    (tmp_path / new_names[-1]).write_bytes(b"damaged")
    Run().train(even(), 1, epochs=3, states=resumed)
    assert new_names[-1] in names(tmp_path) and "not a training state" in resumed.resumed[0]


def test_tails_count_as_updates(tmp_path):
    """No window of this run is full."""
    Run().train(even()[:2], 3, epochs=4, states=Checkpointer(tmp_path, every=1, keep=9))
    assert len(names(tmp_path)) == 4  # the last one is the end, too


@pytest.mark.modes
def test_stop_at_a_windows_end_is_between_windows(tmp_path):
    run = Run()
    end, ended = run.model._window.end, []
    run.model._window.end = lambda requests: ended.append(1) or end(requests)
    with pytest.raises(Stopped):
        run.train(even(), 3, states=Checkpointer(tmp_path, stop=lambda: len(ended) == 2))
    assert (run.model.updates, run.model.micro_batches) == (2, 0)


def test_minutes(tmp_path):
    """At the ends of windows, and at the end of the run."""
    Run().train(even(), 2, epochs=1, states=Checkpointer(tmp_path, minutes=1e-9, keep=9))
    assert len(names(tmp_path)) == 4  # the last one is the end, too
    Run().train(even(), 2, epochs=1, states=Checkpointer(tmp_path, minutes=60, keep=9))
    assert len(names(tmp_path)) == 4 + 1


def scores(*values):
    """Return a function that returns these scores one after the other."""
    remaining = iter(values)
    return lambda: next(remaining)


@pytest.mark.parametrize(
    ("values", "kept", "best"),
    [
        ((1, 5, 3, 4, 2), ["2", "4", "5"], 5),
        ((1, 2, 3, 4, 5), ["4", "5"], 5),
        ((5, 5, 5, 5, 5), ["1", "4", "5"], 5),
        ((math.nan, 1, math.nan, 0, math.nan), ["2", "4", "5"], 1),
        ((math.nan,) * 5, ["4", "5"], None),
        ((-5, -4, -6, -7, -8), ["2", "4", "5"], -4),
    ],
)
def test_best_state_is_kept_in_addition_to_the_newest(tmp_path, stopped, values, kept, best):
    state = training_state.read(str(stopped))
    with Checkpointer(tmp_path, every=1, keep=2, score=scores(*values)) as states:
        for updates in range(1, 6):
            states.after_micro_batch(updates, False, lambda: state, states.requests())
        states.after_micro_batch(6, True, lambda: state, states.requests())  # inside a window none is due
        assert states.best == best
    assert names(tmp_path) == [f"state-0000000{number}.safetensors" for number in kept]


def test_best_state_survives_a_stop(tmp_path):
    """The best state and the scored updates are the same as without a stop."""
    stopped = Checkpointer(tmp_path, every=2, score=scores(3, 9, 2), stop=stop_after(5))
    with pytest.raises(Stopped):
        Run().train(even(), 1, states=stopped)
    assert names(tmp_path) == ["state-00000002.safetensors", "state-00000003.safetensors"]
    resumed = Checkpointer(tmp_path, every=2, score=scores(8, 4, 5, 6, 7, 1), resume="auto")
    Run().train(even(), 1, states=resumed)
    assert resumed.best == 9
    assert names(tmp_path) == ["state-00000002.safetensors", "state-00000008.safetensors"]
    saved_facts = [training_state.read(str(path)).facts for path in sorted(tmp_path.glob("state-*"))]
    assert [facts["updates"] for facts in saved_facts] == [4, 14]
    assert saved_facts[1]["best"] == [9, "state-00000002.safetensors"]


def scored_updates(folder, stop=None):
    """Train two epochs of 7 windows, scored every 2, stopped at a micro-batch and resumed; return what was scored."""
    updates = []
    for requests in (None if stop is None else stop_after(stop), None)[stop is None :]:
        run = Run()
        score = lambda run=run: updates.append(run.model.updates) or float(run.model.updates == 4)  # noqa: E731
        states = Checkpointer(folder, every=2, score=score, resume="auto", stop=requests)
        with contextlib.suppress(Stopped):
            run.train(even(), 1, states=states)
    return updates, states.best, run.left[0]


def test_stop_does_not_change_which_updates_are_scored(tmp_path):
    """The model of update 4 is the best; it must be scored, also if the run stops in its window or at the end."""
    expected = scored_updates(tmp_path / "whole")
    assert expected[:2] == ([2, 4, 6, 8, 10, 12, 14], 1.0)
    for stop in range(1, 15):
        assert scored_updates(tmp_path / str(stop), stop) == expected, stop


def test_end_of_a_run_is_scored_after_a_stop_there(tmp_path):
    """Update 14 is not planned by `every`, but it is the last."""

    def train(**options):
        run, updates = Run(), []
        score = lambda: updates.append(run.model.updates) or 0.0  # noqa: E731
        with contextlib.suppress(Stopped):
            run.train(even(), 1, states=Checkpointer(tmp_path, every=5, score=score, resume="auto", **options))
        return updates

    assert train(stop=stop_after(14)) == [5, 10]
    assert train() == [14] and train() == []


def test_error_at_a_planned_update_does_not_shift_later_ones(tmp_path):
    def train(updates, fails):
        run = Run()

        def score():
            updates.append(run.model.updates)
            if fails and updates == [2, 4]:
                raise OSError("the evaluation failed")
            return 0.0

        run.train(even(), 1, states=Checkpointer(tmp_path, every=2, score=score, resume="auto"))
        return updates

    updates = []
    with pytest.raises(OSError, match="the evaluation failed"):
        train(updates, True)
    assert train([], False) == [5, 6, 8, 10, 12, 14]  # update 4 is saved, and can't be scored again


def test_score_may_draw_random_numbers(tmp_path):
    def train(folder, stop=None):
        np.random.seed(1)
        Run().train(even(), 1, states=Checkpointer(folder, every=2, score=np.random.rand, resume="auto", stop=stop))

    train(tmp_path / "uninterrupted")
    expected = np.random.rand()
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", stop_after(5))
    train(tmp_path / "stopped")
    assert np.random.rand() == expected


@pytest.mark.slow
@pytest.mark.graph
def test_evaluation_in_a_run_is_compiled_once(tmp_path, compiles):
    run, data = Run(features=64), create_dataset(batch_size=400, image_size=8)
    network = run.model._network
    compiled = []

    def score():
        evaluate(network, data)
        compiled.append(len(compiles))
        return 0.0

    run.train(data, 1, epochs=3, states=Checkpointer(tmp_path, every=1, score=score))
    assert len(compiled) == 3 * 4
    assert network.training
    assert compiled[-1] == compiled[4]  # the last batch is shorter: two shapes, of which the first epoch sees both


def test_state_is_saved_if_at_end_fails(tmp_path):
    def full():
        raise OSError("No space left on device")

    run, states = Run(), Checkpointer(tmp_path / "states", at_end=full)
    with pytest.raises(OSError, match="No space left"):
        run.train(numbers(), 3, states=states)
    assert states.rescued == tmp_path / "states" / "state-00000001.safetensors"
    resumed = Checkpointer(tmp_path / "states", resume="auto")
    assert Run().train(numbers(), 3, states=resumed).left[0] == run.left[0]
    assert resumed.epochs_done() == 2 and resumed.rescued is None


@pytest.mark.parametrize("resume", [True, 3])
def test_resume_must_be_a_path(resume, tmp_path):
    with pytest.raises(TypeError, match="'resume' must be a path, 'auto' or None, but got (bool|int)"):
        Checkpointer(tmp_path, resume=resume)


def test_resuming_from_another_folder_keeps_its_states(saved, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(saved, other / "state-00000007.safetensors")
    before = names(other)
    Run().train(numbers(), 3, states=Checkpointer(other, resume=saved))
    assert set(before) < set(names(other))


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / ".saving-abc").mkdir()
    (tmp_path / ".saving-abc" / "state-00000001.safetensors").write_bytes(b"half")
    Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path))
    assert names(tmp_path) == ["state-00000001.safetensors"]


def elsewhere(folder):
    """Return a callback that changes the working directory after the second window."""
    folder.mkdir()
    return Calls(lambda args: os.chdir(folder) if args.cur_step_num == 2 else None)


class Calls(Callback):
    def __init__(self, call):
        self._call = call

    def on_train_step_end(self, run_context):
        self._call(run_context.original_args())


def test_program_may_change_its_working_directory(tmp_path):
    """Relative paths refer to the folder in which they were given; messages then contain absolute paths."""
    os.mkdir("here")
    os.chdir("here")
    states = Checkpointer("states", every=1, stop=stop_after(5))
    log = MetricsFile("metrics.jsonl")
    run = Run()
    options = {"checkpointer": states, "callbacks": [log, elsewhere(tmp_path / "there")], "report": ()}
    with pytest.raises(Stopped, match=f"in '{tmp_path}/here/states/state-00000005.safetensors'"):
        run.model.train_process(1, even(), 1, ckpt_path=None, **options)
    assert names(tmp_path / "here" / "states") == ["state-00000005.safetensors"]
    assert len((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()) == 5
    assert os.listdir(tmp_path / "there") == []
    os.chdir(tmp_path / "here")
    state = "states/state-00000005.safetensors"
    second, resumed = Run(), Checkpointer("states", resume=state)
    options = {"callbacks": elsewhere(tmp_path / "third"), "report": (), "ckpt_path": "m.ckpt", "checkpointer": resumed}
    second.model.train_process(1, even(), 1, **options)
    assert resumed.resumed[0].startswith(f"{state}: 5 updates") and second.model.updates == 7
    assert sorted(os.listdir(tmp_path / "here")) == ["m.ckpt", "metrics.jsonl", "states"]
    assert os.listdir(tmp_path / "third") == []


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Run().train(even(), 1, epochs=1, states=Checkpointer("~/states"))
    assert names(tmp_path / "states") == ["state-00000001.safetensors"]
    assert Run().train(even(), 1, epochs=2, states=Checkpointer("~/states", resume="auto")).model.updates == 14


def test_removed_folder_is_created_and_locked_again(tmp_path):
    """It is locked, so that no second run can use it."""
    folder = tmp_path / "states"
    busy = []

    def meddle(args):
        if args.cur_step_num == 3:
            shutil.rmtree(folder)
            shutil.rmtree(tmp_path / "models")
        elif args.cur_step_num == 5:
            with pytest.raises(RuntimeError, match="another run is using"), Checkpointer(folder):
                pass
            busy.append(True)

    run = Run()
    model = tmp_path / "models" / "m.ckpt"
    model.parent.mkdir()
    options = {
        "callbacks": Calls(meddle),
        "report": (),
        "ckpt_path": model,
        "checkpointer": Checkpointer(folder, every=1),
    }
    run.model.train_process(1, even(), 1, **options)
    assert model.is_file()
    assert busy and run.model.updates == 7
    assert [training_state.read(str(path)).facts["updates"] for path in folder.glob("state-*")] == [7]


def test_second_run_in_the_folder_is_rejected(tmp_path):
    with Checkpointer(tmp_path), pytest.raises(RuntimeError, match="another run is using the folder"):
        Run().train(numbers(), 2, states=Checkpointer(tmp_path))


# What is rejected


def resume(path, make=Run, mini_steps=3, **options):
    return make().train(numbers(), mini_steps, states=Checkpointer(path.parent, resume=path, **options))


def test_missing_file_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere' is not a file"):
        resume(tmp_path / "nowhere")


def test_auto_in_an_empty_folder_starts_a_new_run(tmp_path):
    states = Checkpointer(tmp_path, resume="auto")
    Run().train(numbers(), 3, states=states)
    assert states.resumed == [f"nothing: no state in '{tmp_path}'"]


def test_auto_skips_damaged_states_and_reports_them(saved):
    damaged = saved.with_name("state-00000002.safetensors")
    damaged.write_bytes(saved.read_bytes()[:-1])
    states = Checkpointer(saved.parent, resume="auto")
    Run().train(numbers(), 3, states=states)
    assert "state-00000002" in states.resumed[0] and str(saved) in states.resumed[1]


def test_auto_raises_if_all_states_are_damaged(saved):
    saved.write_bytes(b"\xff" + saved.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="state-00000001"):
        Run().train(numbers(), 3, states=Checkpointer(saved.parent, resume="auto"))


@pytest.mark.parametrize(
    ("make", "mini_steps", "config", "message"),
    [
        (Run, 4, {}, "mini_steps was 3 and is 4"),
        (lambda: Run(clip_norm=1.0), 3, {}, "clip_norm was None and is 1.0"),
        (lambda: Run(adam_with_schedule), 3, {}, "optimizer was Momentum and is Adam"),
        (Run, 3, {"lr": 0.5}, "lr was None and is 0.5"),
    ],
)
def test_other_settings_are_rejected_by_name(saved, make, mini_steps, config, message):
    with pytest.raises(CheckpointError, match=message):
        resume(saved, make, mini_steps, config=config)


def test_other_settings_can_be_allowed(saved):
    assert resume(saved, lambda: Run(clip_norm=1.0), 4, allow_config_change=True).model.updates == 4


@pytest.mark.parametrize("split", [False, True])
def test_another_batch_size_resumes_at_the_same_row(tmp_path, split):
    def digits(batch_size):
        return create_dataset(batch_size=batch_size, image_size=8, seed=5)

    window = {"micro_batch_size": 20} if split else {"mini_steps": 3}
    with pytest.raises(Stopped):
        Run(features=64).train(digits(40), epochs=1, states=Checkpointer(tmp_path, stop=stop_after(13)), **window)
    done = training_state.read(str(tmp_path / "state-00000001.safetensors")).facts["at"]["rows"]
    states = Checkpointer(tmp_path, resume="auto", config={"batch_size": 24}, allow_config_change=True)
    run = Run(features=64).train(digits(24), epochs=1, states=states, **window)
    trained = sum(record.samples for record in run.recorder.records)
    open_rows = 0 if split else 40  # of the window that was open, which is one of these records' too
    assert 1437 - done + open_rows <= trained < 1437 - done + open_rows + 24


def test_batch_with_another_split_is_restarted(tmp_path):
    """The open window contains micro-batches of another size."""
    with pytest.raises(Stopped):
        Run().train(numbers([20] * 3), epochs=1, states=Checkpointer(tmp_path, stop=stop_after(6)), micro_batch_size=6)
    assert training_state.read(str(tmp_path / "state-00000001.safetensors")).facts["window"]["micro_batches"] == 2
    states = Checkpointer(tmp_path, resume="auto", allow_config_change=True)
    run = Run().train(numbers([20] * 3), epochs=1, states=states, micro_batch_size=5)
    assert [record.samples for record in run.recorder.records] == [20, 20]


@pytest.mark.modes
def test_new_learning_rate_is_used_if_a_change_is_allowed(saved):
    def slower():
        return Run(lambda network: nn.Momentum(network.trainable_params(), 0.01, 0.5))

    run = resume(saved, slower, config={"lr": 0.01}, allow_config_change=True)
    assert float(run.optimizer.momentum.asnumpy()) == 0.5
    assert [record.lr for record in run.recorder.records] == pytest.approx([0.01] * 6)


def test_another_network_is_rejected_and_not_changed(saved):
    run = Run(features=7)
    before = digest(run.optimizer.get_parameters())
    states = Checkpointer(saved.parent, resume=saved)
    with pytest.raises(CheckpointError, match=r"1.weight is float32 \(5, 6\) instead of float32 \(5, 7\)"):
        run.train(numbers(), 3, states=states)
    assert digest(run.optimizer.get_parameters()) == before


def test_state_of_another_version_is_rejected(saved):
    state = training_state.read(str(saved))
    other = training_state.TrainingState(state.arrays, {**state.facts, "version": 1})
    with pytest.raises(CheckpointError, match="is a training state of another version of ms_accum"):
        training_state.write(other, str(saved))


def excluding(facts, name):
    return {key: value for key, value in facts.items() if key != name}


CRAFTED = {
    "names that are numbers": lambda facts: {**facts, "kept": [7]},
    "a number instead of names": lambda facts: {**facts, "kept": 7},
    **{
        f"no {name}": lambda facts, name=name: excluding(facts, name)
        for name in training_state._FACTS
        if name != "version"
    },
    "a negative count": lambda facts: {**facts, "updates": -1},
    "a bool for a count": lambda facts: {**facts, "skipped": True},
    "text for a number": lambda facts: {**facts, "skips": "3"},
    "an epoch above 2**31": lambda facts: {**facts, "at": {**facts["at"], "epoch": 2**62}},
    "a position above 32 bits": lambda facts: {
        **facts,
        "at": {**facts["at"], "batches": 2**31, "total": 2**31},
    },
    "more batches than there are": lambda facts: {**facts, "at": {**facts["at"], "batches": 8}},
    "more windows than updates": lambda facts: {**facts, "at": {**facts["at"], "windows": 10**6}},
    "a best score of NaN": lambda facts: {**facts, "best": [float("nan"), None]},
    "a loss beyond float64": lambda facts: {**facts, "window": {**facts["window"], "loss": [10**400, 1.0, 1]}},
    "epoch 0": lambda facts: {**facts, "at": {**facts["at"], "epoch": 0}},
    "an unknown field of the position": lambda facts: {**facts, "at": {**facts["at"], "page": 1}},
    "missing fields of the window": lambda facts: {**facts, "window": {"micro_batches": 2}},
    "a loss of two numbers": lambda facts: {**facts, "window": {**facts["window"], "loss": [1.0, 2.0]}},
    "a NumPy position out of range": lambda facts: {
        **facts,
        "random": {**facts["random"], "numpy": [*facts["random"]["numpy"][:2], 10**6, 0, 0.0]},
    },
    "a truncated Python state": lambda facts: {**facts, "random": {**facts["random"], "python": [3, [1, 2], None]}},
    "another generator": lambda facts: {**facts, "random": {**facts["random"], "numpy": ["PCG64", [], 0, 0, 0.0]}},
    "a list": lambda facts: [facts],
    "too deeply nested": lambda facts: "[" * 10**5 + "]" * 10**5,
}


def write_crafted(path, craft):
    """Write a state with other facts, and a SHA-256 that fits them."""
    state = training_state.read(str(path))
    crafted = craft(state.facts)
    facts = crafted if isinstance(crafted, str) else json.dumps(crafted)
    metadata = {"facts": facts, "sha256": training_state.state_digest(state.arrays, facts)}
    save_file(state.arrays, str(path), metadata=metadata)


@pytest.mark.parametrize("craft", CRAFTED.values(), ids=CRAFTED)
def test_crafted_facts_are_rejected(saved, craft):
    write_crafted(saved, lambda facts: facts)
    training_state.read(str(saved))
    write_crafted(saved, craft)
    with pytest.raises(CheckpointError, match="state-00000001.safetensors' is "):
        training_state.read(str(saved))


def test_crafted_first_epoch_of_data_without_epochs_is_read(saved):
    """Such a state once ended in an AttributeError."""
    write_crafted(saved, lambda facts: {**facts, "at": {**facts["at"], "first": 3}})
    run = Run().train(even(), 3, states=Checkpointer(saved.parent, resume="auto"))
    assert run.model.updates == 6


def test_pipe_is_not_a_state(saved):
    """Reading a pipe would wait forever."""
    os.mkfifo(saved.with_name("state-00000007.safetensors"))
    assert Checkpointer(saved.parent, resume="auto").settings()["mini_steps"] == 3


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_array_types_that_numpy_lacks_are_rejected(saved, dtype):
    """The error of reading them depends on other installed packages; `resume="auto"` must skip them."""
    header = {
        "__metadata__": {"facts": "{}", "sha256": ""},
        "w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 0]},
    }
    size = 8 if dtype == "BF16" else 4
    header["w"]["data_offsets"][1] = size
    text = json.dumps(header).encode()
    crafted = saved.with_name("state-00000002.safetensors")
    crafted.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(CheckpointError, match="state-00000002.safetensors' is not a training state"):
        training_state.read(str(crafted))
    assert Checkpointer(saved.parent, resume="auto").settings()["mini_steps"] == 3


def test_crafted_facts_change_nothing_and_auto_skips_them(saved):
    crafted = saved.with_name("state-00000002.safetensors")
    shutil.copy(saved, crafted)
    write_crafted(crafted, CRAFTED["a truncated Python state"])
    run = Run()
    before = digest(run.optimizer.get_parameters()), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(CheckpointError, match="'random' is wrong"):
        run.train(numbers(), 3, states=Checkpointer(saved.parent, resume=crafted))
    assert (digest(run.optimizer.get_parameters()), random.getstate(), np.random.get_state()[1].tolist()) == before
    assert run.model.micro_batches == run.model.updates == 0
    states = Checkpointer(saved.parent, resume="auto")
    Run().train(numbers(), 3, states=states)
    assert "state-00000002" in states.resumed[0] and str(saved) in states.resumed[1]


def test_windows_of_one_can_not_resume_an_open_window(saved):
    with pytest.raises(
        CheckpointError, match="holds 2 micro-batches of an open window, which windows of 1 can't continue"
    ):
        resume(saved, mini_steps=1, allow_config_change=True)


@pytest.mark.modes
def test_open_window_ends_with_the_next_micro_batch_if_size_shrinks(saved):
    run = resume(saved, mini_steps=2, allow_config_change=True)
    assert run.recorder.records[0].samples == sum(ROWS[:3])


def test_flipped_bits_are_rejected(saved):
    content = saved.read_bytes()
    rng = random.Random(1)
    for _ in range(40):
        check_rejected(saved, flipped(content, rng.randrange(8 * len(content))))


@pytest.mark.slow
def test_400_flipped_bits_are_rejected(saved):
    content = saved.read_bytes()
    rng = random.Random(2)
    for _ in range(400):
        check_rejected(saved, flipped(content, rng.randrange(8 * len(content))))


def test_truncations_are_rejected(saved):
    content = saved.read_bytes()
    for length in range(0, len(content), 37):
        check_rejected(saved, content[:length])


@pytest.mark.slow
def test_truncation_at_every_length_is_rejected(saved):
    content = saved.read_bytes()
    for length in range(len(content)):
        check_rejected(saved, content[:length])


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def check_rejected(path, data):
    path.write_bytes(data)
    with warnings.catch_warnings(), pytest.raises(CheckpointError, match="state-00000001"):
        training_state.read(str(path))


def test_facts_are_json(saved):
    state = training_state.read(str(saved))
    assert json.loads(json.dumps(state.facts)) == state.facts
    assert state.facts["window"]["micro_batches"] == 2 and state.facts["at"]["batches"] == 2


class Drawn:
    """A data set that draws the order of each epoch from NumPy's generator."""

    def __len__(self):
        return len(ROWS)

    def __iter__(self):
        rows = numbers()
        return iter([rows[number] for number in np.random.permutation(len(rows))])


@pytest.mark.host
@pytest.mark.parametrize("stops", [(7,), (10,), (15,), (3, 9)])
def test_order_drawn_from_numpy_is_drawn_again(tmp_path, stops):
    """This includes the orders of epochs that are read and discarded, and of later ones."""
    expected = Run().train(Drawn(), 4, epochs=3).left
    ms.set_seed(1)
    check_same(stopped_and_resumed(tmp_path, stops, Run, Drawn, 4, epochs=3), expected)
