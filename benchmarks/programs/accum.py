"""Ours: windows of the driver, `ms_accum.GradientAccumulation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.programs import networks_ms
from benchmarks.programs.ours import VERSIONS, LastLoss, driver
from benchmarks.programs.workload import Network, Train, Trainer, run


def make(network: Network) -> Trainer:
    """Return `train_process` on ready Tensors, after `tune_cpu`."""
    trained = networks_ms.tuned(networks_ms.make(network))
    model, last = driver(trained), LastLoss()

    def windows_of(window: int) -> Train:
        def train(windows: Sequence[Any]) -> float:
            """Run an epoch of these windows."""
            dataset = [micro_batch for micro_batches in windows for micro_batch in micro_batches]
            model.train_process(1, dataset, mini_steps=window, report=(last,), ckpt_path=None)
            return last.loss

        return train

    return Trainer(VERSIONS, networks_ms.size(trained), networks_ms.tensors, windows_of)


if __name__ == "__main__":
    run(make)
