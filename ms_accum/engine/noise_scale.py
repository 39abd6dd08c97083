"""The gradient noise scale: how large a window should be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindspore.train import Callback, RunContext

from .. import _check
from ..network.compiled import Compiled
from ..network.kernels import kernels
from .ema import check_decay
from .loss_scale import own_scale

_OWNER = "NoiseScale"


class NoiseScale(Callback):
    """Estimate the gradient noise scale: the number of rows beyond which larger windows save few updates.

    The noise scale is ``tr(S) / |G|^2``: the variance of a row's gradient divided by the squared norm of the mean
    gradient (McCandlish et al. 2018). Both are estimated without bias (appendix A.1) from the norms of two gradients
    that accumulation has anyway: that of a window's first micro-batch, and that of the window. Windows with a single
    micro-batch are not sampled. The first micro-batch must be a random sample of its window: the estimate is wrong,
    for example, if micro-batches are sorted by length.

    Pass it to `GradientAccumulation` as `noise_scale`, or to `Model` as a callback. In your own training loop, call
    `observe` after each micro-batch. It is part of the training state: of the driver's, of that of `SaveStates`, if it
    precedes that in the list of callbacks, and of that of a `ResumableLoop` with `noise_scale`.

    Args:
        every (int): the number of windows from one sample to the next. Default: 25, which costs at most 1 % of time.
        decay (float): the weight of earlier samples, >= 0 and < 1, because the noise scale grows during training.
            Default: 0.95.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import GradientAccumulation, NoiseScale
        >>> net, noise = MLP(), NoiseScale(every=4)
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        >>> model = GradientAccumulation(net, nn.CrossEntropyLoss(), optimizer, noise_scale=noise)
        >>> model.train_process(1, create_dataset(image_size=28), mini_steps=4, report=(), ckpt_path=None)
        >>> noise.samples
        3
    """

    def __init__(self, every: int = 25, decay: float = 0.95):
        self._every = _check.positive_int(_OWNER, "every", every)
        self._decay = check_decay(_OWNER, decay)
        self._windows = self._rows = self._open_rows = 0
        self._left_out = 0  # by the observed `Accumulator`, at its last micro-batch inside a window
        self._first: tuple[float, int] | None = None
        self._variance = self._square = 0.0
        self._norm: _Norm | None = None
        self.samples = 0
        """int, the number of sampled windows."""

    @property
    def rows(self) -> float:
        """float, the estimate in rows; NaN without samples, or if the noise hides the mean gradient."""
        return self._variance / self._square if self._square > 0 and self._variance > 0 else math.nan

    @property
    def advice(self) -> str:
        """str, one line about the window size."""
        if not self.samples:
            return "no estimate: no window with several micro-batches was sampled"
        if math.isnan(self.rows):
            causes = "more samples are needed, or micro-batches are sorted"
            return f"no estimate from {_check.quantity(self.samples, 'window')}: {causes}"
        current = f"windows had {_check.quantity(self._rows, 'row')}"
        return f"about {self.rows:,.0f} rows ({current}): larger windows than that save few updates"

    def wants(self, micro_batches: int) -> bool:
        """Return whether to sample the open window, which now contains this number of micro-batches."""
        return micro_batches == 1 and self._windows % self._every == 0

    def first(self, sums: Sequence[Any], divisor: float, rows: int) -> None:
        """Read the accumulators after a window's first micro-batch.

        Args:
            sums (Sequence[Parameter]): the accumulators.
            divisor (float): the factor between them and the mean gradient of the micro-batch's rows.
            rows (int): the number of its rows.
        """
        if self._norm is None or [*map(id, self._norm.sums)] != [*map(id, sums)]:
            self._norm = _Norm(sums)
        self._first = (float(self._norm().asnumpy()) / divisor, rows)

    def window_ended(self, norm: float, rows: int, *, counts: bool = True) -> None:
        """Add a window: the norm of its mean gradient, its rows, and whether it counts (False if it was skipped)."""
        self._windows += 1
        first, self._first = self._first, None
        if first is None or not counts or first[1] == rows or not math.isfinite(first[0] + norm):
            return
        small, large, few = first[0] ** 2, norm**2, first[1]
        self._add((small - large) / (1 / few - 1 / rows), (rows * large - few * small) / (rows - few))
        self._rows = rows

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run."""
        return {"every": self._every, "decay": self._decay}

    @property
    def state(self) -> dict[str, Any]:
        """dict, all that `load` needs to continue, in types that JSON supports."""
        sums = {"variance": self._variance, "square": self._square, "samples": self.samples, "rows": self._rows}
        first = None if self._first is None else [*self._first]
        counters = {"windows": self._windows, "seen": self._open_rows, "left_out": self._left_out}
        return {**self.settings, **sums, **counters, "first": first}

    def load(self, state: Mapping[str, Any] | None) -> bool:
        """Continue from a saved state, and return True; start anew if that is None or has other settings."""
        matches = state is not None and all(state[name] == value for name, value in self.settings.items())
        if state is not None and matches:
            names = ("variance", "square", "samples", "rows", "windows", "seen", "left_out")
            self._variance, self._square, self.samples, self._rows, *counters = (state[name] for name in names)
            self._windows, self._open_rows, self._left_out = counters
            self._first = None if state["first"] is None else (state["first"][0], state["first"][1])
        return matches

    def _add(self, variance: float, square: float) -> None:
        self._variance = self._decay * self._variance + variance
        self._square = self._decay * self._square + square
        self.samples += 1

    def observe(self, accumulator: Any, rows: int) -> None:
        """Read an `Accumulator` after a micro-batch with this number of rows. For your own training loop."""
        window = accumulator.window
        micro_batches = int(window.micro_batches.asnumpy())
        left_out = window.collaborators.left_out
        self._open_rows = rows if micro_batches == 1 else self._open_rows + rows
        if not micro_batches:
            complete = left_out == self._left_out
            updated = bool(window.updated.asnumpy())
            self.window_ended(float(window.grad_norm.asnumpy()), self._open_rows, counts=updated and complete)
            return
        self._left_out = left_out
        skips = window.sums.skips
        if skips is not None and int(skips.counts.asnumpy()[0]) != micro_batches:
            self._first = None  # a micro-batch was left out, so the window has fewer rows than were seen
        elif self.wants(micro_batches):
            sums = window.sums.grad_sum
            weight_sum = window.sums.weight_sum
            divisor = float(weight_sum[0].asnumpy()) if weight_sum else 1.0 / int(window.size.asnumpy())
            if sums and divisor:  # else the micro-batch does not count
                scale = window.collaborators.loss_scale * own_scale(window.collaborators.optimizer)
                self.first(sums, divisor * scale, rows)

    def on_train_step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        cells = [cell for _, cell in args["train_network"].cells_and_names()]
        steps = [cell for cell in cells if type(cell).__name__ == "AccumulatedTrainStep"]  # its module imports this one
        if not steps:
            remedy = "Give it to the driver as 'noise_scale'."
            _check.raise_invalid(
                TypeError, _OWNER, "network", "an AccumulatedTrainStep of Model", "another one", remedy
            )
        if steps[0].loss_and_gradients.has_terms:
            rule, remedy = "a loss with one weight", "Leave NoiseScale out."
            _check.raise_invalid(ValueError, _OWNER, "network", f"one with {rule}", "several terms", remedy)
        self.observe(steps[0], args["train_dataset_element"][0].shape[0])


class _Norm(Compiled):
    """The norm of accumulators, in a graph without a forward."""

    def __init__(self, sums: Sequence[Any]):
        super().__init__(_OWNER, compiles=True)
        self.sums = tuple(sums)
        self.kernels = kernels(self.compiles)

    def construct(self) -> Any:
        return self.kernels.norm(self.sums)
