"""Does a run that was stopped resume as if it had not been stopped?"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, LambdaCallback

from conftest import running_in
from helpers import Recorder
from model_zoo import create_dataset
from ms_accum import Checkpointer, CheckpointError, GradientAccumulation, Stopped, replace_dropout
from ms_accum.network import undo
from ms_accum.saving import training_state
from ms_accum.training import runners
from reference import digest
from runs import (
    ROWS,
    Run,
    adam_with_schedule,
    check_same,
    even,
    names,
    numbers,
    stop_after,
    stopped_and_resumed,
)

pytestmark = pytest.mark.usefixtures("eager")


def with_statistics(features):
    """Return a network whose forwards change statistics and a counter."""
    ms.set_seed(1)
    dropout = replace_dropout(nn.SequentialCell(nn.Dropout(p=0.5)), seed=1)
    return nn.SequentialCell(nn.Dense(features, 5), nn.BatchNorm1d(5), dropout, nn.ReLU(), nn.Dense(5, 10))


def arrays_of(path):
    return {name: array.tobytes() for name, array in training_state.read(str(path)).arrays.items()}


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
@pytest.mark.parametrize(
    ("window", "tail", "step"), [(1, "flush", 5), (4, "carry", 1), pytest.param(4, "flush", 1, marks=pytest.mark.slow)]
)
def test_stopping_at_every_position_changes_no_byte(tmp_path, window, tail, step):
    """Wherever a run stops, its state is that of its last window's end, from which another goes on to the end."""
    check_every_stop(tmp_path, window, tail, step)


class Queue(nn.Cell):
    """A network that counts its forwards in a buffer of its own, and divides by them."""

    def __init__(self, features):
        super().__init__()
        self.dense = nn.Dense(features, 10, weight_init="ones", has_bias=False)
        self.buffer = ms.Parameter(ms.Tensor(np.ones(16), ms.float32), name="buffer", requires_grad=False)

    def construct(self, x):
        return self.dense(x) / ops.assign_add(self.buffer, ops.ones_like(self.buffer))[0]


def test_stop_in_a_window_that_can_not_be_put_back_waits_for_its_end(tmp_path, monkeypatch):
    """Of large buffers there are no copies in the first window."""
    monkeypatch.setattr(undo, "_LARGE", 8)
    monkeypatch.setattr(runners, "_MOST", 1)  # micro-batches in a graph
    expected = Run(make_network=Queue).train(numbers(), 4).left
    for stop in range(4, 9):  # while the window is read and run
        folder = tmp_path / str(stop)
        check_same(stopped_and_resumed(folder, [stop], lambda: Run(make_network=Queue), numbers, 4), expected)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
def test_stopping_between_graphs_changes_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(runners, "_MOST", 2)  # micro-batches in a graph
    check_every_stop(tmp_path, 4, "carry", 1)


def check_every_stop(tmp_path, window, tail, step):
    run = Run(adam_with_schedule, make_network=with_statistics, tail=tail, clip_norm=0.5)
    first = "state-00000001.safetensors"
    begin = tmp_path / "begin" / first

    def train(folder, state, **options):
        run.spoil()
        run.train(numbers(), window, states=Checkpointer(folder, resume=state, **options))
        return run.left, arrays_of(max(folder.glob("state-*")))

    with pytest.raises(Stopped):  # before anything has run
        run.train(numbers(), window, states=Checkpointer(begin.parent, stop=stop_after(1)))
    (left, records, counts, losses), end = train(tmp_path / "all", begin, every=1, keep=99)
    ends = list(map(arrays_of, [begin, *sorted((tmp_path / "all").glob("state-*"))]))
    for stop in itertools.count(1, step):
        stopped = tmp_path / f"stopped{stop}"
        try:
            train(stopped, begin, stop=stop_after(stop))
        except Stopped:
            done = training_state.read(str(stopped / first)).metadata["updates"]
            assert arrays_of(stopped / first) == ends[done], stop
            result, end_of_result = train(tmp_path / f"resumed{stop}", stopped / first)
            check_same(result, (left, records[done:], counts, losses[done:]))
            assert end_of_result == end, stop
        else:
            break
    assert stop > 2 * len(ROWS)


