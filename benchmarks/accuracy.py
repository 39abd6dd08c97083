"""The benchmark `accuracy`: seconds until LeNet5 reaches 98.5 % on MNIST."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import mnist
from .contenders import OURS, Entry, available
from .options import unused
from .runner import Session
from .tables import groups, part

# Each trains LeNet5 epoch by epoch, and evaluates after each.
PROGRAMS = (
    Entry(OURS, "mindspore", "accuracy.py", ("--framework", "ours")),
    Entry("torch-0-workers", "torch", "accuracy.py", ("--framework", "torch")),
    Entry("torch-2-workers", "torch", "accuracy.py", ("--framework", "torch", "--workers", "2")),
)
EPOCHS, ROUNDS = 10, 3
GOAL = 0.985
TABLES = {
    "epoch": ("", "contender seed:d epoch:d seconds:.1f accuracy:.4f"),
    "summary": (
        f"medians over the seeds; goal_s: seconds of training and evaluation to {GOAL:.1%}",
        "contender start_s:.1f goal_s:.1f reached all_s:.1f accuracy:.4f",
    ),
}


def run(arguments: Namespace) -> None:
    """Train each contender alone on the machine, in turn; print tables and write the results."""
    unused("accuracy", networks=arguments.networks, windows=arguments.windows)
    if not (arguments.short or mnist.real()):
        print("accuracy needs the real MNIST: set MNIST_DATA to its zip or folder (train.py --download fetches it)")
        raise SystemExit(2)
    epochs, rounds = (1, 1) if arguments.short else (EPOCHS, arguments.rounds or ROUNDS)
    settings = {"epochs": epochs, "rounds": rounds, "batch": 32, "window": 4, "goal": GOAL, "short": arguments.short}
    settings["data"] = "the embedded digits" if arguments.short else "MNIST"
    session = Session("accuracy", arguments, settings)
    with ExitStack() as kept:
        folder = None if arguments.short else kept.enter_context(mnist.files(short=False))
        programs = available(PROGRAMS, [OURS] if arguments.short else arguments.contenders)
        for seed in range(1, rounds + 1):
            for program in programs:
                session.rows += _train(session, program, seed, folder, epochs)
    session.rows += [_summary(name, rows) for (name,), rows in groups(session.rows, "contender").items()]
    session.finish(TABLES, draw)


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


def _summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the seeds; one that never gets to the goal counts as later than any that does."""
    runs = groups(rows, "seed").values()
    last = [run[-1] for run in runs]
    reached = [next((row["seconds"] for row in run if row["accuracy"] >= GOAL), float("inf")) for run in runs]
    goal = statistics.median_high(reached)
    return {
        "part": "summary",
        "contender": name,
        "start_s": statistics.median(row["start_s"] for row in last),
        "goal_s": None if goal == float("inf") else goal,
        "reached": f"{sum(one != float('inf') for one in reached)}/{len(reached)}",
        "all_s": statistics.median(row["seconds"] for row in last),
        "accuracy": statistics.median(row["accuracy"] for row in last),
    }


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the accuracy of each run over its seconds."""
    axes = figure.subplots()
    runs = groups(part(rows, "epoch"), "contender", "seed")
    names = list(dict.fromkeys(name for name, _ in runs))
    for (name, seed), run in runs.items():
        points = [row["seconds"] for row in run], [row["accuracy"] * 100 for row in run]
        label, colour = name if seed == 1 else None, f"C{names.index(name)}"
        axes.plot(*points, marker="o", markersize=3, color=colour, label=label)
    axes.axhline(GOAL * 100, color="black", linewidth=0.8)
    axes.set_xlabel("seconds of training and evaluation")
    axes.set_ylabel("test accuracy of LeNet5 on MNIST, %")
    axes.legend()
