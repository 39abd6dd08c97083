"""The benchmark `ranks`: what several ranks cost, compared with one process with the same global batch.

A job trains in each way in turn, and beside it one process does alone what all ranks do together: in each round every
one has its burst, and ratios are taken within a round. While the others work, a job that is not asked waits for a
request and takes no time. The ranks share the machine's cores.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, NamedTuple

from .contenders import OURS, Entry
from .options import reject_options, select_settings
from .process import Contender
from .runner import Session, alternate, check_loss, ratio, repeats, summary
from .speed import BATCH as _BATCH

# Every way to train is in one process, and in one of each rank: too much for the large MLP.
BATCH = {**_BATCH, "mlp12m": 32}
ONE = "one process"
APART = "apart"  # ranks that never communicate: what the machine does when all of them compute
WAYS = ("window's end", "every micro-batch", "ZeRO-1", "ZeRO-2")
KEPT = ("parameters", "accumulators", "optimizer")  # what a rank keeps of a parameter set
_MIB, _FLOAT32 = 2**20, 4
TABLES = {
    "time": (
        "ms of an update; ratio: to one process, median of rounds",
        "network ranks:d window:d way ms:,.1f ms_min:,.1f ms_max:,.1f ratio:.2f",
    ),
    "memory": (
        "peak of the largest rank, and what it keeps, in model sizes",
        "network ranks:d way peak_mib:,.0f parameters:.2f accumulators:.2f optimizer:.2f",
    ),
}


class Settings(NamedTuple):
    """What is measured; `seconds` is the least length of a burst."""

    networks: Sequence[str] = ("transformer", "mlp", "mlp12m")
    ranks: Sequence[int] = (2,)
    windows: Sequence[int] = (1, 4, 16)
    rounds: int = 5
    seconds: float = 0.5
    memory: Sequence[str] = ("mlp50m",)
    memory_ways: Sequence[str] = WAYS
    memory_window: int = 4


SHORT = Settings(
    networks=("mlp",),
    ranks=(2,),
    windows=(1, 2, 4),
    rounds=2,
    seconds=0.05,
    memory=("mlp",),
    memory_ways=("ZeRO-2",),
)


def run(arguments: Namespace) -> None:
    """Measure, print the tables and write JSON."""
    reject_options("ranks", contenders=arguments.contenders)
    settings = select_settings(Settings(), SHORT, arguments, tuple(BATCH))
    if sum(window > 1 for window in settings.windows) < 2:
        raise ValueError("argument --windows: must be two or more above 1, to tell micro-batches from the boundary")
    session = Session("ranks", arguments, {**settings._asdict(), "batch": BATCH})
    for ranks in settings.ranks:
        for network in settings.networks:
            print(f"{network}, {ranks} ranks ...", flush=True)
            session.rows += _network(session, network, ranks, settings)
            session.save()  # a collective that fails later does not cost what was measured before
    for network in settings.memory:
        session.rows += _memory(session, network, settings)
    session.finish(TABLES)


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


def _network(session: Session, network: str, ranks: int, settings: Settings) -> list[dict]:
    """Return the rows of a network and a number of ranks."""
    with _job(session, network, ranks, (APART, *WAYS)) as job, _job(session, network, 1, (APART,)) as single:
        measured = {window: _rounds(job, single, network, window, settings) for window in settings.windows}
    key = {"part": "time", "network": network, "ranks": ranks}
    return [{**key, "window": window, **row} for window in measured for row in _times(measured[window])]


def _rounds(job: Contender, single: Contender, network: str, window: int, settings: Settings) -> dict[str, list[float]]:
    """Return the seconds of an update of one process and of each way, one figure a round."""
    print(f"  windows of {window} ...", flush=True)
    ask = partial(_burst, batch=BATCH[network])
    bursts = {ONE: partial(ask, single, way=APART, window=job.about["ranks"] * window)}
    # A window of 1 of a process alone has no accumulators: it would not be comparable.
    ways = (APART, *WAYS) if window > 1 else WAYS
    bursts.update({way: partial(ask, job, way=way, window=window) for way in ways})
    return alternate(settings.rounds, {name: _ready(burst, settings.seconds) for name, burst in bursts.items()})


def _ready(burst: Callable[..., float], seconds: float) -> Callable[[], float]:
    """Compile, and return a burst that takes about `seconds`."""
    return partial(burst, windows=repeats(lambda windows: burst(windows=windows) * windows, seconds))


def _burst(contender: Contender, *, windows: int, **request: Any) -> float:
    answer = contender.ask(what="train", windows=windows, **request)
    ranks = answer.get("ranks", [answer])
    for rank_answer in ranks:
        check_loss(contender, rank_answer)
    return max(rank_answer["seconds"] for rank_answer in ranks) / windows  # the last rank has ended


def _times(seconds: Mapping[str, Sequence[float]]) -> Iterator[dict[str, Any]]:
    for way, values in seconds.items():
        yield {"way": way, **summary([1e3 * value for value in values], "ms"), "ratio": ratio(values, seconds[ONE])}


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
