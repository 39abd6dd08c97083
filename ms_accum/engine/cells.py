"""The three Cells of a window, one graph each, unless the driver puts them into one.

Only the first contains a forward: random layers keep their state in the compiled graph, so a second graph with a
forward would repeat the masks. The host decides when a window ends, so the first graph has no optimizer, which would be
compiled anew for each shape of a micro-batch. Where the end needs nothing from the host, the driver accepts that and
saves a call (`training/runners.Accumulating`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import mindspore as ms
from mindspore import Tensor, nn, ops

from .. import _check
from ..layers.batch_norm import warn_about_batch_norm
from ..loss.known_losses import check_gradient
from ..network import tree
from ..network.branch import branch
from ..network.calls import call
from ..network.compiled import Compiled, check_compile
from ..network.kernels import kernels
from ..network.runtime import tune
from ..network.state import attached, untracked
from ..ranks.agreement import agree, facts_of, prepare_on_ranks, take_from_rank_0
from ..ranks.group import Group
from ..ranks.zero import ZeroOptimizer
from .config import WindowConfig, resolve
from .ema import Ema
from .forward import Forward, check_network
from .nonfinite import SKIP_MICRO, SkipMicro, policy_of, skip_micro_of
from .stages import Stage
from .window import Window, clear_sums

if TYPE_CHECKING:
    from mindspore.amp import LossScaleManager, LossScaler

_NAN = float("nan")
_Cell = TypeVar("_Cell", bound=Compiled)


class TrainForwardBackward(Compiled):
    """Run one micro-batch forward and backward, and add its gradients to `grad_sum`.

    Args:
        network (Cell): returns a micro-batch's loss, a scalar, from its columns.
        optimizer (Optimizer): gradients are computed for ``optimizer.parameters``, in that order.
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators, one for each parameter.
        sens (float): a constant loss scale; the optimizer divides by its own `loss_scale`. Default: 1.0.
        weight_sum (Optional[Parameter]): a float32 scalar that accumulates the weights; gradients are then multiplied
            by the weight in float32, for the exact mean. Default: ``None``, gradients are added without weights.
        group (Union[str, None, Group]): see `TrainOptim`. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether to sum gradients over the ranks before they are added. Pass the same
            value to `TrainOptim`. With a `ZeroOptimizer` on several ranks, make the accumulators from
            ``optimizer.inner.parameters``, this rank's parts. Default: ``False``, once per window.
        loss_scale (Union[None, float, LossScaler, LossScaleManager]): as for `GradientAccumulation`. Pass the same
            object to `TrainOptim`. Default: ``None``.
        nonfinite (str): ``"skip_micro"`` leaves out a micro-batch whose gradient is not finite, with its weight, and
            returns NaN as its loss. Pass the same value to `TrainOptim` and `TrainClear`. Default: ``"skip_window"``.
        compile (bool): whether it runs as a compiled graph in PyNative mode too, MindSpore's default, which is several
            times faster. ``False`` runs it there operator by operator, for debugging. Default: ``True``.

    Inputs:
        - **\\*inputs** (tuple[Tensor]) - the columns of a micro-batch.
        - **weight** (Union[Tensor, float], optional) - with `weight_sum`: the weight of the
          micro-batch. Default: ``None``, the rows of the first column.

    Outputs:
        Tensor, the loss of the micro-batch as returned by the network.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `grad_sum` does not match the optimizer's parameters, or the loss is not a scalar.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn
        >>> from ms_accum import TrainClear, TrainForwardBackward, TrainOptim
        >>> net = nn.Dense(4, 2)
        >>> optimizer = nn.SGD(net.trainable_params(), 0.1)
        >>> grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
        >>> forward_backward = TrainForwardBackward(nn.WithLossCell(net, nn.MSELoss()), optimizer, grad_sum)
        >>> update, clear = TrainOptim(optimizer, grad_sum), TrainClear(grad_sum)
        >>> for _ in range(2):
        ...     loss = forward_backward(Tensor(np.ones((8, 4)), ms.float32), Tensor(np.ones((8, 2)), ms.float32))
        >>> updated, grad_norm = update()
        >>> print(updated, clear())
        True True
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Optimizer | ZeroOptimizer,
        grad_sum: Sequence[ms.Parameter],
        sens: float = 1.0,
        *,
        weight_sum: ms.Parameter | None = None,
        group: Group | str | None = "auto",
        sync_every_micro_batch: bool = False,
        loss_scale: float | LossScaler | LossScaleManager | None = None,
        nonfinite: str = "skip_window",
        compile: bool = True,
    ):
        owner = "TrainForwardBackward"
        super().__init__(owner, check_compile(owner, compile))
        sens = _check.positive_number(owner, "sens", sens)
        window = _window_of(
            owner,
            optimizer,
            grad_sum,
            weight_sum,
            {"'sens'": sens},
            network=network,
            group=group,
            sync_every_micro_batch=sync_every_micro_batch,
            loss_scale=loss_scale,
            nonfinite=nonfinite,
            compiles=self.compiles,
        )
        warn_about_batch_norm(network, training=True)  # `set_train` may be called later
        self._set_up(window, network, sens)

    def _set_up(self, window: Window, network: nn.Cell, sens: float) -> None:
        self.contains(network)
        self.window = window
        self.loss_and_gradients = Forward(network, window.config, sens)
        self.through_branch = branch(self.compiles)

    def construct(self, *inputs: Any, weight: Any = None) -> Any:
        window = self.window
        if weight is not None and not (window.weight_sum or window.config.shares):
            raise ValueError("For 'TrainForwardBackward', 'weight' must come with a 'weight_sum', but got none.")
        counted = None
        if window.weight_sum or weight is not None:
            counted = ops.cast(inputs[0].shape[0] if weight is None else weight, ms.float32)
        loss, grads = call(self.loss_and_gradients, inputs, weight=counted if window.weighs_loss else None)
        total = loss[0] if self.loss_and_gradients.has_terms else loss
        counted, kept_factor, left_out = window.leave_out(grads, counted, total)
        if kept_factor is not None:
            loss = ops.where(left_out, Tensor(_NAN, ms.float32), ops.cast(loss, ms.float32))
        loss = ops.depend(loss, window.add(grads, counted, kept_factor=kept_factor))
        return loss if self.through_branch is None else self.through_branch(loss)


