"""The benchmark `data`: the speed of the input pipelines, and what an epoch takes besides its training."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import mnist, plots
from .contenders import OURS, Entry, available
from .options import Settings, select_settings
from .process import Contender
from .runner import Session, alternate, ratio, ratios, summary, wake_and_ask
from .tables import part

# Each yields MNIST's training images in batches of 32, 32x32 and normalized.
LOADERS = (
    Entry(OURS, "mindspore", "loader.py", ("--pipeline", "ours")),
    Entry("MnistDataset", "mindspore", "loader.py", ("--pipeline", "tutorial")),
    Entry("torch-0-workers", "torch", "loader.py", ("--pipeline", "torch")),
    Entry("torch-2-workers", "torch", "loader.py", ("--pipeline", "torch", "--workers", "2")),
)
EPOCHS = Entry(OURS, "mindspore", "epoch_ours.py")
NETWORKS = ("lenet5", "mlp")
ROUNDS = {"ready": 3, "loader": 7, "epoch": 5}
TABLES = {
    "ready": (
        "seconds from nothing to the first batch, imports not counted: files from the disk, then once more",
        "contender first_s:.3f again_s:.3f",
    ),
    "loader": (
        "milliseconds per batch of 32 over an epoch; ratio: how many times as fast ours is",
        "contender ms:.3f ms_min:.3f ms_max:.3f ratio:.2f",
    ),
    "epoch": (
        "an epoch with data, progress and metrics file, and the same on micro-batches that are ready in memory",
        "network window:d whole_s:.3f training_s:.3f ratio:.3f ratio_min:.3f ratio_max:.3f",
    ),
}
FULL, SHORT = Settings(NETWORKS, (4,), rounds=0), Settings(NETWORKS[:1], (4,), rounds=1)  # 0: those of ROUNDS


def run(arguments: Namespace) -> None:
    """Measure the three, print three tables, and write the results."""
    settings = select_settings(FULL, SHORT, arguments, NETWORKS)
    rounds = {name: settings.rounds or count for name, count in ROUNDS.items()}
    source = mnist.source(arguments.short)
    print(f"data: {source}", flush=True)
    loaders = available(LOADERS, settings.contenders)
    record = {"data": source, "rounds": rounds, "batch": 32, "short": arguments.short}
    session = Session("data", arguments, record)
    session.rows += [_ready(session, loader, arguments.short, rounds["ready"]) for loader in loaders]
    with mnist.files(arguments.short) as folder:
        session.rows += _loaders(session, loaders, folder, rounds["loader"])
        for network in settings.networks:
            for window in settings.windows:
                session.rows.append(_epoch(session, network, window, folder, rounds["epoch"]))
    session.finish(TABLES, draw)


def _ready(session: Session, loader: Entry, short: bool, rounds: int) -> dict[str, Any]:
    """Measure the first batch of fresh processes: on files it never saw and that are not in memory, then again."""

    def first_batch() -> float:
        with session.start(loader, data=folder) as contender:
            return contender.ask(what="ready")["seconds"]

    seconds = []
    for _ in range(rounds):
        with mnist.files(short) as folder:
            mnist.drop_page_cache(folder)
            seconds.append((first_batch(), first_batch()))
    first, again = map(statistics.median, zip(*seconds))
    return {"part": "ready", "contender": loader.name, "first_s": first, "again_s": again}


def _loaders(session: Session, loaders: Sequence[Entry], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure complete epochs, each loader in its turn while the others are stopped."""

    def milliseconds(contender: Contender) -> float:
        answer = wake_and_ask(contender, what="epoch")
        return answer["seconds"] / answer["batches"] * 1000

    with session.stopped(loaders, data=folder) as contenders:
        for contender in contenders:
            wake_and_ask(contender, what="ready")
            wake_and_ask(contender, what="epoch")
        times = alternate(rounds, {contender.name: partial(milliseconds, contender) for contender in contenders})
    return [
        {"part": "loader", "contender": name, **summary(measured, "ms"), "ratio": ratio(measured, times.get(OURS))}
        for name, measured in times.items()
    ]


def _epoch(session: Session, network: str, window: int, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure epochs with everything around them and without, in turn, in one process."""
    with session.start(EPOCHS, data=folder, network=network, window=window) as contender:
        epochs = {kind: lambda kind=kind: contender.ask(what=kind)["seconds"] for kind in ("whole", "training")}
        alternate(1, epochs)  # compiles, and warms up
        whole, training = alternate(rounds, epochs).values()
    medians = {"whole_s": statistics.median(whole), "training_s": statistics.median(training)}
    row = {"part": "epoch", "network": network, "window": window, **medians}
    return {**row, **summary(ratios(whole, training), "ratio"), "ratio": medians["whole_s"] / medians["training_s"]}


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the loaders' milliseconds, and beside them the epochs' ratios."""
    batches, epochs = part(rows, "loader"), part(rows, "epoch")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    plots.bars(left, batches, "contender", "ms", "ms per batch of 32 (shorter is better)")
    names = [f"{row['network']}, window {row['window']}" for row in epochs]
    right.bar_label(right.bar(names, [row["ratio"] for row in epochs]), fmt="%.3f", padding=3)
    right.axhline(1, color="black", linewidth=0.8)
    right.set_ylabel("a whole epoch / its training alone")
