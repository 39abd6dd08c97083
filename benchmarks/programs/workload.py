"""What is trained, and how is a burst of it timed?

The same arrays for every framework: NumPy is the one library that all of their environments have.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any, Callable, Protocol

import numpy as np
from protocol import serve

NETWORKS = ("lenet5", "mlp", "transformer", "mlp12m", "mlp50m")
TOKENS, VOCABULARY, WIDTH, HEADS, LAYERS = 64, 256, 128, 4, 4
MLP_WIDTH = {"mlp": 512, "mlp12m": 3072, "mlp50m": 6700}
LEARNING_RATE, MOMENTUM = 0.01, 0.9

_SHAPES = {"lenet5": (1, 32, 32), **dict.fromkeys(MLP_WIDTH, (1, 28, 28))}
_POOL = 16  # micro-batches made beforehand, which a burst goes round and round
_WRONG = 0.2  # of the targets, so that gradients never die out into denormal numbers, on which a CPU is slow

MicroBatch = tuple[np.ndarray, np.ndarray]


class Trainer(Protocol):
    """One framework's program of gradient accumulation."""

    versions: dict[str, str]
    parameters: int

    def set_window(self, window: int) -> None:
        """Get ready for windows of so many micro-batches, from fresh weights or not."""

    def load(self, micro_batches: Sequence[MicroBatch]) -> Any:
        """Return a window of arrays as the framework wants to have it."""

    def train(self, windows: Sequence[Any]) -> float:
        """Train, with an update after each window, and return the last loss; nothing is left in the queue."""


def run(make: Callable[[argparse.Namespace], Trainer], *flags: str) -> None:
    """Be a program that trains `--network` in bursts; `flags` are those of its own, true if given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=NETWORKS, required=True)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    arguments = parser.parse_args()

    def build() -> tuple[dict, Callable[..., dict]]:
        trainer = make(arguments)
        about = {"versions": trainer.versions, "parameters": trainer.parameters}
        return about, Bursts(trainer, arguments.network)

    serve(build)


class Bursts:
    """Some windows at a time, timed, on data that is ready."""

    def __init__(self, trainer: Trainer, network: str):
        self._trainer, self._network = trainer, network
        self._key: tuple[int, int] | None = None
        self._windows: list[Any] = []

    def __call__(self, window: int, batch: int, windows: int) -> dict[str, float]:
        self._prepare(window, batch)
        chosen = list(itertools.islice(itertools.cycle(self._windows), windows))
        began = time.perf_counter()
        loss = self._trainer.train(chosen)
        return {"seconds": time.perf_counter() - began, "loss": loss}

    def _prepare(self, window: int, batch: int) -> None:
        if self._key == (window, batch):
            return
        pool = micro_batches(self._network, batch, max(_POOL, window))
        self._trainer.set_window(window)
        self._windows = [self._trainer.load(pool[i : i + window]) for i in range(0, len(pool) - window + 1, window)]
        self._key = (window, batch)


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
