"""Is a state that somebody has made up, with a right digest, rejected in one line, before anything is changed?"""

from __future__ import annotations

import contextlib
import copy
import random

import numpy as np
import pytest
from mindspore.train import Model

from helpers import cross_entropy
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    Checkpointer,
    CheckpointError,
    FlushTail,
    ResumableLoop,
    SaveStates,
    Stopped,
)
from ms_accum.network.generators import random_state
from ms_accum.network.parameters import copies_of, restore
from ms_accum.saving import training_state
from ms_accum.training.loop import trained_parameters
from reference import digest
from runs import Run, even, momentum, network_of, stop_after
from test_model_step import dataset

pytestmark = [
    pytest.mark.usefixtures("eager"),
    pytest.mark.filterwarnings("ignore:For 'SaveStates', the resumed run stopped before"),
]
SEED, CASES = 1, 40


class OfDriver:
    """A run of the driver."""

    def __init__(self):
        self.run = Run()
        self.network, self.optimizer = self.run.model._network, self.run.optimizer

    def train(self, states):
        self.run.train(even(), 2, states=states)


class OfModel:
    """A run of MindSpore's Model."""

    def __init__(self):
        self.network = network_of()
        self.optimizer = momentum(self.network)
        self.step = AccumulatedTrainStep((self.network, cross_entropy()), self.optimizer, 2)

    def train(self, states):
        data = dataset(even())
        saves = SaveStates(states, self.step, data)
        if saves.initial_epoch < 2:
            Model(self.step).train(2, data, callbacks=[FlushTail(), saves], initial_epoch=saves.initial_epoch)
        states.__exit__()


class OfLoop:
    """A loop of one's own, which trains nothing."""

    def __init__(self):
        self.network = network_of()
        self.optimizer = momentum(self.network)
        self.accumulator = Accumulator(self.optimizer, 2, reduction="mean")

    def train(self, states):
        with ResumableLoop(states, self.network, self.accumulator) as loop:
            for batches in range(loop.batches + 1, 8):
                loop.after_micro_batch(loop.epoch, batches)


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


VALUES = [None, True, 0, -1, 7, 2**31, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "text", "\x1b[31m"]
VALUES += [[], [1, 2], {}, {"a": 1}, nested(40), nested(400), nested(900)]
ARRAYS = {
    "another shape": lambda array: np.zeros((3, *array.shape), array.dtype),
    "no element": lambda array: array[..., :0] if array.ndim else np.zeros(0, array.dtype),
    "another type": lambda array: array.astype(np.float64),
    "bools": lambda array: array.astype(np.bool_),
}


def places(value, path=()):
    """Return the paths of all values inside a value, of a long list those of three."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    items = [items[0], items[len(items) // 2], items[-1]] if len(items) > 99 else items
    return [found for name, each in items for found in [(*path, name), *places(each, (*path, name))]]


def crafted(state, draw):
    """Return a state in which one thing is otherwise, and what it is."""
    arrays, metadata = dict(state.arrays), copy.deepcopy(state.metadata)
    kind = draw.choice(["a value"] * 4 + ["nothing", "one more", "an array"])
    if kind == "an array":
        name, (what, changed) = draw.choice(sorted(arrays)), draw.choice(list(ARRAYS.items()))
        arrays[name] = changed(arrays[name])
        return training_state.TrainingState(arrays, metadata), (name, what)
    # Each entry as often as the others, however much is inside it.
    entry = draw.choice(sorted(metadata))
    *path, last = draw.choice([place for place in places(metadata) if place[0] == entry])
    holder = metadata
    for name in path:
        holder = holder[name]
    value = copy.deepcopy(draw.choice(VALUES))
    if kind == "nothing":
        del holder[last]
    elif kind == "a value":
        holder[last] = value
    else:
        holder.append(value) if isinstance(holder, list) else holder.update(more=value)
    return training_state.TrainingState(arrays, metadata), (kind, *path, last, str(value)[:50])


@pytest.mark.parametrize("way", [OfDriver, OfModel, OfLoop])
def test_crafted_states_are_rejected_and_nothing_is_changed(tmp_path, way):
    run = way()
    copies = copies_of(trained_parameters(run.network, run.optimizer).values())
    with pytest.raises(Stopped):
        run.train(Checkpointer(tmp_path, stop=stop_after(4)))
    state, draw, rejected = training_state.read(str(*tmp_path.glob("state-*"))), random.Random(SEED), 0
    del state.metadata["state_version"]  # `write` adds it
    for number in range(CASES):
        other, what = crafted(state, draw)
        path = tmp_path / str(number) / "state-00000001.safetensors"
        path.parent.mkdir()
        with contextlib.suppress(CheckpointError):  # it is read back
            training_state.write(other, str(path))
        restore(copies)
        before = digest(each for each, _ in copies), random_state()
        states = Checkpointer(path.parent, resume="auto")
        try:
            run.train(states)
        except CheckpointError as error:
            rejected += 1
            assert str(path) in str(error) and len(str(error).splitlines()) == 1, what
            assert (digest(each for each, _ in copies), random_state()) == before, what
        except Exception as error:
            raise AssertionError(what) from error
        finally:
            states.__exit__()
    assert CASES > rejected > CASES // 2
