"""How does a user's own compiled step accumulate gradients?"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from . import _check
from .loss.first_look import check_compiles
from .loss.reductions import REDUCTIONS
from .network import checks, tree
from .network.accumulators import seen, unique_name
from .network.runtime import tune
from .numerics.collaborators import numerics_of
from .numerics.ema import Ema, check_not_applied
from .numerics.nonfinite import SKIP_WINDOW, check_dense
from .numerics.sizes import sizes_of
from .ranks.agreement import begin_with_networks_of, check_drift
from .ranks.heartbeat import exchange
from .ranks.parallel import AUTO, group_of, networks_of
from .ranks.reduction import summing
from .window.boundary import Boundary
from .window.in_graph import GraphCounters, GraphWindow, Notes, Outside


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
        clip_norm (Optional[float]): the maximum global norm of the window's gradient. Default: ``None``, no clipping.
        reduction (str): ``"sum"`` or ``"mean"``. Default: ``"sum"``.
        group (Union[str, None, Group]): the ranks that train together: ``"auto"`` for all that a launcher started,
            ``None`` for this process alone. With ``"sum"`` divide the loss by the micro-batches of all ranks.
            Default: ``"auto"``.
        sync_every_micro_batch (bool): whether to sum gradients over the ranks in every call, which all ranks must
            make, instead of once per window. With a `ZeroOptimizer` each rank then stores only its part of the sums
            (ZeRO-2). Default: ``False``.
        loss_scale (Union[None, float, LossScaler, LossScaleManager]): the factor by which you multiply the loss, with
            `scale`; the window's gradient is divided by it. A dynamic scale is lowered when a window's gradient is not
            finite. Default: ``None``, no scaling.
        nonfinite (str): ``"skip_window"`` skips a window whose gradient is not finite; ``"skip_micro"`` leaves out only
            the micro-batch, with its weight. Default: ``"skip_window"``.
        ema (Optional[Ema]): maintains an average of the weights. Default: ``None``.

    Inputs:
        - **grads** (tuple[Tensor]) - the gradients of one micro-batch, in the order of ``optimizer.parameters``.
        - **weight** (Union[Tensor, float], optional) - with ``reduction="mean"``: the number that the micro-batch's
          loss averages over, such as rows or tokens. It multiplies the gradients (0 times NaN is NaN).

    Outputs:
        Tensor of bool, whether this call updated the parameters.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the weight or the gradients do not match.
        RuntimeError: If ranks differ in a setting, in the parameters, or in the values of untrained Parameters.

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
        accumulate_step: Any,
        clip_norm: float | None = None,
        *,
        reduction: str = "sum",
        group: Any = AUTO,
        sync_every_micro_batch: bool = False,
        loss_scale: Any = None,
        nonfinite: Any = SKIP_WINDOW,
        ema: Ema | None = None,
    ):
        owner = "Accumulator"
        self._sizes = sizes_of(owner, "accumulate_step", accumulate_step)
        check_compiles(self._sizes.function, "accumulate_step", owner)
        _check.one_of(owner, "reduction", reduction, REDUCTIONS)
        tune(owner, checks.optimizer(owner, optimizer).parameters)
        self.group = group_of(owner, group)
        """Optional[Group], the ranks; None for a single process."""
        self.optimizer = optimizer
        """Optimizer, updates the parameters."""
        how = summing(owner, optimizer, self.group, sync_every_micro_batch)
        networks = networks_of(optimizer.parameters)
        checks.same_for_rows(owner, optimizer, networks)
        # A window of 1 needs no accumulators in a single process with dense gradients.
        holds = self._sizes.constant != 1 or self.group is not None or any(map(tree.gives_rows, networks))
        given: Any = {"loss_scale": loss_scale, "nonfinite": nonfinite, "ema": ema}
        self.numerics = numerics_of(owner, optimizer, in_graph=True, **given)
        self.skips = self.numerics.skips if holds else None
        check_dense(owner, self.skips, networks)
        self._loss_scale = self.numerics.scale if self.numerics.dynamic is None else self.numerics.changing
        ends: Any = {"numerics": self.numerics._replace(skips=self.skips), "sums": how.at_the_end}
        multiply = tree.multiply_in_place if holds else tree.multiply
        name = unique_name("accumulator")
        self.notes = None if self.group is None else Notes(name, self.group)
        """Optional[Notes], what ranks send with the sums of a window; None for a single process."""
        touched = () if self.notes is None else self.notes.parameters
        self._boundary = Boundary(owner, optimizer, clip_norm, multiply=multiply, touched=touched, **ends)
        self._parameters = tuple(optimizer.parameters)
        facts = {"'accumulate_step'": self._sizes.settings, "'clip_norm'": self.clip_norm, "'reduction'": reduction}
        facts |= {"'sync_every_micro_batch'": sync_every_micro_batch, **self.numerics.equal_on_ranks}
        begin_with_networks_of(owner, optimizer, self.group, facts)
        self._mean = reduction == "mean"
        how_to: Any = {"sums": how.of_micro_batch, "skips": self.skips, "weighs": self._mean}
        self._window = GraphWindow(name, self._sizes, how.like if holds else None, **how_to)
        self._counters = GraphCounters(name)
        self._end_compiled, self._take_part_compiled = _ended_by(self), _taken_part_by(self)
        self._outside = Outside()

    def __call__(self, grads: Any, weight: Any = None) -> Any:
        grads = self._checked(grads, weight)
        weight = None if weight is None else checks.weight("Accumulator", weight)
        if self._window.grad_sum is None:
            return self._close(grads, None, only=None if weight is None else ops.cast(weight, ms.float32))[0]
        if self.skips is not None:
            # By index: MindSpore warns about a result that a graph takes and does not use.
            filtered = self.skips(grads, None, weight)
            grads, weight = filtered[0], None if weight is None else weight * filtered[1]
        updated, ends = Tensor(False), self._window.add(grads, weight)
        if self._boundary.touch(ends):
            updated = self._end()[0]
        ops.assign(self._counters.updated, updated)
        return updated

    def add(self, grads: Any, weight: Any, last: Any, figures: Any) -> Any:
        """Add a micro-batch as a call does; end the window also if `last` is true.

        Returns:
            tuple[Tensor], whether the window ended, and `figures`, summed over the ranks if it ended.
        """
        grads = self._checked(grads, weight)
        if self._window.grad_sum is None:
            self._close(grads, None, figures, None if weight is None else ops.cast(weight, ms.float32))
            return Tensor(True), figures
        updated, summed = Tensor(False), figures
        ends = self._window.add(grads, weight, last)
        if self._boundary.touch(ends):
            updated, summed = self._end(figures)
        ops.assign(self._counters.updated, updated)
        return ends, summed

    def scale(self, loss: Any) -> Any:
        """Return the loss times `loss_scale`. Differentiate this one; `value_and_grad` then returns it, too."""
        return loss * self._loss_scale

    def _checked(self, grads: Any, weight: Any) -> Any:
        """Return the gradients as dense tensors; raise an error if they or the weight do not match."""
        self._outside()
        grads = checks.gradients("Accumulator", grads, self._parameters)
        if weight is not None and not self._mean:
            raise ValueError("For 'Accumulator', 'weight' must come with reduction='mean', but got 'sum'.")
        if weight is None and self._mean:
            raise ValueError(
                "For 'Accumulator', 'weight' must be given with reduction='mean', but got None. Call "
                "accumulator(grads, rows) with the number that the micro-batch's loss averages over: rows or tokens."
            )
        return grads

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"Accumulator({checks.kind_of(self.optimizer)}, {shown}, updates={self.updates}, skipped={self.skipped})"

    def _end(self, figures: Any = None) -> Any:
        updated, figures = self._close(self._window.grad_sum, self._window.weight_sum, figures)
        self._window.begin(self._counters.updates)
        return updated, figures

    def _close(self, grads: Any, weight_sum: Any, figures: Any = None, only: Any = None) -> Any:
        if self.notes is None:
            updated, norm, figures = self._boundary(grads, weight_sum, figures, only=only)
            self._counters.add(updated, norm)
            return updated, figures
        notes = self.notes.sent(self._window.micro_batches)
        updated, norm, figures, notes = self._boundary(grads, weight_sum, figures, only=only, notes=notes)
        self._counters.add(updated, norm, notes[0] > 0)
        ops.assign(self.notes.sums, notes)
        return updated, figures

    def flush(self) -> bool:
        """End an open window early and update. Call it outside the compiled step, for example after an epoch.

        With several ranks call it on all of them. A rank whose data are over takes part in the windows of the others,
        without micro-batches of its own, until all ranks flush. Then weights and learning rates are compared.

        With ``reduction="sum"`` a short window has a smaller gradient: the losses were divided by `accumulate_step`.

        Returns:
            bool, whether the parameters were updated; False if the window was empty.

        Raises:
            RuntimeError: If the averages of `ema` are applied, or the ranks have drifted apart.
        """
        updated = self.flush_with()
        self.check_drift("Accumulator")
        return updated

    def check_drift(self, owner: str) -> None:
        """Raise an error if the trained weights, the learning rates or the window sizes of ranks are not equal."""
        if self.group is not None:
            size = {"'accumulate_step'": self.accumulate_step}
            check_drift(owner, self.group, self._parameters, self.optimizer, size)

    def flush_with(self, figures: Any = None) -> bool:
        """Do what `flush` does, without the comparison; `figures` is what `add` would get."""
        if self.notes is None and not self.micro_batches:
            return False
        check_not_applied("flush", self.numerics.ema)
        if self.notes is None:
            return self._end_now(figures)
        in_step = self._window.sums is not None
        self.notes.flushing(True)
        try:
            with exchange():
                return self._flush_in_step(figures) if in_step else self._flush_windows(self.notes, figures)
        except RuntimeError as error:
            if "AllReduce" not in str(error):
                raise
            what = "another rank did not take part. Call 'flush' on all ranks, the same number of times"
            raise RuntimeError(f"For 'flush', {what}.") from error
        finally:
            self.notes.flushing(False)

    def _flush_windows(self, notes: Notes, figures: Any) -> bool:
        """End windows together until no rank holds a micro-batch: first this rank's own, then those of the others."""
        done = False
        while True:
            updated = self._end_now(figures)
            if not notes.ended():
                return done
            done, figures = done or updated, None if figures is None else ops.zeros_like(figures)

    def _flush_in_step(self, figures: Any) -> bool:
        """Take part in the other ranks' micro-batches until no rank adds one, then end the open window together."""
        before = self.updates
        while self._take_part_now(figures):
            if figures is not None and not self.micro_batches:  # a window has ended
                figures = ops.zeros_like(figures)
        self._end_now(figures)
        return self.updates > before

    def _end_now(self, figures: Any) -> bool:
        """End the window in the way in which the step ends windows; return whether the parameters were updated.

        In PyNative mode an optimizer of `mindspore.experimental` that has run outside a graph can't be compiled into
        one any more.
        """
        return bool(self._end(figures)[0] if self._outside.called else self._end_compiled(figures))

    def _take_part_now(self, figures: Any) -> bool:
        """Take part in the other ranks' micro-batch in the same way; return whether there was one."""
        return bool((self._take_part if self._outside.called else self._take_part_compiled)(figures)[0])

    def _take_part(self, figures: Any) -> Any:
        nothing = tuple([ops.zeros(parameter.shape, ms.float32) for parameter in self._parameters])
        adding, ends = self._window.take_part(nothing)
        updated = Tensor(False)
        if self._boundary.touch(ends):
            updated = self._end(figures)[0]
        return adding, updated

    def clear(self) -> None:
        """Discard an open window. Call it outside the compiled step."""
        if self.micro_batches:
            self._window.clear()
            self.numerics.clear()

    @property
    def accumulate_step(self) -> int:
        """int, the number of micro-batches in a full window. You can set it between windows, without recompiling."""
        return seen(self._window.size, int)

    @accumulate_step.setter
    def accumulate_step(self, value: int) -> None:
        self._window.resize(_check.positive_int("Accumulator", "accumulate_step", value), alone=self.group is None)

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run."""
        reduction = "mean" if self._mean else "sum"
        size = self.accumulate_step if self._sizes.constant else self._sizes.settings
        held = {"accumulate_step": size, "reduction": reduction, "clip_norm": self.clip_norm}
        return {**held, **self.numerics.settings}

    @property
    def state(self) -> dict[str, Any]:
        """dict, its Parameters by name; with several ranks without the sums, because they save between windows only."""
        held = {"size": self._window.size, "micro_batches": self._window.micro_batches}
        held |= {**self._counters.state, **self.numerics.state}
        if self.skips is not None:
            held["counts"] = self.skips.counts
        return held if self.group is not None else {**held, **self._window.sums_by([p.name for p in self._parameters])}

    @property
    def clip_norm(self) -> float | None:
        """Optional[float], the maximum norm of the window's gradient; constant in the compiled graph."""
        return self._boundary.clip_norm

    @property
    def updated(self) -> bool:
        """bool, whether the last call updated the parameters."""
        return seen(self._counters.updated, bool)

    @property
    def micro_batches(self) -> int:
        """int, the number of micro-batches in the open window."""
        return seen(self._window.micro_batches, int)

    @property
    def updates(self) -> int:
        """int, the number of updates so far."""
        return seen(self._counters.updates, int)

    @property
    def skipped(self) -> int:
        """int, the number of windows so far without an update: gradient not finite, or all weights 0."""
        return seen(self._counters.skipped, int)

    @property
    def loss_scale(self) -> float:
        """float, the loss scale; 1 if there is none."""
        return self.numerics.value

    @property
    def overflows(self) -> int:
        """int, the number of windows so far that overflowed, so that the dynamic loss scale was lowered."""
        return self.numerics.overflows

    @property
    def left_out(self) -> int:
        """int, the number of micro-batches that ``nonfinite="skip_micro"`` left out, on all ranks."""
        return self.numerics.left_out

    @property
    def grad_norm(self) -> float:
        """float, the norm of the last window's gradient, before clipping."""
        return seen(self._counters.grad_norm, float)


def _ended_by(accumulator: Accumulator) -> Any:
    @ms.jit
    def end(figures: Any) -> Any:  # not the method: in a step that is compiled later it would be the accumulator
        return accumulator._end(figures)[0]

    return end


def _taken_part_by(accumulator: Accumulator) -> Any:
    @ms.jit
    def take_part(figures: Any) -> Any:
        return accumulator._take_part(figures)

    return take_part
