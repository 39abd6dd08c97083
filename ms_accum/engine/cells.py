"""The three Cells of a window, one graph each, unless the driver puts them into one; and the forward and backward pass.

Only the first contains a forward: random layers keep their state in the compiled graph, so a second graph with a
forward would repeat the masks. The host decides when a window ends, so the first graph has no optimizer, which would be
compiled anew for each shape of a micro-batch. Where the end needs nothing from the host, the driver accepts that and
saves a call (`training/runners.AddAndEnd`). It gives them its `Window` as `grad_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from .. import _check
from ..layers import warn_about_batch_norm
from ..loss.known_losses import WithLoss, check_gradient, scalar
from ..loss.terms import WeighedTerms
from ..network import tree
from ..network.compiled import Compiled, branch, call, check_compile
from ..network.kernels import kernels
from ..network.parameters import attached, untracked
from ..network.runtime import tune
from ..ranks.agreement import begin_together
from ..ranks.group import Group
from ..ranks.zero import ZeroOptimizer
from .config import WindowConfig, checked, resolve
from .ema import Ema
from .window import Window, clear_sums


class Forward(nn.Cell):
    """Computes the loss and the gradients of a micro-batch. Scaling the loss scales the gradients at no cost.

    Args:
        network (Cell): returns the loss.
        config (WindowConfig): has the optimizer, whose parameters are differentiated, and the loss scale.
        sens (float): another constant scale.
    """

    def __init__(self, network: nn.Cell, config: WindowConfig, sens: float):
        super().__init__(auto_prefix=False)
        self.owner = config.owner
        self.network = network
        self.has_loss_fn = isinstance(network, WithLoss)
        self.has_terms = isinstance(network, WeighedTerms)
        """bool, whether the loss that is returned is a vector of the loss and its terms."""
        self.sens = sens * config.scale.constant
        self.changing = untracked(config.scale.value)
        self.parameters = config.parameters
        self.frozen = _frozen(self.parameters)
        self.differentiate = ms.value_and_grad(self.forward, None, config.optimizer.parameters, has_aux=True)

    def forward(self, scale: Any, *inputs: Any) -> Any:
        loss = call(self.network, inputs)
        if self.has_terms:
            return loss[0] * scale, loss[1]
        loss = scalar(self.owner, loss, self.has_loss_fn)
        return loss * scale, loss

    def construct(self, *inputs: Any, weight: Tensor | None = None) -> Any:
        scale = self.sens * self.changing[0] if self.changing else self.sens
        if weight is not None:
            scale = scale * weight
        (_, loss), grads = call(self.differentiate, (scale, *inputs))
        grads = tree.check_shapes(self.owner, "the gradients", grads, self.parameters)
        return loss, tree.zero_where(self.frozen(), grads)  # a graph differentiates them all the same


def _frozen(parameters: Sequence[Parameter]) -> Any:
    """Return an operator whose result is whether each parameter requires no gradient when a graph is compiled.

    A graph keeps its operators, and a Cell its graphs. An operator that kept the Cell would never be freed.
    """

    def frozen() -> tuple[bool, ...]:
        return tuple(not parameter.requires_grad for parameter in parameters)

    return ops.constexpr(frozen, reuse_result=False)


def check_network(owner: str, network: nn.Cell) -> None:
    """Raise an error for a network that can't be differentiated micro-batch by micro-batch."""
    _check.instance(owner, "network", network, nn.Cell, "a Cell")
    if any(getattr(cell, "couples_rows", False) for _, cell in network.cells_and_names()):
        remedy = "Give it to GradientAccumulation as 'loss_fn'."
        _check.raise_invalid(ValueError, owner, "network", "one whose loss is per micro-batch", "a CoupledLoss", remedy)


