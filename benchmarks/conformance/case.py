"""What a program gets, a case, and what it returns, the weights after training. Nothing here depends on a library.

Programs import this in environments that have little in common: it needs NumPy only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """A training run whose result is known: a matrix, a loss, an optimizer, and micro-batches in a fixed order.

    The network is ``logits = inputs @ weights.T``. Its weights must become those of training with each window as one
    large batch.
    """

    name: str
    question: str
    """str, what it shows, as a question that a right library answers with yes."""
    inputs: list[Any]
    """list[list], of the micro-batches of an epoch: rows of features, or rows of tokens of features."""
    targets: list[Any]
    """list[list], of the same micro-batches."""
    start: list[Any]
    """list[list[float]], the weights before training, (outputs, features)."""
    windows: list[int] = field(default_factory=lambda: [4, 4])
    """list[int], for each epoch how many micro-batches are one update."""
    loss: str = "squares"
    """str, 'squares', 'cross_entropy', 'penalized': a cross entropy per label and squared logits per row."""
    reduction: str = "mean"
    class_weights: list[float] | None = None
    optimizer: str = "sgd"
    """str, 'sgd', 'adamw' or 'muon'."""
    rates: list[float] = field(default_factory=lambda: [0.1])
    """list[float], the learning rate of each update; the last one holds for all later ones."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    """float, the largest norm of a gradient."""
    average: float | None = None
    """float, the decay of an exponential moving average of the weights."""
    batch_norm: bool = False
    """bool, whether the inputs are normalized by their batch."""
    dtype: str = "float32"
    stop_after: int = 0
    """int, after how many micro-batches the run is stopped, to be resumed from what was saved."""
    evaluates: bool = False
    """bool, whether the weights at the evaluation after the first epoch are compared."""
    ranks: int = 1
    """int, how many processes share the micro-batches: rank r has every `ranks`-th one, beginning with r."""
    needs: list[str] = field(default_factory=list)
    """list[str], features that a library needs for it."""
    tolerance: float = 1e-4

    def rate(self, update: int) -> float:
        """Return the learning rate of an update, the first being 0."""
        return self.rates[min(update, len(self.rates) - 1)]

    @property
    def epochs(self) -> int:
        """int, how often the micro-batches are trained with."""
        return len(self.windows)

    @property
    def window(self) -> int:
        """int, how many micro-batches are one update, where this does not change."""
        return self.windows[0]

    def micro_batches(self, rank: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the columns of the micro-batches of an epoch, those of a rank."""
        kind = np.float32 if self.loss == "squares" else np.int32
        pairs = zip(self.inputs[rank :: self.ranks], self.targets[rank :: self.ranks])
        return [(np.array(x, self.dtype), np.array(y, kind)) for x, y in pairs]

    def large_batches(self) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """Return for each epoch the windows' rows as one batch: for libraries that split batches themselves."""
        made = []
        for window in self.windows:
            pieces = self.micro_batches()
            groups = [pieces[start : start + window] for start in range(0, len(pieces), window)]
            made.append([(np.concatenate([x for x, _ in g]), np.concatenate([y for _, y in g])) for g in groups])
        return made

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Case:
        """Return the case that was sent as `as_json`."""
        return cls(**fields)

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for JSON."""
        return asdict(self)


@dataclass
class Result:
    """What training has come to."""

    weights: Any
    """array, (outputs, features), the trained weights."""
    updates: int | None = None
    """int, how often the optimizer has stepped, where that can be counted."""
    average: Any = None
    """array, the averaged weights."""
    evaluated: Any = None
    """array, the weights at the evaluation after the first epoch."""
    reductions: float | None = None
    """float, sums over the ranks for each update."""
    words: str = ""
    """str, what was printed or warned."""

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for JSON."""
        fields = dict(vars(self))
        for name in ("weights", "average", "evaluated"):
            if fields[name] is not None:
                fields[name] = np.asarray(fields[name], np.float64).tolist()
        return fields


class CannotExpress(Exception):
    """A library has no documented way to run a case."""


def orthogonal(matrix: Any) -> Any:
    """Return Muon's step for a matrix: five steps of Newton and Schulz towards the nearest orthogonal one.

    It is not linear in the gradient. The same lines run with NumPy, PyTorch, JAX and MindSpore.
    """
    first, second, third = 3.4445, -4.7750, 2.0315
    result = matrix / (matrix * matrix).sum() ** 0.5
    for _ in range(5):
        square = result @ result.T
        result = first * result + (second * square + third * (square @ square)) @ result
    return result
