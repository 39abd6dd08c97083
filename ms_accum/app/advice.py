"""Advises whether to accumulate: measures a window's splits, and the same rows with an update for each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, NamedTuple

from .._check import quantity
from ..schedules import scale_adam
from ..zoo.recipes import ADAPTIVE
from .amounts import short
from .search import MicroBatch, find_micro_batch_size, limit_of, time_sizes
from .settings import Settings
from .trials import Trial, run_in_new_process

_OWNER = "find_micro_batch_size"
# Single micro-batches are advised from this part of the speed of the fastest split on.
_ENOUGH = 0.95
# Below this, statistics of BatchNorm are poor (Wu and He 2018, Group Normalization, figure 1).
_LEAST_ROWS_OF_BATCH_NORM = 16
_NOISE_SECONDS, _NOISE_UPDATES = 60.0, 50
_BETA2 = 0.999  # MindSpore's


class Noise(NamedTuple):
    """The estimated noise scale at the beginning of a run."""

    rows: float
    """float, NaN without an estimate."""
    updates: int
    """int, the updates during which it was estimated."""


@dataclass(frozen=True)
class Measured:
    """What was measured about a window and its rows."""

    split: MicroBatch
    """MicroBatch, the splits of the window."""
    single: tuple[Trial, ...]
    """tuple[Trial], the seconds for the window's rows if each micro-batch has an update."""
    noise: Noise
    budget: int | None
    """Optional[int], the bytes that a trial could use."""

    @property
    def table(self) -> list[str]:
        """list[str], a line for each number of rows."""
        rows_of_window = self.split.effective_batch
        alone = {trial.rows: trial for trial in self.single}
        lines = ["rows per second with an update per", f"{'window':>9} {'micro-batch':>12} {'rows':>7} {'N':>4}  peak"]
        for trial in self.split.trials:
            speeds = [_speed(timed, rows_of_window) for timed in (trial, alone.get(trial.rows))]
            peak = "does not fit" if not trial.fits else short(trial.peak) if trial.peak else ""
            count = math.ceil(rows_of_window / trial.rows)
            lines.append(f"{speeds[0]:>9} {speeds[1]:>12} {trial.rows:>7,} {count:>4,}  {peak}")
        return lines


def _speed(trial: Trial | None, rows: int) -> str:
    return "" if trial is None or trial.seconds is None or not trial.fits else f"{rows / trial.seconds:,.0f}"


def measured(
    settings: Settings,
    trial: Callable[[int], Any],
    single: Callable[[int], Any],
    noise: Callable[..., tuple[float, int]],
) -> Measured:
    """Measure, in other processes.

    Args:
        settings (Settings): the settings of the run.
        trial (Callable): as for `find_micro_batch_size`.
        single (Callable): the same with an update for each micro-batch.
        noise (Callable): gets the rows of a micro-batch and a number of updates, trains, and returns the estimated
            noise scale and the number of updates that were made.
    """
    budget = settings.memory_budget
    split = find_micro_batch_size(trial, settings.window_rows, memory_budget=budget)
    limit = limit_of(budget)
    fitting = [result for result in split.trials if result.fits]
    whole = [result for result in fitting if result.rows == settings.window_rows]  # is a single micro-batch
    sizes = sorted(result.rows for result in fitting if result not in whole)
    singles = (*time_sizes(_OWNER, single, sizes, limit), *whole) if sizes else tuple(whole)
    seconds = min(result.seconds or 0.0 for result in fitting)
    updates = max(4, min(_NOISE_UPDATES, int(_NOISE_SECONDS / max(seconds, 1e-9))))
    rows = min(split.micro_batch_size, math.ceil(settings.window_rows / 2))  # at least two, to compare
    work = partial(_send_noise, noise, rows, updates)
    outcome = run_in_new_process(_OWNER, work, [rows], limit)
    estimate = Noise(*outcome.results[0]) if outcome.results else Noise(math.nan, 0)
    return Measured(split, singles, estimate, budget)


def _send_noise(
    noise: Callable[..., tuple[float, int]], rows: int, updates: int, send: Callable[[tuple], None]
) -> None:
    send(noise(rows, updates))


class Advice(NamedTuple):
    """Whether to accumulate."""

    accumulates: bool
    rows: int
    """int, of a micro-batch."""
    speed: float
    """float, rows per second."""
    other: float
    """float, rows per second of the best that is not advised: of single micro-batches, or of the fastest split."""


