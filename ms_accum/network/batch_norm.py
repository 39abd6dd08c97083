"""Does the network contain BatchNorm, with which accumulation is not exact?"""

from __future__ import annotations

from typing import Any

from mindspore import nn

from .. import _check

# Compared by name, because the classes of `mindspore.mint` and of `nn` have no common base.
_KINDS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "PooledBatchNorm"}


def warn_about_batch_norm(network: nn.Cell) -> None:
    """Warn that BatchNorm normalizes micro-batches, so that accumulation does not equal the large batch."""
    names = [name for name, cell in network.cells_and_names() if takes_statistics(cell)]
    if names:
        _check.warn(
            f"BatchNorm layers ({len(names)}, the first is '{names[0]}') normalize each micro-batch by its own "
            "statistics, so accumulation does not equal the large batch. With GroupNorm (batch_to_group_norm) it does.",
            UserWarning,
        )


def takes_statistics(cell: Any, *, training: bool = False) -> bool:
    """Return whether a Cell is a BatchNorm that uses the statistics of its input, now or in training mode.

    A frozen BatchNorm does not.
    """
    if hasattr(cell, "bn2d"):  # nn.BatchNorm3d, whose inner layer is checked instead
        return False
    always = getattr(cell, "use_batch_statistics", None)
    return bool(_KINDS & {kind.__name__ for kind in type(cell).__mro__}) and (
        training or cell.training if always is None else always
    )
