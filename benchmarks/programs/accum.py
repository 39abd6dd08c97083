"""Ours: windows of the driver, `ms_accum.GradientAccumulation`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import networks_ms
from ours import VERSIONS, LastLoss, driver, tuned
from workload import Network, Train, Trainer, run

DEFAULTS = {"MS_DEV_HOST_BLOCKING_RUN": "0", "ONEDNN_MAX_CPU_ISA": "DEFAULT"}


def make(network: Network, untuned: bool = False, plain: bool = False) -> Trainer:
    """Return `train_process` on ready Tensors, after `tune_cpu`, or with `--untuned` without it."""
    if untuned:
        for name, value in DEFAULTS.items():  # the driver would set others
            os.environ.setdefault(name, value)
    trained = networks_ms.make(network, plain)
    model, last = driver(trained if untuned else tuned(trained)), LastLoss()

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
