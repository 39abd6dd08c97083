"""The benchmark `accuracy` runs and writes valid rows."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest

from benchmarks import accuracy, mnist
from benchmarks.contenders import OURS
from benchmarks.options import NotAvailable, check_names, reject_options
from idx_files import fingerprints, write_mnist, zipped
from test_benchmarks import RECORD
from test_benchmarks import benchmark as run_benchmark


def benchmark(name, output, *options):
    """Run a benchmark in its short form as a user does, and return its record and what it printed."""
    record, printed = run_benchmark(name, output, *options)
    assert sorted(path.name for path in output.iterdir()) == [f"{name}.json"]
    assert set(record) == RECORD
    assert record["benchmark"] == name and "mindspore" in record["versions"]
    return record, printed


def part(record, name):
    return [row for row in record["rows"] if row["part"] == name]


def check_positive(rows, *columns):
    for row in rows:
        assert all(0 < row[column] < math.inf for column in columns), row


@pytest.mark.slow
def test_accuracy_benchmark_runs(tmp_path):
    record, printed = benchmark("accuracy", tmp_path)
    (epoch,), (summary,) = part(record, "epoch"), part(record, "summary")
    assert (epoch["contender"], epoch["epoch"], epoch["seed"]) == (OURS, 1, 1)
    assert 0 <= epoch["accuracy"] <= 1 and summary["accuracy"] == epoch["accuracy"]
    check_positive([epoch], "seconds", "start_s")
    assert record["settings"]["data"] == "the embedded digits" and "98.5%" in printed


def test_missing_data_raises_error_naming_variable(monkeypatch):
    monkeypatch.delenv("MNIST_DATA", raising=False)
    options = dict.fromkeys(["networks", "windows", "rounds", "contenders"])
    with pytest.raises(NotAvailable, match="accuracy needs the real MNIST: set MNIST_DATA to where it is"):
        accuracy.run(Namespace(short=False, output="nowhere", **options))


def epochs_of(accuracies, seed):
    row = {"contender": "x", "seed": seed, "start_s": 1.0}
    return [{**row, "epoch": n, "seconds": 10.0 * n, "accuracy": a} for n, a in enumerate(accuracies, start=1)]


@pytest.mark.parametrize(
    ("runs", "goal", "reached"),
    [
        ([[0.98, 0.985, 0.99]], 20.0, "1/1"),
        ([[0.9, 0.98]], None, "0/1"),
        ([[0.99, 0.98], [0.9, 0.99], [0.9, 0.9]], 20.0, "2/3"),
        ([[0.99, 0.98], [0.9, 0.9], [0.9, 0.9]], None, "1/3"),
    ],
)
def test_goal_is_first_epoch_reaching_target(runs, goal, reached):
    rows = [row for seed, accuracies in enumerate(runs) for row in epochs_of(accuracies, seed)]
    summary = accuracy.summary_of("x", rows)
    assert (summary["goal_s"], summary["reached"]) == (goal, reached)


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read_from_zip_or_folder(packed, tmp_path):
    written = write_mnist(tmp_path / "written", train=64, test=32)
    path = written
    if packed:
        names = fingerprints(written)
        path = tmp_path / "MNIST_Data.zip"
        path.write_bytes(zipped([(f"MNIST_Data/{name}", (written / name).read_bytes()) for name in names]))
    with mnist.files(path) as folder:
        assert fingerprints(folder) == fingerprints(written)
    assert not folder.exists()


def test_unknown_options_are_rejected():
    with pytest.raises(ValueError, match="argument --networks: must be of a, b, but got c"):
        check_names("--networks", ["a", "c"], ["a", "b"])
    with pytest.raises(ValueError, match="argument --windows: accuracy has no such choice"):
        reject_options("accuracy", rounds=None, windows=[2])
    check_names("--networks", None, ["a"])
