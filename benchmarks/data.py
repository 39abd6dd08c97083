"""How fast is the input, and what does an epoch take besides its training?"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import mnist, results
from .choosing import available, known, start
from .contenders import OURS, Entry

# Each yields MNIST's training images in batches of 32, 32x32 and normalised.
LOADERS = (
    Entry(OURS, "mindspore", "loader_ours.py"),
    Entry("MnistDataset", "mindspore", "loader_mindspore.py"),
    Entry("torch-0-workers", "torch", "loader_torch.py"),
    Entry("torch-2-workers", "torch", "loader_torch.py", ("--workers", "2")),
)
EPOCHS = Entry(OURS, "mindspore", "epoch_ours.py")
NETWORKS = ("lenet5", "mlp")
WINDOWS = (4,)
ROUNDS = {"ready": 3, "loader": 7, "epoch": 5}
READY_COLUMNS = {"contender": "", "first_s": ".3f", "again_s": ".3f"}
LOADER_COLUMNS = {"contender": "", "ms": ".3f", "ms_min": ".3f", "ms_max": ".3f", "ratio": ".2f"}
EPOCH_COLUMNS = {
    "network": "",
    "window": "d",
    "whole_s": ".3f",
    "training_s": ".3f",
    "ratio": ".3f",
    "ratio_min": ".3f",
    "ratio_max": ".3f",
}
TITLES = (
    "seconds from nothing to the first batch, imports not counted: files from the disk, then once more",
    "milliseconds per batch of 32 over an epoch; ratio: how many times as fast ours is",
    "an epoch with data, progress and metrics file, and the same on micro-batches that are ready in memory",
)


def run(arguments: Namespace) -> None:
    """Measure the three, print three tables, and write the results."""
    known("--networks", arguments.networks, NETWORKS)
    networks = arguments.networks or (NETWORKS[:1] if arguments.short else NETWORKS)
    windows = arguments.windows or WINDOWS
    rounds = {name: 1 if arguments.short else arguments.rounds or count for name, count in ROUNDS.items()}
    source = mnist.source(arguments.short)
    print(f"data: {source}", flush=True)
    loaders = available(LOADERS, arguments.contenders)
    versions: dict[str, str] = {}
    ready = [_ready(loader, arguments.short, rounds["ready"]) for loader in loaders]
    with mnist.files(arguments.short) as folder:
        batches = _loaders(loaders, folder, rounds["loader"], versions)
        epochs = [_epoch(n, window, folder, rounds["epoch"], versions) for n in networks for window in windows]
    for title, rows, columns in zip(TITLES, (ready, batches, epochs), (READY_COLUMNS, LOADER_COLUMNS, EPOCH_COLUMNS)):
        print(f"\n{title}")
        results.show(rows, columns)
    settings = {"data": source, "rounds": rounds, "batch": 32, "short": arguments.short}
    path = results.save("data", arguments.output, [*ready, *batches, *epochs], settings, versions)
    if not arguments.short:
        results.plot(path.with_suffix(".png"), lambda figure: _draw(figure, batches, epochs))


def _first_batch(loader: Entry, folder: Path) -> float:
    with start(loader, "--data", str(folder)) as contender:
        return contender.ask(what="ready")["seconds"]


def _ready(loader: Entry, short: bool, rounds: int) -> dict[str, Any]:
    """Measure the first batch of fresh processes: on files it never saw and that are not in memory, then again."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        with mnist.files(short) as folder:
            mnist.forget(folder)
            for measured in seconds:
                measured.append(_first_batch(loader, folder))
    first, again = map(statistics.median, seconds)
    return {"part": "ready", "contender": loader.name, "first_s": first, "again_s": again}


def _loaders(loaders: Sequence[Entry], folder: Path, rounds: int, versions: dict[str, str]) -> list[dict[str, Any]]:
    """Measure whole epochs, each loader in its turn while the others are stopped."""
    milliseconds: dict[str, list[float]] = {loader.name: [] for loader in loaders}
    with ExitStack() as running:
        contenders = []
        for loader in loaders:
            contenders.append(running.enter_context(start(loader, "--data", str(folder))))
            versions.update(contenders[-1].about["versions"])
            contenders[-1].ask(what="ready")
            contenders[-1].ask(what="epoch")
            contenders[-1].stop()
        for _ in range(rounds):
            for contender in contenders:
                contender.go()
                answer = contender.ask(what="epoch")
                contender.stop()
                milliseconds[contender.name].append(answer["seconds"] / answer["batches"] * 1000)
    return [_loader_row(name, measured, milliseconds.get(OURS)) for name, measured in milliseconds.items()]


def _loader_row(name: str, measured: list[float], ours: list[float] | None) -> dict[str, Any]:
    ratio = statistics.median(theirs / our for theirs, our in zip(measured, ours)) if ours else None
    summary = {"ms": statistics.median(measured), "ms_min": min(measured), "ms_max": max(measured)}
    return {"part": "loader", "contender": name, **summary, "ratio": ratio}


def _epoch(network: str, window: int, folder: Path, rounds: int, versions: dict[str, str]) -> dict[str, Any]:
    """Measure epochs with everything around them and without, in turn, in one process."""
    flags = ("--data", str(folder), "--network", network, "--window", str(window))
    seconds: dict[str, list[float]] = {"whole": [], "training": []}
    with start(EPOCHS, *flags) as contender:
        versions.update(contender.about["versions"])
        for what in seconds:
            contender.ask(what=what)  # compiles, and warms up
        for _ in range(rounds):
            for what, measured in seconds.items():
                measured.append(contender.ask(what=what)["seconds"])
    whole, training = (statistics.median(measured) for measured in seconds.values())
    pairs = [one / other for one, other in zip(seconds["whole"], seconds["training"])]
    summary = {"whole_s": whole, "training_s": training, "ratio": whole / training}
    return {
        "part": "epoch",
        "network": network,
        "window": window,
        **summary,
        "ratio_min": min(pairs),
        "ratio_max": max(pairs),
    }


def _draw(figure: Any, batches: list[dict[str, Any]], epochs: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    bars = left.barh([row["contender"] for row in batches], [row["ms"] for row in batches])
    left.bar_label(bars, fmt="%.2f", padding=3)
    left.invert_yaxis()
    left.margins(x=0.15)
    left.set_xlabel("ms per batch of 32 (shorter is better)")
    names = [f"{row['network']}, window {row['window']}" for row in epochs]
    bars = right.bar(names, [row["ratio"] for row in epochs])
    right.bar_label(bars, fmt="%.3f", padding=3)
    right.axhline(1, color="black", linewidth=0.8)
    right.set_ylabel("a whole epoch / its training alone")
