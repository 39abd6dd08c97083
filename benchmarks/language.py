"""The benchmark `language`: nanoGPT's recipe for a CPU, by the driver of train.py and by PyTorch.

All contenders begin with the same weights and take the same batches and rates. They take turns of some updates each,
while the others are stopped, so that what slows the machine slows them all.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from model_zoo.data.sentences import sentences

from . import plots
from .contenders import OURS, Entry, available, check_same_size
from .options import data_of, reject_options
from .process import Contender
from .runner import Session, alternate, check_loss, ratio, summary, wake_and_ask
from .tables import part

SPLITS = {"12": 12, "6+6": 6, "4+4+4": 4, "3+3+3+3": 3}
"""dict[str, int], the rows of a micro-batch, for each way to split the window of 12 rows."""
WHOLE = f"{OURS}-12"
WRITER = Entry(WHOLE, "mindspore", "gpt_ours.py", ("--write",))
PROGRAMS = (
    *(Entry(f"{OURS}-{name}", "mindspore", "gpt_ours.py", ("--rows", f"{rows}")) for name, rows in SPLITS.items()),
    *(
        Entry(f"torch-{name}", "torch", "gpt_torch.py", ("--rows", f"{SPLITS[name]}"))
        for name in ("12", "6+6", "3+3+3+3")
    ),
    Entry("torch.optim.AdamW-12", "torch", "gpt_torch.py", ("--rule", "adamw")),
)
UPDATES, ROUNDS = 50, 40
"""int, the updates of a burst, and the bursts of a run: short ones, because what disturbs them comes and goes."""
FIRST = 200
"""int, the updates whose losses are compared: after more, rounding differences have grown."""
TABLES = {
    "run": (
        "difference: of the losses from those of the first, the largest in the first 200 updates, then in all; "
        "all_s: with the start, which compiles",
        "contender updates:d validation:.4f difference:.1e difference_all:.1e ms:.1f ms_min:.1f ms_max:.1f ratio:.2f "
        "cpu_ms:.1f tokens_per_s:.0f train_s:.1f start_s:.1f all_s:.1f",
    ),
}
_EVERY = 10  # of the updates whose losses are written


def run(arguments: Namespace) -> None:
    """Train all in turn; print the table, write JSON and plot."""
    reject_options("language", networks=arguments.networks, windows=arguments.windows)
    updates, rounds = (3, 1) if arguments.short else (UPDATES, arguments.rounds or ROUNDS)
    if rounds > ROUNDS:
        raise ValueError(
            f"argument --rounds: must be <= {ROUNDS}, which are all updates of the recipe, but got {rounds}"
        )
    session = Session("language", arguments, {"updates": updates, "rounds": rounds, "short": arguments.short})
    with tempfile.TemporaryDirectory() as folder:
        text = text_in(folder, "language", arguments.short)
        with session.start(WRITER, folder=folder, text=text, updates=updates * rounds):
            pass  # what is written when it is ready
        session.rows = _rows(session, available(PROGRAMS, arguments.contenders), folder, text, updates, rounds)
    session.finish(TABLES, draw, size=(11.0, 5.0))


def text_in(folder: str, benchmark: str, short: bool) -> Path:
    """Return the path of the text, or of made sentences, which are written to the folder."""
    if not short:
        fetch = "data/shakespeare_char/prepare.py of nanoGPT fetches it"
        return data_of(benchmark, "SHAKESPEARE_DATA", "tinyshakespeare", fetch)
    path = Path(folder, "sentences.txt")
    path.write_text(sentences(), encoding="utf-8")
    return path


class Burst(NamedTuple):
    """What some updates took: the seconds that passed, and the CPU time of all threads of the process."""

    updates: int
    seconds: float
    cpu_seconds: float


class Run:
    """The run of a contender.

    Args:
        contender (Contender): it trains, from its first update to its last.
        began (float): when its process was started.
    """

    def __init__(self, contender: Contender, began: float):
        self.contender = contender
        self.losses: list[float] = []
        self.tokens = 0
        self.train(1)
        self.start_s = time.perf_counter() - began
        self.tokens = 0  # those of the first update are part of the start
        contender.stop()

    def train(self, updates: int) -> Burst:
        """Train."""
        answer = self.contender.ask(updates=updates)
        self.losses += answer["losses"]
        self.tokens += answer["tokens"]
        return Burst(updates, answer["seconds"], answer["cpu_seconds"])

    def burst(self, end: int) -> Burst:
        """Train until this number of updates, while the others are stopped."""
        self.contender.resume()
        burst = self.train(end - len(self.losses))
        self.contender.stop()
        return burst


def _rows(
    session: Session, programs: Sequence[Entry], folder: str, text: Path, updates: int, rounds: int
) -> list[dict[str, Any]]:
    """Train all contenders round by round, and evaluate them; return their rows, and those of their losses."""
    with ExitStack() as running:
        runs = {}
        for program in programs:
            print(f"{program.name} ...", flush=True)
            flags = {"folder": folder, "text": text if program.environment == "mindspore" else None}
            began = time.perf_counter()
            runs[program.name] = Run(running.enter_context(session.start(program, **flags)), began)
        check_same_size({name: run.contender.about["parameters"] for name, run in runs.items()})
        bursts: dict[str, list[Burst]] = {name: [] for name in runs}
        for end in range(updates, updates * rounds + 1, updates):
            for name, burst in alternate(1, {name: partial(run.burst, end) for name, run in runs.items()}).items():
                bursts[name] += burst
            print(f"{end} of {updates * rounds} updates", flush=True)
        rows = [_row(name, run, bursts, runs.get(WHOLE)) for name, run in runs.items()]
    return [*rows, *_curves({name: run.losses for name, run in runs.items()})]


def _row(name: str, run: Run, bursts: Mapping[str, Sequence[Burst]], whole: Run | None) -> dict[str, Any]:
    answer = wake_and_ask(run.contender)
    check_loss(run.contender, answer)
    times = {other: [burst.seconds / burst.updates for burst in mine] for other, mine in bursts.items()}
    train_s = sum(burst.seconds for burst in bursts[name])
    return {
        "part": "run",
        "contender": name,
        "updates": len(run.losses),
        "validation": answer["loss"],
        "validation_tokens": answer["tokens"],
        "difference": _difference(run, whole, FIRST),
        "difference_all": _difference(run, whole, len(run.losses)),
        **summary([seconds * 1000 for seconds in times[name]], "ms"),
        "ratio": ratio(times[name], times.get(WHOLE)),
        "cpu_ms": statistics.median(burst.cpu_seconds / burst.updates * 1000 for burst in bursts[name]),
        "tokens_per_s": run.tokens / train_s,
        "train_s": train_s,
        "start_s": run.start_s,
        "all_s": run.start_s + train_s,
    }


def _difference(run: Run, whole: Run | None, updates: int) -> float | None:
    """Return the largest difference of the losses of the first updates from those of ours without a split."""
    if whole is None:
        return None
    return max(abs(mine - other) for mine, other in zip(run.losses[:updates], whole.losses))


def _curves(losses: Mapping[str, Sequence[float]]) -> Iterable[dict[str, Any]]:
    """Yield a row for some updates, with the loss of each contender, as a mean over the updates since the last one."""
    for end in range(_EVERY, min(map(len, losses.values())) + 1, _EVERY):
        means = {name: round(statistics.fmean(mine[end - _EVERY : end]), 5) for name, mine in losses.items()}
        yield {"part": "curve", "update": end, **means}


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the losses over the updates, and the time of an update."""
    runs, curves = part(rows, "run"), part(rows, "curve")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for row in runs:
        name = row["contender"]
        style = "-" if name.startswith(OURS) else "--"
        left.plot([point["update"] for point in curves], [point[name] for point in curves], style, label=name, lw=1)
    left.set_xlabel("update")
    left.set_ylabel("training loss, mean of ten updates")
    left.legend()
    plots.bars(right, runs, "contender", "cpu_ms", "CPU ms per update of 12 rows (shorter is better)", "%.1f")
