"""The benchmark `curves`: one training, with the effective batch in 1, 2, 4 and 8 micro-batches.

A small GPT learns speeches of Shakespeare's plays, a row for each block of a speech, and short rows are padded. With
each split, ours and the usual loop, which divides each mean loss by N, begin with the same weights and read the same
rows. If a way is exact, the curves of its splits are equal.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_zoo.data.sentences import sentences

from .contenders import Entry, available
from .options import data_of, reject_options
from .results import groups, part
from .runner import Session, check_loss

ROWS, SPLITS = 32, (1, 2, 4, 8)
EVERY, UPDATES = 40, 600
OURS, LOOP = "ms_accum", "usual loop"
PROGRAMS = (
    Entry(OURS, "mindspore", "curves_ours.py", ("--way", "ours")),
    Entry(LOOP, "mindspore", "curves_ours.py", ("--way", "loop")),
)
TABLES = {"run": ("", "way split:d updates:d validation:.6f difference:.1e")}
"""`difference` is the largest from the same way without a split, of all evaluations."""


def run(arguments: Namespace) -> None:
    """Train each way with each split; print the table and write JSON."""
    reject_options("curves", networks=arguments.networks, rounds=arguments.rounds)
    updates, splits = (2, (1, 2)) if arguments.short else (UPDATES, splits_of(arguments.windows or SPLITS))
    every = min(EVERY, updates)
    session = Session("curves", arguments, {"rows": ROWS, "updates": updates, "every": every})
    with tempfile.TemporaryDirectory() as folder:
        speeches = speeches_in(folder, arguments.short)
        for program in available(PROGRAMS, arguments.contenders):
            for split in splits:
                session.rows += _trained(session, program, speeches, split, updates, every)
                session.save()
    session.rows = [*with_differences(part(session.rows, "run"), part(session.rows, "curve"))]
    session.finish(TABLES)


def splits_of(windows: Sequence[int]) -> list[int]:
    """Return the numbers of micro-batches to compare, with 1, to which the others are compared."""
    for window in windows:
        if window < 1 or ROWS % window:
            raise ValueError(f"argument --windows: must divide the {ROWS} rows of an update, but got {window}")
    return sorted({1, *windows})


def speeches_in(folder: str, short: bool) -> Path:
    """Write a file for each speech of the text, and return their folder."""
    fetch = "data/shakespeare_char/prepare.py of nanoGPT fetches it"
    text = sentences() if short else data_of("curves", "SHAKESPEARE_DATA", "tinyshakespeare", fetch).read_text("utf-8")
    speeches = Path(folder, "speeches")
    speeches.mkdir()
    parts = text.splitlines() if short else text.split("\n\n")
    for number, speech in enumerate(filter(str.strip, parts)):
        (speeches / f"{number:05}.txt").write_text(speech, encoding="utf-8")
    return speeches


def _trained(
    session: Session, program: Entry, speeches: Path, split: int, updates: int, every: int
) -> Iterator[dict[str, Any]]:
    """Train, and yield the validation losses before the first update and after every few, then the run's row."""
    way = {"way": program.name, "split": split}
    with session.start(program, speeches=speeches, split=split) as contender:
        for end in range(0, updates + 1, every):
            answer = contender.ask(updates=every if end else 0)
            check_loss(contender, answer)
            yield {"part": "curve", **way, "updates": end, "loss": answer["loss"]}
    print(f"{program.name}, {split} x: validation loss {answer['loss']:.6f}", flush=True)
    yield {"part": "run", **way, "updates": updates, "validation": answer["loss"]}


def with_differences(
    runs: Sequence[Mapping[str, Any]], curves: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield all rows, with what lies between the losses of a split and those of the same way without one."""
    undivided = {(row["way"], row["updates"]): row["loss"] for row in curves if row["split"] == 1}
    curves = [{**row, "difference": abs(row["loss"] - undivided[row["way"], row["updates"]])} for row in curves]
    of_runs = groups(curves, "way", "split")
    for row in runs:
        yield {**row, "difference": max(point["difference"] for point in of_runs[row["way"], row["split"]])}
    yield from curves


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the losses of each way, from where they can be told apart."""
    import matplotlib  # here, because training needs none
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves"}):
        figure = Figure(figsize=(8.0, 3.6), layout="constrained")
        of_ways = groups((row for row in part(rows, "curve") if row["updates"] >= 200), "way")
        for axes, ((way,), mine) in zip(figure.subplots(1, 2, sharey=True), of_ways.items()):
            for number, ((split,), points) in enumerate(groups(mine, "split").items()):
                # Of ours each line is thinner than that below it, so that all can be seen.
                width = 6 - 1.5 * number if way == OURS else 1.8
                line = [row["updates"] for row in points], [row["loss"] for row in points]
                axes.plot(*line, label=f"{split} x {ROWS // split}", linewidth=width)
            axes.set(title=way, xlabel="update")
            axes.legend(frameon=False)
        figure.axes[0].set_ylabel("validation loss")
        figure.savefig(path, metadata={"Date": None})