class TrainOptim(Compiled):
    """End a window: update with the gradients in `grad_sum` if they are finite.

    It may divide `grad_sum` in place, so run `TrainClear` before the next window.

    Args:
        optimizer (Optimizer): updates the parameters.
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators.
        weight_sum (Optional[Parameter]): the sum of the weights, the divisor. Default: ``None``, no division.
        clip_norm (Optional[float]): the maximum global norm of the gradient. Default: ``None``, no clipping.
        group (Union[str, None, Group]): the ranks whose gradients are summed first: ``"auto"`` for all that a launcher
            started, ``None`` for this process alone. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether `grad_sum` already holds sums over the ranks. Default: ``False``.
        loss_scale (Union[None, float, LossScaler, LossScaleManager]): see `TrainForwardBackward`. Default: ``None``.
        nonfinite (str): see `TrainForwardBackward`. Default: ``"skip_window"``.
        ema (Optional[Ema]): maintains an average of the weights. Default: ``None``.
        stages (Sequence[Callable]): as for `GradientAccumulation`. Default: ``()``.
        compile (bool): see `TrainForwardBackward`. Default: ``True``.

    Inputs:
        - **figures** (Tensor, optional) - float32 numbers to sum over the ranks in the same communication. With a
          dynamic `loss_scale` the first is the sum of the losses: if it is not finite, the scale is not lowered.

    Outputs:
        tuple[Tensor], whether the parameters were updated, the norm before clipping, and the sum of `figures` if given.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `grad_sum` does not match the optimizer's parameters, or `clip_norm` is not above 0.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        See `TrainForwardBackward`.
    """

    def __init__(
        self,
        optimizer: nn.Optimizer | ZeroOptimizer,
        grad_sum: Sequence[ms.Parameter],
        *,
        weight_sum: ms.Parameter | None = None,
        clip_norm: float | None = None,
        group: Group | str | None = "auto",
        sync_every_micro_batch: bool = False,
        loss_scale: float | LossScaler | LossScaleManager | None = None,
        nonfinite: str = "skip_window",
        ema: Ema | None = None,
        stages: Sequence[Stage] = (),
        compile: bool = True,
    ):
        owner = "TrainOptim"
        super().__init__(owner, check_compile(owner, compile))
        window = _window_of(
            owner,
            optimizer,
            grad_sum,
            weight_sum,
            {},
            clip_norm=clip_norm,
            group=group,
            sync_every_micro_batch=sync_every_micro_batch,
            loss_scale=loss_scale,
            nonfinite=nonfinite,
            ema=ema,
            stages=stages,
            compiles=self.compiles,
        )
        self._set_up(window)

    def _set_up(self, window: Window) -> None:
        self.contains(window.config.optimizer)
        self.window = window

    def construct(self, figures: Any = None) -> Any:
        updated, norm, summed = self.window.close(figures)
        return (updated, norm) if figures is None else (updated, norm, summed)


