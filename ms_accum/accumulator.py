"""Accumulates gradients in the user's own compiled step: the functional pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from . import _check
from .engine.config import resolve
from .engine.ema import Ema
from .engine.ends import sizes_of
from .engine.graph_window import GraphWindow
from .engine.stages import Stage
from .layers.batch_norm import warn_about_batch_norm
from .loss.known_losses import REDUCTIONS
from .network import tree
from .network.calls import call
from .network.compiled import Compiled, check_compile
from .network.optimizers import kind_of, may_have_sparse_rule, warn_if_no_gradient
from .network.runtime import tune
from .network.state import unique_name
from .ranks.agreement import agree_and_broadcast, facts_of
from .ranks.group import Group
from .ranks.zero import ZeroOptimizer

if TYPE_CHECKING:
    from mindspore.amp import LossScaleManager, LossScaler

_OWNER = "Accumulator"
_SIZE = _check.Argument(_OWNER, "accumulate_step")


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
        network (Optional[Cell]): the network that the step differentiates. Needed with several ranks, which compare its
            other Parameters and draw different random numbers, and for sparse gradients that the optimizer treats in
            another way than dense ones. Only with it there is a warning about BatchNorm. Default: ``None``.

    Args: Several processes
        group (Union[str, None, Group]): the ranks that train together: ``"auto"`` for all that a launcher started,
            ``None`` for this process alone. With ``"sum"`` divide the loss by the micro-batches of all ranks.
            Default: ``"auto"``.
        sync_every_micro_batch (bool): whether to sum gradients over the ranks in every call, which all ranks must
            make, instead of once per window. With a `ZeroOptimizer` each rank then stores only its part of the sums
            (ZeRO-2). Default: ``False``.

    Args: Precision, and gradients that are not finite
        loss_scale (Union[None, float, LossScaler, LossScaleManager]): the factor by which you multiply the loss, with
            `scale`; the window's gradient is divided by it. A dynamic scale is lowered when a window's gradient is not
            finite. Default: ``None``, no scaling.
        nonfinite (str): ``"skip_window"`` skips a window whose gradient is not finite; ``"skip_micro"`` leaves out only
            the micro-batch, with its weight, which for windows of 1 on one device is the same. Default:
            ``"skip_window"``.

    Args: Other
        ema (Optional[Ema]): maintains an average of the weights. Default: ``None``.
        stages (Sequence[Callable]): as for `GradientAccumulation`. Default: ``()``.
        compile (bool): whether a call outside your compiled step, in a plain loop, runs as a compiled graph of its own,
            which is faster. Default: ``True``.

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
        ...     print(bool(accumulator.updated), int(accumulator.micro_batches))
        False 1
        True 0
        False 1
        >>> accumulator.flush(), int(accumulator.updates)
        (True, 2)
    """

    def __init__(
        self,
        optimizer: nn.Optimizer | ZeroOptimizer,
        accumulate_step: int | Mapping[int, int] | Callable,
        clip_norm: float | None = None,
        *,
        reduction: str = "sum",
        network: nn.Cell | None = None,
        group: Group | str | None = "auto",
        sync_every_micro_batch: bool = False,
        loss_scale: float | LossScaler | LossScaleManager | None = None,
        nonfinite: str = "skip_window",
        ema: Ema | None = None,
        stages: Sequence[Stage] = (),
        compile: bool = True,
    ):
        sizes = sizes_of(*_SIZE, accumulate_step)
        _check.one_of(_OWNER, "reduction", reduction, REDUCTIONS)
        config = resolve(
            _OWNER,
            optimizer,
            network,
            weighted=reduction == "mean",
            clip_norm=clip_norm,
            group=group,
            sync_every_micro_batch=sync_every_micro_batch,
            loss_scale=loss_scale,
            nonfinite=nonfinite,
            ema=ema,
            stages=stages,
            compiles=check_compile(_OWNER, compile),
            in_graph=True,
        )
        tune(_OWNER, (optimizer if network is None else network).get_parameters())
        if config.group is not None:
            if network is None:
                rule = "given with several ranks, which compare its Parameters and draw different random numbers"
                _check.raise_invalid(ValueError, _OWNER, "network", rule, None)
            settings = {"'accumulate_step'": sizes.settings, "'reduction'": reduction}
            settings["'sync_every_micro_batch'"] = sync_every_micro_batch
            equal_on_ranks = {**settings, **config.equal_on_ranks, **facts_of(optimizer, network)}
            agree_and_broadcast(_OWNER, config.group, equal_on_ranks, optimizer, network)
        if network is not None and sizes.constant != 1:
            warn_about_batch_norm(network, training=True)  # `set_train` may be called later
        self.optimizer = optimizer
        """Optimizer, updates the parameters."""
        self.group = config.group
        """Optional[Group], the ranks; None for a single process."""
        self.window = GraphWindow(unique_name("accumulator"), config, sizes, _SIZE)
        """GraphWindow, the open window."""
        tables = config.tables
        self.rejects_rows = tree.RejectsRows(_OWNER, tables, in_loop=True) if tables else None
        self._add_in_graph = {full: _Add(self, full) for full in (None, False, True)}
        needs = not self.window.sums.has_sums or config.skips is not None or may_have_sparse_rule(optimizer)
        self.dense_only = network is None and needs
        """bool, whether sparse gradients would need the network, which is not given."""
        self._is_gradient_checked = False

    def __call__(self, grads: Any, weight: Any = None) -> Any:
        window = self.window
        if self.rejects_rows is not None:
            call(self.rejects_rows, ())
        if call(window.outside, ()) and window.compiles:
            checked = tree.check_gradients_outside(_OWNER, grads, window.parameters, dense_only=self.dense_only)
            return self._add_in_graph[window.fills_up()](checked, self._checked(weight))
        checked = tree.check_gradients("Accumulator", grads, window.parameters, dense_only=self.dense_only)
        sparse = tree.has_rows(tuple(grads))
        weight = self._checked(weight)
        # By index: MindSpore warns about a result that a graph takes and does not use.
        weighed = window.sums.leave_out(checked, weight)
        weight, kept_factor = weighed[0], weighed[1]
        if sparse:  # in a graph a constant; handed on, it would not be one
            return window.add(checked, weight, kept_factor, True)
        return window.add(checked, weight, kept_factor)

    def scale(self, loss: Any) -> Any:
        """Return the loss times `loss_scale`. Differentiate this one; `value_and_grad` then returns it, too."""
        return loss * self.window.scale

    def _checked(self, weight: Any) -> Any:
        """Return the weight; raise an error if it is missing, not a number, or given where it has no effect."""
        if weight is not None and not self.window.weighted:
            raise ValueError("For 'Accumulator', 'weight' must come with reduction='mean', but got 'sum'.")
        if weight is None and self.window.weighted:
            raise ValueError(
                "For 'Accumulator', 'weight' must be given with reduction='mean', but got None. Call "
                "accumulator(grads, rows) with the number that the micro-batch's loss averages over: rows or tokens."
            )
        return None if weight is None else tree.check_weight("Accumulator", weight)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        counts = f"updates={int(self.updates)}, skipped={int(self.skipped)}"
        return f"Accumulator({kind_of(self.optimizer)}, {shown}, {counts})"

    def flush(self) -> bool:
        """End an open window early and update. Call it outside the compiled step, for example after an epoch.

        With several ranks call it on all of them. A rank whose data are over takes part in the windows of the others,
        without micro-batches of its own, until all ranks flush. Then weights and learning rates are compared.

        Without it the micro-batches left over stay in the window: they are added to the first window of the next epoch,
        and after the last epoch they are lost. Nothing warns of it, because both may be intended.

        With ``reduction="sum"`` a short window has a smaller gradient: the losses were divided by `accumulate_step`.

        Returns:
            bool, whether the parameters were updated; False if the window was empty.

        Raises:
            RuntimeError: If the averages of `ema` are applied, or the ranks have drifted apart.
        """
        updated = self.window.flush()
        self.window.check_drift()
        if self.updated and not self._is_gradient_checked:  # inside a compiled step nothing can warn
            self._is_gradient_checked = True
            warn_if_no_gradient(_OWNER, float(self.grad_norm))
        return updated

    def clear(self) -> None:
        """Discard an open window. Call it outside the compiled step."""
        self.window.clear()

    @property
    def accumulate_step(self) -> int:
        """int, the number of micro-batches in a full window. You can set it between windows, without recompiling."""
        return int(self.window.size.asnumpy())

    @accumulate_step.setter
    def accumulate_step(self, value: int) -> None:
        self.window.resize(_check.positive_int(*_SIZE, value))

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run."""
        return self.window.settings

    @property
    def state(self) -> dict[str, Any]:
        """dict, its Parameters by name; with several ranks without the sums, because they save between windows only."""
        return self.window.state

    @property
    def clip_norm(self) -> float | None:
        """Optional[float], the maximum norm of the window's gradient; constant in the compiled graph."""
        return self.window.config.clip_norm

    @property
    def updated(self) -> Parameter:
        """Parameter of bool, whether the last call updated the parameters."""
        return self.window.updated

    @property
    def micro_batches(self) -> Parameter:
        """Parameter of int32, the number of micro-batches in the open window."""
        return self.window.micro_batches

    @property
    def updates(self) -> Parameter:
        """Parameter of int32, the number of updates so far."""
        return self.window.updates

    @property
    def skipped(self) -> Parameter:
        """Parameter of int32, windows so far without an update: not finite, all weights 0, or skipped by a stage."""
        return self.window.skipped

    @property
    def loss_scale(self) -> float:
        """float, the loss scale; 1 if there is none."""
        return self.window.config.loss_scale

    @property
    def overflows(self) -> int:
        """int, the number of windows so far that overflowed, so that the dynamic loss scale was lowered."""
        return self.window.config.overflows

    @property
    def left_out(self) -> int:
        """int, the number of micro-batches that ``nonfinite="skip_micro"`` left out, on all ranks."""
        return self.window.config.left_out

    @property
    def grad_norm(self) -> Parameter:
        """Parameter of float32, the norm of the last window's gradient, before clipping."""
        return self.window.grad_norm


class _Add(Compiled):
    """Adds a micro-batch from a plain loop, as a graph. Numbers and tuples among its inputs would be constants.

    Args:
        accumulator (Accumulator): what it adds to.
        full (Optional[bool]): whether the window is full with it; None if only the graph finds out.
    """

    def __init__(self, accumulator: Accumulator, full: bool | None):
        window = accumulator.window
        super().__init__(_OWNER, window.compiles, accumulator.optimizer, window.sizes.function)
        self.accumulator, self.full = accumulator, full

    def __call__(self, grads: Any, weight: Any) -> Any:
        if weight is not None and not isinstance(weight, Tensor):
            weight = Tensor(weight, ms.float32)
        return super().__call__(weight, *grads)

    def construct(self, weight: Any, *grads: Any) -> Any:
        window = self.accumulator.window
        weighed = window.sums.leave_out(grads, weight)
        weight, kept_factor = weighed[0], weighed[1]
        if self.full is None:
            return window.add(grads, weight, kept_factor)
        if self.full:
            return window.add_last(grads, weight, kept_factor)
        return window.add_inside(grads, weight, kept_factor)
