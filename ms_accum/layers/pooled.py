"""How do BatchNorm's running statistics become those of the large batch?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ..network import tree
from ..network.accumulators import unique_name
from ..ranks.group import Group, group_of, networks_of
from .batch_norm import contained, without
from .replaced import replaced

SUMS = "window_sums"
_made: dict[int, PooledStatistics] = {}
"""The objects made so far, by the id of their first layer while it exists."""


class PooledBatchNorm(nn.Cell):
    """A BatchNorm that sums the statistics of micro-batches for `PooledStatistics`, instead of averaging them itself.

    Args:
        layer (Cell): the `nn.BatchNorm1d` or `nn.BatchNorm2d` whose Parameters it uses.

    Inputs and Outputs as for that layer.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.gamma, self.beta = layer.gamma, layer.beta
        self.moving_mean, self.moving_variance = layer.moving_mean, layer.moving_variance
        self.num_features, self.eps, self.momentum = layer.num_features, layer.eps, layer.momentum
        self.use_batch_statistics = layer.use_batch_statistics
        self.window_sums = Parameter(Tensor(np.zeros((3, self.num_features), np.float32)), SUMS, requires_grad=False)
        # With momentum 1 the kernel writes the statistics of the micro-batch, which it computes anyway. (Its outputs
        # for them are not set on CPU.) They are in a tuple, so that they are not saved: between calls they are zero.
        self.own = tuple(_scratch(self.num_features, unique_name(kind)) for kind in ("own_mean", "own_variance"))
        self.bn_train = ops.BatchNorm(is_training=True, epsilon=self.eps, momentum=1.0)
        self.bn_infer = ops.BatchNorm(is_training=False, epsilon=self.eps)

    def construct(self, x: Any) -> Any:
        if not (self.training or self.use_batch_statistics):
            return self._infer(x)
        out = self.bn_train(x, self.gamma, self.beta, *self.own)[0]
        added = self._add(ops.depend(self.own, ops.stop_gradient(out)), x.size / self.num_features)
        # The kernel adds 0 times the earlier statistics, so NaN would remain.
        return ops.depend(out, tree.clear(ops.depend(self.own, added)))

    def _infer(self, x: Any) -> Any:
        planes = ops.reshape(x, (*x.shape, 1, 1)[:4]) if x.ndim < 4 else x
        out = self.bn_infer(planes, self.gamma, self.beta, self.moving_mean, self.moving_variance)[0]
        return ops.reshape(out, x.shape)

    def _add(self, own: Any, count: float) -> Any:
        """Add the micro-batch's statistics, relative to the running mean: sums of large squares would be imprecise."""
        mean = own[0] - self.moving_mean
        # For a single value the kernel's variance is NaN.
        variance = own[1] * ((count - 1) / count) if count > 1 else ops.zeros_like(mean)
        row = ops.stack((ops.ones_like(mean), mean, variance + ops.square(mean)))
        return ops.assign_add(self.window_sums, ops.stop_gradient(row * count))

    def extend_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"num_features={self.num_features}, eps={self.eps}, momentum={1.0 - self.momentum}"


def _scratch(size: int, name: str) -> Parameter:
    return Parameter(Tensor(np.zeros(size, np.float32)), name, requires_grad=False)


@ms.jit_class
class PooledStatistics:
    """Updates the running statistics of `PooledBatchNorm` layers once per window. Created by `pool_batch_norm`.

    Args:
        layers (Sequence[PooledBatchNorm]): the layers.
        group (Optional[Group]): the ranks that train together; ``None``: a single process.
        of (Sequence[Parameter]): the Parameters of their network. Default: none.
    """

    def __init__(self, layers: Sequence[PooledBatchNorm], group: Group | None, of: Sequence[Parameter] = ()):
        self.of = {id(parameter) for parameter in of}
        self.state: dict[str, Parameter] = {}
        """Empty: the sums are Parameters of the network, and are saved and restored with it."""
        self.sums = tuple(layer.window_sums for layer in layers)
        self.means = tuple(layer.moving_mean for layer in layers)
        self.variances = tuple(layer.moving_variance for layer in layers)
        self.parameters = (*self.sums, *self.means, *self.variances)
        """The Parameters on which the condition of a branch around `after_window` must depend: see `Boundary.touch`."""
        shares = np.concatenate([np.full(layer.num_features, layer.momentum) for layer in layers])
        self.share = Tensor(shares, ms.float32)
        self.all_reduce = None if group is None else ops.AllReduce()

    def clear(self) -> None:
        """Discard the sums of an open window."""
        for each in self.sums:
            ops.assign(each, ops.zeros_like(each))

    def after_window(self, updated: Any) -> Any:
        """Update the running statistics if the weights were updated, clear the sums, and return `updated`.

        Call it in a compiled graph after the optimizer, once per window, on all ranks.
        """
        sums = ops.depend(ops.cat(self.sums, 1) if len(self.sums) > 1 else self.sums[0] + 0.0, updated)
        if self.all_reduce is not None:
            sums = self.all_reduce(sums)
        means, variances = self._new(updated, *ops.unstack(sums, 0))
        done = (self._assign(self.means, means), self._assign(self.variances, variances))
        return ops.depend(updated, tree.clear(ops.depend(self.sums, done)))

    def _new(self, updated: Any, count: Any, first: Any, second: Any) -> Any:
        mean, variance = tree.flattened(self.means), tree.flattened(self.variances)
        moved = first / count
        pooled = ops.relu(second / count - ops.square(moved)) * (
            count / ops.maximum(count - 1, Tensor(1.0, ms.float32))
        )
        # A layer that did not run in the window gives 0 / 0. Non-finite statistics would never become finite again.
        good = ops.logical_and(ops.isfinite(moved + second), updated)  # relu turns NaN into 0
        new = (mean + self.share * moved, variance + self.share * (pooled - variance))
        return ops.where(good, new[0], mean), ops.where(good, new[1], variance)

    def _assign(self, parameters: Any, row: Any) -> Any:
        values = tree.cast_like(tree.unflattened(row, parameters), parameters)
        done: tuple = ()
        for parameter, value in zip(parameters, values):
            done = (*done, ops.assign(parameter, value))
        return done


def pool_batch_norm(network: nn.Cell, *, group: Any = "auto") -> PooledStatistics:
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
    contained(owner, network, "Put it into a SequentialCell.")
    layers = replaced(network, _is_pooled, lambda layer, number: PooledBatchNorm(layer))
    if not layers:
        without(owner, network)
    made = PooledStatistics(layers, group_of(owner, group), list(network.get_parameters()))
    _made[id(layers[0])] = made
    weakref.finalize(layers[0], _made.pop, id(layers[0]))
    return made


def pooled_of(parameters: Iterable[Parameter]) -> list[PooledStatistics]:
    """Return the statistics of all networks that contain some of these Parameters."""
    if not _made:
        return []
    parameters = list(parameters)
    found = [*parameters, *(each for network in networks_of(parameters) for each in network.get_parameters())]
    wanted = set(map(id, found))  # all of the network, of which only another part may be trained
    return [each for each in _made.values() if each.of & wanted]


def _is_pooled(cell: Any) -> bool:
    return isinstance(cell, (nn.BatchNorm1d, nn.BatchNorm2d)) and cell.use_batch_statistics is not False