class TrainClear(Compiled):
    """Set the accumulators to zero.

    Args:
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators.
        zeros (Any): not used; accepted for compatibility with the tutorial's programs. Default: ``None``.
        weight_sum (Optional[Parameter]): the sum of the weights. Default: ``None``.
        nonfinite (str): see `TrainForwardBackward`. Default: ``"skip_window"``.
        compile (bool): see `TrainForwardBackward`. Default: ``True``.

    Outputs:
        Tensor of bool, True.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        See `TrainForwardBackward`.
    """

    def __init__(
        self,
        grad_sum: Sequence[ms.Parameter],
        zeros: Any = None,
        *,
        weight_sum: ms.Parameter | None = None,
        nonfinite: str = "skip_window",
        compile: bool = True,
    ):
        owner = "TrainClear"
        super().__init__(owner, check_compile(owner, compile))
        del zeros
        skips = None
        if policy_of(owner, nonfinite) == SKIP_MICRO:
            skips = _policy_or_skips(nonfinite, grad_sum)
        self._set_up(kernels(self.compiles, grad_sum), tuple(grad_sum), untracked(weight_sum), skips)

    def _set_up(self, kernels: Any, grad_sum: tuple, weight_sum: tuple, skips: SkipMicro | None) -> None:
        self.kernels = kernels
        self.grad_sum = grad_sum
        self.weight_sum = weight_sum
        self.skips = skips

    def construct(self) -> Any:
        cleared = clear_sums(self.kernels, self.grad_sum, self.weight_sum, self.skips)
        return ops.depend(Tensor(True), cleared)


def cells_around(window: Window, network: nn.Cell, sens: float) -> tuple[TrainForwardBackward, TrainOptim, TrainClear]:
    """Return the three Cells for an existing window, whose config have been checked.

    Args:
        window (Window): the window.
        network (Cell): returns a micro-batch's loss from its columns.
        sens (float): a constant loss scale, by which the optimizer divides.
    """
    config = window.config
    forward_backward = _empty(TrainForwardBackward, config)
    optim, clear = _empty(TrainOptim, config), _empty(TrainClear, config)
    forward_backward._set_up(window, network, sens)
    optim._set_up(window)
    clear._set_up(window.kernels, window.grad_sum, window.weight_sum, window.skips)
    return forward_backward, optim, clear