@pytest.mark.parametrize("window", [3, 9])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_tail_that_is_read_again_does_not_end_its_epoch_again(tmp_path, window, stop):
    ended = []
    callbacks = LambdaCallback(on_train_epoch_end=lambda context: ended.append(context.original_args().cur_epoch_num))
    options = {"epochs": 4, "callbacks": callbacks}
    with pytest.raises(Stopped):
        states = Checkpointer(tmp_path, stop=lambda: len(ended) == stop)
        Run(tail="carry").train(numbers(), window, states=states, **options)
    Run(tail="carry").train(numbers(), window, states=Checkpointer(tmp_path, resume="auto"), **options)
    assert ended == [1, 2, 3, 4]


def digits():
    """A data set that knows its epoch."""
    return create_dataset(batch_size=128, image_size=8, seed=5)


def shuffled():
    """One of MindSpore's, which draws an order for each epoch."""
    ms.dataset.config.set_seed(7)
    rng = np.random.RandomState(3)
    rows = (rng.randn(40, 64).astype(np.float32), rng.randint(0, 3, 40).astype(np.int32))
    return NumpySlicesDataset(rows, ["x", "y"], shuffle=True).batch(8)


@pytest.mark.parametrize(("data", "window", "stops"), [(digits, 1, [40]), (shuffled, 3, [14, 9])])
def test_stopping_with_shuffled_data(tmp_path, data, window, stops):
    def make():
        return Run(features=64)

    expected = make().train(data(), window).left
    check_same(stopped_and_resumed(tmp_path, stops, make, data, window), expected)


def test_random_number_generators_are_restored(tmp_path):
    """To the end of the last window: a window that is read again draws again, and so do batches that are discarded."""
    drawn = []

    class Data:
        def __iter__(self):
            for batch in even():
                drawn.append((np.random.rand(), random.random()))
                yield batch

    def train(folder, seed, **options):
        drawn.clear()
        np.random.seed(seed), random.seed(seed)
        Run().train(Data(), 2, epochs=1, states=Checkpointer(tmp_path / folder, **options))
        return [*drawn, np.random.rand()]

    expected = train("uninterrupted", 1)
    with pytest.raises(Stopped):
        train("stopped", 1, stop=lambda: len(drawn) == 4)
    assert train("stopped", 9, resume="auto") == expected


def test_resuming_a_finished_run_trains_nothing(tmp_path):
    """But it is scored: the run may have ended by a stop after its last update."""
    expected = Run().train(even(), 1, states=Checkpointer(tmp_path)).left
    assert Run().train(even(), 1, states=Checkpointer(tmp_path, resume="auto")).left[0] == expected[0]
    assert names(tmp_path) == ["state-00000001.safetensors"]
    scores = []
    resumed = Run().train(
        even(), 1, states=Checkpointer(tmp_path, resume="auto", score=lambda: scores.append(1) or 0.0)
    )
    assert resumed.left[0] == expected[0] and resumed.recorder.records == [] and scores == [1]
    assert names(tmp_path) == ["state-00000002.safetensors"]


def test_finished_run_resumes_for_more_epochs(tmp_path):
    expected = Run().train(even(), 1, epochs=3).left
    first = Run().train(even(), 1, epochs=1, states=Checkpointer(tmp_path))
    more = Run().train(even(), 1, epochs=3, states=Checkpointer(tmp_path, resume="auto"))
    more.recorder.records = first.recorder.records + more.recorder.records
    check_same(more.left, expected)


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


# Errors that end a run


class Broken(Recorder):
    """A reporter that fails at its third window."""

    def update(self, record):
        super().update(record)
        if len(self.records) == 3:
            raise ZeroDivisionError("not mine")


@pytest.mark.usefixtures("eager")
def test_state_is_saved_if_a_callback_raises(tmp_path):
    expected = Run().train(even(), 1).left
    first = Run()
    first.recorder = Broken()
    with pytest.raises(ZeroDivisionError, match="not mine"):
        first.train(even(), 1, states=Checkpointer(tmp_path))
    second = Run().train(even(), 1, states=Checkpointer(tmp_path, resume="auto"))
    second.recorder.records = first.recorder.records + second.recorder.records
    check_same(second.left, expected)


