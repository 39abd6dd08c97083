"""Ours: how long does a window take in `ms_accum`'s driver?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import networks_ms
from workload import run

from ms_accum import GradientAccumulation, UpdateRecord, __version__, tune_cpu


class LastLoss:
    """A reporter that keeps what the others print."""

    loss = 0.0

    def start(self, updates: int | None) -> None:
        """Nothing to say."""

    def update(self, record: UpdateRecord) -> None:
        """Keep the loss of the window."""
        self.loss = record.loss

    def close(self) -> None:
        """Nothing to say."""


class Driver:
    """`GradientAccumulation.train_process` on ready Tensors, after `tune_cpu`, or with `--untuned` without it."""

    versions = {"ms_accum": __version__, **networks_ms.VERSIONS}
    load = staticmethod(networks_ms.tensors)

    def __init__(self, arguments: argparse.Namespace):
        network = networks_ms.make(arguments.network)
        if not arguments.untuned:
            tune_cpu(network)
        self.parameters = networks_ms.size(network)
        self._model = GradientAccumulation(network, networks_ms.loss(), networks_ms.momentum(network))
        self._window = 0
        self._last = LastLoss()

    def set_window(self, window: int) -> None:
        """Set `mini_steps` of what follows."""
        self._window = window

    def train(self, windows: Sequence[Any]) -> float:
        """Run an epoch of these windows."""
        dataset = [micro_batch for window in windows for micro_batch in window]
        self._model.train_process(1, dataset, mini_steps=self._window, report=(self._last,), ckpt_path=None)
        return self._last.loss


if __name__ == "__main__":
    run(Driver, "--untuned")
