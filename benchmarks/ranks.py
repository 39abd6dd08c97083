"""The benchmark `ranks`: what several ranks cost, compared with one process with the same global batch.

A job trains in each way in turn, and beside it one process does alone what all ranks do together: in each round every
one has its burst, and ratios are taken within a round. While the others work, a job that is not asked waits for a
request and takes no time. The ranks share the machine's cores.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, NamedTuple

from . import plots, scaling
from .contenders import OURS, Entry
from .options import reject_options, select_settings
from .process import Contender, ContenderError
from .runner import Session, alternate, check_loss, ratio, repeats, summary
from .scaling import KEPT, WAYS
from .speed import BATCH as _BATCH
from .tables import groups, part

# Every way to train is in one process, and in one of each rank: too much for the large MLP.
BATCH = {**_BATCH, "mlp12m": 32}
ONE = "one process"
APART = "apart"  # ranks that never communicate: what the machine does when all of them compute
OPERATORS = ("AllReduce", "AllGather")
SIZE = (12.0, 7.0)
COLOURS = {
    ONE: "#4d4d4d",
    APART: "#bfbfbf",
    "window's end": "#c0392b",
    "every micro-batch": "#e67e22",
    "ZeRO-1": "#1f618d",
    "ZeRO-2": "#5dade2",
}
_MIB, _FLOAT32 = 2**20, 4
_KEYS = "network ranks:d window:d way"
TABLES = {
    "time": (
        "ms of an update; ratio: to one process, median of rounds; predicted: by the cost model",
        f"{_KEYS} ms:,.1f ms_min:,.1f ms_max:,.1f ratio:.2f predicted_ms:,.1f",
    ),
    "sent": (
        "collectives of an update and a rank, and what they send",
        f"{_KEYS} AllReduce:d AllGather:d input_mib:,.2f ring_mib:,.2f loopback_mib:,.2f",
    ),
    "alone": ("a collective alone", "ranks:d operator bytes:,d ms:,.3f ms_min:,.3f model_ms:,.3f"),
    "memory": (
        "peak of the largest rank, and what it keeps, in model sizes",
        "network ranks:d way peak_mib:,.0f parameters:.2f accumulators:.2f optimizer:.2f",
    ),
}


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
    reject_options("ranks", contenders=arguments.contenders)
    settings = select_settings(Settings(), SHORT, arguments, tuple(BATCH))
    if sum(window > 1 for window in settings.windows) < 2:
        raise ValueError("argument --windows: must be two or more above 1, to tell micro-batches from the boundary")
    session = Session("ranks", arguments, {**settings._asdict(), "batch": BATCH})
    for ranks in settings.ranks:
        alone: list[dict] = []
        for network in settings.networks:
            print(f"{network}, {ranks} ranks ...", flush=True)
            session.rows += _network(session, network, ranks, settings, alone)
            session.save()  # a collective that fails later does not cost what was measured before
        session.rows += alone
    for network in settings.memory:
        session.rows += _memory(session, network, settings)
    session.finish(TABLES, draw, size=SIZE)


@contextmanager
def _job(session: Session, network: str, ranks: int, ways: Sequence[str]) -> Iterator[Contender]:
    """Start this number of ranks as one contender; a single rank trains alone on the global batch."""
    entry, flags = Entry(OURS, "mindspore", "ranks_ours.py", ("--ways", *ways)), {"network": network}
    with tempfile.TemporaryDirectory() as folder:
        if ranks > 1:
            entry = entry._replace(name=f"{ranks} ranks", program="ranks_job.py")
            flags.update(ranks=ranks, folder=folder)
        with session.start(entry, **flags) as contender:
            yield contender


def _network(session: Session, network: str, ranks: int, settings: Settings, alone: list[dict]) -> list[dict]:
    """Return the rows of a network and a number of ranks, and fill in those of collectives alone if there are none."""
    with _job(session, network, ranks, (APART, *WAYS)) as job, _job(session, network, 1, (APART,)) as single:
        alone += [] if alone else _alone(job, ranks, settings)
        measured = {window: _rounds(job, single, network, window, settings) for window in settings.windows}
        graphs = {way: job.ask(what="graphs", way=way, batch=BATCH[network])["ranks"] for way in WAYS}
        size = single.about["parameters"] * _FLOAT32
    key = {"network": network, "ranks": ranks}
    times = [
        {"part": "time", **key, "window": window, **row} for window in measured for row in _times(measured[window])
    ]
    _predict(times, size, alone)
    return [*times, *({**key, "set_mib": size / _MIB, **row} for row in _sent(graphs, measured, ranks))]


def _alone(job: Contender, ranks: int, settings: Settings) -> list[dict]:
    """Measure collectives of several sizes, and add the figures of the model that is fitted to the extremes."""
    rows = []
    for operator in OPERATORS:
        seconds = {n * _FLOAT32: _collective(job, operator, n, settings) for n in settings.elements}
        medians = {size: statistics.median(durations) for size, durations in seconds.items()}
        link = scaling.fitted(operator, ranks, medians)
        for size, durations in seconds.items():
            row = {"part": "alone", "ranks": ranks, "operator": operator, "bytes": size, **link._asdict()}
            model = scaling.collective_seconds(operator, size, ranks, link) * 1e3
            rows.append({**row, "ms": medians[size] * 1e3, "ms_min": min(durations) * 1e3, "model_ms": model})
    return rows


def _collective(job: Contender, operator: str, elements: int, settings: Settings) -> list[float]:
    """Return the seconds that one takes, one figure a round."""

    def slowest_seconds(count: int) -> float:
        answers = job.ask(what="alone", operator=operator, elements=elements, count=count)["ranks"]
        return max(answer["seconds"] for answer in answers)

    count = repeats(slowest_seconds, settings.seconds, least=2)
    return [slowest_seconds(count) / count for _ in range(settings.rounds)]


class Burst(NamedTuple):
    """What a burst was, for each update."""

    seconds: float
    sent: float


def _rounds(job: Contender, single: Contender, network: str, window: int, settings: Settings) -> dict[str, list[Burst]]:
    """Return the bursts of one process and of each way, one a round."""
    print(f"  windows of {window} ...", flush=True)
    ask = partial(_burst, batch=BATCH[network])
    bursts = {ONE: partial(ask, single, way=APART, window=job.about["ranks"] * window)}
    # A window of 1 of a process alone has no accumulators: it would not be comparable.
    ways = (APART, *WAYS) if window > 1 else WAYS
    bursts.update({way: partial(ask, job, way=way, window=window) for way in ways})
    return alternate(settings.rounds, {name: _ready(burst, settings.seconds) for name, burst in bursts.items()})


def _ready(burst: Callable[..., Burst], seconds: float) -> Callable[[], Burst]:
    """Compile, and return a burst that takes about `seconds`."""
    return partial(burst, windows=repeats(lambda windows: burst(windows=windows).seconds * windows, seconds))


def _burst(contender: Contender, *, windows: int, **request: Any) -> Burst:
    answer = contender.ask(what="train", windows=windows, **request)
    ranks = answer.get("ranks", [answer])
    for rank_answer in ranks:
        check_loss(contender, rank_answer)
    # The last rank has ended; rank 0 has seen what all of them sent.
    return Burst(
        max(rank_answer["seconds"] for rank_answer in ranks) / windows, ranks[0]["sent"] / windows / len(ranks)
    )


def _times(bursts: Mapping[str, Sequence[Burst]]) -> Iterator[dict[str, Any]]:
    seconds = {way: [burst.seconds for burst in values] for way, values in bursts.items()}
    for way, values in seconds.items():
        yield {"way": way, **summary([1e3 * value for value in values], "ms"), "ratio": ratio(values, seconds[ONE])}


def _predict(times: Sequence[dict], size: float, alone: Sequence[dict]) -> None:
    """Add the cost model's figure for each way, from ranks that do not communicate and from collectives alone."""
    (fewer, less), (more, most) = sorted((row["window"], row["ms"]) for row in times if row["way"] == APART)[-2:]
    micro = (most - less) / (more - fewer)
    boundary = less - fewer * micro
    if boundary < 0:  # the machine was slower during the largest windows; a time is not negative
        micro, boundary = most / more, 0.0
    links = {row["operator"]: scaling.Link(row["bandwidth"], row["latency"]) for row in alone}
    for row in times:
        if row["way"] in WAYS:
            ways = (row["way"], row["window"], size, row["ranks"], links.__getitem__)
            sending = 1e3 * scaling.sending_seconds(*ways, scatters=False)
            row["predicted_ms"] = row["window"] * micro + boundary + sending


