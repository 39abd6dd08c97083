"""What each micro-batch of a window, and each term of its loss, counts for: known before the first backward.

The loss of a micro-batch is multiplied by its share of the window, so that the sum of the gradients is that of the
window's mean. A loss of several terms has a share for each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Callable, NamedTuple, Union

import numpy as np
from mindspore import Tensor

from ..loss.objective import Objective
from ..loss.terms import Terms, shares, summed
from ..ranks.group import Group, gather_numbers

Result = tuple[float, Mapping[str, float]]  # of a window: the loss, and the means of its terms, if it has several
Inputs = tuple[Union[float, None], tuple]  # of a micro-batch: a factor of its loss or gradients, and of the network


class Counted(NamedTuple):
    """A micro-batch that counts: what runs of a window."""

    number: int
    """Its number in the window, from 1."""
    columns: tuple
    divisors: tuple[float, ...]
    """What it counts for in each term of the loss."""


class Shared(NamedTuple):
    """A window, and what all ranks know of it before it is run."""

    parts: Sequence[Counted]
    """This rank's micro-batches that count."""
    divisors: np.ndarray
    """The sum of what they count for, of each term, over all ranks."""
    samples: int
    """The rows of those that count, on all ranks."""
    number: int
    """The number of those that count, on all ranks."""
    longest: int
    """The largest number on one rank."""
    ranks: int
    """The number of ranks that have a window."""
    batches: Sequence[int]
    """The number of batches of the epoch that each rank has read."""
    requests: Sequence[float]
    """The requests to stop and to save, summed over the ranks."""
    empty: int
    """This rank's micro-batches that do not count."""


def shared(
    micro_batches: Sequence[tuple] | None,
    objective: Objective,
    requests: Sequence[float],
    group: Group | None,
    *,
    batches: int = 0,
) -> Shared:
    """Return what a window counts for.

    Args:
        micro_batches (Optional[Sequence[tuple]]): their columns; None is the window of a rank whose data are over.
        objective (Objective): what each counts for.
        requests (Sequence[float]): this rank's requests to stop and to save.
        group (Optional[Group]): the ranks.
        batches (int): the number of batches of the epoch that this rank has read. Default: 0.
    """
    counted = [(columns, objective.divisors(columns)) for columns in micro_batches or ()]
    parts = [Counted(number, *each) for number, each in enumerate(counted, 1) if any(each[1])]
    size = 1 if objective.terms is None else len(objective.terms.names)
    divisors = summed([part.divisors for part in parts], size, None)
    samples, empty = sum(part.columns[0].shape[0] for part in parts), len(counted) - len(parts)
    if group is None:
        return Shared(parts, divisors, samples, len(parts), len(parts), 1, [batches], requests, empty)
    own = np.array([*divisors, samples, len(parts), micro_batches is not None, batches, *requests], np.float64)
    of_ranks = gather_numbers(own, group)
    sums = of_ranks.sum(0)
    samples, number, ranks, _, *requests = sums[size:].tolist()
    _, numbers, _, read, *_ = of_ranks.T[size:].astype(int).tolist()
    return Shared(parts, sums[:size], int(samples), int(number), max(numbers), int(ranks), read, requests, empty)


def without(window: Shared, left_out: Collection[int], group: Group | None) -> Shared | None:
    """Return a window without the micro-batches of these numbers; None if no rank leaves out any."""
    parts = [part for part in window.parts if part.number not in left_out]
    size = len(window.divisors)
    own = summed([part.divisors for part in parts], size, None)
    of_ranks = np.array([[*own, len(parts)]])
    of_ranks = of_ranks if group is None else gather_numbers(of_ranks[0], group)
    *divisors, number = of_ranks.sum(0)
    if number == window.number:
        return None
    longest = int(of_ranks[:, size].max())
    return window._replace(parts=parts, divisors=np.array(divisors), number=int(number), longest=longest)


