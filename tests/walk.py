"""Count the calls that one micro-batch takes through ms_accum: python tests/walk.py [driver|accumulator|step] [--list]

The micro-batch ends a window, in a run without options. It runs in PyNative mode, in which the parts that are otherwise
compiled are Python calls, too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Callable, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after PYTHONPATH, which may name another tree

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.experimental import optim

import ms_accum
from ms_accum import AccumulatedTrainStep, Accumulator, GradientAccumulation

LIBRARY = Path(ms_accum.__file__).parent
WINDOW = 4
THIRD_END = 3 * WINDOW  # the number of the micro-batch with which the third window ends
# They belong to the function in which they are written. Generator functions are functions of their own.
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
# `call(function, inputs)` is how a Cell writes `function(*inputs)`.
STAR = LIBRARY / "network" / "calls.py"


class Call(NamedTuple):
    file: str
    """The file of the called function, relative to ms_accum."""
    function: str


class Walk:
    """The calls of functions in ms_accum, in their order, while it is the profiler of this thread.

    The resumption of a generator is a call.

    Args:
        watched (int): the number of the micro-batch during which it is the profiler, from 1.
    """

    def __init__(self, watched):
        self.watched = watched
        self.calls: list[Call] = []
        self.classes: set[str] = set()
        """The classes of ms_accum whose methods were called, or of which objects were made."""

    def start(self):
        sys.setprofile(self._event)

    def stop(self):
        sys.setprofile(None)

    def _event(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or code.co_name in COMPREHENSIONS:
            return
        path = Path(code.co_filename)
        if path == STAR:
            return
        own = LIBRARY in path.parents
        if own:
            name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
            self.calls.append(Call(path.relative_to(LIBRARY).as_posix(), name.replace("<locals>.", "")))
        # Constructors of data classes and of NamedTuples, whose first argument is `_cls`, are in no file of ms_accum.
        first = code.co_varnames[0] if code.co_argcount else ""
        if first == "_cls" or (first in ("self", "cls") and (own or code.co_name == "__init__")):
            owner = frame.f_locals[first]
            owner_class = owner if isinstance(owner, type) else type(owner)
            if owner_class.__module__.split(".")[0] == "ms_accum":
                self.classes.add(owner_class.__name__)

    @property
    def stops(self):
        """The calls that enter another file than the call before."""
        return [next(calls) for _, calls in groupby(self.calls, lambda call: call.file)]

    @property
    def rooms(self):
        """How often each room is entered: each folder of ms_accum, and "top" for its own files."""
        rooms = [call.file.rpartition("/")[0] or "top" for call in self.calls]
        return dict(Counter(room for room, _ in groupby(rooms)).most_common())

    @property
    def counts(self):
        """The numbers of the walk."""
        return {
            "stops": len(self.stops),
            "files": len({call.file for call in self.calls}),
            "rooms": sum(self.rooms.values()),
            "classes": len(self.classes),
        }


class Watched:
    """Micro-batches, one of which is watched, from its `__next__` to the request for the next one."""

    def __init__(self, micro_batches, walk):
        self._micro_batches, self._walk = micro_batches, walk

    def __iter__(self):
        self._number = 0
        return self

    def __len__(self):
        return len(self._micro_batches)

    def __next__(self):
        self._walk.stop()
        if self._number == len(self._micro_batches):
            raise StopIteration
        self._number += 1
        if self._number == self._walk.watched:
            self._walk.start()
        return self._micro_batches[self._number - 1]


def data():
    """Return the micro-batches of four windows."""
    rng = np.random.RandomState(1)
    return [
        (Tensor(rng.randn(8, 6).astype(np.float32)), Tensor(rng.randint(0, 3, 8).astype(np.int32)))
        for _ in range(4 * WINDOW)
    ]


def walk_driver(network, loss_fn, optimizer, walk):
    """Watch the driver from one micro-batch to the next."""
    model = GradientAccumulation(network, loss_fn, optimizer, compile=False)
    model.train_process(1, Watched(data(), walk), WINDOW, report=(), ckpt_path=None)


def walk_accumulator(network, loss_fn, optimizer, walk):
    """Watch one call of the Accumulator."""
    accumulator = Accumulator(optimizer, WINDOW, reduction="mean", compile=False)
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(network(x), y), None, optimizer.parameters)
    watch_call(walk, lambda x, y: (grad_fn(x, y)[1], x.shape[0]), accumulator)


def walk_step(network, loss_fn, optimizer, walk):
    """Watch one call of the AccumulatedTrainStep."""
    step = AccumulatedTrainStep((network, loss_fn), optimizer, WINDOW, compile=False)
    watch_call(walk, lambda x, y: (x, y), step.set_train())


def watch_call(walk, arguments_of, call):
    """Watch a function while it gets the watched micro-batch."""
    for number, micro_batch in enumerate(data(), 1):
        arguments = arguments_of(*micro_batch)
        if number == walk.watched:
            walk.start()
        call(*arguments)
        walk.stop()


WAYS: dict[str, Callable] = {"driver": walk_driver, "accumulator": walk_accumulator, "step": walk_step}


def walk(way, watched=THIRD_END):
    """Train a small network in one of the ways, and return the walk of a micro-batch."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(1)
    network = nn.SequentialCell(nn.Dense(6, 5), nn.ReLU(), nn.Dense(5, 3))
    loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    seen = Walk(watched)
    try:
        # MindSpore compiles `nn` optimizers outside of graphs, too: with them the walk would enter a graph of its own.
        WAYS[way](network, loss_fn, optim.SGD(network.trainable_params(), 0.1, momentum=0.9), seen)
    finally:
        seen.stop()
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ways", nargs="*", metavar="way", help=f"one or several of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="list the stops, and the classes")
    arguments = parser.parse_args()
    if unknown := set(arguments.ways) - set(WAYS):
        parser.error(f"'way' must be one of {', '.join(WAYS)}, but got {', '.join(sorted(unknown))}")
    for way in arguments.ways or WAYS:
        seen = walk(way)
        rooms = ", ".join(f"{room} {entries}" for room, entries in seen.rooms.items())
        print(f"{way:12}" + "".join(f"{name} {count:<5}" for name, count in seen.counts.items()) + f"({rooms})")
        if arguments.list:
            for number, stop in enumerate(seen.stops, 1):
                print(f"{number:5}  {stop.file:32}{stop.function}")
            print(f"       classes: {', '.join(sorted(seen.classes))}")


if __name__ == "__main__":
    main()
