"""Does the accumulated gradient equal that of the large batch, and if not, why?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.train import Callback, RunContext

from . import _check
from .driver import GradientAccumulation
from .engine.coupled import CoupledLoss
from .layers.batch_norm import takes_statistics
from .layers.dropout import CountedDropout
from .loss.additivity import numbers_rows
from .loss.known_losses import WithLoss, loss_reduction, runnable
from .network.calls import call
from .network.compiled import in_graphs, words_of
from .network.generators import random_layers
from .network.parameters import as_array, restoring
from .network.runtime import synchronously
from .network.training_mode import training_mode

_OWNER = "verify"
_SHOWN = 8
_BATCH_NORM = (
    "BatchNorm normalizes each micro-batch with its own statistics. batch_to_group_norm or freeze_batch_norm make the "
    "gradients agree."
)
_RANDOM = "Random layers draw other masks for micro-batches than for the large batch; without them the gradients agree."
_WRONG_BACKWARD = (
    "The loss averages over rows, but MindSpore's gradient of it sums: its backward is wrong here, as that of "
    "BCEWithLogitsLoss in PyNative mode. Compile it, or use reduction='none' and ops.mean."
)
_COUPLES = (
    "The loss couples the rows of a batch: no weights make the gradients of micro-batches add up to the "
    "large batch's. Use CoupledLoss, or a loss that is a mean or a sum over rows."
)
_SEVERAL = (
    "The loss seems to be a sum of several terms, each a mean over another number, such as tokens and rows: no single "
    "weight fits. Let the loss function return them as a dict, and give 'weight' a dict. If it compares the rows of a "
    "batch, use CoupledLoss."
)
_UNCLEAR = (
    "The loss is neither a mean nor a sum over rows. The network has too few parameters to say more: if the loss "
    "averages over something else, give 'weight'; if it couples the rows of a batch, use CoupledLoss."
)
_NEGLIGIBLE = 0.02  # weights above this, in parts of 1, are not noise
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
    rtol: float = 1e-3,
    compile: bool = True,
) -> Verification:
    """Compare the accumulated gradient with that of one large batch, on your network, loss and data.

    The batch is split into this number of micro-batches, the last of which is shorter. Both gradients are those that
    `GradientAccumulation` would pass to the optimizer. If they differ, `verify` looks for the cause: it freezes
    BatchNorm, switches off random layers, and solves for the weights with which the gradients of the micro-batches
    would add up to that of the large batch. The network is not changed.

    Args:
        network (Cell): the network, as for `GradientAccumulation`.
        loss_fn (Union[Cell, Callable, None]): the loss, as for `GradientAccumulation`.
        batch (Union[Tensor, tuple, list, dict]): the columns of one batch.
        gradient_accumulation_steps (int): the number of micro-batches, at least 2.
        reduction (str): ``"mean"`` or ``"sum"``, as for `GradientAccumulation`. Default: ``"mean"``.
        weight (Union[None, float, Tensor, Callable, dict]): the weight of a micro-batch, as for `GradientAccumulation`.
            Default: ``None``.
        coefficients (Optional[dict]): those of the loss's terms, as for `GradientAccumulation`. Default: ``None``.
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
    rows = columns[0].shape[0]
    if any(column.shape[0] != rows for column in columns):
        rule = "columns with the same number of rows"
        _check.raise_invalid(ValueError, _OWNER, "batch", rule, sorted({column.shape[0] for column in columns}))
    if steps < 2 or rows < 2 * steps - 1:
        rule = f"from 2 to {(rows + 1) // 2}, so that {rows} rows can be split"
        _check.raise_invalid(ValueError, _OWNER, "gradient_accumulation_steps", rule, steps)
    sizes = _sizes(rows, steps)
    pieces = _cut(columns, sizes)
    options = {"reduction": reduction, "weight": weight, "coefficients": coefficients, "compile": compile}
    trial = _Trial(network, loss_fn, columns, pieces, options)
    return trial.result(_check.positive_number(_OWNER, "rtol", rtol))


