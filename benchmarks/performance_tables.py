"""The tables of docs/performance.md, for each machine that was measured, and its goals beside their figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Callable, NamedTuple

from .contenders import OURS, PLAIN, UNTUNED
from .results import records, rows
from .tables import Lines, groups, markdown, part

MACHINES = {"avx512-amd": "AMD, AVX-512", "avx512-intel": "Intel, AVX-512", "avx2-amd": "AMD, no AVX-512"}
_FIRST = next(iter(MACHINES))
_WINDOWS, _EVERY = (4, 16), 5
_SHOWN = 5  # of the dearest kernels

NOTHING = "Not measured on this machine.\n"

Rows = Sequence[Mapping[str, Any]]


def tables() -> dict[str, str]:
    """Return the tables by the names of their marks, such as avx2-amd/speed."""
    results = {machine: cache(partial(rows, machine)) for machine in MACHINES}  # most are needed by several tables
    made = {"goals": _goals(results)}
    made.update({name: _readme((results[_FIRST], *words)) for name, words in README.items()})
    for machine, found in results.items():
        made[f"{machine}/runs"] = _runs(machine)
        for name, (benchmark, table) in TABLES.items():
            made[f"{machine}/{name}"] = table(found(benchmark)) if found(benchmark) else NOTHING
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
def _speed(found: Rows) -> Lines:
    """The best start, and in brackets the worst where there were several."""
    panels = {key: mine for key, mine in groups(found, "network", "window").items() if key[1] in _WINDOWS}
    yield ["contender", *(f"{network}, N={window}" for network, window in panels)]
    for (name,) in groups(found, "contender"):
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
    "one by one / together": "window, one by one",
    "skip_micro": "windows, skip_micro",
    "dynamic loss scale": "windows, dynamic loss scale",
    "EMA": "windows, average",
    "noise scale": "windows, noise scale",
}


@markdown
def _cost(found: Rows) -> Lines:
    measured = {row["piece"] for row in found}
    pieces = {name: piece for name, piece in _PIECES.items() if piece in measured}
    yield ["network", "plain, ms", *pieces]
    for (network,), mine in groups(found, "network").items():
        by_piece = {row["piece"]: row for row in mine}
        ratios = [f"{by_piece[piece]['ratio']:.2f}" for piece in pieces.values()]
        yield [network, f"{by_piece['plain']['ms']:.2f}", *ratios]


@markdown
def _memory(found: Rows) -> Lines:
    """Of the windows; in brackets model sizes beyond the same contender's window of 1."""
    shown = [row for row in found if "more_sets" in row and row["batch"] == found[0]["batch"]]
    yield ["contender", *(f"N={window}, MiB" for (window,) in groups(shown, "window"))]
    for (name,), mine in groups(shown, "contender").items():
        yield [name, *(_peak(row) for row in mine)]


def _peak(row: Mapping[str, Any]) -> str:
    more = f" ({row['more_sets']:+.2f})" if row["window"] > 1 else ""
    return f"{row['peak_mib']:,.0f}{more}"


@markdown
def _growth(found: Rows) -> Lines:
    yield ["", "peak, MiB"]
    for row in found:
        if "more_sets" not in row:
            yield [f"{row['network']}, after {row['micro_batches']:,} micro-batches", f"{row['peak_mib']:,.0f}"]
        elif row["batch"] != found[0]["batch"]:
            yield [f"{row['network']}, one micro-batch of {row['batch']} rows", f"{row['peak_mib']:,.0f}"]


@markdown
def _data(found: Rows) -> Lines:
    ready, loader = ({row["contender"]: row for row in part(found, name)} for name in ("ready", "loader"))
    yield ["pipeline", "to the first batch, s", "again", "ms per batch of 32"]
    for name, row in ready.items():
        yield [name, f"{row['first_s']:.2f}", f"{row['again_s']:.2f}", f"{loader[name]['ms']:.2f}"]


@markdown
def _epochs(found: Rows) -> Lines:
    yield ["network", "N", "epoch with data, progress and metrics / its training alone"]
    for row in part(found, "epoch"):
        yield [row["network"], row["window"], f"{row['ratio']:.2f}"]


@markdown
def _start(found: Rows) -> Lines:
    yield ["to the first update of LeNet5, N=4", "seconds, median", "all"]
    for row in part(found, "command"):
        yield [row["contender"], f"{row['seconds']:.2f}", f"{row['min']:.2f} to {row['max']:.2f}"]


@markdown
def _stages(found: Rows) -> Lines:
    mine = part(found, "stage")
    yield ["", *(row["stage"] for row in mine)]
    yield ["seconds of `train.py`'s start", *(f"{row['seconds']:.2f}" for row in mine)]


@markdown
def _compiled(found: Rows) -> Lines:
    yield ["N", "graphs", "compiling, s", "more for a tail", "more for a short micro-batch"]
    for row in part(found, "compile"):
        more = [f"{row[f'{kind}_graphs']}, {row[f'{kind}_s']:.2f} s" for kind in ("tail", "short")]
        yield [row["window"], row["graphs"], f"{row['compile_s']:.2f}", *more]


@markdown
def _accuracy(found: Rows) -> Lines:
    yield ["network", "contender", "goal", "seconds to it", "epochs", "all epochs, s", "accuracy then"]
    of_epochs = groups([{"network": "lenet5", **row} for row in part(found, "epoch")], "network", "contender")
    for row in part(found, "summary"):
        network = row.get("network", "lenet5")
        epochs = max(each["epoch"] for each in of_epochs[network, row["contender"]])
        goal_s = "-" if row["goal_s"] is None else f"{row['goal_s']:,.0f}"
        yield [
            *(network, row["contender"], row.get("goal", "98.5%"), goal_s, epochs),
            *(f"{row['all_s']:,.0f}", f"{row['accuracy']:.2%}"),
        ]


