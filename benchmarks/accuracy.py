"""How soon does LeNet5 read MNIST?"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import mnist, results
from .choosing import available, start, unused
from .contenders import OURS, Entry

# Each trains LeNet5 epoch by epoch, and evaluates after each.
PROGRAMS = (
    Entry(OURS, "mindspore", "accuracy_ours.py"),
    Entry("torch-0-workers", "torch", "accuracy_torch.py"),
    Entry("torch-2-workers", "torch", "accuracy_torch.py", ("--workers", "2")),
)
EPOCHS, ROUNDS = 10, 3
GOAL = 0.985
EPOCH_COLUMNS = {"contender": "", "seed": "d", "epoch": "d", "seconds": ".1f", "accuracy": ".4f"}
SUMMARY_COLUMNS = {"contender": "", "start_s": ".1f", "goal_s": ".1f", "reached": "", "all_s": ".1f", "accuracy": ".4f"}


def run(arguments: Namespace) -> None:
    """Train each contender alone on the machine, in turn; print tables and write the results."""
    unused("accuracy", networks=arguments.networks, windows=arguments.windows)
    if not (arguments.short or mnist.real()):
        print("accuracy needs the real MNIST: set MNIST_DATA to its zip or folder (train.py --download fetches it)")
        raise SystemExit(2)
    epochs = 1 if arguments.short else EPOCHS
    rounds = 1 if arguments.short else arguments.rounds or ROUNDS
    versions: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    with ExitStack() as kept:
        folder = None if arguments.short else kept.enter_context(mnist.files(short=False))
        programs = available(PROGRAMS, [OURS] if arguments.short else arguments.contenders)
        for seed in range(1, rounds + 1):
            for program in programs:
                rows += _train(program, seed, folder, epochs, versions)
    summary = [_summary(p.name, [row for row in rows if row["contender"] == p.name]) for p in programs]
    results.show(rows, EPOCH_COLUMNS)
    print(f"\nmedians over the seeds; goal_s: seconds of training and evaluation to {GOAL:.1%}")
    results.show(summary, SUMMARY_COLUMNS)
    settings = {"epochs": epochs, "rounds": rounds, "batch": 32, "window": 4, "goal": GOAL, "short": arguments.short}
    settings["data"] = "the embedded digits" if folder is None else "MNIST"
    path = results.save("accuracy", arguments.output, [*rows, *summary], settings, versions)
    if not arguments.short:
        results.plot(path.with_suffix(".png"), lambda figure: _draw(figure, rows))


def _train(
    program: Entry, seed: int, folder: Path | None, epochs: int, versions: dict[str, str]
) -> list[dict[str, Any]]:
    """Return a row for each epoch. Its seconds count from the end of the imports; `start_s` is what was before."""
    data = ("--data", str(folder)) if folder else ()
    began = time.perf_counter()
    with start(program, "--seed", str(seed), *data) as contender:
        seconds = contender.about["seconds"]
        start_s = time.perf_counter() - began - seconds
        versions.update(contender.about["versions"])
        rows = []
        for epoch in range(1, epochs + 1):
            answer = contender.ask()
            seconds += answer["seconds"]
            row = {"part": "epoch", "contender": program.name, "seed": seed, "epoch": epoch, "start_s": start_s}
            rows.append({**row, "seconds": seconds, "accuracy": answer["accuracy"]})
    return rows


def _summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the seeds; one that never gets to the goal counts as later than any that does."""
    last = [row for row in rows if row["epoch"] == max(row["epoch"] for row in rows)]
    reached = [_reached([row for row in rows if row["seed"] == end["seed"]]) for end in last]
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


def _reached(rows: list[dict[str, Any]]) -> float:
    """Return the seconds to the end of the first epoch that reaches the goal."""
    return next((row["seconds"] for row in rows if row["accuracy"] >= GOAL), float("inf"))


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(row["contender"] for row in rows)):
        for seed in dict.fromkeys(row["seed"] for row in rows):
            run = [row for row in rows if (row["contender"], row["seed"]) == (name, seed)]
            label = name if seed == 1 else None
            points = [row["seconds"] for row in run], [row["accuracy"] * 100 for row in run]
            axes.plot(*points, marker="o", markersize=3, color=f"C{number}", label=label)
    axes.axhline(GOAL * 100, color="black", linewidth=0.8)
    axes.set_xlabel("seconds of training and evaluation")
    axes.set_ylabel("test accuracy of LeNet5 on MNIST, %")
    axes.legend()