class _Trial:
    """Computes gradients, and finds the cause if they differ.

    Args:
        network (Cell), loss_fn: as for `verify`.
        batch (tuple): the columns of the large batch.
        pieces (Sequence[tuple]): the micro-batches.
        options (dict): other arguments of the driver.
    """

    def __init__(self, network: nn.Cell, loss_fn: Any, batch: tuple, pieces: Sequence[tuple], options: dict[str, Any]):
        self._network, self._options = network, options
        is_rejected = options["reduction"] == "mean" and loss_reduction(loss_fn) == "sum"
        self._loss_fn = _Unrecognised(loss_fn) if is_rejected else loss_fn
        self._batch, self._pieces = batch, pieces
        self._trained = network.trainable_params()
        self._losses = _Recorder()
        self._random: list[nn.Cell] = []  # random layers that do not explain the difference, and are switched off

    def result(self, rtol: float) -> Verification:
        """Return the result."""
        expected = self._gradient([self._batch])
        try:
            self._run_outside_graphs()
            accumulated = self._gradient(self._pieces)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            return self._only_large(expected, error)
        table = _differences(self._trained, expected, accumulated)
        ok = self._agree(expected, accumulated, rtol)
        return Verification(ok, "The gradients agree." if ok else self._cause(expected, accumulated, rtol), table)

    def _run_outside_graphs(self) -> None:
        """Run the micro-batches forward, because an error in a backward outside graphs may end the process."""
        if not in_graphs(self._options["compile"]) and not isinstance(self._loss_fn, CoupledLoss):
            forward = self._network if self._loss_fn is None else WithLoss(self._network, self._loss_fn)
            with self._unchanged(), training_mode(forward, True), synchronously():
                for piece in self._pieces:
                    forward(*piece)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore MindSpore's generator, and the Parameters of the network and the loss, after the block."""
        cells = [cell for cell in (self._network, self._loss_fn) if isinstance(cell, nn.Cell)]
        generator = ms.get_rng_state()
        try:
            with restoring([parameter for cell in cells for parameter in cell.get_parameters()]):
                yield
        finally:
            ms.set_rng_state(generator)

    def _only_large(self, expected: Gradient, error: Exception) -> Verification:
        """Return the result if the large batch can be run, but its micro-batches can't."""
        infinite = [np.full(gradient.shape, np.inf) for gradient in expected]
        reason = "the network or the loss accepts one batch size only, or the loss couples the rows of a batch"
        if any(map(numbers_rows, self._batch[1:])):
            reason = "the loss couples the rows of a batch, which the labels number"
        text = f"The large batch can be run, but its micro-batches can't: {reason}. Use CoupledLoss. {words_of(error)}"
        return Verification(False, text, _differences(self._trained, expected, infinite))

    def _gradient(self, micro_batches: Sequence[tuple], off: Sequence[nn.Cell] = ()) -> Gradient:
        """Return the gradient that the optimizer gets, read from Momentum's moments; a rate of 0 keeps the weights.

        Args:
            micro_batches (Sequence[tuple]): one window.
            off (Sequence[Cell]): layers that behave as in evaluation.
        """
        optimizer = nn.Momentum(self._trained, 0.0, 0.9)
        model = GradientAccumulation(self._network, self._loss_fn, optimizer, check="off", group=None, **self._options)
        with ExitStack() as closing:
            closing.enter_context(self._unchanged())
            closing.enter_context(training_mode(self._network, True))
            closing.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for layer in (*off, *self._random):
                layer.set_train(False)
                if getattr(layer, "use_batch_statistics", False):  # a BatchNorm that ignores the mode
                    closing.callback(setattr, layer, "use_batch_statistics", layer.use_batch_statistics)
                    layer.use_batch_statistics = False
            options: Any = {"report": self._losses, "ckpt_path": None}
            model.train_process(1, list(micro_batches), len(micro_batches), **options)
        if not model.updates:
            return [np.full(parameter.shape, np.nan) for parameter in self._trained]
        return [as_array(moment).astype(np.float64) for moment in optimizer.moments]

    def _agree(self, expected: Gradient, accumulated: Gradient, rtol: float) -> bool:
        return all(difference <= rtol for _, _, difference in _differences(self._trained, expected, accumulated))

    def _both(self, off: Sequence[nn.Cell] = ()) -> tuple[Gradient, Gradient]:
        return self._gradient([self._batch], off), self._gradient(self._pieces, off)

    def _cause(self, expected: Gradient, accumulated: Gradient, rtol: float) -> str:
        if not all(np.isfinite(gradient).all() for gradient in (*expected, *accumulated)):
            return "A gradient is not finite: look for NaN in the data, or lower the loss scale."
        # A kink of the network may move a gradient more than rounding does, but far less than the layers do.
        differences = [difference for _, _, difference in _differences(self._trained, expected, accumulated)]
        limit = max(rtol, 0.01 * max(differences))
        random, normalizing = self._layers()
        for off, diagnosis in (
            (normalizing, _BATCH_NORM),
            (random, _RANDOM),
            ([*random, *normalizing], f"{_BATCH_NORM} {_RANDOM}"),
        ):
            if off and self._agree(*self._both(off), limit):
                return diagnosis
        if random:
            self._random = random
            expected, accumulated = self._both()
        if not self._agree(expected, self._gradient([self._batch]), rtol):
            return "The gradient of one batch differs from run to run: the network or the loss is random."
        if isinstance(self._options["weight"], Mapping):
            return self._of_terms(self._options["weight"], rtol)
        return self._of_weights(expected, accumulated, rtol)

    def _of_terms(self, weight: Mapping[str, Any], rtol: float) -> str:
        """Return the diagnosis for a loss of several terms: which of them differ, and by how much."""
        missing: dict[str, float] = {}
        options = self._options
        for name in weight:
            self._options = {**options, "coefficients": {other: float(other == name) for other in weight}}
            expected, accumulated = self._both()
            if not self._agree(expected, accumulated, rtol):
                difference = np.linalg.norm(_flat(accumulated) - _flat(expected)) / np.linalg.norm(_flat(expected))
                missing[name] = float(difference)
        self._options = options
        if not missing:
            return "The gradients of the single terms agree: their difference is rounding, which 'rtol' does not allow."
        shown = ", ".join(f"'{name}' is off by {difference:.2g}" for name, difference in missing.items())
        return (
            f"'weight' does not match what these terms average over: {shown}. Give for each the number by which the "
            "loss divides; for a term that compares the rows of a batch, use CoupledLoss."
        )

    def _layers(self) -> tuple[list[nn.Cell], list[nn.Cell]]:
        """Return the layers that may be the cause: those that draw random numbers, and those that normalize batches."""
        cells = dict(self._network.cells_and_names())
        names = [name for name, cell in cells.items() if isinstance(cell, CountedDropout) and cell.p]
        random = [cells[name] for name in (*random_layers(self._network), *names)]
        return random, [cell for cell in cells.values() if takes_statistics(cell, training=True)]

    def _of_weights(self, expected: Gradient, accumulated: Gradient, rtol: float) -> str:
        """Return the diagnosis from what the micro-batches count for in the large batch's gradient."""
        of_pieces, losses = self._gradients_and_losses(self._pieces)
        of_batch, rows = _flat(expected), np.array([piece[0].shape[0] for piece in self._pieces])
        shares = rows / rows.sum()
        is_close = _IsClose(of_batch, rtol)
        factor = float(of_batch @ _flat(accumulated) / (of_batch @ of_batch))
        wants_mean, is_mean = self._options["reduction"] == "mean", is_close(of_pieces @ shares)
        if is_close(of_pieces.sum(1)) and wants_mean and not is_mean:
            loss = self._gradients_and_losses([self._batch])[1][0]
            if abs(loss - losses @ shares) < rtol * abs(loss) < abs(loss - losses.sum()):
                return _WRONG_BACKWARD
            return f"The loss sums over rows (off by {factor:.3g}): use reduction='sum', or a loss that averages."
        if is_mean and wants_mean and self._options["weight"] is None:
            return f"The accumulated gradient is {factor:.3g} times the large batch's: the window is divided wrongly."
        pieces, weights = (self._pieces, shares) if is_mean else self._weights(of_pieces, of_batch, is_close)
        if weights is None:
            return _UNCLEAR
        if not len(weights):
            return _SEVERAL if self._is_mean_for_equal_labels(rtol) else _COUPLES
        if not wants_mean:
            return f"The loss averages over rows (off by {factor:.3g}): use reduction='mean', or a loss that sums."
        counts = ", ".join(f"{piece[0].shape[0]}" for piece in pieces)
        shown = ", ".join(f"{weight:.3g}" for weight in weights)
        return (
            f"The weights are not what the loss averages over: micro-batches of {counts} rows count {shown} of the "
            "window. Give 'weight', a function of the columns, such as the number of valid tokens."
        )

    def _is_mean_for_equal_labels(self, rtol: float) -> bool:
        """Return whether the loss is a mean over rows if all rows have the labels of one: then all count the same.

        It is for a loss of several terms, whatever each of them averages over, but not for one that compares rows.
        """
        data, *labels = self._batch
        for row in range(min(_SHOWN, data.shape[0]) if labels else 0):
            same = (
                data,
                *[Tensor(np.repeat(as_array(label)[row : row + 1], len(data), 0), label.dtype) for label in labels],
            )
            pieces = _cut(same, [len(piece[0]) for piece in self._pieces])
            of_batch = self._gradients_and_losses([same])[0][:, 0]
            if np.isfinite(of_batch).all() and of_batch.any():  # otherwise no label of this row counts
                shares = np.array([len(piece[0]) for piece in pieces]) / len(data)
                return _IsClose(of_batch, rtol)(self._gradients_and_losses(pieces)[0] @ shares)
        return False

    def _gradients_and_losses(self, pieces: Sequence[tuple]) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of micro-batches, one in each column, and their losses."""
        self._losses.values = []
        gradients = np.stack([_flat(self._gradient([piece])) for piece in pieces], 1)
        return gradients, np.array(self._losses.values)

    def _weights(
        self, of_pieces: np.ndarray, of_batch: np.ndarray, is_close: Callable
    ) -> tuple[Sequence[tuple], np.ndarray | None]:
        """Return micro-batches and what each counts for, in parts of 1; nothing for a loss that is no mean; or None.

        With the same number of micro-batches and parameters any loss has a solution. So there must be fewer of them:
        if necessary only two, halves of the batch. None: even then it is unclear. A solution for several micro-batches
        must hold for the first two joined as well.
        """
        no_weights, pieces = np.empty(0), self._pieces
        weights, determined = _solved(of_pieces, of_batch)
        if not is_close(of_pieces @ weights):
            return pieces, no_weights
        if not determined and len(pieces) > 2:
            half = len(pieces) >> 1
            pieces = [_joined(self._pieces[:half]), _joined(self._pieces[half:])]
            of_pieces = self._gradients_and_losses(pieces)[0]
            weights, determined = _solved(of_pieces, of_batch)
            if not is_close(of_pieces @ weights):
                return pieces, no_weights
        if not determined:
            return pieces, None
        if weights.min() < -_NEGLIGIBLE:
            return pieces, no_weights
        if len(pieces) > 2 and weights[:2].sum() > _NEGLIGIBLE:
            mean_of_two = of_pieces[:, :2] @ weights[:2] / weights[:2].sum()
            if not is_close(self._gradients_and_losses([_joined(pieces[:2])])[0][:, 0] - mean_of_two + of_batch):
                return pieces, no_weights
        return pieces, weights


def _cut(columns: tuple, sizes: Sequence[int]) -> list[tuple]:
    """Return the columns in pieces of these numbers of rows."""
    return [tuple(column[end - size : end] for column in columns) for size, end in zip(sizes, accumulate(sizes))]


def _joined(pieces: Sequence[tuple]) -> tuple:
    """Return one micro-batch with the rows of several."""
    return tuple(Tensor(np.concatenate([as_array(part) for part in parts]), parts[0].dtype) for parts in zip(*pieces))


class _IsClose:
    """Whether a gradient is that of the large batch."""

    def __init__(self, gradient: np.ndarray, rtol: float):
        self._gradient, self._limit = gradient, rtol * np.abs(gradient).max()

    def __call__(self, gradient: np.ndarray) -> bool:
        return bool(np.abs(gradient - self._gradient).max() <= self._limit)


def _solved(of_pieces: np.ndarray, of_batch: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return weights that add up to 1 with which the gradients add up to `of_batch`, and whether only these do."""
    differences = of_pieces[:, :-1] - of_pieces[:, -1:]
    all_but_last, _, rank, _ = np.linalg.lstsq(differences, of_batch - of_pieces[:, -1], rcond=1e-4)
    determined = rank == differences.shape[1] < differences.shape[0]
    return np.append(all_but_last, 1 - all_but_last.sum()), bool(determined)


