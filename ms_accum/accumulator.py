"""Accumulates gradients in the user's own compiled step: the functional pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from . import _check
from .engine.config import OptionsButClip, checked, resolve, with_options
from .engine.ema import check_not_applied
from .engine.window import Window, new_window
from .layers import warn_about_batch_norm
from .loss.known_losses import REDUCTIONS
from .network import tree
from .network.compiled import Compiled, branch, call
from .network.optimizers import kind_of, warn_if_no_gradient
from .network.parameters import unique_name, untrained
from .network.runtime import tune
from .ranks.agreement import begin_together, check_drift
from .ranks.group import gather_numbers
from .ranks.zero import ZeroOptimizer
from .saving.training_state import SETTING
from .training.sizes import is_full, sizes_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OWNER = "Accumulator"
_SIZE = _check.Argument(_OWNER, "accumulate_step")
_SUMS = (
    f"For '{_OWNER}', 'reduction' is not given, so gradients are summed, as in MindSpore's tutorial: divide each loss "
    "by 'accumulate_step', and give reduction='sum' to silence this line; or give reduction='mean', and do not divide."
)


@with_options
@ms.jit_class
class Accumulator:
    """Accumulate gradients inside your own compiled train step, and update once per window.

    For the functional pattern: call it with the gradients of each micro-batch. With ``reduction="sum"``, as in
    MindSpore's tutorial, the optimizer gets their sum, and you divide each loss by `accumulate_step`. With
    ``reduction="mean"`` it gets ``sum(w_i * g_i) / sum(w_i)``, which is exact also for uneven micro-batches and a short
    last window; do not divide the loss. A window whose gradient is not finite is skipped and counted in `skipped`.

    Args:
        optimizer (Optimizer): updates the parameters. Differentiate with respect to ``optimizer.parameters``: with
            parameter groups their order differs from the network's.
        accumulate_step (Union[int, dict, Callable]): the number of micro-batches in a window; 1 needs no accumulators.
            A dict maps the first update of each size to the size, such as ``{0: 1, 100: 4}``. A function is compiled,
            and gets the number of updates as a Tensor.
        reduction (Optional[str]): ``"sum"`` or ``"mean"``. Default: ``None``, ``"sum"``, with a line in the log.
        network (Optional[Cell]): the network that the step differentiates. Needed with several ranks, which compare its
            other Parameters and draw different random numbers. Only with it there is a warning about BatchNorm.
            Default: ``None``.

    With a `loss_scale` multiply the loss by it, with `scale`. Several ranks must make the same number of calls; with
    ``"sum"`` divide the loss by the micro-batches of all ranks. A call outside your compiled step, in a plain loop,
    runs as a compiled graph of its own, which is faster, unless `compile` is False.

    The counters `updates`, `skipped`, `micro_batches`, `updated` and `grad_norm` are Parameters, right on the host and
    inside the compiled step. ``int()``, ``float()`` or ``bool()`` makes a number of them, which no longer changes.

    Inputs:
        - **grads** (tuple[Tensor]) - the gradients of one micro-batch, in the order of ``optimizer.parameters``.
        - **weight** (Union[Tensor, float], optional) - with ``reduction="mean"``: the number that the micro-batch's
          loss averages over, such as rows or tokens. It multiplies the gradients (0 times NaN is NaN).

    Outputs:
        Tensor of bool, whether this call updated the parameters.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the weight or the gradients do not match.
        RuntimeError: If ranks differ in a setting, or in the names, shapes or types of Parameters.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn, ops
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
        ...     return ops.depend(loss, accumulator(grads, x.shape[0]))
        >>> for rows in (8, 8, 3):
        ...     x, y = Tensor(np.ones((rows, 4)), ms.float32), Tensor(np.zeros(rows), ms.int32)
        ...     loss = train_step(x, y)
        ...     print(bool(accumulator.updated), int(accumulator.micro_batches))
        False 1
        True 0
        False 1
        >>> accumulator.flush(), int(accumulator.updates)
        (True, 2)
    """

    waits = False
    """bool, whether micro-batches wait for their window to be complete."""

    def __init__(
        self,
        optimizer: nn.Optimizer | ZeroOptimizer,
        accumulate_step: int | Mapping[int, int] | Callable,
        clip_norm: float | None = None,
        *,
        reduction: str | None = None,
        network: nn.Cell | None = None,
        **options: Unpack[OptionsButClip],
    ):
        chosen = checked(_OWNER, {**options, "clip_norm": clip_norm})
        sizes = sizes_of(*_SIZE, accumulate_step)
        if reduction is None and sizes.constant != 1:
            _check.log_once(_SUMS)
        reduction = "sum" if reduction is None else _check.one_of(_OWNER, "reduction", reduction, REDUCTIONS)
        config = resolve(_OWNER, optimizer, network, chosen, divides=reduction == "mean", in_graph=True)
        tune(_OWNER, (optimizer if network is None else network).get_parameters())
        if config.group is not None and network is None:
            rule = "given with several ranks, which compare its Parameters and draw different random numbers"
            _check.raise_invalid(ValueError, _OWNER, "network", rule, None)
        facts = {"'accumulate_step'": sizes.settings, "'reduction'": reduction, **config.facts}
        begin_together(_OWNER, config.group, facts, optimizer, network)
        if network is not None and sizes.constant != 1:
            warn_about_batch_norm(network, training=True)  # `set_train` may be called later
        self.optimizer = optimizer
        """Optimizer, updates the parameters."""
        self.group = config.group
        """Optional[Group], the ranks; None for a single process."""
        self._config, self._parameters, self._compiles = config, config.parameters, config.compiles
        self._sizes, self._next_size = sizes, None if sizes.constant else sizes.function or _SizeBySteps(sizes.steps)
        name = unique_name("accumulator")
        # A window of 1 needs no accumulators in a single process.
        without_sums = sizes.constant == 1 and self.group is None
        self._window = Window(config, None) if without_sums else new_window(name, config)
        first = sizes.size_after(Tensor(0, ms.int32) if sizes.function else 0)
        self._size = untrained(f"{name}.window", first, ms.int32)
        self.micro_batches = untrained(f"{name}.micro_batches", 0, ms.int32)
        """Parameter of int32, the number of micro-batches in the open window."""
        self.updates = untrained(f"{name}.updates", 0, ms.int32)
        """Parameter of int32, the number of updates so far."""
        self.skipped = untrained(f"{name}.skipped", 0, ms.int32)
        """Parameter of int32, windows so far without an update: not finite, all weights 0, or skipped by a stage."""
        self.updated = untrained(f"{name}.updated", False, ms.bool_)
        """Parameter of bool, whether the last call updated the parameters."""
        self.grad_norm = untrained(f"{name}.grad_norm", 0.0, ms.float32)
        """Parameter of float32, the norm of the last window's gradient, before clipping."""
        self._loss_scale = config.scale.constant if config.scale.value is None else config.scale.value
        self._outside = _Outside()
        self._through_branch = branch(config.compiles)
        self._add_outside, self._end_outside = _Add(self), _End(self)
        self._is_gradient_checked = self._is_reduction_checked = False
        # The square of a gradient that depends on the data: that of a matrix, of which biases may be independent.
        matrices = [number for number, each in enumerate(self._parameters) if each.ndim > 1]
        self._sample = matrices[-1] if matrices else 0
        self._square = None if self.group is None else untrained(f"{name}.square", 0.0, ms.float32)

    def __call__(self, grads: tuple, weight: Tensor | None = None) -> Any:
        if call(self._outside, ()) and self._compiles:
            gradients = tree.check_gradients_outside(_OWNER, grads, self._parameters)
            return self._add_outside(gradients, self._checked(weight))
        gradients = tree.check_gradients("Accumulator", grads, self._parameters)
        return self.add(gradients, self._checked(weight))

    def add(self, gradients: tuple, weight: Tensor | None) -> Tensor:
        """Add a micro-batch whose gradients have been checked, and end the window if it is full. For `__call__`."""
        window = self._window
        if self._square is not None:
            ops.assign(self._square, ops.sum(ops.square(ops.cast(gradients[self._sample], ms.float32))))
        # By index: MindSpore warns about a result that a graph takes and does not use.
        left = window.leave_out(gradients, weight)
        weight, kept_factor = left[0], left[1]
        if not window.has_sums:
            return self._update_without_sums(gradients, weight)
        added = window.add(gradients, weight, kept_factor)
        ops.assign_add(self.micro_batches, ops.depend(Tensor(1, ms.int32), added))
        updated = Tensor(False)
        if window.boundary.touch(is_full(self.micro_batches, self._size)):
            updated = self.end()
        ops.assign(self.updated, updated)
        return updated

    def end(self) -> Tensor:
        """End the window and begin the next. For `add` and `flush`."""
        closed = self._window.close()
        updated = self._count(closed[0], closed[1])
        ops.assign(self.micro_batches, Tensor(0, ms.int32))
        if self._next_size is not None:
            ops.assign(self._size, ops.cast(self._next_size(self.updates), ms.int32))
        return updated

    def _update_without_sums(self, gradients: tuple, weight: Tensor | None) -> Any:
        """Run a window of one micro-batch, which has no accumulators."""
        weight = None if weight is None else ops.cast(weight, ms.float32)
        closed = self._window.close_without_sums(gradients, weight)
        norm = closed[1] if self._through_branch is None else self._through_branch(closed[1])
        return self._count(closed[0], norm)

    def _count(self, updated: Tensor, norm: Tensor) -> Tensor:
        ops.assign(self.grad_norm, norm)
        ops.assign(self.updated, updated)
        ops.assign_add(self.updates, ops.cast(updated, ms.int32))
        ops.assign_add(self.skipped, ops.cast(ops.logical_not(updated), ms.int32))
        return updated

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times `loss_scale`. Differentiate this one; `value_and_grad` then returns it, too."""
        return loss * self._loss_scale

    def _checked(self, weight: Tensor | None) -> Any:
        """Return the weight; raise an error if it is missing, not a number, or given where it has no effect."""
        if weight is not None and not self._window.divides:
            raise ValueError("For 'Accumulator', 'weight' must come with reduction='mean', but got 'sum'.")
        if weight is None and self._window.divides:
            raise ValueError(
                "For 'Accumulator', 'weight' must be given with reduction='mean', but got None. Call "
                "accumulator(grads, rows) with the number that the micro-batch's loss averages over: rows or tokens."
            )
        return None if weight is None else tree.check_weight("Accumulator", weight)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        counts = f"updates={int(self.updates)}, skipped={int(self.skipped)}"
        return f"Accumulator({kind_of(self.optimizer)}, {shown}, {counts})"

    # What follows is for the host.

    def flush(self) -> bool:
        """End an open window early and update. Call it outside the compiled step, for example after an epoch.

        With several ranks call it on all of them. Then weights and learning rates are compared.

        Without it the micro-batches left over stay in the window: they are added to the first window of the next epoch,
        and after the last epoch they are lost. Nothing warns of it, because both may be intended.

        With ``reduction="sum"`` a short window has a smaller gradient: the losses were divided by `accumulate_step`.

        Returns:
            bool, whether the parameters were updated; False if the window was empty.

        Raises:
            RuntimeError: If the averages of `ema` are applied, or the ranks have ended different numbers of windows, or
                drifted apart.
        """
        updated = False
        if self._is_open_on_a_rank():
            check_not_applied("flush", self._config.ema)
            updated = bool(self._end_outside())
        if self.group is not None:
            size = {"'accumulate_step'": self.accumulate_step}
            check_drift(_OWNER, self.group, self._config.parameters, self.optimizer, size)
        if self.updated and not self._is_gradient_checked:  # inside a compiled step nothing can warn
            self._is_gradient_checked = True
            warn_if_no_gradient(_OWNER, float(self.grad_norm))
        return updated

    def _is_open_on_a_rank(self) -> bool:
        """Return whether there is a micro-batch in the open window, which is the same one on all ranks."""
        held, windows = int(self.micro_batches), int(self.updates) + int(self.skipped)
        if self.group is None or self._square is None:
            return held > 0
        try:
            of_ranks = gather_numbers(np.array([held, windows, float(self._square)]), self.group)
        except RuntimeError as error:
            reason = "another rank did not take part. Call the Accumulator and 'flush' equally often on all ranks"
            raise RuntimeError(f"For 'flush', {reason}.") from error
        self._warn_if_reduced(of_ranks[:, 2])
        held_by_ranks, windows_of_ranks = of_ranks[:, :2].astype(int).T
        if len({*windows_of_ranks}) > 1:
            raise RuntimeError(
                "For 'Accumulator', all ranks must call it the same number of times, but they have ended "
                f"{', '.join(map(str, windows_of_ranks))} windows. Give them equally many micro-batches."
            )
        return bool(held_by_ranks.any())

    def _warn_if_reduced(self, squares: np.ndarray) -> None:
        """Warn, once, if the ranks have added the same gradient, of which these are the squares."""
        if not self._is_reduction_checked and squares[0] and (squares == squares[0]).all():
            _check.warn(
                f"For '{_OWNER}', all ranks add the same gradients. If something has summed them over the ranks, as "
                "nn.DistributedGradReducer does, leave it out: updates are too large. Otherwise all have the same data."
            )
        self._is_reduction_checked = True

    def clear(self) -> None:
        """Discard an open window. Call it outside the compiled step."""
        if int(self.micro_batches):
            ops.assign(self.micro_batches, ops.depend(Tensor(0, ms.int32), self._window.clear()))

    @property
    def accumulate_step(self) -> int:
        """int, the number of micro-batches in a full window. You can set it between windows, without recompiling."""
        return int(self._size.asnumpy())

    @accumulate_step.setter
    def accumulate_step(self, value: int) -> None:
        size, held = _check.positive_int(*_SIZE, value), int(self.micro_batches)
        if held:
            raise RuntimeError(
                f"For 'Accumulator', 'accumulate_step' can't change inside a window, which holds "
                f"{_check.quantity(held, 'micro-batch')}. Call 'flush()' or 'clear()' first."
            )
        if self._next_size is not None:
            raise ValueError("For 'Accumulator', 'accumulate_step' can't be set: it is defined by the update.")
        if self.group is None and (size > 1) != self._window.has_sums:
            raise ValueError("For 'Accumulator', 'accumulate_step' can't change from or to 1. Use a new Accumulator.")
        ops.assign(self._size, Tensor(size, ms.int32))  # a compiled graph does not see set_data

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run."""
        size = self.accumulate_step if self._sizes.constant else self._sizes.settings
        reduction = "mean" if self._window.divides else "sum"
        return {"accumulate_step": size, "reduction": reduction, **self._config.settings}

    @property
    def state(self) -> dict[str, Any]:
        """dict, its Parameters by owner and name; with several ranks without the sums: they save between windows."""
        counters = ("micro_batches", "updates", "skipped", "updated", "grad_norm")
        own = {f"window.{name}": getattr(self, name) for name in counters}
        sums = {} if self.group else self._window.state
        return {f"{SETTING}.accumulate_step": self._size, **own, **sums, **self._config.state}

    @property
    def counters(self) -> dict[str, Any]:
        """dict, what a training state says of it in numbers; the Parameters in `state` say it, too."""
        counters = {"updates": int(self.updates), "skipped": int(self.skipped)}
        return {**counters, "updated": bool(self.updated)}

    def load(self, counters: Mapping[str, Any]) -> None:
        """Continue from a training state, whose Parameters have been loaded."""

    @property
    def clip_norm(self) -> float | None:
        """Optional[float], the maximum norm of the window's gradient; constant in the compiled graph."""
        return self._config.clip_norm

    @property
    def loss_scale(self) -> float:
        """float, the loss scale; 1 if there is none."""
        return self._config.scale.number

    @property
    def overflows(self) -> int:
        """int, the number of windows so far that overflowed, so that the dynamic loss scale was lowered."""
        return self._config.scale.overflows

    @property
    def left_out(self) -> int:
        """int, the number of micro-batches that ``nonfinite="skip_micro"`` left out, on all ranks."""
        return self._config.left_out


