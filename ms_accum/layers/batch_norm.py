"""BatchNorm under accumulation: the warning about it, and layers that are replaced, frozen, or pooled over a window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from .. import _check
from ..network import tree
from ..network.calls import call
from ..network.state import unique_name
from ..ranks.group import Group, group_of
from .replaced import forget_graphs, replace_layers

# Compared by name, because the classes of `mindspore.mint` and of `nn` have no common base.
_NAMES = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "PooledBatchNorm"}
_WITH_PARAMETERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)  # a BatchNorm3d contains a BatchNorm2d
SUMS = "window_sums"
"""str, the name of the Parameter that `pool_batch_norm` adds to a layer."""


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


# Running statistics of the large batch


class PooledBatchNorm(nn.Cell):
    """A BatchNorm that sums the statistics of micro-batches for `PooledStatistics`, instead of averaging them itself.

    Args:
        layer (Cell): the `nn.BatchNorm1d` or `nn.BatchNorm2d` whose Parameters it uses.

    Inputs and Outputs as for that layer.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.gamma = layer.gamma
        self.beta = layer.beta
        self.moving_mean = layer.moving_mean
        self.moving_variance = layer.moving_variance
        self.num_features = layer.num_features
        self.eps = layer.eps
        self.momentum = layer.momentum
        self.use_batch_statistics = layer.use_batch_statistics
        self.window_sums = Parameter(Tensor(np.zeros((3, self.num_features), np.float32)), SUMS, requires_grad=False)
        # With momentum 1 the kernel writes the statistics of the micro-batch, which it computes anyway. (Its outputs
        # for them are not set on CPU.) They are in a tuple, so that they are not saved: between calls they are zero.
        self.batch_statistics = tuple(
            Parameter(Tensor(np.zeros(self.num_features, np.float32)), unique_name(name), requires_grad=False)
            for name in ("own_mean", "own_variance")
        )
        self.bn_train = ops.BatchNorm(is_training=True, epsilon=self.eps, momentum=1.0)
        self.bn_infer = ops.BatchNorm(is_training=False, epsilon=self.eps)

    def construct(self, x: Any) -> Any:
        if not (self.training or self.use_batch_statistics):
            return self._infer(x)
        out = call(self.bn_train, (x, self.gamma, self.beta, *self.batch_statistics))[0]
        added = self._add(ops.depend(self.batch_statistics, ops.stop_gradient(out)), x.size / self.num_features)
        # The kernel adds 0 times the earlier statistics, so NaN would remain.
        return ops.depend(out, tree.clear(ops.depend(self.batch_statistics, added)))

    def _infer(self, x: Any) -> Any:
        planes = ops.reshape(x, (*x.shape, 1, 1)[:4]) if x.ndim < 4 else x
        out = self.bn_infer(planes, self.gamma, self.beta, self.moving_mean, self.moving_variance)[0]
        return ops.reshape(out, x.shape)

    def _add(self, batch_statistics: Any, count: float) -> Any:
        """Add the micro-batch's statistics, relative to the running mean: sums of large squares would be imprecise."""
        mean = batch_statistics[0] - self.moving_mean
        # For a single value the kernel's variance is NaN.
        variance = batch_statistics[1] * ((count - 1) / count) if count > 1 else ops.zeros_like(mean)
        row = ops.stack((ops.ones_like(mean), mean, variance + ops.square(mean)))
        return ops.assign_add(self.window_sums, ops.stop_gradient(row * count))

    def extend_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"num_features={self.num_features}, eps={self.eps}, momentum={1.0 - self.momentum}"


