"""The benchmark `language`: all its contenders train the same network alike. No test measures speed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import language
from benchmarks.contenders import OURS
from benchmarks.environments import python
from benchmarks.options import NotAvailable
from benchmarks.performance_tables import TABLES
from test_benchmarks import RECORD, benchmark

PROGRAMS = Path(__file__).resolve().parents[1] / "benchmarks" / "programs"
ADAMW = "torch.optim.AdamW-12"


def part(record, name):
    return [row for row in record["rows"] if row["part"] == name]


@pytest.mark.slow
def test_contenders_train_alike(tmp_path):
    names = [f"{OURS}-12", f"{OURS}-3+3+3+3"]
    if python("torch") is not None:
        names += ["torch-12", "torch-3+3+3+3", ADAMW]
    record, printed = benchmark("language", tmp_path, "--contenders", *names)
    assert set(record) == RECORD and "validation" in printed
    rows = part(record, "run")
    assert [row["contender"] for row in rows] == names
    for row in rows:
        assert row["updates"] == 3 and row["validation_tokens"] > 10_000
        assert row["tokens_per_s"] > 0 and row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["all_s"] == row["train_s"] + row["start_s"]
        if row["contender"] == ADAMW:  # the mutant: another rule
            assert row["difference"] > 1e-3 and abs(row["validation"] - rows[0]["validation"]) > 1e-3
        else:
            assert row["difference"] < 1e-5 and row["validation"] == pytest.approx(rows[0]["validation"], abs=1e-5)


@pytest.fixture
def files(monkeypatch):
    """The module with which programs read what they begin with."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import language_files

    return language_files


def test_files_are_read_as_written(files, tmp_path, rng):
    windows = [(rng.randint(0, 9, (rows, 4)), rng.randint(-100, 9, (rows, 4))) for rows in (3, 1, 3)]
    start = files.Start(windows, windows[0], {"a.weight": np.ones(2, np.float32)}, [0.5, 0.25, 0.125], {"heads": 4})
    files.write(tmp_path, start)
    read = files.read(tmp_path)
    assert len(read.windows) == 3 and read.rates == start.rates and read.recipe == start.recipe
    for written, same in zip([*windows, start.test], [*read.windows, read.test]):
        assert all(map(np.array_equal, written, same))
    assert np.array_equal(read.weights["a.weight"], start.weights["a.weight"])


def test_window_is_split_into_rows(files):
    columns = np.arange(10).reshape(5, 2), -np.arange(10).reshape(5, 2)
    pieces = files.parts(columns, 2)
    assert [len(tokens) for tokens, _ in pieces] == [2, 2, 1]
    assert all(np.array_equal(np.concatenate(column), whole) for column, whole in zip(zip(*pieces), columns))
    assert files.predicted(columns[1]) == 1  # a target below 0 is padding


def test_difference_is_largest_of_first_updates():
    run, whole = Namespace(losses=[1.0, 2.0, 4.0]), Namespace(losses=[1.0, 1.5, 2.0])
    assert language._difference(run, whole, 2) == 0.5 and language._difference(run, whole, 3) == 2.0
    assert language._difference(run, None, 3) is None


def test_curves_are_means_of_ten_updates():
    losses = {"a": [float(n) for n in range(25)], "b": [1.0] * 25}
    assert list(language._curves(losses)) == [
        {"part": "curve", "update": 10, "a": 4.5, "b": 1.0},
        {"part": "curve", "update": 20, "a": 14.5, "b": 1.0},
    ]


def arguments(**given):
    options = dict.fromkeys(["networks", "windows", "rounds", "contenders"])
    return Namespace(**{**options, "command": "language", "short": False, "output": "nowhere", **given})


def test_missing_text_raises_error_naming_variable(monkeypatch):
    monkeypatch.delenv("SHAKESPEARE_DATA", raising=False)
    with pytest.raises(NotAvailable, match="language needs the real tinyshakespeare: set SHAKESPEARE_DATA to where"):
        language.run(arguments())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": 11}, "argument --rounds: must be <= 10, which are all updates of the recipe, but got 11"),
        ({"windows": [2]}, "argument --windows: language has no such choice"),
    ],
)
def test_invalid_options_are_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        language.run(arguments(**given))


def test_table_shows_each_run():
    row = {"part": "run", "contender": "x", "updates": 2000, "validation": 1.87654, "difference": 0.0001}
    row |= {"difference_all": 0.5, "ms": 20.04, "ms_min": 19.0, "ms_max": 25.0, "ratio": 1.0, "tokens_per_s": 38_123.4}
    benchmark_name, table = TABLES["language"]
    lines = table([{**row, "train_s": 40.2, "all_s": 46.7}]).splitlines()
    assert benchmark_name == "language" and "2,000 updates" in lines[0]
    assert lines[2] == "| x | 1.8765 | 1.0e-04 | 5.0e-01 | 20.0 (19.0–25.0) | 1.00 | 38,123 | 40 | 47 |"
