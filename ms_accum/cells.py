"""Which Cells are compiled?

Three Cells, one graph each. Only the first contains a forward: random layers keep their state in the compiled graph,
so a second graph with a forward would repeat the masks. The host decides when a window ends, because a branch in the
first graph would cost time in every micro-batch.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from . import _check
from .loss.gradients import LossAndGradients
from .network import checks, tree
from .network.accumulators import agreed, emptied, hidden, loss_scale, new_grad_sum, state, unique_name
from .network.runtime import tune
from .numerics.collaborators import NONE, Numerics, numerics_of
from .numerics.coupled import LossOfBatch, SumOfProducts, trained_by_loss
from .numerics.coupled_window import Coupled
from .numerics.nonfinite import SKIP_MICRO, SKIP_WINDOW, check_dense, policy_of, skip_micro_of
from .ranks.agreement import agree, begin_with, facts_of, take_from_rank_0
from .ranks.parallel import AUTO, Group, group_of
from .ranks.reduction import Summing, summing
from .window.boundary import Boundary
from .window.driver_cells import weighs_loss
from .window.running import Accumulating, Immediate

_NO_PARTS = "Its loss is computed once per window, not for each micro-batch."
_DRIVER, NAN = "GradientAccumulation", float("nan")


class TrainForwardBackward(nn.Cell):
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
        optimizer: Any,
        grad_sum: Any,
        sens: float = 1.0,
        *,
        weight_sum: ms.Parameter | None = None,
        group: Any = AUTO,
        sync_every_micro_batch: bool = False,
        loss_scale: Any = None,
        nonfinite: Any = SKIP_WINDOW,
    ):
        super().__init__(auto_prefix=False)
        owner = "TrainForwardBackward"
        numerics = _numerics(owner, optimizer, grad_sum, loss_scale, nonfinite)
        sens = _check.positive_number(owner, "sens", sens) * numerics.scale
        self.loss_and_gradients = LossAndGradients(owner, network, optimizer, sens, numerics.changing)
        self.skips = numerics.skips
        check_dense(owner, self.skips, [network])
        tune(owner, network.get_parameters())
        how = summing(owner, optimizer, group, sync_every_micro_batch)
        self.sums = how.of_micro_batch
        _check_accumulators(owner, grad_sum, optimizer, how, weight_sum, sync_every_micro_batch, numerics)
        group = group_of(owner, group)
        facts = {"'sens'": sens, **_facts(weight_sum, sync_every_micro_batch, numerics)}
        agree(owner, group, {**facts, **facts_of(optimizer, network)} if group else {})
        begin_with(network, optimizer.parameters, group)
        self.grad_sum = tuple(grad_sum)
        self.weight_sum = hidden(weight_sum)
        self.weighs_loss, self.weighs_gradients = False, weight_sum is not None

    def weigh_loss(self) -> TrainForwardBackward:
        """Multiply the loss by the weight instead of the gradients, which costs nothing, and return this Cell.

        For the driver, whose weights have a unit: in float16 a loss times rows or tokens overflows.
        """
        self.weighs_loss, self.weighs_gradients = True, False
        return self

    def construct(self, *inputs: Any, weight: Any = None) -> Any:
        checks.not_traced("TrainForwardBackward")
        if weight is not None and not self.weight_sum:
            raise ValueError("For 'TrainForwardBackward', 'weight' must come with a 'weight_sum', but got none.")
        counted = Tensor(1.0, ms.float32)
        if self.weight_sum:
            counted = ops.cast(inputs[0].shape[0] if weight is None else weight, ms.float32)
        loss, grads = self.loss_and_gradients(counted if self.weighs_loss else 1.0, *inputs)
        if self.skips is not None:
            grads, kept, left_out = self.skips(grads, loss, counted)
            counted, loss = counted * kept, ops.where(left_out, Tensor(NAN, ms.float32), ops.cast(loss, ms.float32))
        if self.weight_sum:
            ops.assign_add(self.weight_sum[0], counted)
        if self.sums is not None:
            grads = self.sums(tree.multiply(grads, counted) if self.weighs_gradients else grads)[0]
        if self.weighs_gradients and self.sums is None:
            tree.add_weighted(self.grad_sum, grads, counted)
        else:
            tree.add(self.grad_sum, grads)
        return loss


class TrainOptim(nn.Cell):
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
        optimizer: Any,
        grad_sum: Any,
        *,
        weight_sum: ms.Parameter | None = None,
        clip_norm: float | None = None,
        group: Any = AUTO,
        sync_every_micro_batch: bool = False,
        loss_scale: Any = None,
        nonfinite: Any = SKIP_WINDOW,
        ema: Any = None,
    ):
        super().__init__(auto_prefix=False)
        owner = "TrainOptim"
        numerics = _numerics(owner, optimizer, grad_sum, loss_scale, nonfinite, ema)
        how = summing(owner, optimizer, group, sync_every_micro_batch)
        _check_accumulators(owner, grad_sum, optimizer, how, weight_sum, sync_every_micro_batch, numerics)
        self.grad_sum = tuple(grad_sum)
        self.weight_sum = hidden(weight_sum)
        how_to: Any = {"numerics": numerics, "multiply": tree.multiply_in_place, "sums": how.at_the_end}
        self.boundary = Boundary(owner, optimizer, clip_norm, **how_to)
        group = group_of(owner, group)
        facts = {"'clip_norm'": clip_norm, **_facts(weight_sum, sync_every_micro_batch, numerics)}
        agree(owner, group, {**facts, **facts_of(optimizer)} if group else {})
        take_from_rank_0(optimizer.parameters, group)

    def construct(self, figures: Any = None) -> Any:
        checks.not_traced("TrainOptim")
        weight_sum = self.weight_sum[0] if self.weight_sum else None
        updated, norm, summed = self.boundary(self.grad_sum, weight_sum, figures)
        return (updated, norm) if figures is None else (updated, norm, summed)


class TrainClear(nn.Cell):
    """Set the accumulators to zero.

    Args:
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators.
        zeros (Any): not used; accepted for compatibility with the tutorial's programs. Default: ``None``.
        weight_sum (Optional[Parameter]): the sum of the weights. Default: ``None``.
        nonfinite (str): see `TrainForwardBackward`. Default: ``"skip_window"``.

    Outputs:
        bool, True.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        See `TrainForwardBackward`.
    """

    def __init__(
        self, grad_sum: Any, zeros: Any = None, *, weight_sum: ms.Parameter | None = None, nonfinite: Any = SKIP_WINDOW
    ):
        super().__init__(auto_prefix=False)
        del zeros
        self.grad_sum = tuple(grad_sum)
        self.weight_sum = hidden(weight_sum)
        self.skips = _shared(nonfinite, grad_sum) if policy_of("TrainClear", nonfinite) == SKIP_MICRO else None

    def construct(self) -> Any:
        return emptied(tree.clear, self.grad_sum, self.weight_sum, self.skips)


def _shared(nonfinite: Any, grad_sum: Any) -> Any:
    """Return `nonfinite`, or the `SkipMicro` of all Cells that share these accumulators."""
    return skip_micro_of(grad_sum) if nonfinite == SKIP_MICRO else nonfinite


def _numerics(owner: str, optimizer: Any, grad_sum: Any, loss_scale: Any, nonfinite: Any, ema: Any = None) -> Numerics:
    checks.optimizer(owner, optimizer)
    policy_of(owner, nonfinite, in_graph=True)
    return numerics_of(owner, optimizer, loss_scale=loss_scale, nonfinite=_shared(nonfinite, grad_sum), ema=ema)


def _facts(weight_sum: Any, sync_every_micro_batch: bool, numerics: Numerics) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks."""
    weighs = "none" if weight_sum is None else "given"
    return {"'weight_sum'": weighs, "'sync_every_micro_batch'": sync_every_micro_batch, **numerics.equal_on_ranks}


