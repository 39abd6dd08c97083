"""Loss curves of one effective batch, split into 1, 4 and 8 micro-batches: five faults, each beside ms_accum.

An exact library trains the same with each split. The data are those of all splits: only where they are cut differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, NamedTuple

import numpy as np

from ..process import ContenderError
from .case import IGNORED, Case
from .cases import CLASSES, FEATURES, TOKENS
from .libraries import LIBRARIES, OURS, Library, contender

SPLITS = (1, 4, 8)
EPOCHS = (1, 2, 3, 4, 6, 8)
BATCH, BATCHES = 16, 3


class Fault(NamedTuple):
    """A fault, and a library that has it."""

    name: str
    library: str
    """str, the key of its row."""
    case: Callable[[int], Case]
    """Callable, returns the case for a number of micro-batches in an effective batch."""


def _rows(split: int, *, left: int = 0, **more: Any) -> Case:
    """Return a regression with `BATCHES` batches and `left` more rows, in micro-batches."""
    draw = np.random.RandomState(5)
    count = BATCH * BATCHES + left
    x = draw.randn(count, FEATURES) + np.repeat(draw.randn(-(-count // 2), FEATURES), 2, 0)[:count]
    truth = draw.randn(CLASSES, FEATURES)
    y = x @ truth.T + 0.5 * draw.randn(count, CLASSES)
    return _cut(Case("", "", [], [], [[0.0] * FEATURES] * CLASSES, **more), x, y, split)


def _tokens(split: int) -> Case:
    """Return sequences that are sorted by length in each batch, as loaders that save padding have them."""
    draw = np.random.RandomState(6)
    count = BATCH * BATCHES
    first, later = draw.randn(2, CLASSES, FEATURES)  # a first token is not like later ones
    x = draw.randn(count, TOKENS, FEATURES)
    logits = np.concatenate([x[:, :1] @ first.T, x[:, 1:] @ later.T], 1)
    y = (2 * logits + draw.gumbel(size=logits.shape)).argmax(-1)
    lengths = np.tile(np.sort(draw.choice([1, 1, 1, 2, TOKENS], BATCH)), BATCHES)
    y[np.arange(TOKENS) >= lengths[:, None]] = IGNORED
    case = Case("", "", [], [], [[0.0] * FEATURES] * CLASSES, loss="cross_entropy", rates=[1.0])
    return _cut(case, x, y, split)


def _cut(case: Case, x: np.ndarray, y: np.ndarray, split: int) -> Case:
    size = BATCH // split
    parts = range(0, len(x), size)
    inputs, targets = ([part[start : start + size].tolist() for start in parts] for part in (x, y))
    return replace(case, inputs=inputs, targets=targets, windows=[split])


def _warm_up(split: int) -> Case:
    return _rows(split, rates=[0.01 * n for n in range(1, 30)], needs=["schedule"])


FAULTS = (
    Fault("mean of means", "Lightning", _tokens),
    Fault("tail added to the next window", "PyTorch, usual loop", lambda split: _rows(split, left=10, rates=[0.15])),
    Fault("schedule counts micro-batches", "Keras", _warm_up),
    Fault("clips each micro-batch", "MindCV", lambda split: _rows(split, clip=2.0, rates=[0.5], needs=["clip"])),
    Fault("average counts micro-batches", "Keras", lambda split: _rows(split, average=0.9, needs=["ema"])),
)


def rows() -> list[dict[str, Any]]:
    """Return for each fault, library and split the loss after epochs."""
    made = []
    for fault in FAULTS:
        for library in (_ours(), *(library for library in LIBRARIES if library.key == fault.library)):
            with contender(library) as program:
                for split in SPLITS:
                    case = fault.case(split)
                    losses = [(0, loss_of(case, np.array(case.start)))]
                    for epochs in EPOCHS:
                        answer = program.ask(**replace(case, windows=[split] * epochs).as_json())
                        if "weights" not in answer:
                            raise ContenderError(f"'{library.key}' gave no weights for a curve: {answer}")
                        weights = answer["average" if case.average else "weights"]
                        losses.append((epochs, loss_of(case, np.array(weights))))
                    row = {"fault": fault.name, "library": library.key, "split": split, "losses": losses}
                    print(" | ".join(str(value) for value in row.values()), flush=True)
                    made.append(row)
    return made


def _ours() -> Library:
    return next(library for library in LIBRARIES if library.name == OURS)


def loss_of(case: Case, weights: np.ndarray) -> float:
    """Return the loss over all rows, as one batch."""
    x, y = (np.concatenate([np.array(part) for part in parts]) for parts in (case.inputs, case.targets))
    logits = x @ weights.T
    if case.loss == "squares":
        return float(((logits - y) ** 2).mean())
    counted = y != IGNORED
    surprise = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.where(counted, y, 0)[..., None], -1)[..., 0]
    )
    return float(surprise[counted].mean())
