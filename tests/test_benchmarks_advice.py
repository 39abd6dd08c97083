"""The benchmark `advice`: which advice counts as right, and that it runs. No test measures speed."""

from __future__ import annotations

import pytest

from benchmarks import advice
from test_benchmarks import RECORD, benchmark


def row(advised, accumulated, single, *, score="Loss", name="GPT, sentences, Adam"):
    seconds = {"accumulated_seconds": 2.0, "single_seconds": 3.0}
    facts = {"set_up": name, "advised": advised, "rows": 8, "score": score}
    return {**facts, "accumulated": accumulated, "single": single, **seconds}


@pytest.mark.parametrize(
    ("advised", "accumulated", "single", "score", "right"),
    [
        ("single", 2.0, 1.9, "Loss", True),
        ("single", 1.9, 2.0, "Loss", False),
        ("accumulated", 1.9, 2.0, "Loss", True),
        ("single", 0.9, 0.8, "Accuracy", False),
        ("accumulated", 0.9, 0.8, "Accuracy", True),
        ("single", 0.9, 0.9, "Accuracy", True),
    ],
)
def test_advice_is_right_if_its_result_is_no_worse(advised, accumulated, single, score, right):
    assert advice.is_right(row(advised, accumulated, single, score=score)) is right


def test_table_counts_how_often_it_was_right():
    rows = [row("single", 2.0, 1.9), row("single", 1.8, 1.9)]
    table = advice._table((rows, advice.WORDS[""])).splitlines()
    assert table[2:] == [
        "| GPT, sentences, Adam | 64 | do not accumulate, 8 rows | loss 1.900 | loss 1.900 | 1.50 | 1 of 2 |"
    ]


def test_each_set_up_has_a_chinese_name():
    assert set(advice.SET_UPS) == set(advice.WORDS[".zh"].set_ups)


@pytest.mark.slow
def test_benchmark_runs(tmp_path):
    record, printed = benchmark("advice", tmp_path)
    assert set(record) == RECORD and "accumulated" in printed
    assert record["rows"][0]["advised"] in ("accumulated", "single")
