"""The benchmark `accuracy`: seconds until LeNet5 reaches an accuracy on MNIST."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from . import mnist
from .contenders import OURS, Entry, available
from .options import data_of, reject_options
from .results import groups
from .runner import Session

PROGRAM = "accuracy.py"
PROGRAMS = (
    Entry(OURS, "mindspore", PROGRAM, ("--framework", "ours")),
    Entry("torch-0-workers", "torch", PROGRAM, ("--framework", "torch")),
    Entry("torch-2-workers", "torch", PROGRAM, ("--framework", "torch", "--workers", "2")),
)
"""tuple[Entry, ...], programs that train epoch by epoch and evaluate after each."""
GOAL, EPOCHS, SEEDS = 0.985, 10, 3
TABLES = {
    "epoch": ("", "contender seed:d epoch:d seconds:.1f accuracy:.4f"),
    "summary": (
        "medians over the seeds; goal_s: seconds of training and evaluation to the goal",
        "contender goal start_s:.1f goal_s:.1f reached all_s:.1f accuracy:.4f",
    ),
}


def run(arguments: Namespace) -> None:
    """Train each contender alone on the machine, in turn; print tables and write the results."""
    reject_options("accuracy", windows=arguments.windows, networks=arguments.networks)
    short = arguments.short  # on the embedded digits
    record = {"rounds": arguments.rounds, "short": short, "data": "the embedded digits" if short else "real"}
    session = Session("accuracy", arguments, record)
    rows: list[dict[str, Any]] = []
    with nullcontext() if short else mnist.files(data_of("accuracy", "MNIST_DATA", "MNIST")) as folder:
        for row in _rows(session, arguments, folder):
            rows.append({"network": "lenet5", **row})
            session.rows = [*rows, *(summary_of(name, mine) for (name,), mine in groups(rows, "contender").items())]
            session.save()
    session.finish(TABLES)


def _rows(session: Session, arguments: Namespace, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each epoch of each contender and seed."""
    short = arguments.short
    epochs, seeds = (1, 1) if short else (EPOCHS, arguments.rounds or SEEDS)
    for seed in range(1, seeds + 1):
        for program in available(PROGRAMS, [OURS] if short else arguments.contenders):
            print(f"lenet5, seed {seed}: {program.name} ...", flush=True)
            yield from train(session, program, seed, folder, epochs)


def train(session: Session, program: Entry, seed: int, folder: Path | None, epochs: int) -> Iterator[dict[str, Any]]:
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


def summary_of(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the seeds; one that never gets to the goal counts as later than any that does."""
    runs = groups(rows, "seed").values()
    last = [run[-1] for run in runs]
    reached = [next((row["seconds"] for row in run if row["accuracy"] >= GOAL), float("inf")) for run in runs]
    seconds = statistics.median_high(reached)
    return {
        "network": "lenet5",
        "part": "summary",
        "contender": name,
        "goal": f"{GOAL:.1%}",
        "start_s": statistics.median(row["start_s"] for row in last),
        "goal_s": None if seconds == float("inf") else seconds,
        "reached": f"{sum(value != float('inf') for value in reached)}/{len(reached)}",
        "all_s": statistics.median(row["seconds"] for row in last),
        "accuracy": statistics.median(row["accuracy"] for row in last),
    }