_NAN = float("nan")


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
        grad_sum: Sequence[ms.Parameter] | Window,
        sens: float = 1.0,
        *,
        weight_sum: ms.Parameter | None = None,
        group: Group | str | None = "auto",
        compile: bool = True,
    ):
        owner = "TrainForwardBackward"
        if isinstance(grad_sum, Window):
            window = grad_sum
        else:
            sens = _check.positive_number(owner, "sens", sens)
            window = _window_of(owner, optimizer, grad_sum, weight_sum, group, compile, network=network, sens=sens)
            warn_about_batch_norm(network, training=True)  # `set_train` may be called later
        super().__init__(window.config.owner, window.config.compiles, network)
        self.window = window
        self.loss_and_gradients = Forward(network, window.config, sens)
        self.through_branch = branch(self.compiles)

    def construct(self, *inputs: Any, weight: Tensor | None = None) -> Any:
        window = self.window
        if weight is not None and not window.takes_weights:
            raise ValueError("For 'TrainForwardBackward', 'weight' must come with a 'weight_sum', but got none.")
        counted = None
        if window.weight_sum or weight is not None:
            counted = ops.cast(inputs[0].shape[0] if weight is None else weight, ms.float32)
        loss, grads = call(self.loss_and_gradients, inputs, weight=counted if window.weight_in_loss else None)
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
        ema (Optional[Ema]): maintains an average of the weights. Default: ``None``.
        compile (bool): see `TrainForwardBackward`. Default: ``True``.

    Inputs:
        - **losses** (Tensor, optional) - float32 numbers, such as sums of losses, to sum over the ranks in the same
          communication.

    Outputs:
        tuple[Tensor], whether the parameters were updated, the norm before clipping, and the sum of `losses` if given.

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
        grad_sum: Sequence[ms.Parameter] | Window,
        *,
        weight_sum: ms.Parameter | None = None,
        clip_norm: float | None = None,
        group: Group | str | None = "auto",
        ema: Ema | None = None,
        compile: bool = True,
    ):
        if isinstance(grad_sum, Window):
            window = grad_sum
        else:
            shared = (optimizer, grad_sum, weight_sum, group, compile)
            window = _window_of("TrainOptim", *shared, clip_norm=clip_norm, ema=ema)
        super().__init__(window.config.owner, window.config.compiles, optimizer)
        self.window = window
        self.before_compiling = window.boundary.find_touched

    def construct(self, losses: Tensor | None = None) -> Any:
        updated, norm, summed = self.window.close(losses)
        return (updated, norm) if losses is None else (updated, norm, summed)


class TrainClear(Compiled):
    """Set the accumulators to zero.

    Args:
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators.
        zeros (Any): not used; accepted for compatibility with the tutorial's programs. Default: ``None``.
        weight_sum (Optional[Parameter]): the sum of the weights. Default: ``None``.
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
        grad_sum: Sequence[ms.Parameter] | Window,
        zeros: Any = None,
        *,
        weight_sum: ms.Parameter | None = None,
        compile: bool = True,
    ):
        del zeros
        if isinstance(grad_sum, Window):
            window = grad_sum
            super().__init__(window.config.owner, window.config.compiles)
            self.kernels, self.skips = window.kernels, window.skips
            self.grad_sum, self.weight_sum = window.grad_sum, window.weight_sum
        else:
            owner = "TrainClear"
            super().__init__(owner, check_compile(owner, compile))
            self.kernels, self.skips = kernels(self.compiles, grad_sum), None
            self.grad_sum, self.weight_sum = tuple(grad_sum), untracked(weight_sum)

    def construct(self) -> Any:
        cleared = clear_sums(self.kernels, self.grad_sum, self.weight_sum, self.skips)
        return ops.depend(Tensor(True), cleared)


def _window_of(
    owner: str,
    optimizer: nn.Optimizer | ZeroOptimizer,
    grad_sum: Any,
    weight_sum: ms.Parameter | None,
    group: Any,
    compile: bool,
    *,
    network: nn.Cell | None = None,
    sens: float = 1.0,
    clip_norm: float | None = None,
    ema: Ema | None = None,
) -> Window:
    """Return the window of a Cell from the user's arguments; with several ranks compare them."""
    compiles = check_compile(owner, compile)
    if network is not None:
        check_network(owner, network)
        check_gradient(owner, network, compiles)
    options = checked(owner, {"clip_norm": clip_norm, "group": group, "ema": ema, "compile": compile})
    config = resolve(owner, optimizer, network, options, divides=weight_sum is not None, accumulators=grad_sum)
    _check_accumulators(config, grad_sum)
    if network is not None:
        tune(owner, network.get_parameters())
    facts = {"'sens'": sens, "'weight_sum'": "none" if weight_sum is None else "given", **config.facts}
    begin_together(owner, config.group, facts, optimizer, network)
    return Window(config, grad_sum, weight_sum)


def _check_accumulators(config: WindowConfig, grad_sum: tuple) -> None:
    """Raise an error unless the accumulators match this Cell, and all Cells that share them have weights, or none."""
    owner, parameters = config.owner, config.parameters
    remedy = "Make them of 'optimizer.parameters'."
    tree.check_number(owner, "grad_sum", grad_sum, parameters, remedy)
    tree.check_shapes(owner, "grad_sum", grad_sum, parameters, remedy)
    known = attached(grad_sum[0], "_ms_accum_divides", lambda: [config.divides])
    if known != [config.divides]:
        other, this = ("given" if divides else "None" for divides in (*known, config.divides))
        rule = f"{other}, as in the other Cell with this 'grad_sum'"
        _check.raise_invalid(ValueError, owner, "weight_sum", rule, this, "Otherwise use separate accumulators.")
