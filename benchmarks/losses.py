"""The benchmark `losses`: the losses of ResNet-18's first updates, compared with PyTorch's from the same weights."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .contenders import OURS, Entry, available
from .options import data_of, reject_options
from .runner import Session

PROGRAMS = (
    Entry(OURS, "mindspore", "resnet18.py", ("--framework", "ours")),
    Entry("torch", "torch", "resnet18.py", ("--framework", "torch")),
)
UPDATES = 30
TABLES = {"": ("", "update:d ours:.4f torch:.4f difference:+.4f ours_s:.1f torch_s:.1f")}


def run(arguments: Namespace) -> None:
    """Train each contender for some updates; print the losses side by side and write the results."""
    reject_options("losses", networks=arguments.networks, windows=arguments.windows, rounds=arguments.rounds)
    data = data_of("losses", "CIFAR10_DATA", "CIFAR-10")
    updates, rows = (1, 8) if arguments.short else (UPDATES, 128)
    session = Session("losses", arguments, {"updates": updates, "rows": rows, "window": 4, "network": "resnet18"})
    # Contenders that are not selected keep their rows: each takes minutes.
    before = session.earlier_rows() if arguments.contenders else []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "weights.npz")  # ours writes it, PyTorch reads it
        answers = {
            program.name: _losses(session, program, updates, data=data, weights=weights, rows=rows)
            for program in available(PROGRAMS, arguments.contenders)
        }
    rows_before = [before[update] if update < len(before) else {} for update in range(updates)]
    session.rows += [_row(update, answers, old) for update, old in enumerate(rows_before)]
    session.finish(TABLES, draw)


def _losses(session: Session, program: Entry, updates: int, **flags: Any) -> list[dict[str, float]]:
    with session.start(program, **flags) as contender:
        answers = []
        for update in range(updates):
            answers.append(contender.ask())
            print(f"{program.name}, update {update + 1} of {updates}: loss {answers[-1]['loss']:.4f}", flush=True)
        return answers


def _row(update: int, answers: Mapping[str, Sequence], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an update, with what an earlier run has measured of the contender that was not asked for."""
    row = {**old, "update": update + 1}
    for name, program in (("ours", PROGRAMS[0]), ("torch", PROGRAMS[1])):
        if program.name in answers:
            answer = answers[program.name][update]
            row |= {name: answer["loss"], f"{name}_s": answer["seconds"]}
    return {**row, "difference": row["ours"] - row["torch"]} if {"ours", "torch"} <= row.keys() else row


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw both losses over the updates."""
    axes = figure.subplots()
    for name in ("ours", "torch"):
        shown = [row for row in rows if name in row]
        axes.plot([row["update"] for row in shown], [row[name] for row in shown], marker="o", markersize=3, label=name)
    axes.set_xlabel("update")
    axes.set_ylabel("loss of ResNet-18 on CIFAR-10")
    axes.legend()