class OneLoss:
    """The shares of a loss that is one number.

    Args:
        objective (Objective): the loss and its weights.
        leaves_out (bool): whether micro-batches whose loss is not finite are left out.
    """

    runs_again = False

    def __init__(self, objective: Objective, leaves_out: bool):
        self._means, self._summing, self._leaves_out = objective.reduction == "mean", objective.summing, leaves_out

    def can_update(self, window: Shared) -> bool:
        """Return whether the window can update: the mean over nothing does not exist; the sum of nothing is 0."""
        return not self._means or bool(window.divisors[0])

    def inputs(self, window: Shared) -> list[Inputs]:
        """Return for each micro-batch the factor of its loss or gradients, and the inputs of the network."""
        factors = shares([part.divisors for part in window.parts], window.divisors)[:, 0].tolist()
        return [(factor if self._means else None, part.columns) for factor, part in zip(factors, window.parts)]

    def sums(self, window: Shared, losses: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
        """Return this rank's part of the window's loss, the part of the window of which it is, and what is bad."""
        sums, bad = np.zeros(2), []
        for part, loss in zip(window.parts, losses):
            share = part.divisors[0] / window.divisors[0]
            if not np.isfinite(loss):
                bad.append(part.number)
                if self._leaves_out:
                    continue
            sums += (float(loss) / window.divisors[0] if self._summing else share * float(loss), share)
        return sums, bad

    def result(self, sums: np.ndarray, window: Shared) -> Result:
        """Return the window's loss from the sums over the ranks."""
        del window
        return float(sums[0] / sums[1]) if sums[1] else math.nan, {}


class SeveralTerms:
    """The shares of a loss of several terms.

    Args:
        terms (Terms): the terms.
        updates (Callable): returns the number of updates so far, for coefficients that change.
        half (bool): whether the network computes in float16, where small gradients get lost: then the factors of a loss
            are multiplied by the number of micro-batches, and its gradients are divided by it.
        leaves_out (bool): whether micro-batches whose loss is not finite are left out.
    """

    def __init__(self, terms: Terms, updates: Callable[[], int], half: bool, leaves_out: bool):
        self._terms, self._updates, self._half = terms, updates, half
        self.runs_again = leaves_out
        """bool, whether what is left out changes the shares of the others, which are in their gradients already."""

    def can_update(self, window: Shared) -> bool:
        """Return whether the window can update: whether any term counts."""
        return bool(window.divisors.any())

    def inputs(self, window: Shared) -> list[Inputs]:
        """Return for each micro-batch the factor of its gradients, and the inputs of the network."""
        unit = max(1, window.number) if self._half else 1
        factor = 1 / unit if self._half else None
        self._coefficients = self._terms.coefficients(self._updates())
        inputs: list[Inputs] = []
        for part, own in zip(window.parts, shares([part.divisors for part in window.parts], window.divisors)):
            numbers = (self._coefficients * own * unit, own)
            tensors = [Tensor.from_numpy(each.astype(np.float32)) for each in numbers]
            counts = tuple(divisor > 0 for divisor in part.divisors)
            inputs.append((factor, (*part.columns, *tensors, counts)))
        return inputs

    def sums(self, window: Shared, losses: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
        """Return this rank's part of the mean of each term, and which micro-batches are bad."""
        sums, bad = np.zeros(len(self._terms.names)), []
        for part, loss in zip(window.parts, losses):
            if not np.isfinite(loss[0]):
                bad.append(part.number)
            sums += np.asarray(loss[1:], np.float64)
        return sums, bad

    def result(self, sums: np.ndarray, window: Shared) -> Result:
        """Return the window's loss from the sums over the ranks, and the mean of each term that counts something."""
        means = zip(self._terms.names, sums, window.divisors)
        with np.errstate(invalid="ignore"):
            loss = float(self._coefficients @ sums) if window.divisors.any() else math.nan
        return loss, {name: float(mean) for name, mean, divisor in means if divisor}
