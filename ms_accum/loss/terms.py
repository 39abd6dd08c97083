"""What micro-batches count for in a window, and a loss of several terms, each a mean over a number of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from .. import _check
from ..network.compiled import call
from ..ranks.group import AUTO, Group, gather_numbers, group_of
from .columns import amount_of
from .known_losses import as_number, divisor_of, loss_reduction, runnable

_WINDOW = "a list of the columns of each micro-batch"
_COUNTS = "'rows', 'elements', a number > 0, one of MindSpore's losses, or a function of the columns"


@ms.jit_class
class Terms:
    """What each term of a loss averages over, and its coefficient: for your own training loop.

    The window's loss is the sum over the terms t of ``c_t * sum_i(d_ti * l_ti) / sum_i(d_ti)``, where the sums are over
    its micro-batches and the ranks. Each term of a micro-batch is therefore multiplied by ``c_t * d_ti / D_t``, which
    needs the divisors D of the complete window: so read the window's micro-batches first, and give all of them to
    `factors`. The gradients are then added, with the `Accumulator`'s ``reduction="sum"``. The driver and
    `AccumulatedTrainStep` do this by themselves if their `weight` is a dict.

    Args:
        weight (dict): from each term's name to what it averages over: ``"rows"``, ``"elements"``, a number, a function
            of the columns, run on the host, or one of MindSpore's losses.
        coefficients (Optional[dict]): the factors of terms, 1 for those that are not in it: numbers, or functions of
            the number of updates so far. Default: ``None``.
        group (Optional[Group]): the ranks, from `own_group`, over which divisors are summed. Default: ``None``.
        inputs (int): the columns before the labels, which one of MindSpore's losses averages over. Default: 1.
        owner (str): the name used in error messages. Default: ``"Terms"``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn, ops
        >>> from ms_accum import Accumulator, Terms
        >>> net, ce = nn.Dense(4, 3), nn.CrossEntropyLoss(ignore_index=-1)
        >>> optimizer = nn.SGD(net.trainable_params(), 0.1)
        >>> accumulator = Accumulator(optimizer, 2, reduction="sum")
        >>> terms = Terms({"ce": ce, "size": "rows"}, {"size": 0.01})
        >>> def forward(x, y, factors, counts):
        ...     outputs = net(x)
        ...     losses = {"ce": ce(outputs, y), "size": ops.mean(ops.square(outputs))}
        ...     return terms.scale(losses, factors, counts)
        >>> grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
        >>> @ms.jit
        ... def train_step(x, y, factors, counts):
        ...     loss, grads = grad_fn(x, y, factors, counts)
        ...     return ops.depend(loss, accumulator(grads))
        >>> x, y = Tensor(np.ones((8, 4)), ms.float32), Tensor([0, 1, 2, -1, -1, -1, 0, 1], ms.int32)
        >>> window = [(x[:5], y[:5]), (x[5:], y[5:])]
        >>> for columns, (factors, counts) in zip(window, terms.factors(window)):
        ...     loss = train_step(*columns, factors, counts)
        >>> int(accumulator.updates)
        1
    """

    def __init__(
        self,
        weight: Mapping[str, float | Callable],
        coefficients: Mapping[str, float | Callable] | None = None,
        *,
        group: Group | None = None,
        inputs: int = 1,
        owner: str = "Terms",
    ):
        self._owner, self._group = owner, group
        if not (isinstance(weight, Mapping) and weight and all(isinstance(name, str) and name for name in weight)):
            _check.raise_invalid(ValueError, owner, "weight", "a dict from the names of terms", weight)
        self.names = tuple(weight)
        """tuple[str], the names of the terms, in the order of the losses if these are a tuple."""
        inputs = _check.positive_int(owner, "inputs", inputs)
        self._counts = [_count_of(owner, name, value, inputs) for name, value in weight.items()]
        given = {} if coefficients is None else coefficients
        if not isinstance(given, Mapping):
            rule = "a dict from the names of terms"
            _check.raise_invalid(TypeError, owner, "coefficients", rule, type(given).__name__)
        unknown = [name for name in given if name not in self.names]
        if unknown:
            rule = f"for terms of 'weight' ({', '.join(self.names)})"
            _check.raise_invalid(ValueError, owner, "coefficients", rule, f"one for {unknown[0]!r}")
        self._coefficients = [_coefficient(owner, name, given.get(name, 1.0)) for name in self.names]

    def scale(self, losses: Any, factors: Any, counts: Any) -> Any:
        """Return the loss of a micro-batch to be differentiated, in your compiled step: its terms times their factors.

        Args:
            losses (Union[dict, tuple]): the terms, scalars.
            factors (Tensor), counts (tuple[bool]): what `factors` returned for this micro-batch.
        """
        return total_of(terms_of(self._owner, self.names, losses), factors, counts)

    def factors(self, window: Sequence[tuple], updates: int = 0) -> list[tuple[Tensor, tuple[bool, ...]]]:
        """Return for each micro-batch of a complete window the factors of its terms, and which terms count in it.

        A term that does not count, because it is a mean over nothing, is not differentiated.

        Args:
            window (Sequence[tuple]): the columns of all its micro-batches, also of a short last window.
            updates (int): the number of updates so far, for coefficients that change. Default: 0.

        Raises:
            ValueError: If the window is empty.
        """
        divisors, factors = self.divisors_and_factors(window, updates)
        if not divisors:
            _check.raise_invalid(ValueError, self._owner, "window", _WINDOW, "[]")
        counts = [tuple(divisor > 0 for divisor in row) for row in divisors]
        return [(Tensor(row, ms.float32), counted) for row, counted in zip(factors, counts)]

    def divisors_and_factors(self, window: Sequence[tuple], updates: int) -> tuple[list[tuple[float, ...]], np.ndarray]:
        """Return for each micro-batch of a window what its terms are divided by, and their factors."""
        if not isinstance(window, (tuple, list)):
            _check.raise_invalid(TypeError, self._owner, "window", _WINDOW, type(window).__name__)
        other = next((each for each in window if not isinstance(each, (tuple, list))), None)
        if other is not None:
            _check.raise_invalid(TypeError, self._owner, "window", _WINDOW, f"one of {type(other).__name__}")
        divisors = [self.counted(tuple(columns)) for columns in window]
        sums = summed(divisors, len(self.names), self._group)
        return divisors, self.coefficients(updates) * shares(divisors, sums)

    @property
    def settings(self) -> dict[str, Any]:
        """dict, what must be equal in a resumed run, and on all ranks."""
        coefficients = [value if isinstance(value, float) else "a function" for value in self._coefficients]
        return {"terms": list(self.names), "coefficients": coefficients}

    def coefficients(self, updates: int) -> np.ndarray:
        """Return the coefficients after this number of updates."""
        values = [value if isinstance(value, float) else as_number(value(updates)) for value in self._coefficients]
        for name, value in zip(self.names, values):
            if not (isinstance(value, (int, float, np.number)) and math.isfinite(value)):
                rule = "functions that return a finite number"
                _check.raise_invalid(ValueError, self._owner, "coefficients", rule, f"{value} for {name!r}")
        return np.array(values, np.float64)

    def counted(self, micro_batch: tuple) -> tuple[float, ...]:
        """Return what each term of a micro-batch is divided by."""
        return tuple(count(micro_batch) for count in self._counts)


def _count_of(owner: str, name: str, value: Any, inputs: int) -> Callable[[tuple], float]:
    """Return what computes the number that a term of a micro-batch is divided by, from its columns."""
    if isinstance(value, str) and value == "rows":
        return lambda columns: float(columns[0].shape[0])
    if isinstance(value, str) and value == "elements":
        return lambda columns: float(columns[inputs if len(columns) > inputs else 0].size)
    if isinstance(value, str):
        _check.raise_invalid(ValueError, owner, "weight", f"{_COUNTS} for each term", f"{value!r} for {name!r}")
    if callable(value) and not isinstance(value, Tensor):
        if loss_reduction(value) in ("sum", "none") or (isinstance(value, nn.LossBase) and divisor_of(value) is None):
            rule = "a loss that averages over a known number, if it is a loss"
            _check.raise_invalid(ValueError, owner, "weight", rule, f"{type(value).__name__} for {name!r}")
        function = divisor_of(value, inputs) or value
        return lambda columns: amount_of(owner, function, columns, name)
    number = _check.positive_number(owner, f"weight[{name!r}]", as_number(value))
    return lambda columns: number


def _coefficient(owner: str, name: str, value: Any) -> Any:
    if callable(value) and not isinstance(value, Tensor):
        return value
    value = as_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        rule = "finite numbers, or functions of the number of updates"
        _check.raise_invalid(ValueError, owner, "coefficients", rule, f"{value!r} for {name!r}")
    return float(value)


def summed(rows: Sequence[tuple[float, ...]], size: int, group: Group | None) -> np.ndarray:
    """Return the sums of `size` numbers over rows and ranks, in float64."""
    own = np.array([np.zeros(size), *rows], np.float64).sum(0)
    return own if group is None else gather_numbers(own, group).sum(0)


def shares(divisors: Sequence[Sequence[float]], sums: np.ndarray) -> np.ndarray:
    """Return for each micro-batch its part of what each term counts in the window, 0 of what counts nothing in it.

    Args:
        divisors (Sequence): what each counts for in each term.
        sums (ndarray): the sums of these over the window, on all ranks.
    """
    return np.array(divisors, np.float64).reshape(-1, len(sums)) / np.where(sums > 0, sums, 1.0)


def are_several(owner: str, weight: Any, coefficients: Any) -> bool:
    """Return whether a weight is that of several terms; raise an error about coefficients without terms."""
    several = isinstance(weight, Mapping)
    if coefficients is not None and not several:
        _check.raise_invalid(ValueError, owner, "coefficients", "None unless 'weight' is a dict of terms", coefficients)
    return several


def window_factors(
    window: Sequence[tuple],
    weight: float | str | Callable | Mapping[str, float | Callable] | None = None,
    *,
    coefficients: Mapping[str, float | Callable] | None = None,
    updates: int = 0,
    group: Group | str | None = AUTO,
    times: float = 1.0,
    inputs: int = 1,
) -> list[Any]:
    """Return for each micro-batch of a window the factor of its mean loss, for training with another engine.

    Multiply each micro-batch's mean loss by its factor before the backward pass, and let the engine add the gradients:
    the sum is the gradient of the mean loss over the whole window, on all ranks. The factors are those with which
    `GradientAccumulation` trains.

    Args:
        window (Sequence[tuple]): the columns of this rank's micro-batches, tensors or arrays.
        weight (Union[None, float, str, Callable, dict]): what a micro-batch's loss averages over: one of MindSpore's
            losses, a function of the columns, run on the host, such as ``lambda x, y: (y >= 0).sum()``, a number,
            ``"rows"`` or ``"elements"``. Default: ``None``, the rows. For a loss of several terms a dict, from each
            term's name to one of these.
        coefficients (Optional[dict]): the factors of terms, 1 for those that are not in it: numbers, or functions of
            the number of updates so far. Default: ``None``.
        updates (int): the number of updates so far, for coefficients that change. Default: 0.
        group (Union[str, None, Group]): the ranks that train together, all of which call it with their own part of the
            window: ``"auto"`` for all that a launcher started, ``None`` for this process alone, or what `own_group`
            returns. Default: ``"auto"``.
        times (float): what the engine divides by itself: the number of micro-batches if it divides each loss, the
            number of ranks if it averages over them, their product if it does both. Default: 1.0.
        inputs (int): the columns before the labels, which one of MindSpore's losses averages over. Default: 1.

    Returns:
        list[float], a factor for each micro-batch; for a loss of several terms list[dict], from each term's name to its
        factor. All are 0 if nothing in the window counts. Leave out what has a factor of 0: a mean over nothing is NaN,
        also times 0.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> from ms_accum import window_factors
        >>> window = [(np.zeros((rows, 4)), np.zeros(rows)) for rows in (10, 4, 2)]
        >>> window_factors(window)
        [0.625, 0.25, 0.125]
        >>> window_factors(window, times=2)  # the engine averages over 2 ranks
        [1.25, 0.5, 0.25]
    """
    owner = "window_factors"
    times = _check.positive_number(owner, "times", as_number(times))
    several = are_several(owner, weight, coefficients)
    given: Any = weight if several else {"loss": "rows" if weight is None else weight}
    terms = Terms(given, coefficients, group=group_of(owner, group), inputs=inputs, owner=owner)
    factors = (times * terms.divisors_and_factors(window, updates)[1]).tolist()
    return [dict(zip(terms.names, row)) for row in factors] if several else [factor for (factor,) in factors]


class LossOfTerms(nn.Cell):
    """Returns the terms of a micro-batch's loss from its columns, in float32.

    Args:
        owner (str): the name used in error messages.
        network (Cell): the network.
        loss_fn (Union[Cell, Callable, None]): returns the terms from its output and the other columns; None: the
            network returns them.
        inputs (int): the columns that the network gets if there is a loss function.
        terms (Terms): the terms.
    """

    def __init__(self, owner: str, network: nn.Cell, loss_fn: Any, inputs: int, terms: Terms):
        super().__init__(auto_prefix=False)
        self.owner, self.names = owner, terms.names
        self.network, self.loss_fn, self.inputs = network, runnable(loss_fn), inputs

    def construct(self, *columns: Tensor) -> Any:
        if self.loss_fn is None:
            return terms_of(self.owner, self.names, call(self.network, columns))
        output = call(self.network, columns[: self.inputs])
        return terms_of(self.owner, self.names, call(self.loss_fn, (output, *columns[self.inputs :])))


class WeighedTerms(nn.Cell):
    """Returns the sum of a micro-batch's terms times their factors, and what the host reads.

    Args:
        terms (LossOfTerms): returns the terms.

    Inputs:
        - **\\*columns** (tuple[Tensor]) - the columns.
        - **factors** (Tensor) - a factor for each term.
        - **shares** (Tensor) - the part of what each term counts in the window that is in this micro-batch.
        - **counts** (tuple[bool]) - whether each term counts. A term that does not, because it is a mean over nothing,
          is not differentiated: its gradient would be 0 times 0/0. So each such tuple has a graph of its own.

    Outputs:
        tuple[Tensor], the sum; and a vector of this micro-batch's parts of the window's loss, and of its terms.
    """

    def __init__(self, terms: LossOfTerms):
        super().__init__(auto_prefix=False)
        self.terms = terms

    def construct(self, *inputs: Any) -> Any:
        factors, shares, counts = inputs[-3], inputs[-2], inputs[-1]
        losses = call(self.terms, inputs[:-3])
        scalars: Any = []
        for number in range(len(counts)):
            scalars.append(losses[number] if counts[number] else Tensor(0.0, ms.float32))
        stacked = ops.stack(scalars)
        total = ops.sum(factors * stacked)
        return total, ops.cat((ops.reshape(total, (1,)), shares * stacked))


def total_of(losses: tuple, factors: Any, counts: Any) -> Any:
    """Return the sum of the terms that count, times their factors."""
    if len(losses) != len(counts):
        raise ValueError("For 'Terms', 'counts' must be what 'factors' returned for this micro-batch.")
    total = Tensor(0.0, ms.float32)
    for number in range(len(counts)):
        if counts[number]:
            total = total + factors[number] * losses[number]
    return total


def terms_of(owner: str, names: tuple[str, ...], losses: Any) -> Any:
    """Return the terms in the order of their names, in float32. Runs on the host and while a graph is compiled.

    Args:
        owner (str): the name used in error messages.
        names (tuple[str]): the names.
        losses (Union[dict, tuple]): the terms, as the user's function returns them.

    Raises:
        TypeError: If these are not terms.
        ValueError: If they are others, or not scalars.
    """
    if isinstance(losses, dict):
        if len(losses) != len(names):
            _raise_other(owner, names, list(losses.keys()))
        ordered: Any = []
        for name in names:
            if name not in losses:
                _raise_other(owner, names, list(losses.keys()))
            ordered.append(losses[name])
    elif isinstance(losses, (tuple, list)):
        if len(losses) != len(names):
            _raise_other(owner, names, len(losses))
        ordered = losses
    else:
        raise TypeError(
            f"For '{owner}', the loss must return a dict or a tuple of terms, as 'weight' is a dict, but got one value."
        )
    converted: Any = []
    for number in range(len(names)):
        term = ordered[number]
        if isinstance(term, (int, float)):  # such as 0.0 for a term that is switched off
            term = Tensor(term, ms.float32)
        if term is None:
            raise TypeError(
                f"For '{owner}', the terms of the loss must be scalars, but got None for '{names[number]}'."
            )
        if term.ndim != 0:
            raise ValueError(f"For '{owner}', the terms of the loss must be scalars, but got shape {term.shape}.")
        converted.append(ops.cast(term, ms.float32))
    return tuple(converted)


def _raise_other(owner: str, names: tuple[str, ...], got: Any) -> None:
    raise ValueError(f"For '{owner}', the loss must return the terms of 'weight' {names}, but got {got}.")
