"""The tables of docs/performance.md, for each machine that was measured, and its goals with their figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Callable, NamedTuple

from .contenders import OURS, OWN, PLAIN, TUNED, UNTUNED
from .results import records
from .results import rows as rows_of
from .tables import Lines, groups, markdown, part

MACHINES = {"avx512-amd": "AMD, AVX-512", "avx512-intel": "Intel, AVX-512", "avx2-amd": "AMD, no AVX-512"}
_WINDOWS = (4, 16)

NOTHING = "Not measured on this machine.\n"

Rows = Sequence[Mapping[str, Any]]


def tables() -> dict[str, str]:
    """Return the tables by the names of their marks, such as avx2-amd/speed."""
    results = {machine: cache(partial(rows_of, machine)) for machine in MACHINES}  # most are needed by several tables
    made = {"goals": _goals(results)}
    for language, words in WORDS.items():
        source = (tuple(results.values()), words)
        made[f"accuracy{language}"], made[f"speed{language}"] = _accuracy_of_all(source), _speed_of_all(source)
        made[f"readme/cost{language}"] = _cost_of_all(source)
    for machine, find_rows in results.items():
        made[f"{machine}/runs"] = _runs(machine)
        for name, (benchmark, table) in TABLES.items():
            made[f"{machine}/{name}"] = table(find_rows(benchmark)) if find_rows(benchmark) else NOTHING
    return made


@markdown
def _runs(machine: str) -> Lines:
    """When, where and with what each benchmark ran."""
    yield ["benchmark", "date", "CPU", "versions"]
    for record in records(machine):
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name != "ms_accum")
        about = record["machine"]
        yield [record["benchmark"], record["date"][:10], f"{about['cores']} cores, {about['cpu']}", versions]


@markdown
def _speed(rows: Rows) -> Lines:
    """The best start, and in brackets the worst where there were several."""
    panels = {key: mine for key, mine in groups(rows, "network", "window").items() if key[1] in _WINDOWS}
    yield ["contender", *(f"{network}, N={window}" for network, window in panels)]
    for (name,) in groups(rows, "contender"):
        cells = []
        for mine in panels.values():
            row = next((row for row in mine if row["contender"] == name), None)
            worst = f" ({row['ms_worst']:,.1f})" if row and "ms_worst" in row else ""
            cells.append(f"{row['ms']:,.1f}{worst}" if row else "-")
        yield [name, *cells]


_PIECES = {
    "accumulating micro-batch / plain": "accumulate",
    "update / plain with optimizer": "update",
    "driver / its Cells": "window, driver",
    "end in a graph of its own / in the last micro-batch's": "window, separate end",
    "skip_micro": "windows, skip_micro",
    "dynamic loss scale": "windows, dynamic loss scale",
    "EMA": "windows, average",
    "two terms / one number": "windows, two terms",
    "driver in default mode / graph mode": "windows, default mode",
    "`Model` in default mode / graph mode": "Model, default mode",
    "plain loop with `Accumulator` / without": "loop, Accumulator",
}


@markdown
def _cost(rows: Rows) -> Lines:
    measured = {row["piece"] for row in rows}
    pieces = {name: piece for name, piece in _PIECES.items() if piece in measured}
    networks = groups(rows, "network")
    yield ["", *(network for (network,) in networks)]
    columns = [{row["piece"]: row for row in mine} for mine in networks.values()]
    yield ["plain, ms", *(f"{by_piece['plain']['ms']:.2f}" for by_piece in columns)]
    for name, piece in pieces.items():
        yield [name, *(f"{by_piece[piece]['ratio']:.2f}" for by_piece in columns)]


@markdown
def _memory(rows: Rows) -> Lines:
    """Of the windows; in brackets model sizes beyond the same contender's window of 1."""
    shown = [row for row in rows if "more_sets" in row and row["batch"] == rows[0]["batch"]]
    yield ["contender", *(f"N={window}, MiB" for (window,) in groups(shown, "window"))]
    for (name,), mine in groups(shown, "contender").items():
        yield [name, *(_peak(row) for row in mine)]


def _peak(row: Mapping[str, Any]) -> str:
    more = f" ({row['more_sets']:+.2f})" if row["window"] > 1 else ""
    return f"{row['peak_mib']:,.0f}{more}"


@markdown
def _growth(rows: Rows) -> Lines:
    yield ["", "peak, MiB"]
    for row in rows:
        if "more_sets" not in row:
            yield [f"{row['network']}, after {row['micro_batches']:,} micro-batches", f"{row['peak_mib']:,.0f}"]
        elif row["batch"] != rows[0]["batch"]:
            yield [f"{row['network']}, one micro-batch of {row['batch']} rows", f"{row['peak_mib']:,.0f}"]


