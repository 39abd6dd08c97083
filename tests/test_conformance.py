"""The benchmark `conformance`: its oracle and its judgement; ours is right in each case, and with a fault it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from threading import Event

import numpy as np
import pytest

from benchmarks.conformance import matrix, oracle, verdicts
from benchmarks.conformance.case import Result
from benchmarks.conformance.cases import cases
from benchmarks.conformance.libraries import LIBRARIES, OURS, PROGRAMS, Library
from benchmarks.results import RESULTS

EVERY = cases()
SMALL = [name for name, case in EVERY.items() if case.dtype == "float32"]


# The oracle


def loss(case, weights, x, y):
    """The loss of a batch by its definition, in float64; what `oracle._part` differentiates by hand."""
    logits = x @ weights.T
    if case.loss == "squares":
        return ((logits - y) ** 2).mean() if case.reduction == "mean" else ((logits - y) ** 2).sum()
    counted = y >= 0
    scale = np.array(case.class_weights or [1.0] * len(weights))
    surprise = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.where(counted, y, 0)[..., None], -1)[..., 0]
    )
    shares = np.where(counted, scale[np.where(counted, y, 0)], 0)
    penalty = oracle.PENALTY * (logits**2).sum() / len(x) if case.loss == "penalized" else 0
    return (shares * surprise).sum() / shares.sum() + penalty


def slope(function, weights, step=1e-6):
    """The gradient by differences."""
    made = np.zeros_like(weights)
    for index in np.ndindex(weights.shape):
        moved = np.zeros_like(weights)
        moved[index] = step
        made[index] = (function(weights + moved) - function(weights - moved)) / (2 * step)
    return made


@pytest.mark.parametrize(
    "name", ["even windows", "ragged rows", "padded tokens", "class weights", "sum losses", "two terms"]
)
def test_first_update_is_slope_of_large_batch(name):
    case = replace(EVERY[name], windows=[len(EVERY[name].inputs)], clip=None)
    start = np.array(case.start)
    x, y = (np.concatenate([np.array(part) for part in parts]) for parts in (case.inputs, case.targets))
    moved = (start - oracle.train(case, oracle.Rules()).weights) / case.rate(0)
    wanted = slope(lambda weights: loss(case, weights, x, y), start)
    np.testing.assert_allclose(moved, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("name", SMALL)
def test_each_case_notices_a_fault(name):
    case = EVERY[name]
    judge = verdicts.Judge(case)
    compared = "average" if case.average else "evaluated" if case.evaluates else "weights"
    misses = [
        min(judge._error(getattr(made, compared), right, compared) for right in oracle.expected(case))
        for made in oracle.faults(case).values()
    ]
    assert max(misses) > 100 * case.tolerance


# The judgement


def answer_of(trained, **more):
    return {**Result(trained.weights, trained.updates, trained.average, trained.evaluated).as_json(), **more}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("short last window", "tail divided by N"),
        ("clip", "clips each micro-batch"),
        ("warm-up", "tail divided by N"),
        ("warm-up", "schedule counts micro-batches"),
        ("EMA", "average counts micro-batches"),
        ("resume", "loses the open window"),
        ("evaluation", "tail divided by N"),
        ("evaluation", "evaluates before the tail"),
        ("two ranks", "mean of means"),
    ],
)
def test_fault_is_named(name, fault):
    cell = verdicts.Judge(EVERY[name]).verdict(answer_of(oracle.faults(EVERY[name])[fault]))
    assert (cell["verdict"], cell["fault"]) == ("off", fault)


def test_right_result_is_right_and_nan_is_poisoned():
    case = EVERY["NaN"]
    for right in oracle.expected(case):
        assert verdicts.Judge(case).verdict(answer_of(right))["verdict"] == "right"
    bad = answer_of(right)
    bad["weights"][0][0] = float("nan")
    assert verdicts.Judge(case).verdict(bad)["verdict"] == "poisoned"


def test_cells_that_were_not_measured_again_are_kept():
    old = {"library": OURS, "way": "driver", "case": "clip", "verdict": "off", "updates": 4, "fault": "does not clip"}
    other = {**old, "case": "NaN"}
    new = {**old, "verdict": "right", "fault": None}
    assert matrix.merged([old, other], [new]) == [new, other]
    assert matrix.changes([old, other], [new, other]) == [
        "changed: ms_accum, driver, clip: off does not clip 4 -> right 4"
    ]


# The programs


def measured(program):
    judges = {name: verdicts.Judge(case) for name, case in EVERY.items()}
    return matrix.measured(Library(OURS, "", "mindspore", program, ""), judges, Event())


@pytest.mark.slow
def test_driver_is_right():
    kinds = {row["case"]: row["verdict"] for row in measured("ours_driver.py")[0]}
    assert kinds == {name: "warns" if name == "BatchNorm" else "right" for name in EVERY}


FAILING = """
import sys
sys.path.insert(0, {folder!r})
from serving import serve_cases

def train(case):
    print("hello")
    raise ValueError("no such case\\nat all")

serve_cases(train, ["numpy"], ["clip"], {{"ema": "no average"}})
"""


def test_program_that_raises_or_dies_is_a_cell(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FAILING.format(folder=str(PROGRAMS)), encoding="utf-8")
    judges = {name: verdicts.Judge(EVERY[name]) for name in ("clip", "EMA", "NaN")}
    rows, versions = matrix.measured(Library("x", "", "mindspore", str(program), ""), judges, Event())
    words = [row["words"] for row in rows]
    assert words == ["ValueError: no such case at all", "no average", "no documented way: nan"] and "numpy" in versions
    program.write_text("import sys\nsys.exit('gone')\n", encoding="utf-8")
    rows, _ = matrix.measured(Library("x", "", "mindspore", str(program), ""), judges, Event())
    assert [row["verdict"] for row in rows] == ["died"] * 3 and "gone" in rows[0]["words"]


# The page


RECORD = json.loads((RESULTS / matrix.FILE).read_text(encoding="utf-8"))


def test_every_library_has_every_case():
    asked = {(library.name, library.way, name) for library in LIBRARIES if not library.missing for name in EVERY}
    assert {matrix._key(row) for row in RECORD["rows"]} == asked
    assert set(RECORD["libraries"]) == {library.key for library in LIBRARIES if not library.missing}
