"""BatchNorm under accumulation: the warning about it, and layers that are replaced or frozen."""

from __future__ import annotations

from typing import Any, NoReturn

from mindspore import nn

from .. import _check
from .replaced import forget_graphs, replace_layers

# Compared by name, because the classes of `mindspore.mint` and of `nn` have no common base.
_NAMES = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}
_WITH_PARAMETERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)  # a BatchNorm3d contains a BatchNorm2d


def warn_about_batch_norm(network: nn.Cell, *, training: bool = False) -> None:
    """Warn that BatchNorm normalizes micro-batches, so that accumulation does not equal the large batch.

    Args:
        network (Cell): the network.
        training (bool): whether it will be in training mode, in whatever mode it is now. Default: ``False``.
    """
    names = [name for name, cell in network.cells_and_names() if takes_statistics(cell, training=training)]
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
    if not _NAMES & {kind.__name__ for kind in type(cell).__mro__}:
        return False
    always = getattr(cell, "use_batch_statistics", None)
    return bool(training or cell.training) if always is None else bool(always)


# Layers that normalize a row in the same way in each batch


def batch_to_group_norm(network: nn.Cell, groups: int = 32) -> nn.Cell:
    """Replace the BatchNorm layers of a network by GroupNorm, in place, so that accumulation is exact.

    GroupNorm normalizes each row separately. The new layers keep the Parameters gamma and beta of the old ones, but
    have no running statistics: train the network again, or fine-tune it. A layer gets the largest number of groups, up
    to `groups`, that divides its number of channels. `nn.BatchNorm1d` gets one group, which is LayerNorm over all
    channels: with inputs of shape (N, C), groups of one channel would give zeros.

    Args:
        network (Cell): a network with `nn.BatchNorm1d`, `nn.BatchNorm2d`, `nn.BatchNorm3d` or `nn.SyncBatchNorm`.
        groups (int): the maximum number of groups. Default: 32.

    Returns:
        Cell, the same network.

    Raises:
        TypeError: If `network` is not a Cell, or is itself a BatchNorm, or `groups` is not an int.
        ValueError: If the network contains no BatchNorm, or a `nn.BatchNorm1d` with one channel, or `groups` is less
            than 1.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from ms_accum import batch_to_group_norm
        >>>
        >>> network = nn.SequentialCell(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU())
        >>> print(batch_to_group_norm(network)[1])
        GroupNorm(num_groups=24, num_channels=48)
    """
    owner = "batch_to_group_norm"
    largest = _check.positive_int(owner, "groups", groups)
    _check_contains(owner, network, "Make a GroupNorm instead.")
    for name, cell in network.cells_and_names():  # before any layer is replaced
        if isinstance(cell, nn.BatchNorm1d) and cell.num_features == 1:
            rule = "without a BatchNorm1d of one channel"
            remedy = "It would give zeros. Use freeze_batch_norm, or remove the layer."
            _check.raise_invalid(ValueError, owner, "network", rule, f"'{name}'", remedy)
    if not replace_layers(network, _is_batch_norm, lambda layer, number: _group_norm(layer, largest)):
        _raise_no_batch_norm(owner, network)
    return network


def _group_norm(layer: Any, largest: int) -> nn.Cell:
    inner = getattr(layer, "bn2d", layer)
    channels = inner.num_features
    groups = 1
    if not isinstance(layer, nn.BatchNorm1d):
        groups = max(number for number in range(1, min(largest, channels) + 1) if channels % number == 0)
    new = nn.GroupNorm(groups, channels, inner.eps)
    new.gamma = inner.gamma
    new.beta = inner.beta
    return new


def freeze_batch_norm(network: nn.Cell) -> nn.Cell:
    """Make the BatchNorm layers of a network use their running statistics also in training, in place.

    Accumulation is then exact. The statistics no longer change, but gamma and beta are still trained. This is meant for
    pretrained networks. Call it before you create the driver, the step or the `Accumulator`.

    Args:
        network (Cell): a network with `nn.BatchNorm1d`, `nn.BatchNorm2d`, `nn.BatchNorm3d` or `nn.SyncBatchNorm`.

    Returns:
        Cell, the same network.

    Raises:
        TypeError: If `network` is not a Cell.
        ValueError: If the network contains no BatchNorm.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_accum import freeze_batch_norm
        >>>
        >>> network = freeze_batch_norm(nn.SequentialCell(nn.BatchNorm2d(3))).set_train()
        >>> before = network[0].moving_mean.asnumpy().copy()
        >>> _ = network(ops.randn(2, 3, 4, 4))
        >>> print((network[0].moving_mean.asnumpy() == before).all())
        True
    """
    owner = "freeze_batch_norm"
    _check.instance(owner, "network", network, nn.Cell, "a Cell")
    layers = [cell for _, cell in network.cells_and_names() if isinstance(cell, _WITH_PARAMETERS)]
    if not layers:
        _raise_no_batch_norm(owner, network)
    for layer in layers:
        layer.use_batch_statistics = False
    forget_graphs(network)
    return network


def _check_contains(owner: str, network: Any, remedy: str) -> None:
    """Raise an error if `network` is not a Cell, or is itself a BatchNorm, which can't be replaced in place."""
    _check.instance(owner, "network", network, nn.Cell, "a Cell")
    if _is_batch_norm(network):
        rule = "one that contains BatchNorm layers"
        _check.raise_invalid(TypeError, owner, "network", rule, type(network).__name__, remedy)


def _is_batch_norm(cell: Any) -> bool:
    return isinstance(cell, (*_WITH_PARAMETERS, nn.BatchNorm3d))


def _raise_no_batch_norm(owner: str, network: nn.Cell) -> NoReturn:
    rule = "one with BatchNorm layers of mindspore.nn"
    _check.raise_invalid(
        ValueError, owner, "network", rule, f"{type(network).__name__} without one", "Leave out this call."
    )