def _check_accumulators(
    owner: str,
    grad_sum: Any,
    optimizer: Any,
    how: Summing,
    weight_sum: Any,
    sync_every_micro_batch: bool,
    numerics: Numerics,
) -> None:
    """Raise an error unless the accumulators match this Cell, and Cells that share them have equal settings."""
    of = "optimizer.parameters" if how.like is optimizer.parameters else "optimizer.inner.parameters"
    remedy = f"Make them of '{of}'."
    checks.same_number(owner, "grad_sum", grad_sum, how.like, remedy)
    checks.same_layout(owner, "grad_sum", grad_sum, how.like, remedy)
    given: dict[str, Any] = {
        "weight_sum": "None" if weight_sum is None else "given",
        "group": "auto" if how.of_micro_batch else "None",
    }
    given |= {"loss_scale": "a dynamic one" if numerics.dynamic else numerics.scale, "nonfinite": numerics.policy}
    agreed(owner, grad_sum, sync_every_micro_batch=sync_every_micro_batch, **given)


def runner_of(
    network: nn.Cell,
    optimizer: Any,
    reduction: str,
    clip_norm: float | None,
    *,
    numerics: Numerics = NONE,
    accumulates: bool = True,
    group: Group | None = None,
    sync_every_micro_batch: bool = False,
    wait: bool = True,
) -> Accumulating | Immediate | Coupled:
    """Return the object that runs the driver's micro-batches: with three Cells, or with one if nothing accumulates."""
    if not accumulates:
        return Immediate(network, optimizer, clip_norm, numerics, reduction=reduction)
    if numerics.noise is not None and group is not None and sync_every_micro_batch:
        remedy = "The accumulators hold sums over the ranks from the first micro-batch on."
        _check.refuse(ValueError, _DRIVER, "noise_scale", "None with sync_every_micro_batch", "one", remedy)
    how: dict[str, Any] = {"group": group, "sync_every_micro_batch": sync_every_micro_batch}
    if isinstance(network, LossOfBatch):
        if numerics.skips is not None or numerics.noise is not None:
            name = "noise_scale" if numerics.skips is None else "nonfinite"
            _check.refuse(ValueError, _DRIVER, name, "the default with a CoupledLoss", "another value", _NO_PARTS)
        by_loss = trained_by_loss(network, optimizer.parameters)
        summed = SumOfProducts(network, by_loss)
        third: Any = runner_of(summed, optimizer, "sum", clip_norm, numerics=numerics, wait=wait, **how)
        return Coupled(network, third, optimizer.parameters, by_loss, group)
    name, where = unique_name("gradient_accumulation"), {**how, **numerics.shared}
    grad_sum = new_grad_sum(name, summing("GradientAccumulation", optimizer, group, sync_every_micro_batch).like)
    weight_sum = state(f"{name}.weight_sum", 0.0, ms.float32) if reduction == "mean" else None
    forward_backward = TrainForwardBackward(
        network, optimizer, grad_sum, loss_scale(optimizer), weight_sum=weight_sum, **where
    )
    if weight_sum is not None and weighs_loss(network, group):
        forward_backward.weigh_loss()
    optim = TrainOptim(optimizer, grad_sum, weight_sum=weight_sum, clip_norm=clip_norm, ema=numerics.ema, **where)
    clear = TrainClear(grad_sum, weight_sum=weight_sum, nonfinite=where["nonfinite"])
    return Accumulating(forward_backward, optim, clear, optimizer, wait=wait)
