"""List the functions of ms_accum that a micro-batch goes through: python tests/walk.py [driver|accumulator|step]

The micro-batch ends a window, in a run without options. It runs in PyNative mode, in which the parts that are otherwise
compiled are Python calls, too. A function is listed where the walk enters another file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after PYTHONPATH, which may name another tree

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.experimental import optim

import ms_accum
from ms_accum import AccumulatedTrainStep, Accumulator, GradientAccumulation

LIBRARY = Path(ms_accum.__file__).parent
WINDOW = 4


def watched(print_call):
    """Yield the micro-batches of three windows; of the last one, print the calls until the next is asked for."""
    rng = np.random.RandomState(1)
    for number in range(1, 3 * WINDOW + 1):
        columns = Tensor(rng.randn(8, 6), ms.float32), Tensor(rng.randint(0, 3, 8), ms.int32)
        sys.setprofile(print_call if number == 3 * WINDOW else None)
        yield columns
    sys.setprofile(None)


class Walk:
    """A profiler that prints each function of ms_accum that is called from another file."""

    def __init__(self):
        self.file = None

    def __call__(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and LIBRARY in path.parents and path != self.file:
            self.file = path
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # since Python 3.11
            print(f"{path.relative_to(LIBRARY).as_posix():32}{name}")


def main(way="driver"):
    """Train a small network in one of the ways, and print the walk."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = nn.SequentialCell(nn.Dense(6, 5), nn.ReLU(), nn.Dense(5, 3))
    loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    # MindSpore compiles `nn` optimizers outside of graphs, too: with them the walk would enter a graph of its own.
    optimizer = optim.SGD(network.trainable_params(), 0.1, momentum=0.9)
    micro_batches = watched(Walk())
    if way == "driver":
        model = GradientAccumulation(network, loss_fn, optimizer, compile=False)
        model.train_process(1, micro_batches, WINDOW, report=(), ckpt_path=None)
    elif way == "step":
        step = AccumulatedTrainStep((network, loss_fn), optimizer, WINDOW, compile=False).set_train()
        for columns in micro_batches:
            step(*columns)
    else:
        accumulator = Accumulator(optimizer, WINDOW, reduction="mean", compile=False)
        grad_fn = ms.value_and_grad(lambda x, y: loss_fn(network(x), y), None, optimizer.parameters)
        for x, y in micro_batches:
            accumulator(grad_fn(x, y)[1], x.shape[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