@markdown
def _data(rows: Rows) -> Lines:
    ready, loader = ({row["contender"]: row for row in part(rows, name)} for name in ("ready", "loader"))
    yield ["pipeline", "to the first batch, s", "again", "ms per batch of 32"]
    for name, row in ready.items():
        yield [name, f"{row['first_s']:.2f}", f"{row['again_s']:.2f}", f"{loader[name]['ms']:.2f}"]


@markdown
def _epochs(rows: Rows) -> Lines:
    yield ["network", "N", "epoch with data, progress and metrics / its training alone"]
    for row in part(rows, "epoch"):
        yield [row["network"], row["window"], f"{row['ratio']:.2f}"]


@markdown
def _start(rows: Rows) -> Lines:
    yield ["to the first update of LeNet5, N=4", "seconds, median", "all"]
    for row in part(rows, "command"):
        yield [row["contender"], f"{row['seconds']:.2f}", f"{row['min']:.2f} to {row['max']:.2f}"]


@markdown
def _stages(rows: Rows) -> Lines:
    mine = part(rows, "stage")
    yield ["", *(row["stage"] for row in mine)]
    yield ["seconds of `train.py`'s start", *(f"{row['seconds']:.2f}" for row in mine)]


@markdown
def _compiled(rows: Rows) -> Lines:
    yield ["N", "graphs", "compiling, s", "more for a tail", "more for a short micro-batch"]
    for row in part(rows, "compile"):
        more = [f"{row[f'{kind}_graphs']}, {row[f'{kind}_s']:.2f} s" for kind in ("tail", "short")]
        yield [row["window"], row["graphs"], f"{row['compile_s']:.2f}", *more]


@markdown
def _accuracy(rows: Rows) -> Lines:
    yield ["network", "contender", "goal", "seconds to it", "epochs", "all epochs, s", "accuracy then"]
    of_epochs = groups([{"network": "lenet5", **row} for row in part(rows, "epoch")], "network", "contender")
    for row in part(rows, "summary"):
        network = row.get("network", "lenet5")
        epochs = max(epoch_row["epoch"] for epoch_row in of_epochs[network, row["contender"]])
        goal_s = "-" if row["goal_s"] is None else f"{row['goal_s']:,.0f}"
        yield [
            *(network, row["contender"], row.get("goal", "98.5%"), goal_s, epochs),
            *(f"{row['all_s']:,.0f}", f"{row['accuracy']:.2%}"),
        ]


class Words(NamedTuple):
    """The words of the tables of all machines in one language."""

    trained: str
    run: str
    speed: Sequence[str]
    forms: Mapping[str, str]
    cost: Mapping[str, str]


_DATA = {"lenet5": "MNIST", "small_resnet": "CIFAR-10"}
_TORCH = ("torch", "torch-compile")
# Networks that have two forms, by what the contender is called that trains the other one.
_FORMS = {"transformer": ("for CPU", PLAIN)}
WORDS = {
    "": Words(
        "test accuracy, minutes",
        "{}, {}, {} epochs",
        ("N={}: ms", "/ MindSpore's", "/ PyTorch"),
        {"for CPU": "{}, forms for CPU", PLAIN: "{}, usual forms"},
        {"accumulate": "micro-batch / plain one", "update": "update / plain one"},
    ),
    ".zh": Words(
        "测试准确率，分钟",
        "{}，{}，{} 个 epoch",
        ("N={}：毫秒", "/ MindSpore", "/ PyTorch"),
        {"for CPU": "{}，适合 CPU 的写法", PLAIN: "{}，常用写法"},
        {"accumulate": "一个微批次的时间 / 普通训练", "update": "一次更新的时间 / 普通训练"},
    ),
}


@markdown
def _accuracy_of_all(source: tuple[Sequence[Callable[[str], Rows]], Words]) -> Lines:
    """Accuracy and minutes, from the machine where they are least to the one where they are most."""
    machines, words = source
    yield [words.trained, OURS, "PyTorch"]
    for benchmark in ("accuracy", "cifar10"):
        measured = [mine for find_rows in machines if (mine := find_rows(benchmark))]
        if measured:
            of_epochs = part(measured[0], "epoch")
            network, epochs = of_epochs[0].get("network", "lenet5"), max(row["epoch"] for row in of_epochs)
            label = words.run.format(network, _DATA[network], epochs)
            yield [label, *(_reached(measured, name) for name in (OURS, "torch"))]


