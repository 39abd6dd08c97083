"""Runs windows whose loss has several terms: a window is collected, because its divisors must be known first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ..engine.config import WindowConfig
from ..engine.nonfinite import SkipMicro
from ..loss.objective import Objective
from ..loss.terms import Terms, summed
from ..network.optimizers import LearningRate
from ..network.parameters import copied, copies_of, restore

# Of the columns of a window, which are kept until it ends.
LIMIT = 2**32


class _Collected(NamedTuple):
    """A micro-batch that has not been run yet."""

    columns: tuple
    divisors: tuple[float, ...]
    """What its terms are divided by."""
    loss: _Loss


class _Loss:
    """The loss of a collected micro-batch: a vector of its parts of the window's loss, and of the terms."""

    value: Tensor | None = None
    """Optional[Tensor], the vector, when the micro-batch has been run."""
    counts: Any = False
    """np.ndarray, whether each term counts in the window."""

    def asnumpy(self) -> np.ndarray:
        """Return the vector, after the window has ended."""
        if self.value is None:
            raise RuntimeError("For 'weight', the window has not been run yet.")
        return self.value.asnumpy()


class WindowOfTerms:
    """Runs windows of a loss with several terms.

    Args:
        objective (Objective): the network and the terms.
        runner (Runner): runs the micro-batches, with their factors as further columns.
        config (WindowConfig): what a window works with.
        updates (Callable): returns the number of updates so far.
        skips (Optional[SkipMicro]): leaves out micro-batches. Default: ``None``, nothing does.
    """

    def __init__(
        self,
        objective: Objective,
        runner: Any,
        config: WindowConfig,
        updates: Callable[[], int],
        skips: SkipMicro | None = None,
    ):
        terms: Any = objective.terms
        self._terms: Terms = terms
        self._owner = config.owner
        self._runner, self._updates = runner, updates
        self._group, self._skips = config.group, skips
        self._network, self._trained = objective.forward, config.parameters
        self._learning_rate = LearningRate(config.optimizer)
        self._collected: list[_Collected] = []
        self._bytes = 0

    def add(self, micro_batch: tuple, divisors: Any, last: bool) -> _Loss:
        """Collect a copy of a micro-batch, because loaders reuse their buffers; return its loss, known at the end."""
        del last
        self._bytes += sum(column.nbytes for column in micro_batch)
        if self._bytes > LIMIT:
            raise RuntimeError(
                f"For '{self._owner}', 'weight' with several terms must get windows whose columns take at most "
                f"{LIMIT / 2**30:.0f} GiB, but got more with micro-batch {len(self._collected) + 1}. "
                "Use smaller windows."
            )
        columns = tuple(copied(column) for column in micro_batch)
        self._collected.append(_Collected(columns, divisors, _Loss()))
        return self._collected[-1].loss

    def pass_over(self) -> None:
        """Skip a micro-batch that no term counts."""

    @property
    def accumulators(self) -> dict[str, Parameter]:
        """The accumulators, which do not contain the open window."""
        return self._runner.accumulators

    def clear(self) -> None:
        """Discard the window."""
        self._collected, self._bytes = [], 0
        self._runner.clear()

    def end(self, scalars: Callable[[], Tensor] | None) -> tuple:
        """Run the window, and do what its end does; if nothing counts on any rank, there is no update and no norm."""
        collected, self._collected, self._bytes = self._collected, [], 0
        if self._skips is not None:  # then the window's end decides by the number that count
            self._run_without_bad(collected, self._skips)
        elif not self._run(collected, may_close=True):
            return self._not_updated(scalars)
        return self._runner.end(scalars)

    def _run(self, collected: Sequence[_Collected], *, may_close: bool) -> bool:
        """Run micro-batches, of which the last one may end the window; return whether anything counts on any rank."""
        divisors = summed([micro_batch.divisors for micro_batch in collected], len(self._terms.names), self._group)
        for micro_batch in collected:
            micro_batch.loss.value = Tensor(np.zeros(1 + len(divisors)), ms.float32)
            micro_batch.loss.counts = divisors > 0
        if not divisors.any():
            return False
        coefficients, safe = self._terms.coefficients(self._updates()), np.where(divisors > 0, divisors, 1.0)
        for micro_batch in collected:
            shares = np.array(micro_batch.divisors) / safe
            numbers = [Tensor.from_numpy(array.astype(np.float32)) for array in (coefficients * shares, shares)]
            counts = tuple(divisor > 0 for divisor in micro_batch.divisors)
            inputs = (*micro_batch.columns, *numbers, counts)
            micro_batch.loss.value = self._runner.add(inputs, None, may_close and micro_batch is collected[-1])
        return True

    def _run_without_bad(self, collected: Sequence[_Collected], skips: SkipMicro) -> None:
        """Run micro-batches without those that are not finite, which take their shares out of all divisors.

        So if one is found, on any rank, the others are run again, from the same state.
        """
        copies = copies_of(self._network.get_parameters(), self._trained)
        while self._run(collected, may_close=False):
            finite = [micro_batch for micro_batch in collected if np.isfinite(micro_batch.loss.asnumpy()[0])]
            if not summed([(float(len(collected) - len(finite)),)], 1, self._group)[0]:
                return
            overflows = skips.counts.asnumpy()[1]
            self._runner.clear()
            restore(copies)
            ops.assign(skips.counts, Tensor([0.0, overflows], ms.float32))
            collected = finite

    def _not_updated(self, scalars: Callable[[], Tensor] | None) -> tuple:
        ended = (self._learning_rate(), Tensor(False), Tensor(math.nan, ms.float32))
        if scalars is None:
            return ended
        figures = scalars().asnumpy()
        return (*ended, Tensor(summed([figures], figures.size, self._group), ms.float32))


