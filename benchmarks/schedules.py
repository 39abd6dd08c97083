"""The benchmark `schedules`: nanoGPT's recipe for a CPU with batch schedules, from several seeds.

All ways read the same 24,000 rows of 64 tokens in micro-batches of 12 rows, and differ in window sizes and learning
rates. With a seed, all begin with the same weights and read the same rows in the same order.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ms_accum.schedules import BatchSchedule, batch_schedule, batch_warmup, seesaw

from .contenders import Entry, available
from .language import text_in
from .options import reject_options
from .results import rows as rows_of
from .runner import Session, check_loss
from .tables import Lines, groups, markdown, part

LR, MIN_LR, WARMUP = 1e-3, 1e-4, 100
MICRO_BATCHES, SEEDS = 2000, 3
TARGET = 1.9
"""float, the validation loss whose updates are counted; nanoGPT states about 1.88 for the end of this recipe."""
COSINE = "cosine, N=1"
# The micro-batches after which a run is evaluated: often where losses are close to each other.
_EVALUATED = (500, 1000, 1200, 1400, 1600, 1800, MICRO_BATCHES)


def _unchanged_rates(run: Mapping[str, Any]) -> BatchSchedule:
    """Return Seesaw's windows with the rates of the cosine: what Seesaw would be without its rule for rates."""
    return batch_schedule(LR, seesaw(LR, **run).mini_steps, rule="none", **run)