class _Outside(ops.constexpr(lambda: False, get_instance=False)):  # type: ignore[misc]
    """Returns whether it is called outside graphs."""

    def __call__(self) -> bool:
        return True


@ms.jit_class
class _SizeBySteps:
    """Computes the size of a window from the number of updates before it, in a graph."""

    def __init__(self, steps: list[tuple[int, int]]):
        sizes = [0, *(size for _, size in steps)]
        self.firsts = Tensor([first for first, _ in steps], ms.float32)
        self.growth = Tensor([size - previous for previous, size in zip(sizes, sizes[1:])], ms.float32)

    def __call__(self, updates: Any) -> Any:
        reached = ops.cast(ops.cast(updates, ms.float32) >= self.firsts, ms.float32)
        return ops.cast(ops.sum(reached * self.growth), ms.int32)


class _Add(Compiled):
    """Adds a micro-batch from a plain loop, as a graph. Numbers and tuples among its inputs would be constants."""

    def __init__(self, accumulator: Accumulator):
        super().__init__(_OWNER, True, accumulator.optimizer, accumulator._sizes.function)
        self.accumulator = accumulator
        self.before_compiling = accumulator._window.boundary.find_touched

    def __call__(self, grads: tuple, weight: Tensor | None) -> Any:
        if weight is not None and not isinstance(weight, Tensor):
            weight = Tensor(weight, ms.float32)
        return super().__call__(weight, *grads)

    def construct(self, weight: Tensor | None, *grads: tuple) -> Any:
        return self.accumulator.add(grads, weight)


class _End(Compiled):
    """Ends a window outside the user's step. A Cell, because a graph of `ms.jit` does not see weights loaded later."""

    def __init__(self, accumulator: Accumulator):
        super().__init__(_OWNER, accumulator._config.compiles, accumulator.optimizer, accumulator._sizes.function)
        self.accumulator = accumulator
        self.before_compiling = accumulator._window.boundary.find_touched

    def construct(self) -> Any:
        return self.accumulator.end()