@markdown
def _cost_of_all(source: tuple[Sequence[Callable[[str], Rows]], Words]) -> Lines:
    """What accumulating costs, compared with training without it on the same machine: from the least to the most."""
    machines, words = source
    yield ["", *words.cost.values()]
    for network in _NETWORKS:
        found = [[_ratio(network, piece, find_rows) for find_rows in machines] for piece in words.cost]
        yield [network, *(_range([figure for figure in figures if figure is not None], ".2f") for figures in found)]


def _reached(measured: Sequence[Rows], name: str) -> str:
    """Return a contender's accuracy and minutes; PyTorch's with the loader that is the fastest on two cores."""
    summaries = [
        row for mine in measured for row in part(mine, "summary") if row["contender"] in (name, f"{name}-0-workers")
    ]
    accuracy = _range([100 * row["accuracy"] for row in summaries], ".1f")
    return f"{accuracy}%, {_range([row['all_s'] / 60 for row in summaries], '.2g')}"


@markdown
def _speed_of_all(source: tuple[Sequence[Callable[[str], Rows]], Words]) -> Lines:
    """The best start, and its ratios to others on the same machine: from the least to the most of the machines.

    MindSpore's own ways are compared with ours under the same environment variables: those that ours sets, or, on
    machines where that was not measured, MindSpore's default settings.
    """
    machines, words = source
    head, *columns = words.speed
    yield ["", *itertools.chain.from_iterable([head.format(window), *columns] for window in _WINDOWS)]
    measured = [groups(mine, "network", "window") for find_rows in machines if (mine := find_rows("speed"))]
    for network in dict.fromkeys(network for mine in measured for network, _ in mine):
        of_windows = [
            [{row["contender"]: row["ms"] for row in mine.get((network, window), ())} for mine in measured]
            for window in _WINDOWS
        ]
        form, plain = _FORMS.get(network, ("", ""))
        yield [words.forms.get(form, "{}").format(network), *_cells(of_windows, OURS, UNTUNED)]
        if plain and any(plain in times for times in of_windows[0]):
            yield [words.forms[plain].format(network), *_cells(of_windows, plain, "")]


def _cells(of_windows: Sequence[Sequence[Mapping[str, float]]], name: str, untuned: str) -> Iterator[str]:
    """Return for each size of the window the times of a contender and both ratios; "" for one that was not measured."""
    for machines in of_windows:
        yield _range([times[name] for times in machines if name in times], ".1f")
        equally_set = [times if set(TUNED) & set(times) else _as_tuned(times, untuned, name) for times in machines]
        yield _ratios(equally_set, name if untuned else "", TUNED)
        yield _ratios(machines, name, _TORCH)


def _as_tuned(times: Mapping[str, float], untuned: str, name: str) -> dict[str, float]:
    """Return the times under MindSpore's default settings, by the names that they have under ours."""
    own = {tuned: times[plain] for tuned, plain in zip(TUNED, OWN) if plain in times}
    return {**own, **({name: times[untuned]} if untuned in times else {})}


def _ratios(machines: Sequence[Mapping[str, float]], name: str, others: Sequence[str]) -> str:
    """Return by how much longer a contender takes than the fastest of others, on each machine."""
    both = [times for times in machines if name in times and set(others) & set(times)]
    fastest = [min(times[other] for other in others if other in times) for times in both]
    return _range([times[name] / least for times, least in zip(both, fastest)], ".2f")


def _range(figures: Sequence[float], spec: str) -> str:
    if not figures:
        return "-"
    low, high = (format(figure, spec) for figure in (min(figures), max(figures)))
    return low if low == high else f"{low}–{high}"


class Goal(NamedTuple):
    """A figure that should be at most so large."""

    name: str
    most: float
    figure: Callable[[Callable[[str], Rows]], float | None]
    """Finds it in the rows of benchmarks, which it asks for by name."""


def _beside_peer(network: str, find_rows: Callable[[str], Rows]) -> float | None:
    mine = [row for row in find_rows("speed") if (row["network"], row["window"]) == (network, _WINDOWS[-1])]
    ours = [row["ms"] for row in mine if row["contender"] == OURS]
    peers = [row["ms"] for row in mine if row["contender"] not in (OURS, UNTUNED, PLAIN)]
    return ours[0] / min(peers) if ours and peers else None


def _beside_own(network: str, windows: Sequence[int], find_rows: Callable[[str], Rows]) -> float | None:
    """Return the worst ratio to the fastest of MindSpore's own ways under the same environment variables."""
    measured = groups(find_rows("speed"), "network", "window")
    ratios = []
    for window in windows:
        times = {row["contender"]: row["ms"] for row in measured.get((network, window), ())}
        own = [times[name] for name in TUNED if name in times]
        if OURS in times and own:
            ratios.append(times[OURS] / min(own))
    return max(ratios) if len(ratios) == len(windows) else None


