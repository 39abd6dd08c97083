"""Does the accumulated gradient equal that of the large batch, and if not, why?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from . import _check
from .driver import GradientAccumulation
from .layers.dropout import CountedDropout
from .network.as_found import left_as_found
from .network.batch_norm import takes_statistics
from .network.generators import random_layers
from .network.parameters import as_array
from .window.ends import split_batch

_OWNER = "verify"
_SHOWN = 8
_BATCH_NORM = (
    "BatchNorm normalizes each micro-batch with its own statistics. batch_to_group_norm or freeze_batch_norm make the "
    "gradients agree."
)
_RANDOM = "Random layers draw other masks for micro-batches than for the large batch; without them the gradients agree."
Gradient = list[np.ndarray]


@_check.documented
class Verification(NamedTuple):
    """The result of `verify`. Printed, it is a table of the parameters that differ most."""

    ok: bool
    """Whether the gradients agree."""
    diagnosis: str
    """One sentence: that the gradients agree, or why they differ and what to change."""
    table: list[tuple[str, float, float]]
    """For each parameter: its name, the norm of the large batch's gradient, and the relative difference."""

    def __str__(self) -> str:
        worst = sorted(self.table, key=lambda row: -row[2])[:_SHOWN]
        width = max([len(name) for name, _, _ in worst], default=0)
        lines = [f"{name:{width}}  {norm:10.4g}  {difference:10.2g}" for name, norm, difference in worst]
        head = f"{'parameter':{width}}  {'norm':>10}  {'difference':>10}"
        left = len(self.table) - len(worst)
        more = [f"... and {left} parameters with smaller differences"] if left else []
        return "\n".join([head, *lines, *more, self.diagnosis])


def verify(
    network: nn.Cell,
    loss_fn: Callable | None,
    batch: Any,
    gradient_accumulation_steps: int,
    *,
    reduction: str = "mean",
    weight: Any = None,
    rtol: float = 1e-3,
) -> Verification:
    """Compare the accumulated gradient with that of one large batch, on your network, loss and data.

    The batch is split into micro-batches, the last of which is shorter if possible. Both gradients are those that
    `GradientAccumulation` would pass to the optimizer. If they differ, `verify` looks for the cause: it freezes
    BatchNorm, switches off random layers, and solves for the weights with which the gradients of the micro-batches
    would add up to that of the large batch. The network is not changed.

    Args:
        network (Cell): the network, as for `GradientAccumulation`.
        loss_fn (Union[Cell, Callable, None]): the loss, as for `GradientAccumulation`.
        batch (Union[Tensor, tuple, list, dict]): the columns of one batch.
        gradient_accumulation_steps (int): the number of micro-batches, at least 2.
        reduction (str): ``"mean"`` or ``"sum"``, as for `GradientAccumulation`. Default: ``"mean"``.
        weight (Union[None, float, Tensor, Callable]): the weight of a micro-batch, as for `GradientAccumulation`.
            Default: ``None``.
        rtol (float): the largest relative difference that counts as equal; use 0.05 for float16. Default: 1e-3.

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
        >>> found = verify(nn.Dense(6, 3), nn.CrossEntropyLoss(), (Tensor(x), Tensor(y, ms.int32)), 4)
        >>> print(found.ok, found.diagnosis)
        True The gradients agree.
    """
    steps = _check.positive_int(_OWNER, "gradient_accumulation_steps", gradient_accumulation_steps)
    batch = list(batch.values()) if isinstance(batch, Mapping) else batch
    columns = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    columns = tuple(each if isinstance(each, Tensor) else Tensor(each) for each in columns)
    rows = columns[0].shape[0]
    if steps < 2 or rows < 2 * steps - 1:
        rule = f"from 2 to {(rows + 1) / 2:.0f}, so that {rows} rows can be split"
        _check.refuse(ValueError, _OWNER, "gradient_accumulation_steps", rule, steps)
    pieces = list(split_batch(columns, math.ceil(rows / (steps - 0.5))))
    trial = _Trial(network, loss_fn, columns, pieces, {"reduction": reduction, "weight": weight})
    return trial.result(_check.positive_number(_OWNER, "rtol", rtol))


