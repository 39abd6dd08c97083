"""The benchmark `start`: seconds until the first update, and what they are spent on."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable

from . import mnist, plots
from .contenders import ENTRIES, OURS, Entry, available
from .options import Settings, check_names, select_settings
from .process import ROOT, ContenderError, environment_of
from .runner import Session, alternate, ratio, summary
from .tables import part

TRAIN = "train.py"
STAGES = Entry(OURS, "mindspore", "start_ours.py")
NETWORKS = ("lenet5", "mlp")
BATCH, SHORT_BATCH = 32, 7
TABLES = {
    "command": (
        "seconds from the command to the first update, in a window of 4; ratio: to train.py",
        "network contender seconds:.2f min:.2f max:.2f ratio:.2f",
    ),
    "stage": ("ours, stage by stage", "network stage seconds:.3f min:.3f max:.3f"),
    "compile": (
        "ours, what is compiled: for the first window, a window with one micro-batch less, one with a short one",
        "network window:d graphs:d compile_s:.2f window_s:.3f tail_graphs:d tail_s:.3f short_graphs:d short_s:.2f",
    ),
}
# All contenders but train.py find their data ready in memory, and write no metrics.
CONTENDERS = (TRAIN, OURS, "tutorial-functional", "tutorial-cells", "torch")
FULL = Settings(NETWORKS[:1], (2, 4, 16, 64), rounds=5, contenders=CONTENDERS)
SHORT = Settings(NETWORKS[:1], (1, 2), rounds=1, contenders=CONTENDERS[:2])


def run(arguments: Namespace) -> None:
    """Measure commands, stages and compilation, print a table of each, and write the results."""
    settings = select_settings(FULL, SHORT, arguments, NETWORKS)
    check_names("--contenders", arguments.contenders, [TRAIN, *(entry.name for entry in ENTRIES)])
    source = mnist.source(arguments.short)
    print(f"data: {source}", flush=True)
    record = {"data": source, "rounds": settings.rounds, "batch": BATCH, "window": 4, "short": arguments.short}
    session = Session("start", arguments, record)
    entries = available(ENTRIES, [name for name in settings.contenders if name != TRAIN])
    with mnist.files(arguments.short) as folder:
        for network in settings.networks:
            commands = {entry.name: partial(_program, session, entry, network) for entry in entries}
            if TRAIN in settings.contenders:
                commands = {TRAIN: partial(_train, network, folder), **commands}
            started = partial(_started, session, network, folder)
            rows = [*_commands(commands, settings.rounds), *_stages(started, settings.rounds)]
            rows += [_compiles(started, window) for window in settings.windows]
            session.rows += [{"part": row.pop("part"), "network": network, **row} for row in rows]
    session.finish(TABLES, draw)


_summary = partial(summary, name="seconds", prefix="")


def _commands(commands: Mapping[str, Callable[[], float]], rounds: int) -> Iterator[dict[str, Any]]:
    """Measure each command in its turn, after a round that fetches its files from the disk."""
    alternate(1, commands)
    seconds = alternate(rounds, commands)
    for name, values in seconds.items():
        yield {"part": "command", "contender": name, **_summary(values), "ratio": ratio(values, seconds.get(TRAIN))}


def _train(network: str, folder: Path) -> float:
    """Return the seconds from the command line to train.py's first line about an update."""
    with tempfile.TemporaryDirectory() as output, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, str(ROOT / "train.py"), f"--data_path={folder}", f"--model={network}"]
        command += [f"--output_dir={output}/run", "--max_updates=1"]
        environment, pipe = environment_of({}), subprocess.PIPE
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=pipe, stderr=errors, env=environment, text=True) as process:
            seen = any(line.startswith("epoch: 1 step: 1 ") for line in process.stdout or ())
            seconds = time.perf_counter() - began
            process.kill()
        if not seen:
            errors.seek(0)
            raise ContenderError(f"train.py ended before its first update. Its last words:\n{errors.read()}")
    return seconds


def _program(session: Session, entry: Entry, network: str) -> float:
    """Return the seconds from a program's start to its answer about one window, of data that is made up."""
    began = time.perf_counter()
    with session.start(entry, network=network) as contender:
        contender.ask(window=4, batch=BATCH, windows=1)
        return time.perf_counter() - began


def _started(session: Session, network: str, folder: Path, window: int) -> Any:
    return session.start(STAGES, network=network, window=window, data=folder, started=time.time())


def _stages(started: Callable[[int], Any], rounds: int) -> Iterator[dict[str, Any]]:
    """Measure what train.py does one after the other, in fresh processes."""
    measured = []
    for _ in range(rounds):
        with started(4) as contender:
            first = contender.ask(rows=[BATCH] * 4)["seconds"]
            measured.append({**contender.about["stages"], "first window": first})
    for name in measured[0]:
        yield {"part": "stage", "stage": name, **_summary([stages[name] for stages in measured])}


def _compiles(started: Callable[[int], Any], window: int) -> dict[str, Any]:
    """Count the graphs of a window's size, and time them: a first window less a later one."""
    full, tail = [BATCH] * window, [BATCH] * max(1, window - 1)
    with started(window) as contender:
        first = contender.ask(rows=full)
        later = statistics.median(contender.ask(rows=full)["seconds"] for _ in range(5))
        shorter = contender.ask(rows=tail)
        uneven = contender.ask(rows=[*tail, SHORT_BATCH])
    return {
        "part": "compile",
        "window": window,
        "graphs": len(first["graphs"]),
        "compile_s": first["seconds"] - later,
        "window_s": later,
        "tail_graphs": len(shorter["graphs"]),
        "tail_s": shorter["seconds"],
        "short_graphs": len(uneven["graphs"]),
        "short_s": uneven["seconds"] - later,
    }


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the first network's commands, and beside them our stages."""
    network = rows[0]["network"]
    mine = [row for row in rows if row["network"] == network]
    left, right = figure.subplots(1, 2)
    label = f"s from the command to the first update ({network})"
    plots.bars(left, part(mine, "command"), "contender", "seconds", label)
    plots.bars(right, part(mine, "stage"), "stage", "seconds", f"s of each stage, ours ({network})")