@pytest.mark.usefixtures("each_mode")
@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda x, y: (x, y[:2]), r"must be one that yields labels of the shape \(8,\), .*, but got Int32"),
        (lambda x, y: (x[:, :5], y), "For 'MatMul' the input dimensions must be equal"),
    ],
    ids=["before it runs", "when it runs"],
)
def test_state_after_a_micro_batch_fails_is_that_of_the_last_windows_end(tmp_path, cut, message):
    """What other micro-batches of the window have changed is put back."""
    data = even()[:4]
    with pytest.raises(ValueError, match=message):
        run = Run(make_network=with_statistics)
        run.train([*data[:3], cut(*data[3])], 2, epochs=1, states=Checkpointer(tmp_path, every=1, keep=9))
    at_the_end, after_the_error = sorted(tmp_path.glob("state-*"))
    assert arrays_of(at_the_end) == arrays_of(after_the_error)
    assert run.model.micro_batches == 0


@pytest.mark.usefixtures("eager")
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


# When states are saved


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, mode):
    """The state of a run that was stopped inside its second window."""
    folder = tmp_path_factory.mktemp("stopped")
    with running_in(mode), pytest.raises(Stopped, match="state-00000001"):
        Run().train(numbers(), 3, states=Checkpointer(folder, stop=stop_after(9)))
    return folder / "state-00000001.safetensors"


@pytest.fixture
def saved(stopped, tmp_path):
    """A copy of this state in the test's folder."""
    (tmp_path / "saved").mkdir()
    return Path(shutil.copy(stopped, tmp_path / "saved"))


def test_end_of_a_run_is_scored_and_saved_once(tmp_path):
    """A state is due at the last update, which is also the end of the run."""
    calls = []
    Run().train(
        even(), 1, epochs=1, states=Checkpointer(tmp_path, every=1, keep=99, score=lambda: calls.append(1) or 0.0)
    )
    assert len(calls) == len(names(tmp_path)) == 7


def scored_updates(folder, stop=None):
    """Train two epochs of 7 windows, scored every 2, stopped when asked and resumed; return what was scored."""
    updates = []
    for requests in (None if stop is None else stop_after(stop), None)[stop is None :]:
        run = Run()
        score = lambda run=run: updates.append(run.model.updates) or float(run.model.updates == 4)  # noqa: E731
        states = Checkpointer(folder, every=2, score=score, resume="auto", stop=requests)
        with contextlib.suppress(Stopped):
            run.train(even(), 1, states=states)
    return sorted({*updates}), states.best, run.left[0]


def test_stop_does_not_change_which_updates_are_scored(tmp_path):
    """The model of update 4 is the best; it must be scored, also if the run stops in its window or at the end."""
    expected = scored_updates(tmp_path / "whole")
    assert expected[:2] == ([2, 4, 6, 8, 10, 12, 14], 1.0)
    for stop in range(1, 3 * 14, 2):  # it is asked three times in a window
        assert scored_updates(tmp_path / str(stop), stop) == expected, stop


def test_score_may_draw_random_numbers(tmp_path):
    def train(folder, stop=None):
        np.random.seed(1)
        Run().train(even(), 1, states=Checkpointer(folder, every=2, score=np.random.rand, resume="auto", stop=stop))

    train(tmp_path / "uninterrupted")
    expected = np.random.rand()
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", stop_after(14))
    train(tmp_path / "stopped")
    assert np.random.rand() == expected


class Calls(Callback):
    def __init__(self, call):
        self._call = call

    def on_train_step_end(self, run_context):
        self._call(run_context.original_args())


def elsewhere(folder):
    """Return a callback that changes the working directory after the second window."""
    folder.mkdir()
    return Calls(lambda args: os.chdir(folder) if args.cur_step_num == 2 else None)


def test_program_may_change_its_working_directory(tmp_path):
    """Relative paths refer to the folder in which they were given."""
    os.mkdir("here")
    os.chdir("here")
    run = Run()
    states = Checkpointer("states", every=1, stop=lambda: run.model.updates == 5)
    options = {"callbacks": elsewhere(tmp_path / "there"), "report": ()}
    with pytest.raises(Stopped, match="in 'states/state-00000005.safetensors'"):
        run.model.train_process(1, even(), 1, ckpt_path=None, checkpointer=states, **options)
    assert names(tmp_path / "here" / "states") == ["state-00000005.safetensors"]
    os.chdir(tmp_path / "here")
    second, resumed = Run(), Checkpointer("states", resume="states/state-00000005.safetensors")
    options = {"callbacks": elsewhere(tmp_path / "third"), "report": (), "ckpt_path": "m.ckpt", "checkpointer": resumed}
    second.model.train_process(1, even(), 1, **options)
    assert resumed.resumed[0].startswith("states/state-00000005.safetensors: 5 updates") and second.model.updates == 7
    assert sorted(os.listdir(tmp_path / "here")) == ["m.ckpt", "states"]
    assert os.listdir(tmp_path / "there") == os.listdir(tmp_path / "third") == []


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Run().train(even(), 1, epochs=1, states=Checkpointer("~/states"))
    assert names(tmp_path / "states") == ["state-00000001.safetensors"]
    assert Run().train(even(), 1, epochs=2, states=Checkpointer("~/states", resume="auto")).model.updates == 14


