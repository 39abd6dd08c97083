"""The oracle: the weights that a case must end with, in float64, and those that known faults end with.

One function trains by rules. The rules of the large batch give what is expected; each other rule is a fault that was
seen somewhere, so that a wrong result can be named. Nothing here is taken from a library, `ms_accum` included.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from .case import IGNORED, Case, orthogonal

Columns = tuple[np.ndarray, np.ndarray]
BETAS, EPSILON = (0.9, 0.999), 1e-8
PENALTY = 0.05


class Rules(NamedTuple):
    """How micro-batches become updates. The defaults are the large batch; each other value is named in a table."""

    weights: str = "exact"
    tail: str = "applied"
    clip: str = "once a window"
    rates: str = "count updates"
    average: str = "counts updates"
    evaluation: str = "after the tail"
    bad: str = "skips the window"
    first: str = "averages from the first update on"
    resumed: str = "continues"
    normalizes: str = "the window"
    ends: str = "windows end after N micro-batches"


FAULTS = {
    "weights": ("mean of means", "not divided by N", "weighted by rows", "last micro-batch only", "one update each")
    + ("weighted by labels", "divided by labels instead of their weights", "the second term is N times too strong")
    + ("mean of means of interleaved parts",),
    "tail": ("tail divided by N", "tail added to the next window", "windows cross epochs", "tail dropped")
    + ("tail split in two",),
    "clip": ("clips each micro-batch", "clips the sum", "does not clip"),
    "rates": ("schedule counts micro-batches",),
    "average": ("average counts micro-batches",),
    "evaluation": ("evaluates before the tail",),
    "resumed": ("loses the open window", "begins a window where it was stopped"),
    "normalizes": ("normalizes micro-batches",),
    "bad": ("a later micro-batch takes its place",),
    "ends": ("windows end after a number of rows", "windows end one micro-batch late"),
}
"""dict, by the field of `Rules` its other values: what goes wrong."""
_TAILS = ("tail divided by N", "tail added to the next window", "tail dropped", "tail split in two")
_NOT_DIVIDED = {"mean of means": "divided by N"}
"""dict, what a fault is called where losses are sums."""


class Trained(NamedTuple):
    """Weights in float64, and the number of updates."""

    weights: np.ndarray
    updates: int
    average: np.ndarray
    evaluated: np.ndarray


class Part(NamedTuple):
    """Of a micro-batch, for each term of the loss: the sum of its gradients, and what it is divided by."""

    sums: tuple[np.ndarray, ...]
    divisors: tuple[float, ...]
    rows: int
    labels: int

    @property
    def mean(self) -> np.ndarray:
        """ndarray, the gradient that a library gets if it differentiates this micro-batch alone."""
        return sum((g / d for g, d in zip(self.sums, self.divisors) if d), np.zeros_like(self.sums[0]))


def expected(case: Case) -> list[Trained]:
    """Return what is right: more than one result where libraries may choose."""
    choices = {
        "bad": ("skips the window", "leaves out the micro-batch") if "nan" in case.needs else (),
        "first": ("averages from the first update on", "averages from the start on") if case.average else (),
    }
    made = itertools.product(*(values or (getattr(Rules(), name),) for name, values in choices.items()))
    return [train(case, Rules(**dict(zip(choices, values)))) for values in made]


def faults(case: Case) -> dict[str, Trained]:
    """Return by its name what each fault ends with, and each two and three of them together."""
    apt = {name: values for name, values in FAULTS.items() if _matters(case, name)}
    made = {}
    for number in (1, 2, 3):
        for fields in itertools.combinations(apt, number):
            for values in itertools.product(*(apt[name] for name in fields)):
                if case.stop_after and values[-1] in FAULTS["resumed"] and set(values) & set(_TAILS):
                    continue  # a window of the case is never short
                trained = train(case, Rules(**dict(zip(fields, values))))
                called = [_NOT_DIVIDED.get(value, value) if case.reduction == "sum" else value for value in values]
                made[", ".join(called)] = trained
    if case.class_weights is None:
        made.pop("divided by labels instead of their weights", None)
    return made


def faults_of_float16(case: Case) -> dict[str, Trained]:
    """Return what sums in float16 end with: of parts of the mean, of gradients that are divided afterwards, or not."""
    made = {}
    for name, before, after in (
        ("sums in float16", len(case.inputs), 1),
        ("sums in float16, then divides", 1, len(case.inputs)),
        ("sums in float16, not divided by N", 1, 1),
    ):
        learner = _Learner(case, Rules())
        total = np.zeros(learner.weights.shape, np.float16)
        for part in learner._parts(_columns(case)):
            total = total + (part.mean / before).astype(np.float16)
        learner._step(total.astype(np.float64) / after, case.rate(0))
        made[name] = Trained(learner.weights, 1, learner.average, learner.weights)
    return made


def _matters(case: Case, field: str) -> bool:
    """Return whether the result of a case depends on a field of the rules."""
    return {
        "weights": True,
        "tail": case.stop_after > 0 or any(len(case.inputs) % (size * case.ranks) for size in case.windows),
        "clip": case.clip is not None,
        "rates": len(case.rates) > 1,
        "average": case.average is not None,
        "evaluation": case.evaluates,
        "resumed": case.stop_after > 0,
        "normalizes": case.batch_norm,
        "bad": "nan" in case.needs,
        "ends": True,
    }[field]


def train(case: Case, rules: Rules) -> Trained:
    """Return what training by these rules ends with."""
    learner, window = _Learner(case, rules), []
    evaluated = None
    count = 0
    for micro_batches in case.windows:
        ends = _Ends(case, rules, micro_batches * case.ranks)
        for number, columns in enumerate(_columns(case), 1):
            count += 1
            if rules.bad == "a later micro-batch takes its place" and not np.isfinite(columns[0]).all():
                continue
            window.append(columns)
            if ends.here(number, window) or rules.weights == "one update each":
                learner.update(window, ends.size_at(number), count)
                window = []
            if rules.average == "average counts micro-batches":
                learner.add_to_average()
            if count == case.stop_after and rules.resumed != "continues":
                window = []
        before = learner.weights
        if ends.flushes and window:
            learner.update(window, ends.size, count)
        if not ends.keeps_open:
            window = []
        if evaluated is None:
            evaluated = before if rules.evaluation == "evaluates before the tail" else learner.weights
    return Trained(learner.weights, learner.updates, learner.average, evaluated)


class _Ends:
    """Where the windows of an epoch end."""

    def __init__(self, case: Case, rules: Rules, size: int):
        self.size, self._rules, self._count = size, rules, len(case.inputs)
        self._rows = size * len(case.inputs[0])
        # With this fault the end is looked for by the length of the tail, once that has begun.
        self._tail = self._count % size if rules.tail == "tail split in two" else 0
        crosses = rules.tail == "windows cross epochs" or rules.bad == "a later micro-batch takes its place"
        self._by_count = crosses or rules.resumed == "begins a window where it was stopped"
        usual = rules.ends == Rules().ends
        self.keeps_open = crosses or not usual or rules.tail == "tail added to the next window"
        """bool, whether a short last window stays open in the next epoch."""
        self.flushes = not self.keeps_open and rules.tail in ("applied", "tail divided by N")
        """bool, whether a short last window becomes an update."""

    def here(self, number: int, window: list[Columns]) -> bool:
        """Return whether a window ends with the micro-batch of this number, counted from 1."""
        if self._rules.ends == "windows end one micro-batch late":
            return number % self.size == 1
        if self._rules.ends == "windows end after a number of rows":
            return sum(len(x) for x, _ in window) >= self._rows
        if self._by_count:
            return len(window) >= self.size
        return number % self.size_at(number) == 0 or (self._tail > 0 and number == self._count)

    def size_at(self, number: int) -> int:
        """Return how many micro-batches the window of this one should have."""
        return self._tail if number > self._count - self._tail else self.size


def _columns(case: Case) -> list[Columns]:
    return [(np.array(x, case.dtype).astype(np.float64), np.array(y)) for x, y in zip(case.inputs, case.targets)]


class _Learner:
    """The weights, the optimizer's state and the average."""

    def __init__(self, case: Case, rules: Rules):
        self.case, self.rules = case, rules
        self.weights = np.array(case.start, case.dtype).astype(np.float64)
        self.average = self.weights
        self.updates = 0
        self.rows = len(case.inputs[0])
        """int, the rows of the first micro-batch."""
        self._first = self._second = np.zeros_like(self.weights)

    def update(self, window: list[Columns], size: int, micro_batches: int) -> None:
        """Make an update of a window, whose last micro-batch is the one of this number, counted from 1."""
        parts = self._parts(window)
        if any(not np.isfinite(part.mean).all() for part in parts):
            parts = [part for part in parts if np.isfinite(part.mean).all()]
            if self.rules.bad == "skips the window":
                return
        by_micro_batches = self.rules.rates == "schedule counts micro-batches"
        rate = self.case.rate(micro_batches - 1 if by_micro_batches else self.updates)
        self._step(self._gradient(parts, size), rate)
        self.updates += 1
        if self.updates == 1 and self.rules.first == "averages from the first update on":
            self.average = self.weights
        elif self.rules.average == "counts updates":
            self.add_to_average()

    def add_to_average(self) -> None:
        """Count the weights once."""
        decay = self.case.average or 0.0
        self.average = decay * self.average + (1 - decay) * self.weights

    def _parts(self, window: list[Columns]) -> list[Part]:
        if self.case.batch_norm:
            whole = np.concatenate([x for x, _ in window])
            each = self.rules.normalizes == "normalizes micro-batches"
            window = [(_normalized(x, x if each else whole), y) for x, y in window]
        if self.rules.weights == "mean of means of interleaved parts":
            x, y = (np.concatenate(columns) for columns in zip(*window))
            window = [(x[first :: len(window)], y[first :: len(window)]) for first in range(len(window))]
        return [_part(self.case, self.weights, x, y) for x, y in window]

    def _gradient(self, parts: list[Part], size: int) -> np.ndarray:
        """Return the gradient that the optimizer gets."""
        case, rules = self.case, self.rules
        by_size = (
            rules.tail in ("tail divided by N", "tail added to the next window", "tail split in two")
            or rules.resumed != "continues"
            or rules.ends == "windows end one micro-batch late"
        )
        count = size if by_size else len(parts)
        means = [part.mean for part in parts]
        if rules.clip == "clips each micro-batch":
            scales = [min(1.0, case.clip / np.linalg.norm(mean)) for mean in means]
            means = [scale * mean for scale, mean in zip(scales, means)]
            parts = [part._replace(sums=tuple(s * g for g in part.sums)) for s, part in zip(scales, parts)]
        if rules.ends == "windows end after a number of rows":  # and divides by it
            gradient = sum(part.rows * mean for part, mean in zip(parts, means)) / (size * self.rows)
        elif rules.weights == "exact":
            gradient = self._exact(parts) * (len(parts) / count if case.reduction == "mean" else 1.0)
        elif rules.weights == "divided by labels instead of their weights":
            gradient = sum(part.sums[0] for part in parts) / sum(part.labels for part in parts)
        elif rules.weights == "the second term is N times too strong":
            gradient = self._exact(parts) + sum(part.sums[-1] / part.divisors[-1] for part in parts) * (1 - 1 / count)
        elif rules.weights == "weighted by labels":
            gradient = sum(part.labels * mean for part, mean in zip(parts, means)) / sum(p.labels for p in parts)
        elif rules.weights == "weighted by rows":
            rows = [part.rows for part in parts]
            gradient = sum(r * mean for r, mean in zip(rows, means)) / sum(rows)
        elif rules.weights in ("last micro-batch only", "one update each"):
            gradient = means[-1]
        else:
            gradient = sum(means) / (1 if rules.weights == "not divided by N" else count)
        if case.clip is not None and rules.clip in ("once a window", "clips the sum"):
            bound = case.clip / (count if rules.clip == "clips the sum" else 1)
            gradient = gradient * min(1.0, bound / np.linalg.norm(gradient))
        return gradient

    def _exact(self, parts: list[Part]) -> np.ndarray:
        gradient = np.zeros_like(self.weights)
        for term in range(len(parts[0].sums)):
            total = sum(part.sums[term] for part in parts)
            divisor = math.fsum(part.divisors[term] for part in parts) if self.case.reduction == "mean" else 1.0
            gradient = gradient + (total / divisor if divisor else 0.0)
        return gradient

    def _step(self, gradient: np.ndarray, rate: float) -> None:
        case, weights = self.case, self.weights
        if case.optimizer == "adamw":
            number = self.updates + 1
            self._first = BETAS[0] * self._first + (1 - BETAS[0]) * gradient
            self._second = BETAS[1] * self._second + (1 - BETAS[1]) * gradient**2
            first, second = self._first / (1 - BETAS[0] ** number), self._second / (1 - BETAS[1] ** number)
            self.weights = weights * (1 - rate * case.weight_decay) - rate * first / (np.sqrt(second) + EPSILON)
            return
        gradient = gradient + case.weight_decay * weights
        self._first = case.momentum * self._first + gradient
        self.weights = weights - rate * (orthogonal(self._first) if case.optimizer == "muon" else self._first)


def _normalized(x: np.ndarray, batch: np.ndarray) -> np.ndarray:
    return (x - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-5)


def _part(case: Case, weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> Part:
    """Return the gradients of a micro-batch, by hand."""
    logits = x @ weights.T
    rows = len(x)
    if case.loss == "squares":
        return Part((_outer(2 * (logits - y), x),), (y.size if case.reduction == "mean" else 1.0,), rows, y.size)
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    label = np.where(y == IGNORED, 0, y)
    share = np.where(y == IGNORED, 0.0, np.array(case.class_weights or [1.0] * len(weights))[label])
    wrong = shifted / shifted.sum(-1, keepdims=True) - np.eye(len(weights))[label]
    terms = [(_outer(share[..., None] * wrong, x), share.sum())]
    if case.loss == "penalized":
        terms.append((_outer(2 * PENALTY * logits, x), float(rows)))
    sums, divisors = zip(*terms)
    return Part(sums, divisors if case.reduction == "mean" else (1.0,) * len(sums), rows, int((y != IGNORED).sum()))


def _outer(errors: np.ndarray, x: np.ndarray) -> np.ndarray:
    return errors.reshape(-1, errors.shape[-1]).T @ x.reshape(-1, x.shape[-1])
