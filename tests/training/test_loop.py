"""Is a loop of the user's own, around an Accumulator, resumed exactly?"""

from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from helpers import batches, compiled_step, cross_entropy, mutate
from ms_accum import Accumulator, Checkpointer, CheckpointError, ResumableLoop, Stopped
from ms_accum.saving import training_state
from reference import digest
from runs import stop_after

ROWS = [8, 8, 5, 8, 8, 8, 5]


def batches_of(epoch):
    """The order is a function of the epoch."""
    return batches(np.random.RandomState(epoch), ROWS)


class Own:
    """A user's program."""

    def __init__(self, window=3, make=nn.Adam):
        ms.set_seed(1)
        self.network, loss_fn = nn.SequentialCell(nn.Flatten(), nn.Dense(6, 3)), cross_entropy()
        self.optimizer = make(self.network.trainable_params(), 0.1)
        self.accumulator = Accumulator(self.optimizer, window, clip_norm=0.5, reduction="mean")
        self.step = compiled_step(self.network, loss_fn, self.accumulator, self.optimizer)

    def train(self, folder, epochs=2, **options):
        options = {"resume": "auto", **options}
        with ResumableLoop(Checkpointer(folder, **options), self.network, self.accumulator) as loop:
            self.resumed_at = (loop.epoch, loop.batches)
            for epoch in range(loop.epoch, epochs + 1):
                for number, (x, y) in enumerate(batches_of(epoch), 1):
                    if number > loop.batches:
                        self.step(x, y)
                        loop.after_micro_batch(epoch, number)
                self.accumulator.flush()
                loop.after_micro_batch(epoch + 1, 0)
        return self

    @property
    def left(self):
        state = [parameter.asnumpy() for parameter in self.accumulator.state.values()]
        return digest([*(each.asnumpy() for each in self.optimizer.get_parameters()), *state])


def stopped_and_resumed(folder, *stops, **options):
    for stop in stops:
        with pytest.raises(Stopped, match="the training state is in"):
            Own(**options).train(folder, stop=stop_after(stop))
    return Own(**options).train(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    ms.set_context(mode=ms.GRAPH_MODE)
    return Own().train(tmp_path_factory.mktemp("whole")).left


# Each micro-batch, and after each epoch the beginning of the next one: 8 positions.
@pytest.mark.parametrize("stops", [(7, 2), *(pytest.param((stop,), marks=pytest.mark.slow) for stop in range(1, 16))])
def test_a_resumed_loop_is_the_same(tmp_path, whole, stops):
    assert stopped_and_resumed(tmp_path, *stops).left == whole


@pytest.mark.slow
def test_a_window_of_one(tmp_path):
    assert stopped_and_resumed(tmp_path / "b", 4, window=1).left == Own(window=1).train(tmp_path / "a").left


@pytest.mark.slow
@pytest.mark.parametrize("forgets", ["window", "position", None])
def test_what_a_state_must_hold(tmp_path, whole, forgets):
    """The mutants: what is not put back makes it another run."""
    with pytest.raises(Stopped):
        Own().train(tmp_path, stop=stop_after(5))
    own = Own()
    states = Checkpointer(tmp_path, resume="auto")
    with ResumableLoop(states, own.network, own.accumulator) as loop:
        done = loop.batches if forgets != "position" else 0
        if forgets == "window":
            own.accumulator.clear()
        for epoch in (1, 2):
            for x, y in itertools.islice(batches_of(epoch), done if epoch == 1 else 0, None):
                own.step(x, y)
            own.accumulator.flush()
    assert (own.left == whole) is (forgets is None)


@pytest.mark.host
def test_states_are_saved_on_the_update_clock(tmp_path):
    own = Own().train(tmp_path, every=2, keep=9, resume=None)
    saved = [training_state.read(str(path)).facts for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [facts["updates"] for facts in saved] == [2, 4, 6] and own.accumulator.updates == 6
    assert [facts["at"]["batches"] for facts in saved] == [6, 3, 0]


@pytest.mark.host
def test_after_an_error_nothing_is_saved(tmp_path):
    """The Parameters may be ahead of the position."""
    own = Own()
    with pytest.raises(KeyError), ResumableLoop(Checkpointer(tmp_path), own.network, own.accumulator):
        raise KeyError("mine")
    assert list(tmp_path.glob("*.safetensors")) == []
    own.train(tmp_path)  # the folder is free again


@pytest.mark.slow
@pytest.mark.host
def test_a_finished_loop_goes_on(tmp_path):
    Own().train(tmp_path, epochs=1)
    own = Own().train(tmp_path, epochs=2)
    assert own.resumed_at == (2, 0) and own.accumulator.updates == 6


@pytest.mark.host
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"window": 4}, "accumulate_step was 3 and is 4"),
        ({"make": nn.SGD}, "optimizer was Adam and is SGD"),
    ],
)
def test_another_run_is_refused(tmp_path, other, message):
    with pytest.raises(Stopped):
        Own().train(tmp_path, stop=stop_after(4))
    with pytest.raises(CheckpointError, match=message):
        Own(**other).train(tmp_path)


@pytest.mark.slow
@pytest.mark.host
def test_another_window_on_request(tmp_path):
    with pytest.raises(Stopped):
        Own().train(tmp_path, stop=stop_after(4))
    own = Own(window=4).train(tmp_path, allow_config_change=True)
    assert own.accumulator.accumulate_step == 4 and own.accumulator.updates == 4


@pytest.mark.host
def test_a_window_of_one_can_not_go_on_with_an_open_window(tmp_path):
    with pytest.raises(Stopped):
        Own().train(tmp_path, stop=stop_after(4))
    with pytest.raises(CheckpointError, match="holds 1 micro-batches of an open window, which windows of 1"):
        Own(window=1).train(tmp_path, allow_config_change=True)


@pytest.mark.host
@pytest.mark.parametrize("mutation", ["one late"])
def test_the_windows_end_is_saved(tmp_path, monkeypatch, mutation):
    mutate(monkeypatch, mutation)
    own = Own().train(tmp_path, epochs=1)
    assert own.accumulator.updates == 2


@pytest.mark.host
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("folder", "network"), "'checkpointer' must be a Checkpointer, but got str"),
        (("states", "function"), "'network' must be a Cell, but got function"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    own = Own()
    given = {"folder": "states", "states": Checkpointer(tmp_path), "network": own.network, "function": batches_of}
    with pytest.raises(TypeError, match=message):
        ResumableLoop(*(given[name] for name in arguments), own.accumulator)


@pytest.mark.parametrize(
    ("position", "error", "said"),
    [
        ((0, 3), ValueError, "'epoch' must be an int >= 1, but got 0."),
        ((1, -1), ValueError, "'batches' must be an int >= 0, but got -1."),
        ((1.0, 0), TypeError, "'epoch' must be an int >= 1, but got 1.0 (float)."),
        ((1, True), TypeError, "'batches' must be an int >= 0, but got True (bool)."),
    ],
)
@pytest.mark.host
def test_a_position_that_can_not_be_saved_is_refused_when_it_is_given(tmp_path, position, error, said):
    """And not at the save, which may come hours later."""
    own = Own()
    with ResumableLoop(Checkpointer(tmp_path), own.network, own.accumulator) as loop:
        with pytest.raises(error) as caught:
            loop.after_micro_batch(*position)
        assert str(caught.value) == f"For 'after_micro_batch', {said}"
        loop.after_micro_batch(np.int64(1), np.int64(0))
