"""How long until the first update, and what does it go into?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable

from . import mnist, results
from .choosing import available, known, start
from .contenders import ENTRIES, OURS, Entry
from .process import ROOT, Contender, ContenderError, environment_of

Command = tuple[str, Callable[..., float]]

TRAIN = "train.py"
# All but train.py find their data ready in memory, and write no metrics.
CONTENDERS = (TRAIN, OURS, "tutorial-functional", "tutorial-cells", "torch")
STAGES = Entry(OURS, "mindspore", "start_ours.py")
NETWORKS = ("lenet5", "mlp")
WINDOWS = (2, 4, 16, 64)
BATCH, SHORT_BATCH = 32, 7
ROUNDS = 5
COMMAND_COLUMNS = {"network": "", "contender": "", "seconds": ".2f", "min": ".2f", "max": ".2f", "ratio": ".2f"}
STAGE_COLUMNS = {"network": "", "stage": "", "seconds": ".3f", "min": ".3f", "max": ".3f"}
COMPILE_COLUMNS = {"network": "", "window": "d", "graphs": "d", "compile_s": ".2f", "window_s": ".3f"}
TAIL_COLUMNS = {"tail_graphs": "d", "tail_s": ".3f", "short_graphs": "d", "short_s": ".2f"}


def run(arguments: Namespace) -> None:
    """Measure commands, stages and compilation, print a table of each, and write the results."""
    known("--networks", arguments.networks, NETWORKS)
    known("--contenders", arguments.contenders, [TRAIN, *(entry.name for entry in ENTRIES)])
    source = mnist.source(arguments.short)
    print(f"data: {source}", flush=True)
    rounds = 1 if arguments.short else arguments.rounds or ROUNDS
    windows = arguments.windows or ((1, 2) if arguments.short else WINDOWS)
    versions: dict[str, str] = {}
    commands_of = _chosen(arguments.contenders or (CONTENDERS[:2] if arguments.short else CONTENDERS))
    commands, stages, compiles = [], [], []
    with mnist.files(arguments.short) as folder:
        for network in arguments.networks or NETWORKS[:1]:
            commands += _commands(commands_of, network, folder, rounds, versions)
            stages += _stages(network, folder, rounds, versions)
            compiles += [_compiles(network, window, folder) for window in windows]
    print("\nseconds from the command to the first update, in a window of 4; ratio: to train.py")
    results.show(commands, COMMAND_COLUMNS)
    print("\nours, stage by stage")
    results.show(stages, STAGE_COLUMNS)
    print("\nours, what is compiled: for the first window, a window with one micro-batch less, one with a short one")
    results.show(compiles, {**COMPILE_COLUMNS, **TAIL_COLUMNS})
    settings = {"data": source, "rounds": rounds, "batch": BATCH, "window": 4, "short": arguments.short}
    path = results.save("start", arguments.output, [*commands, *stages, *compiles], settings, versions)
    if not arguments.short:
        results.plot(path.with_suffix(".png"), lambda figure: _draw(figure, commands, stages))


def _chosen(names: Sequence[str]) -> list[Command]:
    """Return what the contenders of these names are measured with, as far as they can run here."""
    entries = available(ENTRIES, [name for name in names if name != TRAIN])
    programs = [(entry.name, partial(_program, entry)) for entry in entries]
    return [*([(TRAIN, _train)] if TRAIN in names else ()), *programs]


def _commands(
    commands: Sequence[Command], network: str, folder: Path, rounds: int, versions: dict[str, str]
) -> list[dict[str, Any]]:
    """Measure each command in its turn, after a round that fetches its files from the disk."""
    seconds: dict[str, list[float]] = {name: [] for name, _ in commands}
    for number in range(rounds + 1):
        for name, first_update in commands:
            once = first_update(network, folder, versions)
            if number:
                seconds[name].append(once)
    return [_command_row(network, name, measured, seconds.get(TRAIN)) for name, measured in seconds.items()]


def _command_row(network: str, name: str, measured: list[float], ours: list[float] | None) -> dict[str, Any]:
    ratio = statistics.median(one / our for one, our in zip(measured, ours)) if ours else None
    row = {"part": "command", "network": network, "contender": name, **_summary(measured)}
    return {**row, "ratio": ratio}


def _summary(measured: Sequence[float]) -> dict[str, float]:
    return {"seconds": statistics.median(measured), "min": min(measured), "max": max(measured)}


def _train(network: str, folder: Path, versions: dict[str, str]) -> float:
    """Return the seconds from the command line to train.py's first line about an update."""
    del versions  # those of ours
    with tempfile.TemporaryDirectory() as output, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, str(ROOT / "train.py"), f"--data_path={folder}", f"--model={network}"]
        command.append(f"--output_dir={output}")
        environment, pipe = environment_of({}), subprocess.PIPE
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=pipe, stderr=said, env=environment, text=True) as process:
            seen = any(line.startswith("epoch: 1 step: 1 ") for line in process.stdout or ())
            seconds = time.perf_counter() - began
            process.kill()
        if not seen:
            said.seek(0)
            raise ContenderError(f"train.py ended before its first update. Its last words:\n{said.read()}")
    return seconds