def part_of_larger_graph(window: Window, network: nn.Cell, sens: float) -> TrainForwardBackward:
    """Return the first of these Cells to be called in another one's graph, without a branch of its own."""
    cell = _empty(TrainForwardBackward, window.config)
    cell._set_up(window, network, sens)
    cell.through_branch = None
    return cell


def _empty(kind: type[_Cell], config: WindowConfig) -> _Cell:
    """Return a Cell without a window. Its own constructor would make a window from the user's arguments."""
    cell: _Cell = kind.__new__(kind)
    Compiled.__init__(cell, config.owner, config.compiles)
    return cell


def _policy_or_skips(nonfinite: Any, grad_sum: Any) -> Any:
    """Return `nonfinite`; for "skip_micro" the `SkipMicro` of all Cells that share these accumulators."""
    return skip_micro_of(grad_sum) if nonfinite == SKIP_MICRO else nonfinite


def _window_of(
    owner: str,
    optimizer: Any,
    grad_sum: Any,
    weight_sum: ms.Parameter | None,
    settings: Mapping[str, Any],
    *,
    network: nn.Cell | None = None,
    clip_norm: float | None = None,
    group: Any,
    sync_every_micro_batch: bool,
    loss_scale: Any,
    nonfinite: Any,
    compiles: bool,
    ema: Ema | None = None,
    stages: Sequence[Stage] = (),
) -> Window:
    """Return the window of a Cell from the user's arguments; with several ranks compare them, and `settings`."""
    if network is not None:
        check_network(owner, network)
        check_gradient(owner, network, compiles)
    config = resolve(
        owner,
        optimizer,
        network,
        weighted=weight_sum is not None,
        clip_norm=clip_norm,
        group=group,
        sync_every_micro_batch=sync_every_micro_batch,
        loss_scale=loss_scale,
        nonfinite=_policy_or_skips(nonfinite, grad_sum),
        ema=ema,
        stages=stages,
        compiles=compiles,
        in_graph=True,
        accumulators=grad_sum,
    )
    _check_accumulators(config, grad_sum, sync_every_micro_batch)
    if network is not None:
        tune(owner, network.get_parameters())
    group = config.group
    if group is not None:
        weights = "none" if weight_sum is None else "given"
        facts = {**settings, "'weight_sum'": weights, "'sync_every_micro_batch'": sync_every_micro_batch}
        agree(owner, group, {**facts, **config.equal_on_ranks, **facts_of(optimizer, network)})
        if network is None:
            take_from_rank_0(optimizer.parameters, group)
        else:
            prepare_on_ranks(network, optimizer.parameters, group)
    return Window(config, grad_sum, weight_sum)


def _check_accumulators(config: WindowConfig, grad_sum: Any, sync_every_micro_batch: bool) -> None:
    """Raise an error unless the accumulators match this Cell, and Cells that share them have equal settings."""
    owner, optimizer, like = config.owner, config.optimizer, config.summing.like
    source = "optimizer.parameters" if like is optimizer.parameters else "optimizer.inner.parameters"
    remedy = f"Make them of '{source}'."
    tree.check_number(owner, "grad_sum", grad_sum, like, remedy)
    tree.check_shapes(owner, "grad_sum", grad_sum, like, remedy)
    settings = {
        "sync_every_micro_batch": sync_every_micro_batch,
        "weight_sum": "given" if config.weighted else "None",
        "group": "auto" if config.summing.of_micro_batch else "None",
        "loss_scale": "a dynamic one" if config.dynamic else config.scale,
        "nonfinite": config.policy,
    }
    known = attached(grad_sum[0], "_ms_accum_settings", lambda: settings)
    for name, value in settings.items():
        if known[name] != value:
            rule = f"{known[name]}, as in the other Cell with this 'grad_sum'"
            _check.raise_invalid(ValueError, owner, name, rule, value, "Otherwise use separate accumulators.")
