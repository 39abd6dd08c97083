"""What do several ranks cost, beside one process with the same global batch?

A job trains in each way in turn, and beside it one process does alone what all ranks do together: in each round every
one has its burst, and ratios are taken within a round. While the others work, a job that is not asked waits for a
request and takes no time. The ranks share the machine's cores.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from . import ranks_plot, scaling
from .choosing import changed, known, start, unused
from .contenders import OURS, Entry
from .process import Contender, ContenderError
from .results import plot, save, show
from .speed import BATCH as _BATCH

# Every way to train is in one process, and in one of each rank: too much for the large MLP.
BATCH = {**_BATCH, "mlp12m": 32}
ONE = "one process"
APART = "apart"  # ranks that never speak: what the machine does when all of them compute
WAYS = tuple(scaling.COLLECTIVES)
OPERATORS = ("AllReduce", "AllGather")
_MIB, _FLOAT32 = 2**20, 4
_KEYS = {"network": "", "ranks": "d", "window": "d", "way": ""}
TIME_COLUMNS = {**_KEYS, "ms": ",.1f", "ms_min": ",.1f", "ms_max": ",.1f", "ratio": ".2f", "predicted_ms": ",.1f"}
SENT_COLUMNS = {
    **_KEYS,
    **dict.fromkeys(OPERATORS, "d"),
    "input_mib": ",.2f",
    "ring_mib": ",.2f",
    "loopback_mib": ",.2f",
}
ALONE_COLUMNS = {"ranks": "d", "operator": "", "bytes": ",d", "ms": ",.3f", "ms_min": ",.3f", "model_ms": ",.3f"}
KEPT = ("parameters", "accumulators", "optimizer")
MEMORY_COLUMNS = {"network": "", "ranks": "d", "way": "", "peak_mib": ",.0f", **dict.fromkeys(KEPT, ".2f")}


class Settings(NamedTuple):
    """What is measured; `seconds` is the least length of a burst, `elements` are sizes of a collective alone."""

    networks: Sequence[str] = ("transformer", "mlp", "mlp12m")
    ranks: Sequence[int] = (2, 4)
    windows: Sequence[int] = (1, 4, 16)
    rounds: int = 5
    seconds: float = 0.5
    elements: Sequence[int] = (4, 2**14, 2**18, 2**20, 2**22, 2**24)
    memory: Sequence[str] = ("mlp50m",)
    memory_ways: Sequence[str] = WAYS
    memory_window: int = 4


SHORT = Settings(
    networks=("mlp",),
    ranks=(2,),
    windows=(1, 2, 4),
    rounds=2,
    seconds=0.05,
    elements=(4, 2**18),
    memory=("mlp",),
    memory_ways=("ZeRO-2",),
)


def run(arguments: Namespace) -> None:
    """Measure, print the tables, write JSON and plot."""
    unused("ranks", contenders=arguments.contenders)
    known("--networks", arguments.networks, tuple(BATCH))
    settings = changed(SHORT if arguments.short else Settings(), arguments)
    if sum(window > 1 for window in settings.windows) < 2:
        raise ValueError("argument --windows: must be two or more above 1, to tell micro-batches from the boundary")
    rows: list[dict] = []
    versions: dict[str, str] = {}
    keep = partial(save, "ranks", arguments.output, rows, {**settings._asdict(), "batch": BATCH}, versions)
    for ranks in settings.ranks:
        alone: list[dict] = []
        for network in settings.networks:
            print(f"{network}, {ranks} ranks ...", flush=True)
            rows += _network(network, ranks, settings, alone, versions)
            keep()  # a collective that fails later does not cost what was measured before
        rows += alone
    rows += [row for network in settings.memory for row in _memory(network, settings)]
    _say(rows)
    path = keep()
    if not arguments.short:
        plot(path.with_suffix(".png"), lambda figure: ranks_plot.draw(figure, rows), ranks_plot.SIZE)


def _say(rows: Sequence[dict]) -> None:
    tables = {
        "ms of an update; ratio: to one process, median of rounds; predicted: by the cost model": TIME_COLUMNS,
        "collectives of an update and a rank, and what they send": SENT_COLUMNS,
        "a collective alone": ALONE_COLUMNS,
        "peak of the largest rank, and parameter sets that it keeps": MEMORY_COLUMNS,
    }
    for part, (what, columns) in zip(("time", "sent", "alone", "memory"), tables.items()):
        print(f"\n{what}")
        show([row for row in rows if row["part"] == part], columns)


@contextmanager
def job(network: str, ranks: int, ways: Sequence[str]) -> Iterator[Contender]:
    """Start so many ranks, as one contender."""
    with tempfile.TemporaryDirectory() as folder:
        entry = Entry(f"{ranks} ranks", "mindspore", "ranks_job.py")
        with start(entry, "--ranks", str(ranks), "--folder", folder, *_flags(network, ways)) as contender:
            yield contender


def one_process(network: str) -> Contender:
    """Return the process that does alone what all ranks do together, to be entered."""
    return start(Entry(OURS, "mindspore", "ranks_ours.py"), *_flags(network, (APART,)))


def _flags(network: str, ways: Sequence[str]) -> tuple[str, ...]:
    return ("--network", network, "--ways", *ways)


def _network(network: str, ranks: int, settings: Settings, alone: list[dict], versions: dict) -> list[dict]:
    """Return the rows of a network and a number of ranks, and fill in those of collectives alone if there are none."""
    with job(network, ranks, (APART, *WAYS)) as many, one_process(network) as one:
        versions.update(one.about["versions"])
        alone += [] if alone else _alone(many, ranks, settings)
        measured = {window: _rounds(many, one, network, window, settings) for window in settings.windows}
        graphs = {way: many.ask(what="graphs", way=way, batch=BATCH[network])["ranks"] for way in WAYS}
        size = one.about["parameters"] * _FLOAT32
    key = {"network": network, "ranks": ranks}
    times = [
        {"part": "time", **key, "window": window, **row} for window in measured for row in _times(measured[window])
    ]
    _predict(times, size, alone)
    seen = {(window, way): each for window, ways in measured.items() for way, each in ways.items()}
    sent = _sent(graphs, seen, settings.windows, ranks)
    return [*times, *({**key, "set_mib": size / _MIB, **row} for row in sent)]


def _alone(many: Contender, ranks: int, settings: Settings) -> list[dict]:
    """Measure collectives of several sizes, and say what the model that is fitted to the extremes says of each."""
    rows = []
    for operator in OPERATORS:
        seconds = {n * _FLOAT32: _collective(many, operator, n, settings) for n in settings.elements}
        medians = {size: statistics.median(each) for size, each in seconds.items()}
        link = scaling.fitted(operator, ranks, medians)
        for size, each in seconds.items():
            row = {"part": "alone", "ranks": ranks, "operator": operator, "bytes": size, **link._asdict()}
            model = scaling.collective_seconds(operator, size, ranks, link) * 1e3
            rows.append({**row, "ms": medians[size] * 1e3, "ms_min": min(each) * 1e3, "model_ms": model})
    return rows


def _collective(many: Contender, operator: str, elements: int, settings: Settings) -> list[float]:
    """Return the seconds that one takes, one figure a round."""

    def took(count: int) -> float:
        answers = many.ask(what="alone", operator=operator, elements=elements, count=count)["ranks"]
        return max(answer["seconds"] for answer in answers) / count

    count = max(2, round(settings.seconds / took(2)))
    return [took(count) for _ in range(settings.rounds)]


class Burst(NamedTuple):
    """What a burst was, for each update."""

    seconds: float
    sent: float


def _rounds(many: Contender, one: Contender, network: str, window: int, settings: Settings) -> dict[str, list[Burst]]:
    """Return the bursts of one process and of each way, one a round."""
    ranks, batch = many.about["ranks"], BATCH[network]
    print(f"  windows of {window} ...", flush=True)
    # A window of 1 of a process alone has no accumulators: it would not be comparable.
    ways = [way for way in (APART, *WAYS) if way != APART or window > 1]
    asked = {ONE: (one, APART, ranks * window), **{way: (many, way, window) for way in ways}}
    requests = {name: {"way": way, "window": n, "batch": batch} for name, (_, way, n) in asked.items()}
    windows = {name: _count(asked[name][0], request, settings.seconds) for name, request in requests.items()}
    bursts: dict[str, list[Burst]] = {name: [] for name in asked}
    for _ in range(settings.rounds):
        for name, request in requests.items():
            bursts[name].append(_burst(asked[name][0], request, windows[name]))
    return bursts


def _count(contender: Contender, request: dict[str, Any], seconds: float) -> int:
    """Return how many windows a burst has; compiles, if nothing has."""
    took = _burst(contender, request, 1).seconds
    if took < 10 * seconds:  # it may have been compiling
        took = _burst(contender, request, 1).seconds
    return max(1, round(seconds / took))


def _burst(contender: Contender, request: dict[str, Any], windows: int) -> Burst:
    answer = contender.ask(what="train", windows=windows, **request)
    ranks = answer.get("ranks", [answer])
    if not all(math.isfinite(each["loss"]) for each in ranks):
        raise ContenderError(f"The contender '{contender.name}' must have a finite loss, but got {ranks}.")
    # The last rank has ended; rank 0 has seen what all of them sent.
    return Burst(max(each["seconds"] for each in ranks) / windows, ranks[0]["sent"] / windows / len(ranks))


def _times(bursts: Mapping[str, Sequence[Burst]]) -> list[dict[str, Any]]:
    rows = []
    for way, each in bursts.items():
        ms = [1e3 * burst.seconds for burst in each]
        ratio = statistics.median(mine.seconds / one.seconds for mine, one in zip(each, bursts[ONE]))
        rows.append({"way": way, "ms": statistics.median(ms), "ms_min": min(ms), "ms_max": max(ms), "ratio": ratio})
    return rows


def _predict(times: Sequence[dict], size: float, alone: Sequence[dict]) -> None:
    """Add what the cost model says of each way, from what ranks take that do not speak and from collectives alone."""
    (fewer, less), (more, most) = sorted((row["window"], row["ms"]) for row in times if row["way"] == APART)[-2:]
    micro = (most - less) / (more - fewer)
    boundary = less - fewer * micro
    links = {row["operator"]: scaling.Link(row["bandwidth"], row["latency"]) for row in alone}
    for row in times:
        if row["way"] in WAYS:
            ways = (row["way"], row["window"], size, row["ranks"], links.__getitem__)
            speaking = 1e3 * scaling.speaking_seconds(*ways, scatters=False)
            row["predicted_ms"] = row["window"] * micro + boundary + speaking


def _sent(graphs: Mapping, seen: Mapping, windows: Sequence[int], ranks: int) -> Iterator[dict[str, Any]]:
    """Yield what each way's graphs send for an update, and what went over the loopback device, at least."""
    for way, (first, *others) in graphs.items():
        if any(other != first for other in others):
            raise ContenderError(f"All ranks must have the same graphs, but got {graphs[way]}.")
        for window in windows:
            found = [*first["micro_batch"] * window, *first["update"]]
            # As the model counts: of an AllGather, the size is that of what comes out.
            sizes = [each["bytes"] * (ranks if each["operator"] == "AllGather" else 1) for each in found]
            ring = sum(scaling.sent(each["operator"], size, ranks) for each, size in zip(found, sizes))
            yield {
                "part": "sent",
                "window": window,
                "way": way,
                **{operator: sum(each["operator"] == operator for each in found) for operator in OPERATORS},
                "input_mib": sum(each["bytes"] for each in found) / _MIB,
                "ring_mib": ring / _MIB,
                "loopback_mib": min(burst.sent for burst in seen[window, way]) / _MIB,
            }


def _memory(network: str, settings: Settings) -> list[dict]:
    """Return the peaks of fresh processes, first that of one alone."""
    rows = []
    for ranks in (1, *settings.ranks):
        for way in settings.memory_ways if ranks > 1 else (APART,):
            print(f"{network}, memory of {ranks} ranks, {way} ...", flush=True)
            with one_process(network) if ranks == 1 else job(network, ranks, (way,)) as contender:
                request = {"way": way, "window": settings.memory_window, "batch": BATCH[network], "windows": 3}
                contender.ask(what="train", **request)
                answer = contender.ask(what="memory", way=way)
                size = contender.about["parameters"] * _FLOAT32
            largest = max(answer.get("ranks", [answer]), key=lambda each: each["peak_mib"])
            kept = {name: largest[name] / size for name in KEPT}
            row = {"part": "memory", "network": network, "ranks": ranks, "window": settings.memory_window}
            rows.append({**row, "way": way if ranks > 1 else ONE, "peak_mib": largest["peak_mib"], **kept})
    return rows