WAYS: dict[str, Callable[[Mapping[str, Any]], BatchSchedule]] = {
    COSINE: lambda run: batch_schedule(LR, 1, **run),
    "Seesaw": lambda run: seesaw(LR, **run),
    "warm-up, N=1 to 4": lambda run: batch_warmup(LR, 1, 4, over=run["micro_batches"] // 2, **run),
    "Seesaw's windows, cosine's rates": _unchanged_rates,
    "cosine, N=2, rate times 1.41": lambda run: batch_schedule(
        LR * 2**0.5, 2, **{**run, "warmup_updates": WARMUP // 2}
    ),
    "cosine in steps, N=1": lambda run: seesaw(LR, most=1, **run),
}
"""dict[str, Callable], the ways; each makes its schedule from the arguments of a run. The last three are controls.

All but the last were chosen before the first run, and none was changed after it. The last was added to see whether
Seesaw differs from the cosine because its rates fall in steps.
"""
TABLES = {"run": ("", "way seed:d updates:d validation:.4f updates_to_target:d")}


def run(arguments: Namespace) -> None:
    """Train each way from each seed; print the table, write JSON and plot after each run."""
    reject_options("schedules", networks=arguments.networks, windows=arguments.windows)
    seeds, micro_batches = (1, 4) if arguments.short else (arguments.rounds or SEEDS, MICRO_BATCHES)
    settings = {"micro_batches": micro_batches, "seeds": seeds, "target": TARGET, "lr": LR, "min_lr": MIN_LR}
    session = Session("schedules", arguments, settings)
    programs = [Entry(way, "mindspore", "schedules_ours.py") for way in WAYS]
    wanted = available(programs, arguments.contenders)
    names = [program.name for program in wanted]
    # Ways that are not selected keep their rows: each takes minutes.
    before = session.earlier_rows() if arguments.contenders else []
    session.rows = [row for row in before if row["way"] not in names]
    with tempfile.TemporaryDirectory() as folder:
        text = text_in(folder, "schedules", arguments.short)
        for seed in range(1, seeds + 1):
            for program in wanted:
                session.rows += _trained(session, program, seed, text, micro_batches)
                session.save()
    session.finish(TABLES, draw)


def schedule_of(way: str, micro_batches: int) -> BatchSchedule:
    """Return the schedule of a way."""
    warmup = min(WARMUP, micro_batches)
    return WAYS[way]({"micro_batches": micro_batches, "warmup_updates": warmup, "min_lr": MIN_LR, "tail": "carry"})


def _trained(session: Session, program: Entry, seed: int, text: Path, micro_batches: int) -> list[dict[str, Any]]:
    """Train, and evaluate now and then; return the row of the run and those of its curve."""
    curve: list[dict[str, Any]] = []
    with session.start(program, way=program.name, seed=seed, text=text, micro_batches=micro_batches) as contender:
        ends = sorted({min(end, micro_batches) for end in _EVALUATED})
        for begin, end in zip([0, *ends], ends):
            answer = contender.ask(micro_batches=end - begin)
            check_loss(contender, answer)
            point = {"micro_batches": end, "updates": answer["updates"]}
            curve.append({"part": "curve", "way": program.name, "seed": seed, **point, "loss": answer["loss"]})
    last = curve[-1]
    print(f"{program.name}, seed {seed}: {last['updates']} updates, validation loss {last['loss']:.4f}", flush=True)
    row = {"part": "run", "way": program.name, "seed": seed, "updates": last["updates"], "validation": last["loss"]}
    return [{**row, "updates_to_target": updates_to(TARGET, curve)}, *curve]


def updates_to(target: float, curve: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the updates after which the loss first is at most this, interpolated between evaluations; None: never."""
    for before, after in zip([None, *curve], curve):
        if after["loss"] > target:
            continue
        if before is None:
            return after["updates"]
        way = (before["loss"] - target) / (before["loss"] - after["loss"])
        return round(before["updates"] + way * (after["updates"] - before["updates"]))
    return None


def compared(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each way its updates, its losses, and their differences from the cosine's of the same seed."""
    runs = part(rows, "run")
    cosine = {row["seed"]: row for row in runs if row["way"] == COSINE}
    for (way,), mine in groups(runs, "way").items():
        reached = [row for row in mine if row["updates_to_target"] is not None]
        yield {
            "way": way,
            "updates": mine[0]["updates"],
            "losses": [row["validation"] for row in mine],
            "differences": [row["validation"] - cosine[row["seed"]]["validation"] for row in mine],
            "to_target": [row["updates_to_target"] for row in reached] if len(reached) == len(mine) else [],
            "fewer": 1 - mine[0]["updates"] / next(iter(cosine.values()))["updates"],
        }


class Words(NamedTuple):
    """The words of a table in a language."""

    head: Sequence[str]
    never: str
    """For a loss that is not reached."""
    to: str
    """Between the least and the most."""
    ways: Mapping[str, str]
    """Names of ways that are not as in the results."""


WORDS = {
    "": Words(
        ("way", "updates", "fewer", "final validation loss", "difference from the first", "updates to {:.2f}"),
        "never",
        "to",
        {},
    ),
    ".zh": Words(
        ("方式", "更新次数", "减少", "最终验证损失", "与第一行的差", "达到 {:.2f} 所需的更新次数"),
        "未达到",
        "至",
        {
            COSINE: "余弦，N=1",
            "warm-up, N=1 to 4": "批次预热，N=1 至 4",
            "Seesaw's windows, cosine's rates": "Seesaw 的窗口，余弦的学习率",
            "cosine, N=2, rate times 1.41": "余弦，N=2，学习率乘以 1.41",
            "cosine in steps, N=1": "阶梯形余弦，N=1",
        },
    ),
}


def tables() -> dict[str, str]:
    """Return the tables of docs/how-to/schedules.md by the names of their marks."""
    rows = rows_of("avx512-amd", "schedules")
    return {f"schedules{language}": _table((rows, words)) for language, words in WORDS.items()}


@markdown
def _table(source: tuple[Sequence[Mapping[str, Any]], Words]) -> Lines:
    """Means over the seeds, and in brackets the least and the most."""
    rows, words = source
    yield [text.format(TARGET) for text in words.head]
    for row in compared(rows):
        reached = _spread(row["to_target"], ",.0f", words.to) if row["to_target"] else words.never
        losses = (_spread(row["losses"], ".3f", words.to), _spread(row["differences"], "+.3f", words.to))
        way = words.ways.get(row["way"], row["way"])
        yield [way, f"{row['updates']:,}", f"{row['fewer']:.0%}", *losses, reached]


def _spread(numbers: Sequence[float], form: str, to: str) -> str:
    least, most = format(min(numbers), form), format(max(numbers), form)
    return f"{statistics.fmean(numbers):{form}}" + (f" ({least} {to} {most})" if least != most else "")


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the mean validation losses over the data, and over the updates."""
    axes = figure.subplots(1, 2, sharey=True)
    for (way,), mine in groups(part(rows, "curve"), "way").items():
        points = groups(mine, "micro_batches", "updates")
        losses = [statistics.fmean(row["loss"] for row in same) for same in points.values()]
        for number, place in enumerate(axes):
            place.plot([point[number] for point in points], losses, label=way, lw=1)
    for place, name in zip(axes, ("micro-batches of 12 rows", "updates")):
        place.set_xlabel(name)
        place.set_ylim(1.8, 2.4)
        place.axhline(TARGET, color="grey", lw=0.5)
    axes[0].set_ylabel("validation loss, mean over the seeds")
    axes[0].legend()
