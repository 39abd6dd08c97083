"""Programs that the memory tests run in separate processes. Also: python tests/memory_runs.py NET ROWS NxCOUNT ..."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import numpy as np


def images(rows, side=32):
    """A wide convolution and what goes with it: at 32 x 32, 0.5 MB of activations a row and 10,000 parameters."""
    from mindspore import nn

    layers = (
        nn.Conv2d(1, 16, 3),
        nn.GELU(),
        nn.Conv2d(16, 16, 3, stride=4),
        nn.GELU(),
        nn.Flatten(),
        nn.Dense(side * side, 10),
    )
    rng = np.random.RandomState(0)
    batch = (rng.randn(rows, 1, side, side).astype(np.float32), rng.randint(0, 10, rows).astype(np.int32))
    return nn.SequentialCell(*layers), batch


def wide(rows, width=4096):
    """An MLP that is nearly all parameters: 33.6 million at 4096."""
    from mindspore import nn

    network = nn.SequentialCell(nn.Dense(width, width), nn.ReLU(), nn.Dense(width, width))
    return network, (np.ones((rows, width), np.float32), np.zeros(rows, np.int32))


NETWORKS = {"images": images, "wide": wide, "small": partial(wide, width=16)}


def driver(network):
    import mindspore as ms
    from mindspore import nn

    from ms_accum import GradientAccumulation

    ms.set_context(mode=ms.GRAPH_MODE)
    return GradientAccumulation(network, nn.CrossEntropyLoss(), nn.SGD(network.trainable_params(), 0.001))


def peak():
    """Return the peak memory of this process so far, in MB."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def print_peaks(name, rows, *runs):
    """Train a network several times, each with COUNT micro-batches, N in a window; print the peak so far each time."""
    network, batch = NETWORKS[name](int(rows))
    model = driver(network)
    for run in runs:
        mini_steps, count = map(int, run.split("x"))
        model.train_process(1, [batch] * count, mini_steps, report=(), ckpt_path=None)
        print(peak())


if __name__ == "__main__":
    print_peaks(*sys.argv[1:])