def test_second_run_in_the_folder_is_rejected(tmp_path):
    with Checkpointer(tmp_path), pytest.raises(RuntimeError, match="another run is using the folder"):
        Run().train(numbers(), 2, states=Checkpointer(tmp_path))


# What is rejected


def resume(path, make=Run, mini_steps=3, **options):
    return make().train(numbers(), mini_steps, states=Checkpointer(path.parent, resume=path, **options))


def test_new_run_in_a_folder_with_states_is_rejected(saved):
    """They are another run's, whose last state the new run would remove."""
    before = saved.read_bytes()
    elsewhere = shutil.copy(saved, saved.with_name("other.safetensors"))
    for resume in (None, Path(shutil.move(elsewhere, saved.parent.parent))):
        with pytest.raises(CheckpointError, match="'folder' must have no training states when a run begins, but "):
            Run().train(numbers(), 3, states=Checkpointer(saved.parent, resume=resume))
    assert saved.read_bytes() == before and names(saved.parent) == [saved.name]


def test_missing_file_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere' is not a file"):
        resume(tmp_path / "nowhere")


def test_auto_in_an_empty_folder_starts_a_new_run(tmp_path):
    states = Checkpointer(tmp_path, resume="auto")
    Run().train(numbers(), 3, states=states)
    assert states.resumed == [f"nothing: no state in '{tmp_path}'"]


def test_auto_skips_damaged_states_and_reports_them(saved):
    """Also a pipe, whose other end it would wait for."""
    saved.with_name("state-00000002.safetensors").write_bytes(saved.read_bytes()[:-1])
    os.mkfifo(saved.with_name("state-00000007.safetensors"))
    states = Checkpointer(saved.parent, resume="auto")
    Run().train(numbers(), 3, states=states)
    assert "state-00000007.safetensors' is not a file" in states.resumed[0]
    assert "state-00000002" in states.resumed[1] and str(saved) in states.resumed[2]


def test_auto_raises_if_all_states_are_damaged(saved):
    saved.write_bytes(b"\xff" + saved.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="state-00000001"):
        Run().train(numbers(), 3, states=Checkpointer(saved.parent, resume="auto"))


@pytest.mark.parametrize(
    ("make", "mini_steps", "config", "message"),
    [
        (Run, 4, {}, "mini_steps was 3 and is 4"),
        (lambda: Run(clip_norm=1.0), 3, {}, "clip_norm was None and is 1.0"),
        (lambda: Run(nonfinite="raise"), 3, {}, "nonfinite was None and is raise"),
        (lambda: Run(adam_with_schedule), 3, {}, "optimizer was Momentum and is Adam"),
        (Run, 3, {"lr": 0.5}, "lr was None and is 0.5"),
    ],
)
def test_other_settings_are_rejected_by_name(saved, make, mini_steps, config, message):
    with pytest.raises(CheckpointError, match=message):
        resume(saved, make, mini_steps, config=config)


@pytest.mark.parametrize("split", [False, True])
def test_another_batch_size_resumes_at_the_same_row(tmp_path, split):
    def digits(batch_size):
        return create_dataset(batch_size=batch_size, image_size=8, seed=5)

    window = {"micro_batch_size": 20} if split else {"mini_steps": 3}
    with pytest.raises(Stopped):
        Run(features=64).train(digits(40), epochs=1, states=Checkpointer(tmp_path, stop=stop_after(20)), **window)
    done = training_state.read(str(tmp_path / "state-00000001.safetensors")).metadata["at"]["rows"]
    states = Checkpointer(tmp_path, resume="auto", config={"batch_size": 24}, allow_config_change=True)
    run = Run(features=64).train(digits(24), epochs=1, states=states, **window)
    trained = sum(record.samples for record in run.recorder.records)
    assert done and 1437 - done <= trained < 1437 - done + 24