def _epoch(network: str, find_rows: Callable[[str], Rows]) -> float | None:
    mine = [row for row in part(find_rows("data"), "epoch") if row["network"] == network]
    return mine[0]["ratio"] if mine else None


def _ratio(network: str, piece: str, find_rows: Callable[[str], Rows]) -> float | None:
    mine = [row for row in find_rows("cost") if (row["network"], row["piece"]) == (network, piece)]
    return mine[0]["ratio"] if mine else None


def _sets(find_rows: Callable[[str], Rows]) -> float | None:
    mine = [row for row in find_rows("memory") if row["contender"] == OURS and row["window"] == 2]
    return mine[0]["more_sets"] if mine else None


def _peak_beside_tutorial(find_rows: Callable[[str], Rows]) -> float | None:
    mine = {row["contender"]: row["peak_mib"] for row in find_rows("memory") if row["window"] == 2}
    tutorials = [peak for name, peak in mine.items() if name.startswith("tutorial")]
    return mine[OURS] / max(tutorials) if tutorials else None


def _beside_tutorial(name: str, find_rows: Callable[[str], Rows]) -> float | None:
    seconds = {row["contender"]: row["seconds"] for row in part(find_rows("start"), "command")}
    tutorials = [time for other, time in seconds.items() if other.startswith("tutorial")]
    return seconds[name] / max(tutorials) if tutorials else None


_NETWORKS = {"lenet5": 1.3, "mlp": 1.5, "transformer": 1.6, "mlp50m": 1.0}
_EVERY_WINDOW = (1, 2, 4, 16)
GOALS = (
    *(
        Goal(
            f"{name}, worst of N=1, 2, 4, 16: time / best of MindSpore's, equally set",
            1.0,
            partial(_beside_own, name, _EVERY_WINDOW),
        )
        for name in _NETWORKS
    ),
    Goal("mlp50m, N=2: the same", 0.85, partial(_beside_own, "mlp50m", (2,))),
    *(Goal(f"{name}, N=16: time / best peer's", most, partial(_beside_peer, name)) for name, most in _NETWORKS.items()),
    *(Goal(f"{name}: micro-batch / plain", 1.05, partial(_ratio, name, "accumulate")) for name in _NETWORKS),
    *(Goal(f"{name}: update / plain with optimizer", 1.0, partial(_ratio, name, "update")) for name in _NETWORKS),
    *(
        Goal(f"{name}: {more} / without", 1.03, partial(_ratio, name, _PIECES[more]))
        for more in ("skip_micro", "dynamic loss scale", "EMA")
        for name in ("lenet5", "mlp", "transformer")
    ),
    Goal("memory of N=2 beyond N=1, model sizes", 1.0, _sets),
    Goal("peak at N=2 / the larger tutorial's", 1.0, _peak_beside_tutorial),
    Goal("start of `train.py` / the slower tutorial's", 1.05, partial(_beside_tutorial, "train.py")),
    Goal("start of a program with the driver / the slower tutorial's", 1.05, partial(_beside_tutorial, OURS)),
    *(
        Goal(f"{name}: epoch with data and metrics / its training", 1.05, partial(_epoch, name))
        for name in ("lenet5", "mlp")
    ),
    *(Goal(f"{name}: two terms / one number", 1.02, partial(_ratio, name, "windows, two terms")) for name in _NETWORKS),
)


@markdown
def _goals(machines: Mapping[str, Callable[[str], Rows]]) -> Lines:
    """Compare what is printed: a figure that rounds to its goal meets it."""
    yield ["", "goal", *(MACHINES[machine] for machine in machines)]
    for goal in GOALS:
        figures = [goal.figure(find_rows) for find_rows in machines.values()]
        yield [goal.name, f"≤ {goal.most:.2f}", *(_judged(figure, goal.most) for figure in figures)]


def _judged(figure: float | None, most: float) -> str:
    if figure is None or math.isnan(figure):
        return "not measured"
    return f"{figure:.2f}" if round(figure, 2) <= most else f"**{figure:.2f}**, missed"


TABLES: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "speed": ("speed", _speed),
    "cost": ("cost", _cost),
    "memory": ("memory", _memory),
    "growth": ("memory", _growth),
    "data": ("data", _data),
    "epochs": ("data", _epochs),
    "start": ("start", _start),
    "stages": ("start", _stages),
    "compiled": ("start", _compiled),
    "accuracy": ("accuracy", _accuracy),
    "cifar10": ("cifar10", _accuracy),
}
