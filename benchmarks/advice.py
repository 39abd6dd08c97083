"""The benchmark `advice`: is `train.py --advise` right?

A set-up is trained with the window it asks for, in the fastest split, and without accumulation, with the flags that
`--advise` gives for that. Both read the same rows. The advice was right if what it advised had no worse result.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms

import ms_accum
import train
from ms_accum.app import steps
from ms_accum.app.advice import Advice, advice, flags_of, measured

from .language import text_in
from .options import data_of, reject_options
from .process import ROOT, ContenderError
from .results import rows as rows_of
from .runner import Session
from .tables import Lines, groups, markdown

ACCUMULATED, SINGLE = "accumulated", "single"
_RESULT = re.compile(r"^=+ \{'(Loss|Accuracy)': ([\d.e-]+)", re.MULTILINE)
_SECONDS = re.compile(r"^time +([\d.]+) (s|min|h)$", re.MULTILINE)
_UNITS = {"s": 1, "min": 60, "h": 3600}


class SetUp(NamedTuple):
    """What a user would start."""

    window: int
    """int, the rows of a window."""
    data: str
    """str, ``"text"``, ``"mnist"`` or ``""``, embedded."""
    flags: str
    budget: str = "4GiB"


# Chosen before the first run, except the small budget, in which at first not even one row fitted.
SET_UPS = {
    "GPT, Shakespeare, AdamW": SetUp(
        48,
        "text",
        "--context 64 --layers 4 --heads 4 --width 128 --max_updates 500 --optimizer adamw --lr 0.002 "
        "--lr_decay cosine --min_lr 0.0002 --warmup_updates 25 --beta2 0.98 --weight_decay 0.1 --clip_norm 1",
    ),
    "GPT, sentences, Adam": SetUp(64, "", "--model gpt --epochs 5"),
    "wide GPT, little memory, AdamW": SetUp(
        16,
        "text",
        "--vocabulary bytes --context 32 --layers 4 --heads 8 --width 512 --max_updates 60 --optimizer adamw "
        "--lr 0.001 --beta2 0.95",
        "1900MiB",
    ),
    "LeNet5, MNIST, momentum": SetUp(128, "mnist", "--model lenet5 --optimizer momentum --lr 0.04 --epochs 3"),
    "MLP, MNIST, Adam": SetUp(256, "mnist", "--model mlp --optimizer adam --lr 0.001 --epochs 3"),
}
COLUMNS = "set_up seed:d advised rows:d accumulated:.4f single:.4f accumulated_seconds:.0f single_seconds:.0f"
TABLES = {"": ("", COLUMNS)}


def run(arguments: Namespace) -> None:
    """Ask for advice and train both ways, from each seed; print the table, write JSON and plot."""
    reject_options("advice", networks=arguments.networks, windows=arguments.windows)
    seeds = 1 if arguments.short else arguments.rounds or 2
    wanted = [name for name in SET_UPS if not arguments.contenders or name in arguments.contenders]
    session = Session("advice", arguments, {"seeds": seeds})
    session.versions = {"ms_accum": ms_accum.__version__, "mindspore": ms.__version__}
    before = session.earlier_rows() if arguments.contenders else []
    session.rows = [row for row in before if row["set_up"] not in wanted]
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted[:1] if arguments.short else wanted:
            set_up = SET_UPS[name]
            base = [*set_up.flags.split(), f"--effective_batch={set_up.window}", *_data(set_up.data, folder)]
            if arguments.short:
                base = ["--model=mlp", "--epochs=1", f"--effective_batch={set_up.window}"]
            session.rows += _measured(name, base, set_up, seeds, folder)
            session.save()
    session.finish(TABLES, draw)


def _data(kind: str, folder: str) -> list[str]:
    if kind == "text":
        return ["--dataset=text", f"--data_path={text_in(folder, 'advice', False)}"]
    if kind == "mnist":
        path = data_of("advice", "MNIST_DATA", "MNIST")
        if path.is_file():
            shutil.unpack_archive(path, folder)
            path = Path(folder, "MNIST_Data")
        return ["--dataset=mnist", f"--data_path={path}"]
    return []


def _measured(name: str, base: list[str], set_up: SetUp, seeds: int, folder: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed."""
    settings = train.flags().parse([*base, "--advise", f"--memory_budget={set_up.budget}"])
    data, _ = train.datasets(settings, train.task_of(settings), None)
    settings = steps.with_planned_updates(settings, data)
    single = partial(train.trial, settings, single=True)
    found = measured(settings, partial(train.trial, settings), single, partial(train.estimate_noise, settings))
    print(name, *found.table, sep="\n", flush=True)
    advised = advice(found)
    ways = {
        ACCUMULATED: [*base, f"--batch_size={found.split.micro_batch_size}"],
        SINGLE: [*base, *flags_of(settings, Advice(False, advised.rows, 0.0, 0.0))],
    }
    ways[SINGLE].remove(f"--effective_batch={set_up.window}")
    for seed in range(1, seeds + 1):
        row: dict[str, Any] = {"set_up": name, "seed": seed, "advised": ACCUMULATED if advised.accumulates else SINGLE}
        row |= {"rows": advised.rows, "split": found.split.micro_batch_size, "noise": found.noise.rows}
        for way, argv in ways.items():
            row["score"], row[way], row[f"{way}_seconds"] = _trained([*argv, f"--seed={seed}"], folder)
        print(row, flush=True)
        yield row


