"""The benchmark `accuracy`: seconds until a network reaches an accuracy on real data."""

from __future__ import annotations

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Callable, NamedTuple

from . import mnist
from .contenders import OURS, Entry, available
from .options import known, unused
from .runner import Session
from .tables import groups, part


class Task(NamedTuple):
    """What a network is trained to do, by programs that train it epoch by epoch and evaluate after each."""

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
    "lenet5": Task(
        *("MNIST", 0.985, 10, 3),
        (
            Entry(OURS, "mindspore", _MNIST, ("--framework", "ours")),
            Entry("torch-0-workers", "torch", _MNIST, ("--framework", "torch")),
            Entry("torch-2-workers", "torch", _MNIST, ("--framework", "torch", "--workers", "2")),
        ),
        "MNIST_DATA",
        lambda path: mnist.files(short=False),
    ),
    "small_resnet": Task(
        *("CIFAR-10", 0.8, 15, 1),
        (
            Entry(OURS, "mindspore", _CIFAR, ("--framework", "ours")),
            Entry(f"{OURS}-batchnorm", "mindspore", _CIFAR, ("--framework", "ours", "--norm", "batch")),
            Entry("torch", "torch", _CIFAR, ("--framework", "torch")),
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
    unused("accuracy", windows=arguments.windows)
    known("--networks", arguments.networks, ["lenet5"] if arguments.short else TASKS)  # digits are embedded
    networks = arguments.networks or ["lenet5"]
    missing = [TASKS[name] for name in networks if not (arguments.short or _data(TASKS[name]).exists())]
    for task in missing:
        print(
            f"accuracy needs the real {task.data}: set {task.variable} to where it is (train.py --download fetches it)"
        )
    if missing:
        raise SystemExit(2)
    what = {"rounds": arguments.rounds, "short": arguments.short}
    session = Session("accuracy", arguments, {**what, "data": "the embedded digits" if arguments.short else "real"})
    for name in networks:
        rows = _rows(session, name, arguments)
        summaries = [_summary(who, each, TASKS[name].goal) for (who,), each in groups(rows, "contender").items()]
        session.rows += [{"network": name, **row} for row in (*rows, *summaries)]
        session.save()
    session.finish(TABLES, draw, size=(1 + 6.0 * len(networks), 5.0))


def _data(task: Task) -> Path:
    return Path(os.environ.get(task.variable) or "/nowhere")


def _rows(session: Session, name: str, arguments: Namespace) -> list[dict[str, Any]]:
    """Return a row for each epoch of each contender and seed."""
    task, short = TASKS[name], arguments.short
    epochs, rounds = (1, 1) if short else (task.epochs, arguments.rounds or task.rounds)
    rows = []
    with ExitStack() as kept:
        folder = None if short else kept.enter_context(task.files(_data(task)))
        for seed in range(1, rounds + 1):
            for program in available(task.programs, [OURS] if short else arguments.contenders):
                print(f"{name}, seed {seed}: {program.name} ...", flush=True)
                rows += _train(session, program, seed, folder, epochs)
    return rows


def _train(session: Session, program: Entry, seed: int, folder: Path | None, epochs: int) -> list[dict[str, Any]]:
    """Return a row for each epoch. Its seconds count from the end of the imports; `start_s` is what was before."""
    began = time.perf_counter()
    with session.start(program, seed=seed, data=folder) as contender:
        seconds = contender.about["seconds"]
        start_s = time.perf_counter() - began - seconds
        rows = []
        for epoch in range(1, epochs + 1):
            answer = contender.ask()
            seconds += answer["seconds"]
            row = {"part": "epoch", "contender": program.name, "seed": seed, "epoch": epoch, "start_s": start_s}
            rows.append({**row, "seconds": seconds, "accuracy": answer["accuracy"]})
    return rows


def _summary(name: str, rows: list[dict[str, Any]], goal: float) -> dict[str, Any]:
    """Return medians over the seeds; one that never gets to the goal counts as later than any that does."""
    runs = groups(rows, "seed").values()
    last = [run[-1] for run in runs]
    reached = [next((row["seconds"] for row in run if row["accuracy"] >= goal), float("inf")) for run in runs]
    seconds = statistics.median_high(reached)
    return {
        "part": "summary",
        "contender": name,
        "goal": f"{goal:.1%}",
        "start_s": statistics.median(row["start_s"] for row in last),
        "goal_s": None if seconds == float("inf") else seconds,
        "reached": f"{sum(one != float('inf') for one in reached)}/{len(reached)}",
        "all_s": statistics.median(row["seconds"] for row in last),
        "accuracy": statistics.median(row["accuracy"] for row in last),
    }


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the accuracy of each run over its seconds, for each network."""
    networks = groups(part(rows, "epoch"), "network")
    panels = figure.subplots(1, len(networks), squeeze=False)[0]
    for axes, ((network,), mine) in zip(panels, networks.items()):
        runs = groups(mine, "contender", "seed")
        names = list(dict.fromkeys(name for name, _ in runs))
        for (name, seed), run in runs.items():
            points = [row["seconds"] for row in run], [row["accuracy"] * 100 for row in run]
            label, colour = name if seed == 1 else None, f"C{names.index(name)}"
            axes.plot(*points, marker="o", markersize=3, color=colour, label=label)
        axes.axhline(TASKS[network].goal * 100, color="black", linewidth=0.8)
        axes.set_xlabel("seconds of training and evaluation")
        axes.set_ylabel(f"test accuracy of {network} on {TASKS[network].data}, %")
        axes.legend()
