"""The benchmarks of input, start and accuracy run and write valid rows. No test measures speed."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest

from benchmarks import accuracy, data, mnist, start
from benchmarks.contenders import OURS
from benchmarks.contenders import start as launch
from benchmarks.environments import python
from benchmarks.options import NotAvailable, check_names, reject_options
from benchmarks.runner import Session
from cifar_files import write_cifar10
from idx_files import fingerprints, write_mnist, zipped
from model_zoo import create_dataset
from test_benchmarks import RECORD
from test_benchmarks import benchmark as run_benchmark

TORCH = pytest.mark.skipif(python("torch") is None, reason="no environment of PyTorch (python -m benchmarks setup)")


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


def check_data(record, contenders):
    ready, loaders, epochs = (part(record, name) for name in ("ready", "loader", "epoch"))
    assert [row["contender"] for row in ready] == [row["contender"] for row in loaders] == contenders
    check_positive(ready, "first_s", "again_s")
    check_positive(loaders, "ms", "ms_min", "ms_max", "ratio")
    assert [row["ratio"] for row in loaders if row["contender"] == OURS] == [1]
    assert [(row["network"], row["window"]) for row in epochs] == [("lenet5", 4)]
    check_positive(epochs, "whole_s", "training_s", "ratio")
    assert all(row["ratio"] == pytest.approx(row["whole_s"] / row["training_s"]) for row in epochs)


@pytest.mark.slow
def test_data_benchmark_runs(tmp_path):
    record, printed = benchmark("data", tmp_path, "--contenders", OURS, "MnistDataset")
    check_data(record, [OURS, "MnistDataset"])
    assert "to the first batch" in printed and "batch of 32" in printed and "ready in memory" in printed


@TORCH
@pytest.mark.slow
def test_data_benchmark_runs_with_pytorch(tmp_path):
    record, _ = benchmark("data", tmp_path)
    check_data(record, [entry.name for entry in data.LOADERS])
    assert "torch" in record["versions"]


def check_start(record, contenders):
    commands, stages, compiles = (part(record, name) for name in ("command", "stage", "compile"))
    assert [row["contender"] for row in commands] == contenders
    check_positive([*commands, *stages], "seconds", "min", "max")
    assert [row["stage"] for row in stages][:2] == ["interpreter", "import mindspore"]
    assert stages[-1]["stage"] == "first window"
    check_positive(compiles, "graphs", "compile_s", "window_s", "tail_s")


@pytest.mark.slow
def test_start_benchmark_runs(tmp_path):
    record, printed = benchmark("start", tmp_path)
    check_start(record, [start.TRAIN, OURS])
    assert "stage by stage" in printed
    # What a run compiles does not depend on the size of the window.
    _, two = rows = part(record, "compile")
    assert [row["window"] for row in rows] == [1, 2]
    assert two["tail_graphs"] == 1 and two["short_graphs"] <= 1  # the update that divides


@pytest.mark.slow
def test_accuracy_benchmark_runs(tmp_path):
    record, printed = benchmark("accuracy", tmp_path)
    (epoch,), (summary,) = part(record, "epoch"), part(record, "summary")
    assert (epoch["contender"], epoch["epoch"], epoch["seed"]) == (OURS, 1, 1)
    assert 0 <= epoch["accuracy"] <= 1 and summary["accuracy"] == epoch["accuracy"]
    check_positive([epoch], "seconds", "start_s")
    assert record["settings"]["data"] == "the embedded digits" and "98.5%" in printed


@TORCH
@pytest.mark.slow
@pytest.mark.parametrize("program", accuracy.TASKS["accuracy"].programs, ids=lambda program: program.name)
def test_each_accuracy_program_learns(program, tmp_path):
    folder = write_mnist(tmp_path, train=640, test=100)
    session = Session("accuracy", Namespace(output=tmp_path), {})
    rows = list(accuracy._train(session, program, 1, folder, 15))
    assert [row["epoch"] for row in rows] == list(range(1, 16)) and session.versions
    assert rows[-1]["accuracy"] > 0.9
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("program", accuracy.TASKS["cifar10"].programs, ids=lambda program: program.name)
def test_each_cifar10_program_learns(program, tmp_path):
    if python(program.environment) is None:
        pytest.skip("no environment of PyTorch (python -m benchmarks setup)")
    folder = write_cifar10(tmp_path / "data", train=128, test=100)
    rows = list(accuracy._train(Session("cifar10", Namespace(output=tmp_path), {}), program, 1, folder, 10))
    assert rows[-1]["accuracy"] > 0.25, rows  # 10 classes


@pytest.mark.parametrize("name", ["cifar10", "accuracy"])
def test_missing_data_raises_error_naming_variable(name, monkeypatch):
    variable = "MNIST_DATA" if name == "accuracy" else "CIFAR10_DATA"
    monkeypatch.delenv(variable, raising=False)
    options = dict.fromkeys(["networks", "windows", "rounds", "contenders"])
    arguments = Namespace(command=name, short=False, output="nowhere", **options)
    with pytest.raises(NotAvailable, match=f"{name} needs the real .*: set {variable} to where it is"):
        accuracy.run(arguments)


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
    summary = accuracy._summary(accuracy.TASKS["accuracy"], "x", rows)
    assert (summary["goal_s"], summary["reached"]) == (goal, reached)


@TORCH
@pytest.mark.slow
def test_all_loaders_yield_equal_images(tmp_path):
    write_mnist(tmp_path, train=64, test=32)
    means = [_mean(loader, tmp_path) for loader in data.LOADERS]
    assert means == pytest.approx([means[0]] * len(means), abs=0.01)


def _mean(loader, folder):
    with launch(loader, "--data", str(folder)) as contender:
        answer = contender.ask(what="ready")
        assert answer["images"] == [32, 1, 32, 32] and answer["labels"] == [32]
        assert contender.ask(what="epoch")["rows"] == 64
        return contender.ask(what="mean")["mean"]


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read_from_zip_or_folder(packed, tmp_path, monkeypatch):
    written = write_mnist(tmp_path / "written", train=64, test=32)
    path = written
    if packed:
        names = fingerprints(written)
        path = tmp_path / "MNIST_Data.zip"
        path.write_bytes(zipped([(f"MNIST_Data/{name}", (written / name).read_bytes()) for name in names]))
    monkeypatch.setenv("MNIST_DATA", str(path))
    assert mnist.source(short=False) == "MNIST"
    with mnist.files(short=False) as folder:
        mnist.drop_page_cache(folder)
        assert fingerprints(folder) == fingerprints(written)
    assert not folder.exists()


def test_random_files_replace_missing_mnist(monkeypatch):
    monkeypatch.setenv("MNIST_DATA", "/nowhere")
    assert mnist.source(short=False).startswith("random")
    with mnist.files(short=True) as folder:
        assert create_dataset(folder, 32, usage="train").get_dataset_size() == 20
        assert create_dataset(folder, 32, usage="test").get_dataset_size() == 4


def test_unknown_options_are_rejected():
    with pytest.raises(ValueError, match="argument --networks: must be of a, b, but got c"):
        check_names("--networks", ["a", "c"], ["a", "b"])
    with pytest.raises(ValueError, match="argument --windows: accuracy has no such choice"):
        reject_options("accuracy", rounds=None, windows=[2])
    check_names("--networks", None, ["a"])
