"""The benchmark `curves`."""

from __future__ import annotations

import pytest

from benchmarks import curves
from benchmarks.results import part


def test_differences_are_from_the_same_way_without_a_split():
    losses = {("a", 1): (2.0, 1.0), ("a", 2): (2.0, 1.5), ("b", 1): (3.0, 3.0), ("b", 2): (2.75, 3.0)}
    made = [{"way": way, "split": split} for way, split in losses]
    points = [{**row, "updates": n, "loss": losses[row["way"], row["split"]][n]} for row in made for n in (0, 1)]
    runs = part([{"part": "run", **row} for row in curves.with_differences(made, points)][:4], "run")
    assert [row["difference"] for row in runs] == [0, 0.5, 0, 0.25]


def test_splits_are_compared_with_the_undivided_batch():
    assert curves.splits_of([8, 4]) == [1, 4, 8]
    with pytest.raises(ValueError, match="argument --windows: must divide the 32 rows of an update, but got 3"):
        curves.splits_of([3])
