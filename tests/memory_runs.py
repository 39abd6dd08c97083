"""Trains a network several times, and prints the peak memory, in MB, after each: tests/memory_runs.py NET ROWS RUN ...

A run is N x COUNT: so many micro-batches, N in a window, such as 4x16. Run by the memory tests, each in a process.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import ms_accum.network.tree as tree
from ms_accum import GradientAccumulation


def images(rows):
    """A wide convolution and what goes with it: 0.5 MB of activations a row and 10,000 parameters."""
    layers = nn.Conv2d(1, 16, 3), nn.GELU(), nn.Conv2d(16, 16, 3, stride=4), nn.GELU(), nn.Flatten(), nn.Dense(1024, 10)
    return nn.SequentialCell(*layers), np.ones((rows, 1, 32, 32), np.float32)


def wide(rows, width=4096):
    """An MLP that is nearly all parameters: 33.6 million at 4096."""
    return nn.SequentialCell(nn.Dense(width, width), nn.ReLU(), nn.Dense(width, width)), np.ones((rows, width), "f4")


def small(rows):
    return wide(rows, 16)


def sums(rows):
    """The same as `wide`, with reduction="sum"."""
    return wide(rows)


def zeros(rows):
    """The mutant of `sums`: the accumulators are emptied with zeros of their size."""
    tree.clear = lambda total, finite=False: tuple([ops.assign(each, ops.zeros_like(each)) for each in total])
    return wide(rows)


def peak():
    """Return the peak memory of this process so far, in MB."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def main(name, rows, *runs):
    ms.set_context(mode=ms.GRAPH_MODE)
    network, x = {kind.__name__: kind for kind in (images, wide, small, sums, zeros)}[name](int(rows))
    optimizer, reduction = nn.SGD(network.trainable_params(), 0.001), "mean" if name not in ("sums", "zeros") else "sum"
    model = GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, reduction=reduction)
    for run in runs:
        mini_steps, count = map(int, run.split("x"))
        data = [(x, np.zeros(len(x), np.int32))] * count
        model.train_process(1, data, mini_steps, report=(), ckpt_path=None)
        print(peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
