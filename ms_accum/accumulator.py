"""How does a user's own compiled step accumulate gradients?"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from . import _check
from .fitting.runtime import parameters_around, tune
from .loss.reductions import REDUCTIONS
from .network import checks, tree
from .network.accumulators import new_grad_sum, seen, state, unique_name
from .ranks.parallel import AUTO, begin_with_networks_of, group_of, networks_of, total
from .ranks.reduction import summing
from .window.boundary import Boundary
from .window.ends import is_full


@ms.jit_class
class Accumulator:
    r"""Accumulate the gradients of `accumulate_step` micro-batches, then update once.

    For the functional pattern: call it with a micro-batch's gradients inside the compiled train step.
    With ``reduction="sum"``, MindSpore's tutorial pattern, the optimizer gets :math:`\sum_i g_i` and the
    user divides each loss by `accumulate_step`. With ``reduction="mean"`` it gets
    :math:`\sum_i w_i g_i / \sum_i w_i`, which is exact for uneven micro-batches and a short last window;
    the loss is not divided.

    A window whose gradient is not finite is skipped: the optimizer is not called, and `skipped` is increased.

    Args:
        optimizer (Optimizer): updates the parameters. Differentiate with respect to
            ``optimizer.parameters``: with parameter groups their order is not the network's.
        accumulate_step (int): micro-batches in a window. 1 allocates nothing.
        clip_norm (Optional[float]): bound of the global norm of the window's gradient.
            Default: ``None``, no clipping.
        reduction (str): ``"sum"`` or ``"mean"``. Default: ``"sum"``.
        group (Union[str, None, Group]): the ranks whose gradients are summed at a window's end: ``"auto"``, all that a
            launcher started; ``None``, no others. For "sum" divide by all ranks' micro-batches. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether gradients are summed in every call, which all ranks must make; with a
            `ZeroOptimizer` each rank keeps only its part of the sums. Default: ``False``.

    Inputs:
        - **grads** (tuple[Tensor]) - the gradients of one micro-batch, in the optimizer's order.
        - **weight** (Union[Tensor, float], optional) - the weight of the micro-batch, required with
          ``reduction="mean"``: what its loss averages over, such as rows or tokens. It multiplies the gradients, so
          a NaN gradient stays NaN with weight 0. Default: ``None``, for ``reduction="sum"``.

    Outputs:
        Tensor of bool, whether this call updated the parameters.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, `weight` is missing with ``reduction="mean"`` or given with
            ``"sum"``, or the gradients do not match the optimizer's parameters.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn
        >>> from ms_accum import Accumulator
        >>> net = nn.Dense(4, 2)
        >>> loss_fn = nn.CrossEntropyLoss()
        >>> optimizer = nn.SGD(net.trainable_params(), 0.1)
        >>> accumulator = Accumulator(optimizer, 2, reduction="mean")
        >>> def forward(x, y):
        ...     return loss_fn(net(x), y)
        >>> grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
        >>> @ms.jit
        ... def train_step(x, y):
        ...     loss, grads = grad_fn(x, y)
        ...     accumulator(grads, x.shape[0])
        ...     return loss
        >>> for rows in (8, 8, 3):
        ...     x, y = Tensor(np.ones((rows, 4)), ms.float32), Tensor(np.zeros(rows), ms.int32)
        ...     loss = train_step(x, y)
        ...     print(accumulator.updated, accumulator.micro_batches)
        False 1
        True 0
        False 1
        >>> accumulator.flush(), accumulator.updates
        (True, 2)
    """

    def __init__(
        self,
        optimizer: Any,
        accumulate_step: int,
        clip_norm: float | None = None,
        *,
        reduction: str = "sum",
        group: Any = AUTO,
        sync_every_micro_batch: bool = False,
    ):
        owner = "Accumulator"
        window = _check.positive_int(owner, "accumulate_step", accumulate_step)
        _check.one_of(owner, "reduction", reduction, REDUCTIONS)
        tune(owner, parameters_around(checks.optimizer(owner, optimizer).parameters))
        self.group = group_of(owner, group)
        """Optional[Group], the ranks; None for a single process."""
        self.optimizer = optimizer
        """Optimizer, updates the parameters."""
        how = summing(owner, optimizer, self.group, sync_every_micro_batch)
        # In a single process a window of 1 needs no accumulators, unless its gradients are sparse.
        holds = window > 1 or self.group is not None or any(map(tree.gives_rows, networks_of(optimizer.parameters)))
        multiply = tree.multiply_in_place if holds else tree.multiply
        self._boundary = Boundary(owner, optimizer, clip_norm, multiply=multiply, sums=how.at_the_end)
        self._sums = how.of_micro_batch
        name = unique_name("accumulator")
        self._parameters = tuple(optimizer.parameters)
        begin_with_networks_of(owner, self._parameters, self.group)
        self._grad_sum = new_grad_sum(name, how.like) if holds else None
        self._mean = reduction == "mean"
        self._weight_sum = state(f"{name}.weight_sum", 0.0, ms.float32) if self._mean and holds else None
        self._accumulate_step = state(f"{name}.window", window, ms.int32)
        self._micro_batches = state(f"{name}.micro_batches", 0, ms.int32)
        self._updates = state(f"{name}.updates", 0, ms.int32)
        self._skipped = state(f"{name}.skipped", 0, ms.int32)
        self._updated = state(f"{name}.updated", False, ms.bool_)
        self._grad_norm = state(f"{name}.grad_norm", 0.0, ms.float32)
        self._end_compiled = _compiled_end(self)

    def __call__(self, grads: Any, weight: Any = None) -> Any:
        grads = self._checked(grads, weight)
        if self._grad_sum is None:
            return self._close(grads, None, only=None if weight is None else ops.cast(weight, ms.float32))[0]
        self._add(grads, weight)
        updated = Tensor(False)
        if self._boundary.touch(is_full(self._micro_batches, self._accumulate_step)):
            updated = self._end()[0]
        ops.assign(self._updated, updated)
        return updated

    def add(self, grads: Any, weight: Any, last: Any, figures: Any) -> Any:
        """Do what a call does, for a step that also ends the window with a micro-batch that is `last`.

        Returns:
            tuple[Tensor], whether the window ended, and `figures`, at its end summed over the ranks.
        """
        grads = self._checked(grads, weight)
        if self._grad_sum is None:
            self._close(grads, None, only=None if weight is None else ops.cast(weight, ms.float32))
            return Tensor(True), figures
        self._add(grads, weight)
        updated, summed = Tensor(False), figures
        ends = ops.logical_or(is_full(self._micro_batches, self._accumulate_step), last)
        if self._boundary.touch(ends):
            updated, summed = self._end(figures)
        ops.assign(self._updated, updated)
        return ends, summed

    def _checked(self, grads: Any, weight: Any) -> Any:
        """Return the gradients, dense, or raise an error if they or the weight do not fit."""
        checks.not_traced("Accumulator")
        grads = tuple(grads)  # `ms.grad` returns a list if it was given one
        checks.as_many("Accumulator", "grads", grads, self._parameters)
        grads = checks.same_layout("Accumulator", "grads", tree.dense(grads, self._parameters), self._parameters)
        if weight is not None and not self._mean:
            raise ValueError("For 'Accumulator', 'weight' must come with reduction='mean', but got 'sum'.")
        if weight is None and self._mean:
            raise ValueError(
                "For 'Accumulator', 'weight' must be given with reduction='mean', but got None. Call "
                "accumulator(grads, rows) with what the loss of the micro-batch averages over: its rows, or tokens."
            )
        return grads

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"Accumulator({checks.kind_of(self.optimizer)}, {shown}, updates={self.updates}, skipped={self.skipped})"

    def _add(self, grads: Any, weight: Any) -> None:
        if self._sums is not None:
            grads = self._sums(grads if weight is None else tree.multiply(grads, weight))[0]
        if weight is None or self._sums is not None:
            tree.add(self._grad_sum, grads)
        else:
            tree.add_weighted(self._grad_sum, grads, weight)
        if self._weight_sum is not None:
            ops.assign_add(self._weight_sum, ops.cast(weight, ms.float32))
        ops.assign_add(self._micro_batches, 1)

    def _end(self, figures: Any = None) -> Any:
        updated, figures = self._close(self._grad_sum, self._weight_sum, figures)
        self._clear()
        return updated, figures

    def _close(self, grads: Any, weight_sum: Any, figures: Any = None, only: Any = None) -> Any:
        updated, norm, figures = self._boundary(grads, weight_sum, figures, only=only)
        ops.assign(self._grad_norm, norm)
        ops.assign(self._updated, updated)
        ops.assign_add(self._updates, ops.cast(updated, ms.int32))
        ops.assign_add(self._skipped, ops.cast(ops.logical_not(updated), ms.int32))
        return updated, figures

    def _clear(self) -> None:
        tree.clear(self._grad_sum)
        ops.assign(self._micro_batches, Tensor(0, ms.int32))
        if self._weight_sum is not None:
            ops.assign(self._weight_sum, Tensor(0.0, ms.float32))

    def flush(self) -> bool:
        """Update with the micro-batches of an open window; call it outside the compiled step.

        With ``reduction="sum"`` a short window has a smaller gradient: the losses were divided by `accumulate_step`.

        Returns:
            bool, whether the parameters were updated; False for an empty window.
        """
        held = total([self.micro_batches], self.group)
        return held != [0] and bool(self._end_compiled())

    def clear(self) -> None:
        """Discard an open window; call it outside the compiled step."""
        if self.micro_batches:
            self._clear()

    @property
    def accumulate_step(self) -> int:
        """int, the window's size. It may be set between two windows, without a new compilation."""
        return seen(self._accumulate_step, int)

    @accumulate_step.setter
    def accumulate_step(self, value: int) -> None:
        window = _check.positive_int("Accumulator", "accumulate_step", value)
        if self.micro_batches:
            raise RuntimeError(
                f"For 'Accumulator', 'accumulate_step' can't change inside a window, which holds "
                f"{self.micro_batches} micro-batches. Call 'flush()' or 'clear()' first."
            )
        if self.group is None and (window > 1) != (self._grad_sum is not None):
            raise ValueError("For 'Accumulator', 'accumulate_step' can't change from or to 1. Make a new Accumulator.")
        ops.assign(self._accumulate_step, Tensor(window, ms.int32))  # a compiled graph does not see set_data

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that a resumed run must have in common with this one."""
        reduction = "mean" if self._mean else "sum"
        return {"accumulate_step": self.accumulate_step, "reduction": reduction, "clip_norm": self.clip_norm}

    @property
    def state(self) -> dict[str, Any]:
        """dict, its Parameters by names that are the same in every process; several ranks save between windows only."""
        names = ("micro_batches", "updates", "skipped", "updated", "grad_norm")
        held = {"size": self._accumulate_step, **{name: getattr(self, f"_{name}") for name in names}}
        if self._grad_sum is None or self.group is not None:
            return held
        held |= {f"grad_sum.{each.name}": total for each, total in zip(self._parameters, self._grad_sum)}
        return held if self._weight_sum is None else {**held, "weight_sum": self._weight_sum}

    @property
    def clip_norm(self) -> float | None:
        """Optional[float], the bound of the window's gradient; a constant of the compiled graph."""
        return self._boundary.clip_norm

    @property
    def updated(self) -> bool:
        """bool, whether the last call updated the parameters."""
        return seen(self._updated, bool)

    @property
    def micro_batches(self) -> int:
        """int, the micro-batches in the window."""
        return seen(self._micro_batches, int)

    @property
    def updates(self) -> int:
        """int, the updates so far."""
        return seen(self._updates, int)

    @property
    def skipped(self) -> int:
        """int, the windows so far whose gradient was not finite."""
        return seen(self._skipped, int)

    @property
    def grad_norm(self) -> float:
        """float, the norm of the last window's gradient, before clipping."""
        return seen(self._grad_norm, float)


def _compiled_end(accumulator: Accumulator) -> Any:
    """Return a compiled function that ends the window.

    Not the compiled method: MindSpore would take it for the accumulator itself in a step that is compiled later.
    """

    @ms.jit
    def end() -> Any:
        return accumulator._end()[0]

    return end
