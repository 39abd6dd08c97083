"""The cases: data, a small network with a gradient that is computed by hand, and what is asked of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .case import IGNORED, Case

FEATURES, CLASSES, TOKENS = 6, 4, 5
EVEN = (4,) * 8
TAIL = (4,) * 7
RAGGED = (8, 1, 2, 5, 7, 1, 3, 5)


def cases() -> dict[str, Case]:
    """Return all cases by name, in the order of the table."""
    made = (
        _squares("even windows", "8 micro-batches of 4 rows, windows of 4: is it the large batch at all?", EVEN),
        _squares(
            "short last window", "7 micro-batches, windows of 4: is the last window one of 3, and divided by 3?", TAIL
        ),
        _squares("one row left", "The last micro-batch has one row: does it count as one row?", (4,) * 7 + (1,)),
        _squares("ragged rows", "Micro-batches of 8, 1, 2, 5, ... rows: does each row count the same?", RAGGED),
        _tokens("padded tokens", "Padding is ignored: does each token count the same?", 8),
        _tokens("padded tokens, tail", "The same with 7 micro-batches.", 7),
        _labels("class weights", "A cross entropy with class weights and ignored labels, a mean over these weights."),
        _summed(),
        _cancelling(),
        _warm_up(),
        _adamw(),
        _nan(),
        _averaged(),
        _muon(),
        _changing(),
        _float16(),
        _two_terms(),
        _batch_norm(),
        _resumed(),
        _evaluated(),
        _two_ranks(),
    )
    return {case.name: case for case in made}


def _squares(name: str, question: str, rows: tuple[int, ...], *, seed: int = 1, **more: Any) -> Case:
    """Return a regression by mean squares, whose micro-batches have these numbers of rows."""
    draw = np.random.RandomState(seed)
    # Micro-batches differ in what they are drawn from, else a wrong weight would change little.
    x = [draw.randn(n, FEATURES) + draw.randn(FEATURES) for n in rows]
    y = [draw.randn(n, CLASSES) + 2 * draw.randn(CLASSES) for n in rows]
    return _case(name, question, x, y, draw, **more)


def _case(name: str, question: str, x: list, y: list, draw: np.random.RandomState, **more: Any) -> Case:
    start = 0.5 * draw.randn(CLASSES, FEATURES)
    return Case(name, question, [_exact(part) for part in x], [_exact(part) for part in y], _exact(start), **more)


def _exact(values: np.ndarray) -> list:
    """Return numbers that are the same in float32."""
    return (values.astype(np.float32) if values.dtype == np.float64 else values).tolist()


def _tokens(name: str, question: str, count: int, **more: Any) -> Case:
    """Return sequences of which most are short, as if sorted by length, and one micro-batch is full."""
    draw = np.random.RandomState(2)
    lengths = [1 + (number % 4 == 3) * (TOKENS - 1) + (number % 4 == 1) for number in range(count)]
    x = [draw.randn(3, TOKENS, FEATURES) + draw.randn(FEATURES) for _ in lengths]
    y = [draw.randint(0, CLASSES, (3, 1)) * np.ones((3, TOKENS), int) for _ in lengths]
    for labels, length in zip(y, lengths):
        labels[:, length:] = IGNORED
    more = {"loss": "cross_entropy", "rates": [0.5], **more}
    return _case(name, question, x, y, draw, **more)


def _labels(name: str, question: str) -> Case:
    draw = np.random.RandomState(3)
    x = [draw.randn(4, FEATURES) + draw.randn(FEATURES) for _ in EVEN]
    y = [np.full(4, number % CLASSES) for number in range(len(x))]
    for number, labels in enumerate(y):
        labels[: number % 4] = IGNORED
    weights = [0.1, 1.0, 4.0, 0.5]
    more = {"needs": ["class weights"], "rates": [0.5]}
    return _case(name, question, x, y, draw, loss="cross_entropy", class_weights=weights, **more)


def _summed() -> Case:
    question = "The loss is a sum over rows: is the update that of the sum over the window?"
    return _squares("sum losses", question, EVEN, reduction="sum", rates=[0.002])


def _cancelling() -> Case:
    """Return large gradients that cancel in a window, of which each alone is far above the bound."""
    question = "Gradients of a window cancel: is the norm of their mean bounded, not theirs?"
    case = _squares("clip", question, EVEN, clip=1.0)
    y = [(np.array(part) + (40.0 if number % 2 else -40.0)).tolist() for number, part in enumerate(case.targets)]
    x = [(np.array(part) * 0.1 + 1.0).astype(np.float32).tolist() for part in case.inputs]
    return Case(**{**case.as_json(), "inputs": x, "targets": y, "needs": ["clip"]})


def _warm_up() -> Case:
    question = "A warm-up counts updates, also over a short last window?"
    return _squares("warm-up", question, TAIL, rates=[0.01 * n for n in range(1, 13)], needs=["schedule"])


def _adamw() -> Case:
    question = "AdamW: do moments, bias correction and weight decay count updates?"
    more = {"optimizer": "adamw", "rates": [0.05], "weight_decay": 0.5}
    return _squares("AdamW", question, (4,) * 16, windows=[4, 4], **more)


def _nan() -> Case:
    question = "One micro-batch is NaN: is it left out, or its window, and is the next window clean?"
    case = _squares("NaN", question, (4,) * 12, needs=["nan"], windows=[4])
    case.inputs[5][0][0] = float("nan")
    return case


def _averaged() -> Case:
    question = "An exponential moving average of the weights counts updates?"
    return _squares("EMA", question, (4,) * 16, average=0.8, needs=["ema"], windows=[4])


def _muon() -> Case:
    question = "Muon, which is not linear in the gradient: is it applied once a window?"
    more = {"optimizer": "muon", "momentum": 0.9, "rates": [0.05]}
    return _squares("Muon", question, EVEN, needs=["own optimizer"], **more)


def _changing() -> Case:
    question = "Windows of 2 in the first epoch, 4 in the second, 8 in the third?"
    return _squares("N that changes", question, EVEN, windows=[2, 4, 8], needs=["N that changes"])


def _float16() -> Case:
    """Return 4,096 gradients of about 0.1 in float16: their sum needs more digits than float16 has."""
    draw = np.random.RandomState(4)
    count = 4096
    x = [np.round(0.25 + 0.25 * draw.rand(1, 2), 2).astype(np.float16).astype(float) for _ in range(count)]
    y = [np.array([draw.randint(0, 2)]) for _ in range(count)]
    question = "float16 weights, 4,096 micro-batches in a window: is nothing lost in the sum?"
    start = [[0.0, 0.0], [0.0, 0.0]]
    more = {"windows": [count], "dtype": "float16", "rates": [8.0], "needs": ["float16"], "tolerance": 1e-2}
    inputs, targets = [part.tolist() for part in x], [part.tolist() for part in y]
    return Case("float16", question, inputs, targets, start, loss="cross_entropy", **more)


def _two_terms() -> Case:
    question = "A cross entropy per token and a penalty per row: does each have its own divisor?"
    return _tokens("two terms", question, 8, loss="penalized", needs=["two terms"])


def _batch_norm() -> Case:
    question = "Each micro-batch is normalized by itself: is the result the large batch's, or is there a warning?"
    return _squares("BatchNorm", question, EVEN, batch_norm=True, needs=["BatchNorm"])


def _resumed() -> Case:
    question = "Stopped after 6 micro-batches, inside a window, and resumed: is it the run that was not stopped?"
    return _squares("resume", question, EVEN, stop_after=6, needs=["resume"], windows=[4])


def _evaluated() -> Case:
    question = "Does the evaluation of an epoch come after the update of its short last window?"
    return _squares("evaluation", question, TAIL, evaluates=True, needs=["evaluation"])


def _two_ranks() -> Case:
    question = "Two processes with 8, 2, 7, 3 and 1, 5, 1, 5 rows: is it one process with all rows?"
    return _squares("two ranks", question, RAGGED, ranks=2, windows=[2, 2], needs=["two ranks"])