class _Trial:
    """Computes gradients, and finds the cause if they differ.

    Args:
        network (Cell), loss_fn: as for `verify`.
        whole (tuple): the columns of the large batch.
        pieces (Sequence[tuple]): the micro-batches.
        how (dict): other arguments of the driver.
    """

    def __init__(self, network: nn.Cell, loss_fn: Any, whole: tuple, pieces: Sequence[tuple], how: dict[str, Any]):
        self._network, self._loss_fn, self._how = network, loss_fn, how
        self._whole, self._pieces = whole, pieces
        self._trained = network.trainable_params()

    def result(self, rtol: float) -> Verification:
        """Return the result."""
        expected, found = self._both()
        table = _differences(self._trained, expected, found)
        ok = self._agree(expected, found, rtol)
        return Verification(ok, "The gradients agree." if ok else self._cause(expected, found, rtol), table)

    def _gradient(self, micro_batches: Sequence[tuple], off: Sequence[nn.Cell] = ()) -> Gradient:
        """Return the gradient that the optimizer gets, read from Momentum's moments; a rate of 0 keeps the weights.

        Args:
            micro_batches (Sequence[tuple]): one window.
            off (Sequence[Cell]): layers that behave as in evaluation.
        """
        optimizer = nn.Momentum(self._trained, 0.0, 0.9)
        model = GradientAccumulation(self._network, self._loss_fn, optimizer, check="off", group=None, **self._how)
        mode = ms.get_context("mode")
        restored = left_as_found(self._network, (), training=True, within=mode, loss_fn=self._loss_fn)
        with restored, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for layer in off:
                layer.set_train(False)
            model.train_process(1, list(micro_batches), len(micro_batches), report=(), ckpt_path=None)
        if not model.updates:
            return [np.full(each.shape, np.nan) for each in self._trained]
        return [as_array(each).astype(np.float64) for each in optimizer.moments]

    def _agree(self, expected: Gradient, found: Gradient, rtol: float) -> bool:
        return all(difference <= rtol for _, _, difference in _differences(self._trained, expected, found))

    def _both(self, off: Sequence[nn.Cell] = ()) -> tuple[Gradient, Gradient]:
        return self._gradient([self._whole], off), self._gradient(self._pieces, off)

    def _cause(self, expected: Gradient, found: Gradient, rtol: float) -> str:
        if not all(np.isfinite(each).all() for each in (*expected, *found)):
            return "A gradient is not finite: look for NaN in the data, or lower the loss scale."
        for off, words in self._suspects():
            if self._agree(*self._both(off), rtol):
                return words
        if not self._agree(expected, self._gradient([self._whole]), rtol):
            return "The gradient of one batch differs from run to run: the network or the loss is random."
        return self._of_weights(expected, found, rtol)

    def _suspects(self) -> Iterator[tuple[list[nn.Cell], str]]:
        """Yield layers that may be the cause, and the diagnosis if the gradients agree without them."""
        cells = dict(self._network.cells_and_names())
        names = [name for name, cell in cells.items() if isinstance(cell, CountedDropout) and cell.p]
        random = [cells[name] for name in (*random_layers(self._network), *names)]
        normalizing = [cell for cell in cells.values() if takes_statistics(cell, training=True)]
        if normalizing:
            yield normalizing, _BATCH_NORM
        if random:
            yield random, _RANDOM
        if random and normalizing:
            yield [*random, *normalizing], f"{_BATCH_NORM} {_RANDOM}"

    def _of_weights(self, expected: Gradient, found: Gradient, rtol: float) -> str:
        """Return the diagnosis from the weights with which the micro-batches' gradients add up to the large batch's."""
        each = np.stack([_flat(self._gradient([piece])) for piece in self._pieces], 1)
        whole = _flat(expected)
        weights = np.linalg.lstsq(each, whole, rcond=None)[0]
        if np.abs(each @ weights - whole).max() > rtol * np.abs(whole).max():
            return (
                "The loss couples the rows of a batch: no weights make the gradients of micro-batches add up to the "
                "large batch's. Use CoupledLoss, or a loss that is a mean or a sum over rows."
            )
        rows = [piece[0].shape[0] for piece in self._pieces]
        shown = ", ".join(f"{weight:.3g}" for weight in weights)
        factor = float(whole @ _flat(found) / (whole @ whole))
        if np.allclose(weights, 1.0, rtol=0.02) and self._how["reduction"] == "mean":
            return f"The loss sums over rows (off by {factor:.3g}): use reduction='sum', or a loss that averages."
        if self._how["reduction"] == "sum":
            return f"The loss averages over rows (off by {factor:.3g}): use reduction='mean', or a loss that sums."
        if np.allclose(weights, np.array(rows) / sum(rows), rtol=0.02) and self._how["weight"] is None:
            return f"The accumulated gradient is {factor:.3g} times the large batch's: the window is divided wrongly."
        return (
            f"The weights are not what the loss averages over: micro-batches of {', '.join(map(str, rows))} rows count "
            f"{shown} of the window. Give 'weight', a function of the columns, such as the number of valid tokens."
        )


def _flat(gradient: Gradient) -> np.ndarray:
    return np.concatenate([each.ravel() for each in gradient])


def _differences(parameters: Sequence[Any], expected: Gradient, found: Gradient) -> list[tuple[str, float, float]]:
    """Return a row of the table for each parameter; differences are relative, but to 1e-3 of the largest at least."""
    largest = [float(np.abs(each).max(initial=0.0)) for each in expected]
    floor = max(1e-3 * max(largest), 1e-30)
    missed = [float(np.abs(one - other).max(initial=0.0)) for one, other in zip(expected, found)]
    norms = [float(np.linalg.norm(each)) for each in expected]
    return [
        (parameter.name, norm, miss / max(size, floor))
        for parameter, norm, miss, size in zip(parameters, norms, missed, largest)
    ]