def _sent(graphs: Mapping, measured: Mapping, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield what each way's graphs send for an update, and what went over the loopback device, at least."""
    for way, (first, *others) in graphs.items():
        if any(other != first for other in others):
            raise ContenderError(f"All ranks must have the same graphs, but got {graphs[way]}.")
        for window, bursts in measured.items():
            collectives = [*first["micro_batch"] * window, *first["update"]]
            # As the model counts: of an AllGather, the size is that of what comes out.
            sizes = [
                collective["bytes"] * (ranks if collective["operator"] == "AllGather" else 1)
                for collective in collectives
            ]
            ring = sum(
                scaling.sent(collective["operator"], size, ranks) for collective, size in zip(collectives, sizes)
            )
            yield {
                "part": "sent",
                "window": window,
                "way": way,
                **{
                    operator: sum(collective["operator"] == operator for collective in collectives)
                    for operator in OPERATORS
                },
                "input_mib": sum(collective["bytes"] for collective in collectives) / _MIB,
                "ring_mib": ring / _MIB,
                "loopback_mib": min(burst.sent for burst in bursts[way]) / _MIB,
            }


def _memory(session: Session, network: str, settings: Settings) -> Iterator[dict]:
    """Yield the peaks of fresh processes, first that of one alone."""
    for ranks in (1, *settings.ranks):
        for way in settings.memory_ways if ranks > 1 else (APART,):
            print(f"{network}, memory of {ranks} ranks, {way} ...", flush=True)
            with _job(session, network, ranks, (way,)) as contender:
                request = {"way": way, "window": settings.memory_window, "batch": BATCH[network], "windows": 3}
                contender.ask(what="train", **request)
                answer = contender.ask(what="memory", way=way)
                size = contender.about["parameters"] * _FLOAT32
            largest = max(answer.get("ranks", [answer]), key=lambda rank: rank["peak_mib"])
            kept = {name: largest[name] / size for name in KEPT}
            row = {"part": "memory", "network": network, "ranks": ranks, "window": settings.memory_window}
            yield {**row, "way": way if ranks > 1 else ONE, "peak_mib": largest["peak_mib"], **kept}


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the ratio to one process over the window, a column for each network, and below it the peaks of memory."""
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    panels = plots.columns(above, part(rows, "time"))
    for axes, network, mine in panels:
        styles = dict(zip(sorted({row["ranks"] for row in mine}), ("-", "--", ":")))
        lines = groups(mine, "way", "ranks")
        for way, ranks in itertools.product(WAYS, styles):
            style = {"linestyle": styles[ranks], "color": COLOURS[way], "label": f"{way}, {ranks} ranks"}
            plots.line(axes, lines[way, ranks], "ratio", "o", **style)
        plots.ratios_over_windows(axes, mine)
        axes.axhline(1, color=COLOURS[ONE], linewidth=0.8)
        axes.set_title(network)
    panels[0][0].set_ylabel("time of an update / time of one process")
    plots.legend(above, panels[0][0], 4)
    peaks = [{**row, "name": f"{row['way']}, {row['ranks']}"} for row in part(rows, "memory")]
    axes, colours = below.subplots(), [COLOURS[row["way"]] for row in peaks]
    plots.bars(axes, peaks, "name", "peak_mib", "peak MiB of the largest rank", "{:,.0f}", color=colours)
    axes.margins(x=0.1)
    plots.bare(axes)
