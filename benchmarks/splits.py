"""The benchmark `splits`: time and peak memory of one window, as one micro-batch and in 2 to 32 parts.

It measures as `find_micro_batch_size` does, in other processes, each size several times. Rows are random.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Callable, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn

import ms_accum
from model_zoo import GPT, NextTokenLoss, SmallResNet
from ms_accum import GradientAccumulation, find_micro_batch_size

from . import charts
from .options import check_names, reject_options
from .results import rows as rows_of
from .runner import Session
from .tables import groups

WINDOWS = {"GPT": 96, "SmallResNet": 256}
"""dict[str, int], the rows of a window of each network."""
TABLES = {"": ("", "network rows:d mini_steps:d ms:.1f peak_mib:.0f")}
NOTE = "peak_mib: of the process, in which Python and MindSpore take about 400 MiB"


def run(arguments: Namespace) -> None:
    """Measure each split of each network; print the table and write JSON."""
    reject_options("splits", contenders=arguments.contenders, rounds=arguments.rounds, windows=arguments.windows)
    check_names("--networks", arguments.networks, WINDOWS)
    session = Session("splits", arguments, {"windows": WINDOWS})
    session.versions = {"ms_accum": ms_accum.__version__, "mindspore": ms.__version__}
    for name in list(WINDOWS)[:1] if arguments.short else arguments.networks or WINDOWS:
        rows = 4 if arguments.short else WINDOWS[name]
        found = find_micro_batch_size(partial(trial, name, rows), rows, memory_budget=16 * 2**30)
        print(name, found.table, sep="\n", flush=True)
        session.rows += _rows(name, rows, found.trials)
        session.save()
    session.finish(TABLES, draw, note=NOTE)


def trial(name: str, window: int, rows: int) -> Callable[[], None]:
    """Train a window of a network in micro-batches of `rows` rows; return what trains it once more."""
    draw = np.random.RandomState(1)
    network: nn.Cell
    if name == "GPT":
        network, loss = GPT(65, context=64, layers=4, heads=4, width=128), NextTokenLoss()
        columns = draw.randint(0, 65, (2, window, 64)).astype(np.int32)
    else:
        network, loss = SmallResNet(), nn.CrossEntropyLoss()
        columns = draw.randn(window, 3, 32, 32).astype(np.float32), draw.randint(0, 10, window).astype(np.int32)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 1e-3)
    model = GradientAccumulation(network, loss, optimizer, weight=getattr(loss, "weight", None))
    window_of_rows = [tuple(map(ms.Tensor, columns))]
    train = partial(model.train_process, 1, window_of_rows, micro_batch_size=rows, report=(), ckpt_path=None)
    train()
    return train


def _rows(name: str, window: int, trials: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for rows, seconds, peak in trials:
        size = {"network": name, "rows": rows, "mini_steps": -(-window // rows)}
        yield {**size, "ms": 1000 * seconds, "peak_mib": peak / 2**20}


class Words(NamedTuple):
    """The words of the picture in a language."""

    title: str
    panel: str
    memory: str
    time: str


WORDS = {
    "": Words(
        "Time and peak memory of one window in several splits, labelled N x rows",
        "{}, a window of {} rows",
        "peak memory of the process, MiB",
        "ms per window",
    ),
    ".zh": Words(
        "同一窗口按多种方式拆分的时间与内存峰值，标注为 N x 样本数",
        "{}，窗口为 {} 个样本",
        "进程的内存峰值（MiB）",
        "每个窗口的毫秒数",
    ),
}


def pictures() -> dict[str, str]:
    """Return the pictures by the names of their files."""
    rows = rows_of("avx512-amd", "splits")
    return {f"splits{language}.svg": _picture(rows, words) for language, words in WORDS.items()}


def _picture(rows: Sequence[Mapping[str, Any]], words: Words) -> str:
    panels = []
    for ((name,), mine), colour in zip(groups(rows, "network").items(), charts.COLOURS):
        points = [(row["peak_mib"], row["ms"]) for row in mine]
        labels = [f"{row['mini_steps']} x {row['rows']}" for row in mine]
        peaks, times = zip(*points)
        memory, time = _axis(words.memory, peaks), _axis(words.time, times, begins_at_zero=True)
        line = charts.Line(name, points, colour, 1, "3 3", labels)
        title = words.panel.format(name, mine[0]["rows"] * mine[0]["mini_steps"])
        panels.append(charts.Panel(title, memory, time, [line], has_legend=False))
    return charts.chart(words.title, panels, width=300)


def _axis(words: str, values: Sequence[float], *, begins_at_zero: bool = False) -> charts.Axis:
    """Return an axis with at most seven marks, which begins and ends at one."""
    least = 0 if begins_at_zero else min(values)
    range_of_values = (max(values) - least) * 1.1
    steps = (number * 10**power for power in range(7) for number in (1, 2, 5))
    step = next(step for step in steps if range_of_values < 5 * step)
    low = int(least / step) * step
    high = (int((least + range_of_values) / step) + 1) * step
    return charts.Axis(words, low, high, range(low, high + 1, step), ",")


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw time over memory."""
    for axes, ((name,), mine) in zip(figure.subplots(1, 2, squeeze=False)[0], groups(rows, "network").items()):
        axes.plot([row["peak_mib"] for row in mine], [row["ms"] for row in mine], "o--", label=name)
        axes.legend()
