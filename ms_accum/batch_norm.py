"""What to do about BatchNorm?"""

from __future__ import annotations

import warnings

from mindspore import nn

# By name: those of `mindspore.mint` share no class with those of `nn`.
_KINDS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}


def warn_about_batch_norm(network: nn.Cell) -> None:
    """Warn that BatchNorm sees micro-batches, so that no accumulation can equal the big batch."""
    names = [
        name for name, cell in network.cells_and_names() if _KINDS & {kind.__name__ for kind in type(cell).__mro__}
    ]
    if names:
        warnings.warn(
            f"BatchNorm layers ({len(names)}, the first is '{names[0]}') normalise each micro-batch by its own "
            "statistics, so accumulation does not equal the big batch. GroupNorm or LayerNorm would.",
            UserWarning,
            stacklevel=4,
        )
