"""Programs that the memory tests run in separate processes. Also: python tests/memory_runs.py NET ROWS NxCOUNT ..."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from importlib import import_module

import numpy as np


def ends_well(rows):
    """Take next to nothing."""


def takes_memory(rows):
    """Print on both streams, and take a MiB a row, page by page."""
    print(rows, "MiB", flush=True)
    print(rows, "MiB", file=sys.stderr)
    return [np.ones(2**17) for _ in range(rows)]


def costs(rows, most=10_000):
    """Windows of 64 rows: a call costs 4 ms, and one with more than 16 rows 100 ms; more than `most` rows fail."""
    if rows > most:
        raise ValueError(f"{rows} are too many")

    def window():
        time.sleep(0.004 * len(range(0, 64, rows)) + 0.1 * (rows > 16))

    window()
    return window


def takes_memory_and_time(rows):
    """Take 10 MiB a row, and longer with more rows."""
    arrays = [np.ones(10 * 2**17) for _ in range(rows)]
    return lambda: time.sleep(0.01 * len(arrays))


def waits(path, rows):
    """Note which process this is, and stay."""
    with open(f"{path}.new", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"{path}.new", path)
    while True:
        signal.pause()


def raises(error, rows):
    raise error


def is_killed(rows):
    os.kill(os.getpid(), signal.SIGKILL)


def aborts(rows):
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def leaves(code, rows):
    os._exit(code)


class NotThere:
    """A function that a new process can't import."""

    def __call__(self, rows):
        pass

    def __reduce__(self):
        return import_module, ("there_is_no_such_module",)


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


def trains(name, rows):
    """A window of two micro-batches of one of the networks."""
    import mindspore as ms

    network, batch = NETWORKS[name](rows)
    micro_batch = tuple(ms.Tensor(column) for column in batch)
    driver(network).train_process(1, [micro_batch] * 2, 2, report=(), ckpt_path=None)


def train_whole(effective_batch, rows, report=()):
    """Train a window of larger `images` in micro-batches of `rows` rows, twice."""
    import mindspore as ms

    ms.set_seed(1)
    network, batch = images(effective_batch, side=96)
    driver(network).train_process(2, [batch], micro_batch_size=rows, report=report, ckpt_path=None)


def peak():
    """Return the peak so far in MB."""
    from ms_accum.app.trials import peak_of

    return peak_of("self") / 2**20


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