@markdown
def _losses(found: Rows) -> Lines:
    shown = [row for row in found if row["update"] < _EVERY or row["update"] % _EVERY == 0]
    yield ["update", *(row["update"] for row in shown)]
    for name in ("ours", "torch"):
        if name in shown[0]:
            yield [name, *(f"{row[name]:.4f}" for row in shown)]


@markdown
def _operators(found: Rows) -> Lines:
    yield ["network", "contender", "kernels, share of the time in all"]
    for (network, contender), mine in groups(found, "network", "contender").items():
        yield [network, contender, ", ".join(f"{row['kernel']} {row['share']:.0%}" for row in mine[:_SHOWN])]


@markdown
def _forms(found: Rows) -> Lines:
    yield ["block", "form", "ms", "ratio to the first"]
    for row in found:
        yield [row["block"], row["form"], f"{row['ms']:.2f}", f"{row['ratio']:.2f}"]


README = {
    "readme": ("{}, {}, {} epochs: test accuracy, minutes", "{}: ms per micro-batch, N=16", "MindSpore's tutorial"),
    "readme.zh": ("{}，{}，{} 个 epoch：测试准确率，分钟", "{}：每个微批次的毫秒数，N=16", "MindSpore 教程"),
}
_DATA = {"lenet5": "MNIST", "small_resnet": "CIFAR-10"}
_BESIDE = ("torch", "tutorial-functional")  # of the tutorials the one that is written today


@markdown
def _readme(source: Sequence[Any]) -> Lines:
    """Accuracy and speed in a few lines, from the results of a machine and the words of a language."""
    found, trained, speed, tutorial = source
    yield ["", OURS, "PyTorch", tutorial]
    for mine in (found("accuracy"), found("cifar10")):
        summaries = {row["contender"].replace("-0-workers", ""): row for row in part(mine, "summary")}
        if OURS in summaries:
            network = summaries[OURS]["network"]
            epochs = max(row["epoch"] for row in part(mine, "epoch"))
            cells = [_reached(summaries.get(name)) for name in (OURS, *_BESIDE)]
            yield [trained.format(network, _DATA[network], epochs), *cells]
    of_sixteen = [row for row in found("speed") if row["window"] == _WINDOWS[-1]]
    for (network,), mine in groups(of_sixteen, "network").items():
        times = {row["contender"]: f"{row['ms']:,.1f}" for row in mine}
        yield [speed.format(network), *(times.get(name, "-") for name in (OURS, *_BESIDE))]


def _reached(row: Mapping[str, Any] | None) -> str:
    return f"{row['accuracy']:.1%}, {row['all_s'] / 60:.2g}" if row else "-"


class Goal(NamedTuple):
    """A figure that should be at most so large."""

    what: str
    most: float
    figure: Callable[[Callable[[str], Rows]], float | None]
    """Finds it in the rows of benchmarks, which it asks for by name."""


def _beside_peer(network: str, found: Callable[[str], Rows]) -> float | None:
    mine = [row for row in found("speed") if (row["network"], row["window"]) == (network, _WINDOWS[-1])]
    ours = [row["ms"] for row in mine if row["contender"] == OURS]
    peers = [row["ms"] for row in mine if row["contender"] not in (OURS, UNTUNED, PLAIN)]
    return ours[0] / min(peers) if ours and peers else None


def _ratio(network: str, piece: str, found: Callable[[str], Rows]) -> float | None:
    mine = [row for row in found("cost") if (row["network"], row["piece"]) == (network, piece)]
    return mine[0]["ratio"] if mine else None


def _sets(found: Callable[[str], Rows]) -> float | None:
    mine = [row for row in found("memory") if row["contender"] == OURS and row["window"] == 2]
    return mine[0]["more_sets"] if mine else None


def _beside_tutorial(found: Callable[[str], Rows]) -> float | None:
    seconds = {row["contender"]: row["seconds"] for row in part(found("start"), "command")}
    tutorials = [each for name, each in seconds.items() if name.startswith("tutorial")]
    return seconds["train.py"] / max(tutorials) if tutorials else None


_NETWORKS = {"lenet5": 1.3, "mlp": 1.5, "transformer": 1.6, "mlp50m": 1.0}
GOALS = (
    *(Goal(f"{name}, N=16: time / best peer's", most, partial(_beside_peer, name)) for name, most in _NETWORKS.items()),
    *(Goal(f"{name}: micro-batch / plain", 1.05, partial(_ratio, name, "accumulate")) for name in _NETWORKS),
    *(Goal(f"{name}: update / plain with optimizer", 1.05, partial(_ratio, name, "update")) for name in _NETWORKS),
    *(
        Goal(f"{name}: {more} / without", 1.03, partial(_ratio, name, _PIECES[more]))
        for more in ("skip_micro", "dynamic loss scale", "EMA", "noise scale")
        for name in ("lenet5", "mlp", "transformer")
    ),
    Goal("memory of N=2 beyond N=1, model sizes", 1.0, _sets),
    Goal("start of `train.py` / the slower tutorial's", 1.0, _beside_tutorial),
)


@markdown
def _goals(found: Mapping[str, Callable[[str], Rows]]) -> Lines:
    """Compare what is printed: a figure that rounds to its goal meets it."""
    yield ["", "goal", *(MACHINES[machine] for machine in found)]
    for goal in GOALS:
        figures = [goal.figure(of) for of in found.values()]
        yield [goal.what, f"≤ {goal.most:.2f}", *(_judged(figure, goal.most) for figure in figures)]


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
    "losses": ("losses", _losses),
    "operators": ("operators", _operators),
    "forms": ("forms", _forms),
}