def _program(entry: Entry, network: str, folder: Path, versions: dict[str, str]) -> float:
    """Return the seconds from a program's start to its answer about one window."""
    del folder  # its data is made up
    began = time.perf_counter()
    with start(entry, "--network", network) as contender:
        contender.ask(window=4, batch=BATCH, windows=1)
        seconds = time.perf_counter() - began
        versions.update(contender.about["versions"])
    return seconds


def _started(network: str, window: int, folder: Path) -> Contender:
    flags = ("--network", network, "--window", str(window), "--data", str(folder), "--started", str(time.time()))
    return start(STAGES, *flags)


def _stages(network: str, folder: Path, rounds: int, versions: dict[str, str]) -> list[dict[str, Any]]:
    """Measure what train.py does one after the other, in fresh processes."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        with _started(network, 4, folder) as contender:
            versions.update(contender.about["versions"])
            stages = {**contender.about["stages"], "first window": contender.ask(rows=[BATCH] * 4)["seconds"]}
        for name, once in stages.items():
            seconds.setdefault(name, []).append(once)
    return [
        {"part": "stage", "network": network, "stage": name, **_summary(measured)} for name, measured in seconds.items()
    ]


def _compiles(network: str, window: int, folder: Path) -> dict[str, Any]:
    """Count the graphs of a window's size, and time them: a first window less a later one."""
    full, tail = [BATCH] * window, [BATCH] * max(1, window - 1)
    with _started(network, window, folder) as contender:
        first = contender.ask(rows=full)
        later = statistics.median(contender.ask(rows=full)["seconds"] for _ in range(5))
        shorter = contender.ask(rows=tail)
        uneven = contender.ask(rows=[*tail, SHORT_BATCH])
    return {
        "part": "compile",
        "network": network,
        "window": window,
        "graphs": len(first["graphs"]),
        "compile_s": first["seconds"] - later,
        "window_s": later,
        "tail_graphs": len(shorter["graphs"]),
        "tail_s": shorter["seconds"],
        "short_graphs": len(uneven["graphs"]),
        "short_s": uneven["seconds"] - later,
    }


def _draw(figure: Any, commands: list[dict[str, Any]], stages: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    _bars(left, "contender", commands, "s from the command to the first update")
    _bars(right, "stage", stages, "s of each stage, ours")


def _bars(axes: Any, key: str, rows: list[dict[str, Any]], label: str) -> None:
    network = rows[0]["network"]
    chosen = [row for row in rows if row["network"] == network]
    bars = axes.barh([row[key] for row in chosen], [row["seconds"] for row in chosen])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"{label} ({network})")