class TermLosses:
    """The mean loss of a window, and of each of its terms: the sums of its micro-batches' parts of them.

    Args:
        terms (Terms): the terms.
        leaves_out (bool): whether micro-batches whose loss is not finite are left out.
    """

    def __init__(self, terms: Terms, leaves_out: bool = False):
        self._names, self._leaves_out = terms.names, leaves_out
        self.clear()

    def clear(self) -> None:
        """Discard the window."""
        self._added: list[tuple[_Loss, int]] = []
        self._sums = np.zeros(1 + len(self._names))
        self._counts = np.zeros(len(self._names), bool)
        self._bad: list[int] = []
        self.samples = 0

    def add(self, loss: _Loss, divisors: Any, samples: int, number: int = 0) -> None:
        """Add a micro-batch with its number. Its loss is read when the window has ended."""
        del divisors
        self._added.append((loss, number))
        self.samples += samples

    def _carry(self) -> np.ndarray:
        """Return the loss of the window, and of the terms."""
        added, self._added = self._added, []
        for loss, number in added:
            parts = np.asarray(loss.asnumpy(), np.float64)
            if not np.isfinite(parts[0]):
                self._bad.append(number)
                if self._leaves_out:
                    continue
            self._sums = self._sums + parts
            self._counts = loss.counts
        return self._sums

    @property
    def bad(self) -> list[int]:
        """list[int], the numbers of the micro-batches whose loss is not finite."""
        self._carry()
        return self._bad

    @property
    def mean(self) -> float:
        """The loss of the window; NaN if nothing in it counts."""
        loss = float(self._carry()[0])
        return loss if self._counts.any() else math.nan

    @property
    def terms(self) -> dict[str, float]:
        """dict, the mean of each term over what it counts; not of those that count nothing."""
        means = self._carry()[1:]
        return {name: float(mean) for name, mean, counts in zip(self._names, means, self._counts) if counts}

    @property
    def state(self) -> list[float]:
        """list, the values that `load` needs."""
        return [*self._carry(), self.samples]

    def load(self, state: Sequence[float], bad: Sequence[int] = ()) -> None:
        """Continue with the sums over the ranks."""
        *sums, samples = state
        self._sums, self._added, self.samples, self._bad = np.array(sums), [], int(samples), [*bad]


class TermsOfBatches:
    """The mean loss of an evaluation, and of each of its terms.

    Args:
        terms (Terms): the terms.
        updates (int): the number of updates so far, for coefficients that change.
    """

    def __init__(self, terms: Terms, updates: int):
        self._coefficients = dict(zip(terms.names, terms.coefficients(updates)))
        self._sums = dict.fromkeys(terms.names, 0.0)
        self._divisors = dict.fromkeys(terms.names, 0.0)
        self.last = Tensor(0.0, ms.float32)
        """Tensor, the loss of the last batch, for callbacks."""

    def add(self, losses: Sequence[Tensor], divisors: tuple[float, ...], samples: int) -> None:
        """Add a batch."""
        del samples
        loss = 0.0
        for name, term, divisor in zip(self._sums, losses, divisors):
            if divisor:
                value = float(term.asnumpy())
                loss += self._coefficients[name] * value
                self._sums[name] += value * divisor
                self._divisors[name] += divisor
        self.last = Tensor(loss, ms.float32)

    @property
    def terms(self) -> dict[str, float]:
        """dict, the mean of each term over what it counts; not of those that count nothing."""
        return {name: self._sums[name] / divisor for name, divisor in self._divisors.items() if divisor}

    @property
    def mean(self) -> float:
        """float, the sum of the means times their coefficients; NaN if nothing counts."""
        weighted = [self._coefficients[name] * mean for name, mean in self.terms.items()]
        return float(sum(weighted)) if weighted else math.nan
