"""The metrics of a run are read, and written as a table, without changes."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from ms_accum.app import series
from ms_accum.app.series import read

pytestmark = pytest.mark.host
NAN = float("nan")
FIRST = {"epoch": 1, "update": 1, "loss": 2.5, "lr": 0.1, "grad_norm": 1.5, "samples": 64, "seconds": 0.5}
SKIPPED = {**FIRST, "loss": None, "grad_norm": None, "skipped": True, "bad": [3, 4]}
SECOND = {**FIRST, "update": 2, "loss": 1e-07, "skipped": False}
EVALUATION = {"epoch": 1, "updates": 2, "accuracy": 0.75, "correct": 3, "total": 4}


def text_of(*lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def written(folder, text):
    (folder / "metrics.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


# Reading


def test_windows_and_evaluations_are_separated(tmp_path):
    metrics = read(written(tmp_path, text_of(FIRST, SKIPPED, SECOND, EVALUATION, SECOND)))
    assert metrics.windows == [FIRST, SKIPPED, SECOND, SECOND] and metrics.path == tmp_path / "metrics.jsonl"
    (evaluation,) = metrics.evaluations
    assert (evaluation.windows_before, evaluation.updates, evaluation.results) == (3, 2, EVALUATION)


@pytest.mark.parametrize("value", ["null", "NaN", "Infinity", "-Infinity", f"1{'0' * 400}"])
def test_value_that_is_not_finite_is_a_gap(tmp_path, value):
    metrics = read(written(tmp_path, text_of(FIRST, SECOND).replace("2.5", value)))
    np.testing.assert_array_equal(metrics.numbers("loss"), [NAN, 1e-07])
    np.testing.assert_array_equal(metrics.numbers("none"), [NAN, NAN])
    np.testing.assert_array_equal(metrics.numbers("lr"), [0.1, 0.1])


@pytest.mark.parametrize("cut", [1, 2, 30, len(text_of(SECOND)) - 1])
def test_truncated_last_line_is_left_out(tmp_path, cut):
    text = text_of(FIRST, SECOND)
    is_complete = cut == 1  # its line break alone is missing
    assert read(written(tmp_path, text[:-cut])).windows == ([FIRST, SECOND] if is_complete else [FIRST])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("{", "damaged"),
        ("7", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        ('{"update": "1"}', "damaged"),
        ('{"update": true}', "damaged"),
        ('{"update": 1, "loss": "low"}', "damaged"),
        ('{"updates": 1, "accuracy": [1]}', "damaged"),
        ('{"update": 1' + "0" * 9999 + "}", "damaged"),
        ("[" * 99999, "damaged"),
        ("\x00" * 9, "damaged"),
        (b"\xff\xfe", "damaged"),
    ],
)
def test_damaged_line_is_named(tmp_path, line, reason):
    line = line if isinstance(line, bytes) else line.encode()
    first, second = text_of(FIRST).encode(), text_of(SECOND).encode()
    for text, number in ((first + line + b"\n" + second, 2), (first + second + line + b"\n", 3)):
        with pytest.raises(ValueError, match=rf"^line {number} of '.*metrics\.jsonl' is {reason}$"):
            read(written(tmp_path, text))


@pytest.mark.parametrize("text", ["", '{"epoch": 1, "upd', text_of(EVALUATION)])
def test_file_without_updates_is_an_error(tmp_path, text):
    with pytest.raises(ValueError, match=r"^'.*metrics\.jsonl' has no updates$"):
        read(written(tmp_path, text))


def test_folder_without_metrics_is_an_error(tmp_path):
    (tmp_path / "a" / "metrics.jsonl").mkdir(parents=True)
    for folder, reason in (("none", "is not a folder"), ("a", "has no metrics.jsonl"), ("a/b/c", "is not a folder")):
        with pytest.raises(FileNotFoundError, match=f"'.*{folder}' {reason}; give the folder of a run"):
            read(tmp_path / folder)


# The table


def table_of(folder, *lines):
    text = series.table_of(read(written(folder, text_of(*lines))))
    (folder / "metrics.csv").write_text(text, encoding="utf-8")
    return text


def test_table_has_a_row_for_each_window(tmp_path):
    assert table_of(tmp_path, FIRST, SKIPPED, SECOND, EVALUATION, {**SECOND, "update": 3}) == (
        "epoch,update,loss,lr,grad_norm,samples,seconds,skipped,bad,accuracy\n"
        "1,1,2.5,0.1,1.5,64,0.5,,,\n"
        '1,1,,0.1,,64,0.5,true,"[3, 4]",\n'
        "1,2,1e-07,0.1,1.5,64,0.5,false,,0.75\n"
        "1,3,1e-07,0.1,1.5,64,0.5,false,,\n"
    )


def check_table(folder, rng):
    """Compare a table with the metrics that were written, for numbers of all sizes."""
    losses = np.exp(rng.uniform(-300, 300, 99)).tolist()
    table_of(folder, *({**FIRST, "update": number, "loss": loss} for number, loss in enumerate(losses, 1)))
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == losses and [int(row["update"]) for row in rows] == list(
        range(1, 100)
    )


def test_table_has_all_digits(tmp_path, rng):
    check_table(tmp_path, rng)


def test_rounded_table_is_detected(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(series, "_cell", lambda value: f"{value:.12g}")
    with pytest.raises(AssertionError):
        check_table(tmp_path, rng)


def test_table_without_evaluations_has_no_accuracy_column(tmp_path):
    assert table_of(tmp_path, FIRST).splitlines()[0] == ",".join(FIRST)


def test_table_of_text_has_its_figures_but_not_its_counts(tmp_path):
    text = {"epoch": 1, "updates": 2, "eval_loss": 1.5, "bits_per_character": 2.25, "tokens": 9}
    head, row = table_of(tmp_path, FIRST, text).splitlines()
    assert head == ",".join([*FIRST, "eval_loss", "bits_per_character"]) and row.endswith(",1.5,2.25")


def test_last_of_two_evaluations_is_used(tmp_path):
    rows = table_of(tmp_path, FIRST, EVALUATION, {**EVALUATION, "accuracy": 0.5}).splitlines()
    assert rows[1].endswith(",0.5")


def test_evaluation_before_first_window_has_no_row(tmp_path):
    assert table_of(tmp_path, EVALUATION, FIRST).splitlines()[1] == "1,1,2.5,0.1,1.5,64,0.5,"


@pytest.mark.parametrize("begins", ["=", "+", "-", "@", " =", "\uff1d", "\uff0b", "\uff0d", "\uff20"])
def test_text_is_not_a_formula(tmp_path, begins):
    """A spreadsheet would compute a formula and open its links; numbers stay numbers."""
    text = f"{begins}cmd|' /C calc'!A0"
    line = {**FIRST, "loss": -2.5, text: text, "note": "a=b", "list": [text]}
    names, cells = list(csv.reader(table_of(tmp_path, line).splitlines()))
    row = dict(zip(names, cells))
    assert row[f"'{text}"] == f"'{text}" and row["loss"] == "-2.5" and row["note"] == "a=b"
    assert row["list"] == json.dumps([text])


def test_table_texts_are_visible_and_cut(tmp_path):
    table = table_of(tmp_path, {**FIRST, "a\x1b\nb": "\udc80\r", "long": "x" * 10**5})
    assert len(table.splitlines()) == 2 and r"a\x1b\nb" in table and r"\udc80\r" in table and len(table) < 500


def test_number_of_table_columns_is_limited(tmp_path):
    """Each line with a name of its own would be lines times names of cells: 493 kB became 141 MB."""
    assert len(table_of(tmp_path, {**FIRST, **{f"n{number}": 1 for number in range(192)}}).splitlines()) == 2
    with pytest.raises(ValueError, match=r"^'.*metrics.jsonl' has 307 names of values; a table has at most 200$"):
        table_of(tmp_path, *({**FIRST, f"n{number}": 1} for number in range(300)))
