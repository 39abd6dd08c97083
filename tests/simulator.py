"""A simulator of windows in NumPy float64 and plain loops; nothing here imports ms_accum.

A simulator of the whole: sizes, tails, weights, policies, loss scale, clipping, optimizers, averages, counters, and
several ranks. It trains one network, whose loss is known in closed form: half the mean squared distance of four weights
from the rows of `x`, plus the mean of sqrt(z * s) with s = 1, which has a NaN as its gradient where z = 0. With two
terms the second is the mean of w * x, and counts what the third column says. The weights are two Parameters of two, so
that gradients in the wrong order go unnoticed by their shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import reference

HUGE = 2.0**100
"""float, a loss scale at which the norm of every gradient overflows in float32."""
FACTOR = 2**50
"""int, by which a dynamic scale changes: it is 1, the factor, at which nothing overflows, or HUGE."""
GROWS_AFTER = 3
IN_A_ROW = 10
SHIFT = 0.25
"""float, what a user adds to the weights between two calls."""
BOUND = 0.75
"""float, to which a stage of the user's clips."""
SECOND = 0.5
"""float, the coefficient of the second term."""
RATIO = 0.25
"""float, the learning rate of the second Parameter, if it has its own, in parts of the first one's."""
WIDTH = 4
# Adam divides by the root of a moment, which for a gradient near 0 would enlarge what float32 rounds.
OPTIMIZERS = {
    "SGD": (reference.sgd, {}),
    "Momentum": (reference.momentum, {"momentum": 0.9}),
    "Adam": (reference.adam, {"eps": 1e-2}),
}
STATES = {"SGD": (), "Momentum": ("v",), "Adam": ("m", "v")}


class Settings(NamedTuple):
    """What a run is made with."""

    way: str
    """"driver", "step", "model", "accumulator", "loop" or "cells"."""
    size: Any
    """An int, a dict, or a function of the number of updates; ("split", rows) splits each batch, which is a window."""
    tail: str
    reduction: str
    weight: Any
    """"rows", "column" (the first value of the third column), "terms", or a number."""
    clip: float | None
    policy: str
    scale: Any
    """None, a number, or "dynamic"."""
    ema: tuple[float, int] | None
    optimizer: str
    rates: Any
    """A learning rate, or one for each update."""
    ranks: int = 1
    stages: tuple = ()
    """Of "bound" (clip by value) and "spikes" (skip a norm above twice the average norm), in order."""
    groups: bool = False
    """Whether the second Parameter is in a group of its own, the first of the optimizer's, with another rate."""
    half: bool = False
    """Whether the network computes in float16."""

    def size_after(self, updates):
        """Return the size of the window after this number of updates."""
        if callable(self.size):
            return self.size(updates)
        return max((first, size) for first, size in self.size.items() if first <= updates)[1]

    @property
    def is_immediate(self):
        """Whether windows have no accumulators."""
        return self.size == {0: 1} and self.way != "cells" and self.ranks == 1

    def of_size(self, size):
        """Return these settings with another size."""
        return self._replace(size={0: size} if isinstance(size, int) else size)

    @property
    def splits(self):
        return isinstance(self.size, tuple)


class MicroBatch(NamedTuple):
    """A micro-batch of the open window."""

    columns: tuple
    loss: float
    gradient: Any
    weight: float
    left_out: bool

    @property
    def rows(self):
        return len(self.columns[0])


class Record(NamedTuple):
    """What is known of a window that has ended."""

    epoch: int
    step: int
    update: int
    loss: float
    samples: int
    norm: float
    lr: float
    skipped: bool
    overflow: bool
    bad: tuple
    terms: dict


class Fails(Exception):
    """The run must end with an error of this kind."""