def advice(measured: Measured, *, has_batch_norm: bool = False) -> Advice:
    """Return the smallest single micro-batch that is nearly as fast as all else; if there is none, the fastest split.

    Args:
        measured (Measured): the measurements.
        has_batch_norm (bool): whether the network's statistics are those of a micro-batch. Default: ``False``.
    """
    rows = measured.split.effective_batch
    best_split = min(_timed(measured.split.trials), key=lambda trial: trial.seconds or 0.0)
    least = min(_LEAST_ROWS_OF_BATCH_NORM, rows) if has_batch_norm else 1
    singles = [trial for trial in _timed(measured.single) if trial.rows >= least]
    split_speed = rows / (best_split.seconds or math.inf)
    speeds = {trial.rows: rows / (trial.seconds or math.inf) for trial in singles}
    fast = [size for size, speed in speeds.items() if speed >= _ENOUGH * max(split_speed, *speeds.values())]
    if fast:
        return Advice(False, min(fast), speeds[min(fast)], split_speed)
    return Advice(True, best_split.rows, split_speed, max(speeds.values(), default=0.0))


def _timed(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.fits and trial.seconds]


def flags_of(settings: Settings, advised: Advice) -> list[str]:
    """Return the flags that replace those of the window, with the same schedule over the data."""
    if advised.accumulates:
        return [f"--effective_batch={settings.window_rows}", f"--batch_size={advised.rows}"]
    ratio = advised.rows / settings.window_rows
    is_adaptive = settings.optimizer in ADAPTIVE
    flags = [f"--batch_size={advised.rows}", "--mini_steps=1"]
    if ratio == 1:
        return flags
    if settings.lr_scaling == "none":  # else it follows the window anyway
        factor = math.sqrt(ratio) if is_adaptive else ratio
        rates = {"lr": settings.lr, "min_lr": settings.min_lr}
        flags += [f"--{name}={rate * factor:.3g}" for name, rate in rates.items() if rate is not None]
    # With six digits a decay near 1 would be printed as 1, which the flags reject.
    if is_adaptive:
        flags.append(f"--beta2={scale_adam(settings.beta2 or _BETA2, settings.window_rows, advised.rows):.9g}")
    if settings.ema is not None:
        flags.append(f"--ema={settings.ema**ratio:.9g}")
    updates = {name: getattr(settings, name) for name in ("warmup_updates", "max_updates", "eval_every")}
    flags += [f"--{name}={round(count / ratio)}" for name, count in updates.items() if type(count) is int and count]
    return flags


def reasons(settings: Settings, measured: Measured, advised: Advice, *, has_batch_norm: bool = False) -> str:
    """Return why, in a paragraph."""
    window, fastest = settings.window_rows, quantity(measured.split.micro_batch_size, "row")
    peak = _peak(measured, advised)
    memory = f"{short(peak)}{f' of {short(measured.budget)}' if measured.budget else ''}"
    if advised.accumulates:
        single = " ".join(flags_of(settings, advised._replace(accumulates=False)))
        sentences = [f"The window trains {advised.speed:,.0f} rows per second in {memory}."]
        if advised.other:
            sentences += [
                f"With an update after each micro-batch it would be {advised.other:,.0f}: updates take the time.",
                f"If you have little data rather than little time, compare with {single}.",
            ]
    elif advised.rows == window:
        sentences = [
            f"The window of {quantity(window, 'row')} fits in one piece, in {memory}, and trains {advised.speed:,.0f} "
            "rows per second; smaller micro-batches are slower.",
        ]
    else:
        sentences = [
            f"An update after each {quantity(advised.rows, 'row')} trains {advised.speed:,.0f} rows per second in "
            f"{memory}; the fastest split of {window:,}, in micro-batches of {fastest}, {advised.other:,.0f}.",
            _why_small(settings),
            f"Accumulate to repeat a run with windows of {quantity(window, 'row')}, or on several devices.",
        ]
    if has_batch_norm:
        sentences.append(f"BatchNorm takes its statistics from {quantity(advised.rows, 'row')}: compare the results.")
    return " ".join([*filter(None, sentences), _about_noise(measured.noise)])


def _peak(measured: Measured, advised: Advice) -> int:
    trials = measured.split.trials if advised.accumulates else measured.single
    return next((trial.peak or 0 for trial in trials if trial.rows == advised.rows), 0)


def _why_small(settings: Settings) -> str:
    if settings.optimizer in ADAPTIVE:
        means = "if the second moment of Adam averages over as much data as before, hence --beta2"
    else:
        means = "if the rate is lower"
    start = "" if settings.lr_scaling != "none" else " The rate is a first guess: try twice as much too."
    return f"Small batches train as well per row as large ones {means} (arXiv 2507.07101).{start}"


def _about_noise(noise: Noise) -> str:
    if math.isnan(noise.rows):
        about = f"The noise scale could not be estimated from {quantity(noise.updates, 'update')}."
    else:
        about = f"The noise scale is about {noise.rows:,.0f} rows in the first {quantity(noise.updates, 'update')}, "
        about += "and grows later."
    return f"{about} It is a poor guide to the best window (arXiv 2505.23971), so it does not decide here."