@ms.jit_class
class PooledStatistics:
    """Updates the running statistics of `PooledBatchNorm` layers once per window. Created by `pool_batch_norm`.

    Args:
        layers (Sequence[PooledBatchNorm]): the layers.
        group (Optional[Group]): the ranks that train together; ``None``: a single process.
    """

    def __init__(self, layers: Sequence[PooledBatchNorm], group: Group | None):
        self.state: dict[str, Parameter] = {}
        """Empty: the sums are Parameters of the network, and are saved and restored with it."""
        self.sums = tuple(layer.window_sums for layer in layers)
        self.means = tuple(layer.moving_mean for layer in layers)
        self.variances = tuple(layer.moving_variance for layer in layers)
        self.parameters = (*self.sums, *self.means, *self.variances)
        """The Parameters on which the condition of a branch around `after_window` must depend: see `Boundary.touch`."""
        momenta = np.concatenate([np.full(layer.num_features, layer.momentum) for layer in layers])
        self.momenta = Tensor(momenta, ms.float32)
        self.all_reduce = None if group is None else ops.AllReduce()

    def clear(self) -> None:
        """Discard the sums of an open window."""
        for sums in self.sums:
            ops.assign(sums, ops.zeros_like(sums))

    def after_window(self, updated: Any) -> Any:
        """Update the running statistics if the weights were updated, clear the sums, and return `updated`.

        Call it in a compiled graph after the optimizer, once per window, on all ranks.
        """
        sums = ops.depend(ops.cat(self.sums, 1) if len(self.sums) > 1 else self.sums[0] + 0.0, updated)
        if self.all_reduce is not None:
            sums = self.all_reduce(sums)
        means, variances = self._averaged(updated, *ops.unstack(sums, 0))
        assigned = (self._assign(self.means, means), self._assign(self.variances, variances))
        return ops.depend(updated, tree.clear(ops.depend(self.sums, assigned)))

    def _averaged(self, updated: Any, count: Any, first: Any, second: Any) -> Any:
        mean, variance = tree.flattened(self.means), tree.flattened(self.variances)
        shift = first / count
        pooled = ops.relu(second / count - ops.square(shift)) * (
            count / ops.maximum(count - 1, Tensor(1.0, ms.float32))
        )
        # A layer that did not run in the window gives 0 / 0. Non-finite statistics would never become finite again.
        valid = ops.logical_and(ops.isfinite(shift + second), updated)  # relu turns NaN into 0
        new_mean = mean + self.momenta * shift
        new_variance = variance + self.momenta * (pooled - variance)
        return ops.where(valid, new_mean, mean), ops.where(valid, new_variance, variance)

    def _assign(self, parameters: Any, row: Any) -> Any:
        values = tree.cast_like(tree.unflattened(row, parameters), parameters)
        assigned: tuple = ()
        for parameter, value in zip(parameters, values):
            assigned = (*assigned, ops.assign(parameter, value))
        return assigned


_ATTACHED = "_ms_accum_pooled"  # the name under which the network's Parameters have the statistics


def pool_batch_norm(network: nn.Cell, *, group: Group | str | None = "auto") -> PooledStatistics:
    """Compute the running statistics of BatchNorm layers over the complete window, as for a large batch.

    The layers are replaced in place by layers with the same Parameters. Means and variances (within and between
    micro-batches) are pooled over the window and the ranks, and averaged into the running statistics with the layer's
    momentum, once per window. Without this function each micro-batch is averaged in, with its own variance. A skipped
    window does not change the statistics.

    Each micro-batch is still normalized with its own statistics, so the gradient is not exactly that of the large
    batch. The running statistics are exact only for layers without an earlier BatchNorm, because the inputs of later
    layers were normalized by micro-batch.

    Call this before you create the driver, the step or the `Accumulator`, which then updates the statistics. For mixed
    precision call it after `mindspore.amp.auto_mixed_precision`. A saved model contains the sums, which are zero
    between windows: load a model that was trained with `nn.BatchNorm2d` before this call.

    Args:
        network (Cell): a network with `nn.BatchNorm1d`, `nn.BatchNorm2d` or `nn.BatchNorm3d`.
        group (Union[str, None, Group]): the ranks that train together: ``"auto"`` for all that a launcher started,
            ``None`` for this process alone. Default: ``"auto"``.

    Returns:
        PooledStatistics. Call its `after_window(updated)` yourself only in a loop without this package.

    Raises:
        TypeError: If `network` is not a Cell, or is itself a BatchNorm.
        ValueError: If the network contains no such layer, or all of them are frozen.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import mindspore as ms
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_accum import pool_batch_norm
        >>>
        >>> network = nn.SequentialCell(nn.BatchNorm1d(1, momentum=0.0)).set_train()
        >>> pooled = pool_batch_norm(network)
        >>> for rows in ([[1.0], [3.0]], [[5.0], [7.0]]):
        ...     _ = network(Tensor(np.array(rows), ms.float32))
        >>> _ = pooled.after_window(Tensor(True))
        >>> print(network[0].moving_mean.asnumpy(), np.var([1, 3, 5, 7], ddof=1).round(4))
        [4.] 6.6667
        >>> print(network[0].moving_variance.asnumpy().round(4))
        [6.6667]
    """
    owner = "pool_batch_norm"
    _check_contains(owner, network, "Put it into a SequentialCell.")
    layers = replace_layers(network, _is_to_be_pooled, lambda layer, number: PooledBatchNorm(layer))
    if not layers:
        _raise_no_batch_norm(owner, network)
    statistics = PooledStatistics(layers, group_of(owner, group))
    for parameter in network.get_parameters():  # also those of other layers: these may be the only ones trained
        vars(parameter)[_ATTACHED] = statistics
    return statistics


def pooled_of(parameters: Iterable[Parameter]) -> list[PooledStatistics]:
    """Return the statistics of the networks to which these Parameters belong."""
    attached = (vars(parameter).get(_ATTACHED) for parameter in parameters)
    return list({id(statistics): statistics for statistics in attached if statistics is not None}.values())


def _is_to_be_pooled(cell: Any) -> bool:
    return isinstance(cell, (nn.BatchNorm1d, nn.BatchNorm2d)) and cell.use_batch_statistics is not False