class Simulator:
    """Everything that training changes."""

    def __init__(self, settings):
        self.settings = settings.of_size(settings.size)
        self.has_terms = settings.weight == "terms"
        self.waits = self.has_terms or settings.way in ("driver", "step", "model")  # a window runs when it is complete
        self.w, self.optimizer_state = np.zeros(WIDTH), {}
        self.updates = self.skipped = self.left_out = self.overflows = self.in_a_row = self.good = 0
        self.average, self.averaged = np.zeros(WIDTH), 0
        self.average_norm = 0.0
        self.norm, self.updated = 0.0, False
        self.epoch, self.step = 1, 0
        self.scale = {None: 1.0, "dynamic": HUGE}.get(settings.scale, settings.scale)
        self.records: list[Record] = []
        self.losses: list[float] = []
        """list[float], after each micro-batch the mean loss of the last window."""
        self.clear()

    def clear(self):
        """Discard the window."""
        self.open: list[MicroBatch] = []
        self.last_loss = 0.0

    @property
    def held(self):
        """The micro-batches of one rank in the open window."""
        return len(self.open) // self.settings.ranks

    def loss_and_gradient(self, x, z):
        x, z = np.asarray(x, np.float64), np.asarray(z, np.float64)
        with np.errstate(all="ignore"):
            loss = 0.5 * np.mean(np.sum((self.w - x) ** 2, axis=1)) + np.mean(np.sqrt(z))
            gradient = self.w - np.mean(x, axis=0)
            gradient[0] += 0.5 * np.mean(np.sqrt(z)) if z.all() else np.nan
        return loss, gradient

    def weight_of(self, x, c):
        kind = self.settings.weight
        if self.settings.reduction == "sum" or kind in ("rows", "terms"):
            return float(len(x))
        return float(c[0]) if kind == "column" else float(kind)

    def evaluated(self, columns):
        """Return a micro-batch with the weights of now."""
        x, z, c = columns
        weight = self.weight_of(x, c)
        loss, gradient = self.loss_and_gradient(x, z)
        leaves_out = self.settings.policy == "skip_micro" and not self.settings.is_immediate
        infinite = self.settings.half and self.is_too_large  # in float32 their norm is
        bad = weight != 0 and (infinite or not (np.isfinite(loss) and np.isfinite(gradient).all()))
        return MicroBatch(columns, loss, gradient, weight, bad and leaves_out)

    def add(self, columns):
        """Add a micro-batch."""
        if not self.open:
            size = len(columns[0]) if self.settings.splits else self.settings.size_after(self.updates)
            self.window = size * self.settings.ranks
        self.open.append(self.evaluated(columns))
        by_user = self.has_terms and self.settings.way in ("accumulator", "loop")
        if self.settings.way != "driver" and not by_user:  # these say it of the last window
            self.updated = False
        self.losses.append(self.last_loss)
        if not self.waits:
            self.left_out += self.open[-1].left_out

    @property
    def is_too_large(self):
        """Whether gradients overflow at this loss scale."""
        return self.scale >= (FACTOR if self.settings.half else HUGE)

    @property
    def is_full(self):
        return len(self.open) >= self.window

    @property
    def kept(self):
        return [each for each in self.open if each.weight and not each.left_out]

    def _losses(self):
        return sum(each.loss * each.weight for each in self.kept), sum(each.weight for each in self.kept)

    def _second_term(self):
        """Return the mean of the second term over what it counts, and its gradient; zeros if it counts nothing."""
        counts = [float(each.columns[2][0]) for each in self.kept]
        if not sum(counts):
            return 0.0, np.zeros(WIDTH)
        means = [np.mean(np.asarray(each.columns[0], np.float64), axis=0) for each in self.kept]
        mean = sum(count * mean for count, mean in zip(counts, means) if count) / sum(counts)
        return float(mean @ self.w), mean

    def _gradient(self):
        """Return the window's gradient, or None if it has none."""
        if not self.kept or self.is_too_large:
            return None
        sums = self.settings.reduction == "sum"
        total = sum(each.gradient * (1.0 if sums else each.weight) for each in self.kept)
        gradient = total if sums else total / sum(each.weight for each in self.kept)
        if self.has_terms:
            gradient = gradient + SECOND * self._second_term()[1]
        return gradient if np.isfinite(gradient).all() else None

    def end(self, number=0):
        """End the window; `number` is that of its last micro-batch in the epoch, for what the record calls bad."""
        if self.waits:
            self.open = [self.evaluated(each.columns) for each in self.open]
            self.left_out += sum(each.left_out for each in self.open)
        with np.errstate(all="ignore"):
            gradient, (total, weights) = self._gradient(), self._losses()
            mean = total / weights if weights and np.isfinite(total) else float("nan")
            terms = self._terms(mean)
            mean = mean + SECOND * terms.get("slope", 0.0)
        rates = self.settings.rates
        lr = rates if np.isscalar(rates) else rates[self.updates]
        norm, updated = float("nan") if gradient is None else float(np.sqrt(np.sum(gradient**2))), False
        if gradient is not None:
            if self.settings.clip is not None:
                gradient = gradient * min(1.0, self.settings.clip / norm)
            gradient, updated = self._changed(gradient, norm)
        if updated:
            self._update(gradient, lr)
        self.skipped += not updated
        overflow = self._rescale(gradient is not None, updated, total / weights if weights else float("nan"))
        ranks = self.settings.ranks
        bad = tuple(  # of rank 0, which reports
            at // ranks + 1
            for at, each in enumerate(self.open, number - len(self.open))
            if at % ranks == 0 and each.weight and (each.left_out or not np.isfinite(each.loss))
        )
        samples = sum(each.rows for each in self.open if each.weight)
        if self.waits:
            nothing = not weights or (self.settings.policy == "skip_micro" and np.isnan(mean))
            self.last_loss = 0.0 if nothing else mean
            if self.settings.way == "model" or self.is_full:  # with its last micro-batch
                self.losses[-1] = self.last_loss
        self.open = []
        self.norm, self.updated, self.step = norm, updated, self.step + 1
        shown = lr * RATIO if self.settings.groups else lr
        known = (mean, samples, norm, shown, not updated, overflow, bad, terms)
        self.records.append(Record(self.epoch, self.step, self.updates, *known))
        return self.records[-1]

    def _terms(self, mean):
        """Return the mean of each term that counts; `mean` is that of the first."""
        if not self.has_terms or not self.kept:
            return {}
        counts = sum(float(each.columns[2][0]) for each in self.kept)
        return {"distance": mean, **({"slope": self._second_term()[0]} if counts else {})}

    def _changed(self, gradient, norm):
        """Do what the user's stages do; return the gradient, and whether to update with it."""
        for stage in self.settings.stages:
            if stage == "bound":
                gradient = np.clip(gradient, -BOUND, BOUND)
            elif self.average_norm and norm > 2 * self.average_norm:
                return gradient, False
            else:
                self.average_norm = 0.9 * self.average_norm + 0.1 * norm if self.average_norm else norm
        return gradient, True

    def _update(self, gradient, lr):
        self.updates += 1
        update, options = OPTIMIZERS[self.settings.optimizer]
        rates = lr * np.array([1, 1, RATIO, RATIO]) if self.settings.groups else lr
        self.w = update(self.w, gradient, self.optimizer_state, self.updates, rates, **options)
        if self.settings.ema is not None:
            decay, warm_up = self.settings.ema
            self.averaged += 1
            if self.averaged <= max(warm_up, 1):
                decay = min(decay, (self.averaged - 1) / self.averaged)
            self.average = decay * self.average + (1 - decay) * self.w

    def _rescale(self, finite, updated, loss):
        """Change the dynamic scale, and return whether the window overflowed."""
        if self.settings.scale != "dynamic":
            return False
        blind = self.settings.way in ("accumulator", "loop")  # they get no loss
        lost = [each for each in self.open if each.left_out and (blind or np.isfinite(each.loss))]
        # Without a weight there is no gradient, which is no overflow. Nor is NaN in the data, where the loss is known.
        skipped = not finite and bool(self.kept) and (blind or np.isfinite(loss))
        overflow = bool((skipped or lost) and self.scale > 1)
        if overflow:
            self.overflows += 1
            self.scale, self.good = max(1.0, self.scale / FACTOR), 0
        elif updated:
            self.good += 1
            if self.good >= GROWS_AFTER:
                self.scale, self.good = min(HUGE, self.scale * FACTOR), 0
        return overflow

    def count(self, record):
        """Do what the driver and `FlushTail` do after a window: too many that are skipped end the run."""
        if not record.samples or record.overflow or (record.skipped and np.isfinite(record.norm)):
            return
        self.in_a_row = self.in_a_row + 1 if record.skipped else 0
        if self.settings.policy == "raise" and record.skipped:
            raise Fails(FloatingPointError)
        if self.in_a_row >= IN_A_ROW and self.settings.way == "driver":
            raise Fails(RuntimeError)

    def train(self, batches, epochs, size=None):
        """Train; the tail of each epoch as the settings say. A batch is a tuple of columns for each rank."""
        self.in_a_row = 0
        if self.settings.way == "model":
            self.clear()
        if size is not None:
            self.settings = self.settings.of_size(size)
        for epoch in range(1, epochs + 1):
            number, self.epoch, self.step = 0, epoch, 0
            for batch in batches:
                pieces = split(batch[0], self.settings.size[1]) if self.settings.splits else batch
                for at, columns in enumerate(pieces, 1):
                    number = at if self.settings.splits else number + 1
                    self.add(columns)
                    if at == len(pieces) if self.settings.splits else self.is_full:
                        self.count(self.end(number))
            if self.settings.tail == "flush" and self.open:
                self.count(self.end(number))
            elif self.settings.tail == "drop":
                self.clear()

    def shift(self):
        """Change the weights, as a user may between two calls."""
        self.w = self.w + SHIFT

    def resize(self, size):
        """Change the size of windows, of which none is open."""
        self.settings = self.settings.of_size(size)

    def flush(self):
        """End an open window; return whether there was an update."""
        if not self.open:
            return False
        record = self.end()
        self.records.pop()  # callbacks do not get it
        if self.settings.way == "driver" and self.settings.policy == "raise" and record.samples:
            if not np.isfinite(record.norm) and not record.overflow:
                raise Fails(FloatingPointError)
        return not record.skipped


def split(columns, rows):
    return [tuple(column[at : at + rows] for column in columns) for at in range(0, len(columns[0]), rows)]