class _Recorder(Callback):
    """Keeps the losses of windows."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_step_end(self, run_context: RunContext) -> None:
        self.values.append(run_context.original_args().record.loss)


class _Unrecognised(nn.Cell):
    """A loss that the driver does not recognise, so that it is not rejected but compared."""

    def __init__(self, loss_fn: Any):
        super().__init__(auto_prefix=False)
        self.loss_fn = runnable(loss_fn)

    def construct(self, *columns: Any) -> Any:
        return call(self.loss_fn, columns)


def _sizes(rows: int, steps: int) -> list[int]:
    """Return the rows of micro-batches, the last of which is the shortest; there are at least ``2 * steps - 1`` rows.

    All others are equal if that is possible: each size is compiled.
    """
    size = rows // steps + 1
    if size * (steps - 1) < rows:
        return [*[size] * (steps - 1), rows - size * (steps - 1)]
    last = (rows - steps + 1) // steps
    size, larger = divmod(rows - last, steps - 1)
    return [*[size + 1] * larger, *[size] * (steps - 1 - larger), last]


def _flat(gradient: Gradient) -> np.ndarray:
    return np.concatenate([array.ravel() for array in gradient])


def _differences(
    parameters: Sequence[Any], expected: Gradient, accumulated: Gradient
) -> list[tuple[str, float, float]]:
    """Return a row of the table for each parameter; differences are relative, but to 1e-3 of the largest at least."""
    largest = [float(np.abs(gradient).max(initial=0.0)) for gradient in expected]
    floor = max(1e-3 * max(largest), 1e-30)
    errors = [float(np.abs(left - right).max(initial=0.0)) for left, right in zip(expected, accumulated)]
    norms = [float(np.linalg.norm(gradient)) for gradient in expected]
    return [
        (parameter.name, norm, error / max(size, floor))
        for parameter, norm, error, size in zip(parameters, norms, errors, largest)
    ]
