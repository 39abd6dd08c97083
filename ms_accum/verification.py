"""Does the accumulated gradient equal that of the large batch, and if not, is the cause certain?"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from . import _check
from .driver import GradientAccumulation
from .layers import CountedDropout, takes_statistics
from .loss.known_losses import loss_reduction
from .loss.objective import Weight
from .network.compiled import in_graphs, words_of
from .network.generators import random_layers
from .network.parameters import as_array, copies_of, restore
from .network.training_mode import training_mode
from .training.coupled import CoupledLoss
from .training.sizes import rows_of

_log = logging.getLogger("ms_accum")
_OWNER = "verify"
_SHOWN = 8
_AGREE = "The gradients agree."
_NOT_FINITE = (
    "A gradient is not finite: look for NaN in the data, overflows, and weights that are all 0, as if no label counts."
)
_NOTHING = "All gradients are 0, which says nothing: no label may count, or the loss may not depend on the network."
_COUPLED = "If the loss compares the rows of a batch, it needs CoupledLoss."
_BATCH_NORM = (
    "BatchNorm normalizes each micro-batch with its own statistics: use batch_to_group_norm or freeze_batch_norm."
)
_DROPOUT = (
    "Random layers draw other masks for micro-batches than for the large batch; without them the gradients agree."
)
_RANDOM = "The gradient of one batch differs from run to run: the network or the loss is random."
_UNCERTAIN = (
    "No cause is certain. A loss that averages over something other than rows needs 'weight', a dict if it has several "
    "terms; a loss that compares the rows of a batch needs CoupledLoss."
)
Gradient = list[np.ndarray]  # an array for each trained parameter


class Verification(NamedTuple):
    """The result of `verify`. Printed, it is a table of the parameters that differ most.

    Attributes:
        ok (bool): whether the gradients agree.
        diagnosis (str): that the gradients agree, or the most likely cause of the difference, where one is certain.
        table (list[tuple[str, float, float]]): for each parameter: its name, the norm of the large batch's gradient,
            and the relative difference.
    """

    ok: bool
    diagnosis: str
    table: list[tuple[str, float, float]]

    def __str__(self) -> str:
        worst = sorted(self.table, key=lambda row: -row[2])[:_SHOWN]
        width = max([len(name) for name, _, _ in worst], default=0)
        lines = [f"{name:{width}}  {norm:10.4g}  {difference:10.2g}" for name, norm, difference in worst]
        header = f"{'parameter':{width}}  {'norm':>10}  {'difference':>10}"
        not_shown = len(self.table) - len(worst)
        remainder = [f"... and {_check.quantity(not_shown, 'parameter')} with smaller differences"] if not_shown else []
        return "\n".join([header, *lines, *remainder, self.diagnosis])


def verify(
    network: nn.Cell,
    loss_fn: Callable | None,
    batch: Tensor | Sequence[Any] | Mapping[str, Any],
    gradient_accumulation_steps: int,
    *,
    reduction: str = "mean",
    weight: float | Tensor | Callable | Mapping[str, float | Callable] | None = None,
    coefficients: Mapping[str, float | Callable] | None = None,
    inputs: int | None = None,
    rtol: float = 1e-3,
    compile: bool = True,
) -> Verification:
    """Compare the accumulated gradient with that of one large batch, on your network, loss and data.

    The batch is split into this number of micro-batches, the last of which is shorter. Both gradients are those that
    `GradientAccumulation` would pass to the optimizer. If they differ, `verify` logs by how much, and names the most
    likely cause, where it is certain: BatchNorm, something random, or a `reduction` or `weight` with which the
    gradients would agree. If all gradients are 0, or a micro-batch can't be run, they do not agree. The network is not
    changed.

    Args:
        network (Cell): the network, as for `GradientAccumulation`.
        loss_fn (Union[Cell, Callable, None]): the loss, as for `GradientAccumulation`.
        batch (Union[Tensor, tuple, list, dict]): the columns of one batch.
        gradient_accumulation_steps (int): the number of micro-batches, at least 2.
        reduction (str): ``"mean"`` or ``"sum"``, as for `GradientAccumulation`. Default: ``"mean"``.
        weight (Union[None, float, Tensor, Callable, dict]): the weight of a micro-batch, as for `GradientAccumulation`.
            Default: ``None``.
        coefficients (Optional[dict]): those of the loss's terms, as for `GradientAccumulation`. Default: ``None``.
        inputs (Optional[int]): the columns that the network gets, as for `GradientAccumulation`. Default: ``None``.
        rtol (float): the largest relative difference that counts as equal; use 0.05 for float16. Default: 1e-3.
        compile (bool): whether the network runs as a compiled graph in PyNative mode too, as for
            `GradientAccumulation`. Default: ``True``.

    Returns:
        Verification, with `ok`, `diagnosis` and `table`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the batch has too few rows, or an argument is out of range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn
        >>> from ms_accum import verify
        >>> x, y = np.random.RandomState(1).randn(24, 6).astype(np.float32), np.arange(24) % 3
        >>> result = verify(nn.Dense(6, 3), nn.CrossEntropyLoss(), (Tensor(x), Tensor(y, ms.int32)), 4)
        >>> print(result.ok, result.diagnosis)
        True The gradients agree.
    """
    steps = _check.positive_int(_OWNER, "gradient_accumulation_steps", gradient_accumulation_steps)
    batch = list(batch.values()) if isinstance(batch, Mapping) else batch
    columns = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    columns = tuple(column if isinstance(column, Tensor) else Tensor(column) for column in columns)
    rows = rows_of(_check.Argument(_OWNER, "batch"), columns)
    if steps < 2 or rows < 2 * steps - 1:
        rule = f"from 2 to {(rows + 1) // 2}, so that {rows} rows can be split"
        _check.raise_invalid(ValueError, _OWNER, "gradient_accumulation_steps", rule, steps)
    options: dict[str, Any] = {"reduction": reduction, "weight": weight, "coefficients": coefficients}
    options |= {"inputs": inputs, "compile": compile}
    rtol = _check.positive_number(_OWNER, "rtol", rtol)
    return _Trial(network, loss_fn, columns, _split(columns, steps), options, rtol).result()


@dataclass(frozen=True)
class _Trial:
    """Computes both gradients, and looks for the cause if they differ."""

    network: nn.Cell
    loss_fn: Any
    batch: tuple
    micro_batches: Sequence[tuple]
    options: Mapping[str, Any]  # other arguments of the driver
    rtol: float

    def result(self) -> Verification:
        """Return the result."""
        expected = self._gradient([self.batch])
        try:
            accumulated = self._gradient(self.micro_batches)
        except Exception as error:  # the batch could be run
            words = words_of(error).rstrip(".")
            cause = f"A micro-batch can't be run: {words}. {'' if 'CoupledLoss' in words else _COUPLED}".rstrip()
            return Verification(False, cause, self._table(expected, _unknown(expected)))
        table, ok = self._table(expected, accumulated), self._agree(expected, accumulated)
        if ok and not any(gradient.any() for gradient in expected):
            return Verification(False, _NOTHING, table)
        return Verification(ok, _AGREE if ok else self._cause(expected, accumulated), table)

    def _cause(self, expected: Gradient, accumulated: Gradient) -> str:
        if not all(np.isfinite(gradient).all() for gradient in (*expected, *accumulated)):
            return _NOT_FINITE
        cells = dict(self.network.cells_and_names())
        if any(takes_statistics(cell, training=True) for cell in cells.values()):
            return _BATCH_NORM
        largest = max(difference for _, _, difference in self._table(expected, accumulated))
        _log.warning(
            "For 'verify', the gradients differ, by up to %.2g of the largest element. To find the cause, the network "
            "is compiled and run a few times more.",
            largest,
        )
        counted = [cell for cell in cells.values() if isinstance(cell, CountedDropout) and cell.p]
        off = [*counted, *(cells[name] for name in random_layers(self.network))]
        if off:
            expected, accumulated = self._gradient([self.batch], off), self._gradient(self.micro_batches, off)
            if self._agree(expected, accumulated):
                return _DROPOUT
        if not self._agree(expected, self._gradient([self.batch], off)):
            return _RANDOM
        meant = self._meant(expected, off)
        return _UNCERTAIN if meant is None else f"With {meant} the gradients agree."

    def _meant(self, expected: Gradient, off: Sequence[nn.Cell]) -> str | None:
        """Return the options with which the gradients would agree, as text.

        Each micro-batch is run once: with other options its gradient only gets another factor.
        """
        factors = self._factors()
        sums = {text: [np.zeros_like(gradient) for gradient in expected] for text in factors}
        if not factors:
            return None
        windows, options = ([micro_batch] for micro_batch in self.micro_batches), {"reduction": "mean", "weight": 1.0}
        for number, gradient in enumerate(self._gradients(windows, off, **options)):
            for text, of_all in sums.items():
                factor = factors[text][number]
                if factor:  # the mean over nothing is 0/0
                    for total, of_parameter in zip(of_all, gradient):
                        total += factor * of_parameter
        return next((text for text, of_all in sums.items() if self._agree(expected, of_all)), None)

    def _factors(self) -> dict[str, np.ndarray]:
        """Return what the user may have meant, as text, and the factor of each micro-batch's gradient then."""
        weight, averages = self.options["weight"], self.options["reduction"] == "mean"
        summing = loss_reduction(self.loss_fn) == "sum"
        if isinstance(weight, Mapping) or isinstance(self.loss_fn, CoupledLoss) or summing:
            return {}
        alike = np.ones(len(self.micro_batches))
        inputs = self.options["inputs"] or 1
        tried = [self._shares(Weight(_OWNER, weight, "mean", self.loss_fn, inputs).of) if averages else alike]
        factors: dict[str, np.ndarray] = {}
        if averages and in_graphs(self.options["compile"]):  # outside graphs MindSpore's backward of a mean may sum
            factors["reduction='sum' and weight=None"] = alike
        mean = "" if averages else "reduction='mean' and "
        weights: dict[str, Callable[[tuple], float]] = {"None": Weight(_OWNER, None, "mean", self.loss_fn, inputs).of}
        for number, column in enumerate(self.batch[1:], 1):
            is_integer = "Int" in str(column.dtype)
            for sign, compare in ((">=", operator.ge), ("!=", operator.ne))[not is_integer :]:
                text = f"lambda *columns: (columns[{number}] {sign} 0).sum()"
                weights[text] = partial(_count, number, compare)
        for text, weight_of in weights.items():
            shares = self._shares(weight_of)
            if not any(np.allclose(shares, others) for others in tried):
                tried.append(shares)
                factors[f"{mean}weight={text}"] = shares
        return factors

    def _shares(self, weight_of: Callable[[tuple], float]) -> np.ndarray:
        """Return what each micro-batch counts for, divided by the sum."""
        weights = np.array([weight_of(micro_batch) for micro_batch in self.micro_batches], np.float64)
        return weights / (weights.sum() or np.nan)

    def _gradient(self, micro_batches: Sequence[tuple], off: Sequence[nn.Cell] = ()) -> Gradient:
        return next(self._gradients([micro_batches], off))

    def _gradients(
        self, windows: Iterable[Sequence[tuple]], off: Sequence[nn.Cell] = (), **options: Any
    ) -> Iterator[Gradient]:
        """Yield the gradient of each window that the optimizer gets, read from Momentum's moments.

        Args:
            windows (Iterable): windows of micro-batches, of the same size.
            off (Sequence[Cell]): layers that behave as in evaluation.
            options: arguments of the driver that differ.
        """
        trained = self.network.trainable_params()
        optimizer = nn.Momentum(trained, 0.0, 0.9)  # a rate of 0 keeps the weights
        arguments: dict[str, Any] = {**self.options, **options, "check": "off", "group": None}
        model = GradientAccumulation(self.network, self.loss_fn, optimizer, **arguments)
        cells = [cell for cell in (self.network, self.loss_fn) if isinstance(cell, nn.Cell)]
        changed = [*(parameter for cell in cells for parameter in cell.get_parameters()), *optimizer.moments]
        for micro_batches in windows:
            copies, generator = copies_of(changed), ms.get_rng_state()
            with training_mode(self.network, True), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for layer in off:
                    layer.set_train(False)
                try:
                    model.train_process(1, list(micro_batches), len(micro_batches), report=(), ckpt_path=None)
                    gradient = [as_array(moment).astype(np.float64) for moment in optimizer.moments]
                finally:
                    restore(copies)
                    ms.set_rng_state(generator)
            yield gradient if model.updated else _unknown(gradient)

    def _agree(self, expected: Gradient, accumulated: Gradient) -> bool:
        return all(difference <= self.rtol for _, _, difference in self._table(expected, accumulated))

    def _table(self, expected: Gradient, accumulated: Gradient) -> list[tuple[str, float, float]]:
        """Return a row for each parameter; differences are relative, but to 1e-3 of the largest gradient at least."""
        largest = [np.abs(gradient).max(initial=0.0) for gradient in expected]
        floor = max(1e-3 * max(largest), 1e-30)
        rows = []
        for parameter, left, right, size in zip(self.network.trainable_params(), expected, accumulated, largest):
            difference = np.abs(left - right).max(initial=0.0) / max(size, floor)
            rows.append((parameter.name, float(np.linalg.norm(left)), float(difference)))
        return rows


def _count(number: int, compare: Callable, columns: tuple) -> int:
    """Return how many elements of a column differ from 0, or are not below it."""
    return int(compare(as_array(columns[number]), 0).sum())


def _unknown(gradient: Gradient) -> Gradient:
    """Return a gradient of the same shapes that is NaN."""
    return [np.full(of_parameter.shape, np.nan) for of_parameter in gradient]


def _split(columns: tuple, steps: int) -> list[tuple]:
    """Return micro-batches, the last of which has about half the rows of the others, to show wrong weights."""
    rows = columns[0].shape[0]
    last = max(1, rows // (2 * steps))
    sizes = [len(part) for part in np.array_split(np.arange(rows - last), steps - 1)] + [last]
    return [tuple(column[end - size : end] for column in columns) for size, end in zip(sizes, accumulate(sizes))]
