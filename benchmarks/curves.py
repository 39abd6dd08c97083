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
from typing import Any, NamedTuple

from model_zoo.data.sentences import sentences

from . import charts
from .contenders import Entry, available
from .options import data_of, reject_options
from .results import rows as rows_of
from .runner import Session, check_loss
from .tables import Lines, groups, markdown, part

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
    session.finish(TABLES, draw)


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


class Words(NamedTuple):
    """The words of the picture and the table in a language."""

    title: str
    ways: Mapping[str, str]
    update: str
    loss: str
    head: Sequence[str]


WORDS = {
    "": Words(
        "Validation losses of one training with four splits: with ms_accum they are one line, with the usual loop not",
        {OURS: "ms_accum", LOOP: "the usual loop"},
        "update",
        "validation loss",
        ("", "1 x 32 rows", "2 x 16", "4 x 8", "8 x 4", "largest difference"),
    ),
    ".zh": Words(
        "同一训练、四种拆分方式的验证损失：ms_accum 的曲线重合为一条，常见写法的不重合",
        {OURS: "ms_accum", LOOP: "常见写法"},
        "更新次数",
        "验证损失",
        ("", "1 x 32 个样本", "2 x 16 个", "4 x 8 个", "8 x 4 个", "最大差异"),
    ),
}


def tables() -> dict[str, str]:
    """Return the tables by the names of their marks."""
    return {f"curves{language}": _table((_rows(), words)) for language, words in WORDS.items()}


def pictures() -> dict[str, str]:
    """Return the pictures by the names of their files."""
    return {f"equal_curves{language}.svg": _picture(part(_rows(), "curve"), words) for language, words in WORDS.items()}


def _rows() -> list[dict[str, Any]]:
    return rows_of("avx512-amd", "curves")


@markdown
def _table(source: tuple[Sequence[Mapping[str, Any]], Words]) -> Lines:
    rows, words = source
    yield words.head
    for (way,), mine in groups(part(rows, "run"), "way").items():
        losses = [f"{row['validation']:.4f}" for row in mine]
        yield [words.ways[way], *losses, f"{max(row['difference'] for row in mine):.1e}"]


def _picture(curves: Sequence[Mapping[str, Any]], words: Words) -> str:
    """Return a panel with the curves of each way, from where they can be told apart."""
    last = max(row["updates"] for row in curves)
    updates = charts.Axis(words.update, 200, last, range(200, last + 1, 200))
    shown = [row for row in curves if row["updates"] >= 200]
    low, high = (end(row["loss"] for row in shown) for end in (min, max))
    ticks = [tenth / 10 for tenth in range(int(low * 10), int(high * 10) + 2)]
    losses = charts.Axis(words.loss, ticks[0], ticks[-1], ticks, ".1f")
    panels = [charts.Panel(words.ways[way], updates, losses, [*_lines(shown, way)]) for way in (LOOP, OURS)]
    return charts.chart(words.title, panels)


def _lines(curves: Sequence[Mapping[str, Any]], way: str) -> Iterator[charts.Line]:
    """Yield the line of each split; of ours each is thinner than that below it, so that all can be seen."""
    for number, (split, colour) in enumerate(zip(SPLITS, charts.COLOURS)):
        points = [(row["updates"], row["loss"]) for row in curves if (row["way"], row["split"]) == (way, split)]
        yield charts.Line(f"{split} x {ROWS // split}", points, colour, 6 - 1.5 * number if way == OURS else 1.8)


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the losses of each way."""
    for axes, ((way,), mine) in zip(figure.subplots(1, 2, sharey=True), groups(part(rows, "curve"), "way").items()):
        for (split,), points in groups(mine, "split").items():
            axes.plot([row["updates"] for row in points], [row["loss"] for row in points], label=f"{way}, {split} x")
        axes.legend()