def _trained(argv: Sequence[str], folder: str) -> tuple[str, float, float]:
    """Train with these flags of train.py; return the name of the result, the result and the seconds."""
    command = [sys.executable, str(ROOT / "train.py"), *argv, "--eval_every=end"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    result, time = _RESULT.search(done.stdout), _SECONDS.search(done.stdout)
    if result is None or time is None:
        raise ContenderError(f"{' '.join(command)}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return result[1], float(result[2]), float(time[1]) * _UNITS[time[2]]


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether what was advised had no worse result."""
    sign = 1 if row["score"] == "Accuracy" else -1
    other = ACCUMULATED if row["advised"] == SINGLE else SINGLE
    return sign * (row[row["advised"]] - row[other]) >= 0


class Words(NamedTuple):
    """The words of a table in a language."""

    head: Sequence[str]
    advised: Mapping[str, str]
    results: Mapping[str, str]
    right: str
    """How often the advice had no worse result, with two numbers."""
    set_ups: Mapping[str, str]
    """Names of set-ups that are not as in the results."""


WORDS = {
    "": Words(
        ("set-up", "window", "advice", "result, accumulated", "result, an update per micro-batch", "time", "right"),
        {ACCUMULATED: "accumulate", SINGLE: "do not accumulate, {} rows"},
        {"Loss": "loss {:.3f}", "Accuracy": "accuracy {:.2%}"},
        "{} of {}",
        {},
    ),
    ".zh": Words(
        ("设置", "窗口", "建议", "累积的结果", "每个微批次更新一次的结果", "时间比", "正确"),
        {ACCUMULATED: "累积", SINGLE: "不累积，{} 个样本"},
        {"Loss": "损失 {:.3f}", "Accuracy": "准确率 {:.2%}"},
        "{} / {}",
        {
            "GPT, Shakespeare, AdamW": "GPT，莎士比亚文本，AdamW",
            "GPT, sentences, Adam": "GPT，内置句子，Adam",
            "wide GPT, little memory, AdamW": "宽 GPT，内存较小，AdamW",
            "LeNet5, MNIST, momentum": "LeNet5，MNIST，Momentum",
            "MLP, MNIST, Adam": "MLP，MNIST，Adam",
        },
    ),
}


def tables() -> dict[str, str]:
    """Return the tables of docs/how-to/split.md by the names of their marks."""
    rows = rows_of("avx512-amd", "advice")
    return {f"advice{language}": _table((rows, words)) for language, words in WORDS.items()}


@markdown
def _table(source: tuple[Sequence[Mapping[str, Any]], Words]) -> Lines:
    """Means over the seeds; the time is that without accumulation, divided by that with it."""
    rows, words = source
    yield list(words.head)
    for (name,), mine in groups(rows, "set_up").items():
        first = mine[0]
        results = [words.results[first["score"]].format(_mean(mine, way)) for way in (ACCUMULATED, SINGLE)]
        ratio = _mean(mine, f"{SINGLE}_seconds") / _mean(mine, f"{ACCUMULATED}_seconds")
        right = words.right.format(sum(map(is_right, mine)), len(mine))
        advised = words.advised[first["advised"]].format(first["rows"])
        yield [words.set_ups.get(name, name), str(SET_UPS[name].window), advised, *results, f"{ratio:.2f}", right]


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def draw(figure: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the time without accumulation, divided by that with it."""
    axes = figure.subplots()
    for (name,), mine in groups(rows, "set_up").items():
        axes.barh(name, _mean(mine, f"{SINGLE}_seconds") / _mean(mine, f"{ACCUMULATED}_seconds"))
    axes.axvline(1, color="grey", lw=0.5)
    axes.set_xlabel("time without accumulation / with it")
