"""The benchmarks `curves` and `splits`, and the charts of the documents. No test measures speed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import charts, curves, splits
from benchmarks.tables import part
from test_benchmarks import RECORD, benchmark

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
def test_our_splits_are_one_curve_and_those_of_the_usual_loop_are_not(tmp_path):
    record, printed = benchmark("curves", tmp_path)
    assert set(record) == RECORD and "validation loss" in printed
    runs = {(row["way"], row["split"]): row for row in part(record["rows"], "run")}
    assert runs[curves.OURS, 2]["difference"] < 1e-6 < 1e-5 < runs[curves.LOOP, 2]["difference"]
    first = [row["loss"] for row in part(record["rows"], "curve") if row["updates"] == 0]
    assert len(first) == 4 and len(set(first)) == 1


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


@pytest.mark.slow
def test_splits_are_measured(tmp_path):
    record, printed = benchmark("splits", tmp_path)
    assert set(record) == RECORD and "ms/window" in printed
    assert [(row["rows"], row["mini_steps"]) for row in record["rows"]] == [(1, 4), (2, 2), (4, 1)]
    assert all(row["ms"] > 0 and row["peak_mib"] > 100 for row in record["rows"])


# Charts


@pytest.mark.parametrize(
    ("axis", "value", "place"),
    [
        (charts.Axis("", 0, 10, ()), 5, 0.5),
        (charts.Axis("", 0, 10, ()), 20, 1.0),
        (charts.Axis("", 1e-4, 1, (), log=True), 1e-2, 0.5),
        (charts.Axis("", 1e-4, 1, (), log=True), 0, 0.0),
    ],
)
def test_axis_places_values(axis, value, place):
    assert axis.place(value) == pytest.approx(place)


def test_chart_has_what_was_given():
    axis = charts.Axis("x & y", 0, 10, (0, 5, 10))
    line = charts.Line("ours", [(0, 0), (10, 10)], charts.COLOURS[0], labels=["first", "last"])
    root = ElementTree.fromstring(charts.chart("a < b", [charts.Panel("left", axis, axis, [line])]))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert root.find(f"{SVG}title").text == "a < b"
    axes = ["0", "5", "10"] * 2
    assert words == ["left", *axes, "x & y", "x & y", "first", "last", "ours"]
    assert any(path.get("d") == "M0.0 230.0L235.0 0.0" for path in root.iter(f"{SVG}path"))


@pytest.mark.parametrize(
    ("values", "begins_at_zero", "ends", "marks"),
    [((1, 95), True, (0, 150), 4), ((700, 1400), False, (600, 1600), 6), ((657, 867), False, (650, 900), 6)],
)
def test_axis_of_a_picture_has_few_marks(values, begins_at_zero, ends, marks):
    axis = splits._axis("", values, begins_at_zero=begins_at_zero)
    assert ((axis.low, axis.high), len(axis.ticks)) == (ends, marks)


@pytest.mark.parametrize("module", [curves, splits])
def test_pictures_have_the_same_lines_in_both_languages(module):
    english, chinese = module.pictures().values()
    assert english.count("<path") == chinese.count("<path") and english != chinese
