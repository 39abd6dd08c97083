"""What to do about BatchNorm?"""

from __future__ import annotations

from typing import Any

from mindspore import nn

from . import _check

# By name: those of `mindspore.mint` share no class with those of `nn`.
_KINDS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}


def warn_about_batch_norm(network: nn.Cell) -> None:
    """Warn that BatchNorm sees micro-batches, so that no accumulation can equal the big batch."""
    names = [name for name, cell in network.cells_and_names() if _takes_statistics(cell)]
    if names:
        _check.warn(
            f"BatchNorm layers ({len(names)}, the first is '{names[0]}') normalise each micro-batch by its own "
            "statistics, so accumulation does not equal the big batch. GroupNorm or LayerNorm would.",
            UserWarning,
        )


def _takes_statistics(cell: Any) -> bool:
    """Return whether it is BatchNorm and normalises by what it sees: a frozen one need not."""
    always = getattr(cell, "use_batch_statistics", None)
    return bool(_KINDS & {kind.__name__ for kind in type(cell).__mro__}) and (
        cell.training if always is None else always
    )
