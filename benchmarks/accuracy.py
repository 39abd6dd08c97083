"""The benchmarks `accuracy` and `cifar10`: seconds until a network reaches an accuracy on real data."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Callable, NamedTuple

from . import mnist
from .contenders import OURS, Entry, available
from .options import data_of, reject_options
from .runner import Session
from .tables import groups, part


class Task(NamedTuple):
    """What a network is trained to do, by programs that train it epoch by epoch and evaluate after each."""

    network: str
    data: str
    goal: float
    epochs: int
    rounds: int
    programs: Sequence[Entry]
    variable: str
    """The environment variable that names the data."""
    files: Callable[[Path], AbstractContextManager[Path]]
    """Opens it as the folder that the programs read."""


_MNIST, _CIFAR = "accuracy.py", "cifar10.py"
TASKS = {
    "accuracy": Task(
        *("lenet5", "MNIST", 0.985, 10, 3),
        (
            Entry(OURS, "mindspore", _MNIST, ("--framework", "ours")),
            Entry("torch-0-workers", "torch", _MNIST, ("--framework", "torch")),
            Entry("torch-2-workers", "torch", _MNIST, ("--framework", "torch", "--workers", "2")),
        ),
        "MNIST_DATA",
        lambda path: mnist.files(short=False),
    ),
    "cifar10": Task(
        *("small_resnet", "CIFAR-10", 0.8, 16, 1),
        (
            Entry(OURS, "mindspore", _CIFAR, ("--framework", "train.py")),
            Entry("torch", "torch", _CIFAR, ("--framework", "torch")),
            Entry(f"{OURS}-batchnorm", "mindspore", _CIFAR, ("--framework", "batch_norm")),
        ),
        "CIFAR10_DATA",
        nullcontext,
    ),
}
TABLES = {
    "epoch": ("", "network contender seed:d epoch:d seconds:.1f accuracy:.4f"),
    "summary": (
        "medians over the seeds; goal_s: seconds of training and evaluation to the goal",
        "network contender goal start_s:.1f goal_s:.1f reached all_s:.1f accuracy:.4f",
    ),
}


def run(arguments: Namespace) -> None:
    """Train each contender alone on the machine, in turn; print tables and write the results."""
    name, short = arguments.command, arguments.short
    reject_options(name, windows=arguments.windows, networks=arguments.networks)
    task = TASKS[name]
    embedded = short and name == "accuracy"  # the digits
    record = {"rounds": arguments.rounds, "short": short, "data": "the embedded digits" if embedded else "real"}
    session = Session(name, arguments, record)
    with nullcontext() if embedded else task.files(data_of(name, task.variable, task.data)) as folder:
        rows = _kept(session, arguments)
        for row in _rows(session, task, arguments, folder):
            rows.append({"network": task.network, **row})
            summaries = [_summary(task, contender, mine) for (contender,), mine in groups(rows, "contender").items()]
            session.rows = [*rows, *summaries]
            session.save()  # it takes hours
    session.finish(TABLES, draw, size=(11.0, 5.0))


def _kept(session: Session, arguments: Namespace) -> list[dict[str, Any]]:
    """Return the epochs that an earlier run has measured of contenders that are not asked for: each takes an hour."""
    if not arguments.contenders:
        return []
    return [row for row in part(session.earlier_rows(), "epoch") if row["contender"] not in arguments.contenders]


def _rows(session: Session, task: Task, arguments: Namespace, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each epoch of each contender and seed."""
    short = arguments.short
    epochs, rounds = (1, 1) if short else (task.epochs, arguments.rounds or task.rounds)
    for seed in range(1, rounds + 1):
        for program in available(task.programs, [OURS] if short else arguments.contenders):
            print(f"{task.network}, seed {seed}: {program.name} ...", flush=True)
            yield from _train(session, program, seed, folder, epochs)


def _train(session: Session, program: Entry, seed: int, folder: Path | None, epochs: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each epoch. Its seconds count from the end of the imports; `start_s` is what was before."""
    began = time.perf_counter()
    with session.start(program, seed=seed, data=folder) as contender:
        seconds = contender.about["seconds"]
        start_s = time.perf_counter() - began - seconds
        for epoch in range(1, epochs + 1):
            answer = contender.ask()
            seconds += answer["seconds"]
            row = {"part": "epoch", "contender": program.name, "seed": seed, "epoch": epoch, "start_s": start_s}
            yield {**row, "seconds": seconds, "accuracy": answer["accuracy"]}


def _summary(task: Task, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the seeds; one that never gets to the goal counts as later than any that does."""
    runs = groups(rows, "seed").values()
    last = [run[-1] for run in runs]
    reached = [next((row["seconds"] for row in run if row["accuracy"] >= task.goal), float("inf")) for run in runs]
    seconds = statistics.median_high(reached)
    return {
        "network": task.network,
        "part": "summary",
        "contender": name,
        "goal": f"{task.goal:.1%}",
        "start_s": statistics.median(row["start_s"] for row in last),
        "goal_s": None if seconds == float("inf") else seconds,
        "reached": f"{sum(value != float('inf') for value in reached)}/{len(reached)}",
        "all_s": statistics.median(row["seconds"] for row in last),
        "accuracy": statistics.median(row["accuracy"] for row in last),
    }


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the accuracy of each run over its epochs, and over its seconds."""
    runs = groups(part(rows, "epoch"), "contender", "seed")
    names = list(dict.fromkeys(name for name, _ in runs))
    (task,) = [task for task in TASKS.values() if task.network == rows[0]["network"]]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, label in zip(panels, ("epoch", "seconds"), ("epoch", "seconds of training and evaluation")):
        for (name, seed), run in runs.items():
            points = [row[key] for row in run], [row["accuracy"] * 100 for row in run]
            style = {"color": f"C{names.index(name)}", "label": name if seed == 1 else None}
            axes.plot(*points, marker="o", markersize=3, **style)
        axes.axhline(task.goal * 100, color="black", linewidth=0.8)
        axes.set_xlabel(label)
    panels[0].set_ylabel(f"test accuracy of {task.network} on {task.data}, %")
    panels[1].legend()
