"""The parts of `ms_accum` that several of our programs share."""

from __future__ import annotations

from typing import Any

from mindspore import nn
from mindspore.train import Callback, RunContext

from benchmarks.programs import networks_ms
from ms_accum import GradientAccumulation, __version__, native

# What an update costs depends on whether the operators were built.
VERSIONS = {
    "ms_accum": __version__,
    "C++ operators": "yes" if native.available() else "no",
    **networks_ms.VERSIONS,
}


class LastLoss(Callback):
    """Keeps what the others print."""

    loss = 0.0

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Keep the loss of the window."""
        self.loss = run_context.original_args().record.loss


def driver(network: nn.Cell, optimizer: Any = None, loss_fn: Any = None, **options: Any) -> GradientAccumulation:
    """Return the driver of a network, with the workload's loss and optimizer unless others are given."""
    optimizer = networks_ms.momentum(network) if optimizer is None else optimizer
    return GradientAccumulation(network, loss_fn or networks_ms.loss(), optimizer, **options)
