"""The workload that every framework trains, and the timing of a burst of it.

The same arrays for every framework: NumPy is the one library that all of their environments have.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Callable, Literal, NamedTuple

import numpy as np

from benchmarks.programs.protocol import flags_of, serve, timed

Network = Literal["lenet5", "mlp", "transformer", "mlp12m", "mlp50m"]
TOKENS, VOCABULARY, WIDTH, HEADS, LAYERS = 64, 256, 128, 4, 4
MLP_WIDTH = {"mlp": 512, "mlp12m": 3072, "mlp50m": 6700}
LEARNING_RATE, MOMENTUM = 0.01, 0.9

_SHAPES = {"lenet5": (1, 32, 32), **dict.fromkeys(MLP_WIDTH, (1, 28, 28))}
_POOL = 16  # micro-batches made beforehand, which a burst goes round and round
_WRONG = 0.2  # of the targets, so that gradients never die out into denormal numbers, on which a CPU is slow

MicroBatch = tuple[np.ndarray, np.ndarray]
Train = Callable[[Sequence[Any]], float]


class Trainer(NamedTuple):
    """One framework's program of gradient accumulation."""

    versions: Mapping[str, str]
    """Of the libraries."""
    parameters: int
    """How many numbers are trained."""
    load: Callable[[Sequence[MicroBatch]], Any]
    """Turns a window of arrays into the framework's own."""
    windows_of: Callable[[int], Train]
    """Prepares windows of this number of micro-batches, from new or trained weights. Returns the function that trains
    some: an update after each window, and nothing left in the queue when it returns the last loss."""


def one_by_one(
    step: Callable[..., Any], end: Callable[[], Any] | None = None, wait: Callable[[], Any] | None = None
) -> Train:
    """Return the usual loop: `step` with each micro-batch, the loss read once for each window, then its `end`."""

    def train(windows: Sequence[Any]) -> float:
        shown = 0.0
        for window in windows:
            for micro_batch in window:
                loss = step(*micro_batch)
            shown = float(loss)
            if end:
                end()
        if wait:
            wait()
        return shown

    return train


def run(make: Callable[..., Trainer]) -> None:
    """Serve requests to train `--network` in bursts; the flags are the parameters of `make`."""
    flags = flags_of(make)

    def build() -> tuple[dict, Callable[..., dict]]:
        trainer = make(**flags)

        @lru_cache(1)
        def prepared(window: int, batch: int) -> tuple[Train, list]:
            pool = micro_batches(flags["network"], batch, max(_POOL, window))
            windows = [pool[i : i + window] for i in range(0, len(pool) - window + 1, window)]
            return trainer.windows_of(window), [trainer.load(arrays) for arrays in windows]

        def burst(window: int, batch: int, windows: int) -> dict[str, float]:
            train, ready = prepared(window, batch)
            seconds, loss = timed(train, list(itertools.islice(itertools.cycle(ready), windows)))
            return {"seconds": seconds, "loss": loss}

        return {"versions": trainer.versions, "parameters": trainer.parameters}, burst

    serve(build)


def micro_batches(network: str, batch: int, count: int) -> list[MicroBatch]:
    """Return random micro-batches, the same in every program."""
    rng = np.random.default_rng(1)
    make = _sentences if network == "transformer" else _images
    return [make(rng, network, batch) for _ in range(count)]


def _images(rng: np.random.Generator, network: str, batch: int) -> MicroBatch:
    """Return copies of ten pictures of noise, and which of the ten each is."""
    pictures = np.random.default_rng(0).standard_normal((10, *_SHAPES[network]), np.float32)
    digits = rng.integers(0, 10, batch)
    return pictures[digits], _blur(rng, digits, 10)


def _sentences(rng: np.random.Generator, network: str, batch: int) -> MicroBatch:
    """Return tokens that count upwards from a random one, and for all of them, flat, which one is next."""
    del network
    tokens = (rng.integers(0, VOCABULARY, (batch, 1)) + np.arange(TOKENS + 1)) % VOCABULARY
    return tokens[:, :-1].astype(np.int32), _blur(rng, tokens[:, 1:].reshape(-1), VOCABULARY)


def _blur(rng: np.random.Generator, targets: np.ndarray, classes: int) -> np.ndarray:
    wrong = rng.random(targets.shape) < _WRONG
    return np.where(wrong, rng.integers(0, classes, targets.shape), targets).astype(np.int32)