@pytest.mark.parametrize("kind", ["data set", "list", "split"])
@pytest.mark.parametrize("rows", [6, 2])
def test_batches_of_another_size_are_refused(tmp_path, kind, rows):
    """They would begin at another row: some would be lost, or trained twice."""

    def data(size):
        if kind == "list":
            return numbers([size] * (24 // size))
        columns = [column.asnumpy() for column in numbers([24])[0]]
        return NumpySlicesDataset(tuple(columns), ["x", "y"], shuffle=False).batch(size)

    window = {"micro_batch_size": 2} if kind == "split" else {"mini_steps": 2}
    with pytest.raises(Stopped):
        Run().train(data(4), epochs=1, states=Checkpointer(tmp_path, stop=stop_after(9)), **window)
    with pytest.raises(CheckpointError, match=f"batches was 6 and is {24 // rows}"):
        Run().train(data(rows), epochs=1, states=Checkpointer(tmp_path, resume="auto"), **window)


def test_a_list_with_other_rows_is_refused(tmp_path):
    with pytest.raises(Stopped):
        Run().train(numbers([4] * 6), 2, epochs=1, states=Checkpointer(tmp_path, stop=stop_after(9)))
    rule = r"which had finished \d batch.* of \d+ rows, but got another: these have \d+ rows"
    with pytest.raises(ValueError, match=rule):
        Run().train(numbers([6] * 6), 2, epochs=1, states=Checkpointer(tmp_path, resume="auto"))


@pytest.mark.parametrize("size", [4, 2])
def test_fewer_batches_than_are_done_are_refused(tmp_path, size):
    def data(rows, size=4):
        columns = [column.asnumpy() for column in numbers([rows])[0]]
        return NumpySlicesDataset(tuple(columns), ["x", "y"], shuffle=False).batch(size)

    with pytest.raises(Stopped):
        Run().train(data(24), 1, epochs=1, states=Checkpointer(tmp_path, stop=stop_after(9)))
    states = Checkpointer(tmp_path, resume="auto", allow_config_change=True)
    message = f"'train_dataset' must have more batches, but got {8 // size}, of which the run"
    run = Run()
    before = digest(run.optimizer.get_parameters())
    with pytest.raises(ValueError, match=message):
        run.train(data(8, size), 1, epochs=1, states=states)
    assert digest(run.optimizer.get_parameters()) == before and run.model.updates == 0


def test_batch_with_another_split_is_restarted(tmp_path):
    with pytest.raises(Stopped):
        Run().train(numbers([20] * 3), epochs=1, states=Checkpointer(tmp_path, stop=stop_after(11)), micro_batch_size=6)
    states = Checkpointer(tmp_path, resume="auto", allow_config_change=True)
    run = Run().train(numbers([20] * 3), epochs=1, states=states, micro_batch_size=5)
    assert [(record.update, record.samples) for record in run.recorder.records] == [(2, 20), (3, 20)]


@pytest.mark.usefixtures("eager")
def test_new_learning_rate_is_used_if_a_change_is_allowed(saved):
    def slower():
        return Run(lambda network: nn.Momentum(network.trainable_params(), 0.01, 0.5))

    run = resume(saved, slower, config={"lr": 0.01}, allow_config_change=True)
    assert float(run.optimizer.momentum.asnumpy()) == 0.5
    assert [record.lr for record in run.recorder.records] == pytest.approx([0.01] * 5)


def test_another_network_is_rejected_and_not_changed(saved):
    run = Run(features=7)
    before = digest(run.optimizer.get_parameters())
    states = Checkpointer(saved.parent, resume=saved)
    with pytest.raises(CheckpointError, match=r"1.weight is float32 \(5, 6\) instead of float32 \(5, 7\)"):
        run.train(numbers(), 3, states=states)
    assert digest(run.optimizer.get_parameters()) == before


def test_state_of_another_version_is_rejected(saved, monkeypatch):
    monkeypatch.setattr(training_state, "VERSION", training_state.VERSION + 1)
    with pytest.raises(CheckpointError, match="is a training state of another version of ms_accum"):
        resume(saved)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_windows_of_another_size_begin_after_the_last_window(saved, size):
    run = resume(saved, mini_steps=size, allow_config_change=True)
    assert run.recorder.records[0].update == 2
    assert run.recorder.records[0].samples == sum(ROWS[3 : 3 + size])
