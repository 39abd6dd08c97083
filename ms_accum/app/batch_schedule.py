"""Reads the text of --batch_schedule, and makes the window sizes and learning rates of a run from it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

from .. import schedules
from .flags import number, sizes, whole

KINDS = ("seesaw", "warmup", "updates", "samples", "tokens")
FORMS = "seesaw, seesaw:max=64, warmup:1-8:20000, updates:0:1,100:4, samples:0:1,20000:4 or tokens:0:1,1000000:4"
"""str, examples of all kinds, for the help of the flag and for error messages."""


@dataclass(frozen=True)
class BatchScheduleText:
    """What the text of --batch_schedule defines."""

    text: str
    """str, the text, which must be equal in a resumed run."""
    kind: str
    """str, one of `KINDS`."""
    sizes: Mapping[int, int]
    """Mapping[int, int], of updates, samples and tokens: the micro-batches in a window, by the first that have them."""
    options: Mapping[str, Any]
    """Mapping, of seesaw and warmup: arguments of `ms_accum.seesaw`, or ``first``, ``last`` and ``samples``."""


class RunOfData(NamedTuple):
    """The data of a run, and its rates with windows of the first size."""

    micro_batches: int
    """int, the micro-batches of the run."""
    per_epoch: int
    """int, the micro-batches of an epoch."""
    rows_per_epoch: int
    """int, the rows of an epoch, on all ranks together: the last micro-batch may be shorter."""
    rows: int
    """int, the rows of a micro-batch, on all ranks together."""
    mini_steps: int
    """int, the micro-batches in a window before `seesaw` changes it."""
    lr: float
    warmup_updates: int
    lr_decay: str
    min_lr: float
    lr_scaling: str
    """str, ``"none"``, ``"linear"`` or ``"sqrt"``, how the rate follows the window's size."""
    is_adaptive: bool
    """bool, whether the optimizer is of the Adam family."""
    tail: str = "flush"
    tokens_per_row: int | None = None
    """Optional[int], of text; None: the data has no tokens."""

    @property
    def rates(self) -> dict[str, Any]:
        """dict[str, Any], the arguments that all functions of `schedules` have."""
        return {
            "per_epoch": self.per_epoch,
            "tail": self.tail,
            "warmup_updates": self.warmup_updates,
            "decay": self.lr_decay,
            "min_lr": self.min_lr,
        }

    @property
    def rule(self) -> str:
        """str, how the rate follows the window where the method requires it: as given, or by the optimizer."""
        usual = "sqrt" if self.is_adaptive else "linear"
        return usual if self.lr_scaling == "none" else self.lr_scaling


def batch_schedule(text: str) -> BatchScheduleText:
    """Convert the flag's text.

    Raises:
        ArgumentTypeError: If it is not one of `FORMS`.
    """
    kind, _, rest = text.partition(":")
    if kind == "seesaw":
        return BatchScheduleText(text, kind, {}, _seesaw_options(text, rest))
    if kind == "warmup":
        return BatchScheduleText(text, kind, {}, _warmup_options(text, rest))
    if kind in KINDS and ":" in rest:
        return BatchScheduleText(text, kind, _sizes(rest), {})
    raise argparse.ArgumentTypeError(f"must be such as {FORMS}, but got '{text}'")


def _sizes(text: str) -> dict[int, int]:
    by_first = sizes(text)
    return by_first if isinstance(by_first, dict) else {0: by_first}


def _seesaw_options(text: str, rest: str) -> dict[str, Any]:
    """Return the arguments of `seesaw`: each may be given once, and `smooth` has no value."""
    kinds: dict[str, tuple[str, Callable[[str], Any]]] = {
        "max": ("most", whole(1)),
        "factor": ("factor", number(1, above=True)),
    }
    options: dict[str, Any] = {}
    for part in rest.split(",") if rest or text.endswith(":") else ():
        name, is_given, value = part.partition("=")
        if part == "smooth":
            argument, converted = "smooth", True
        elif name in kinds and is_given:
            argument, converted = kinds[name][0], kinds[name][1](value)
        else:
            raise argparse.ArgumentTypeError(f"seesaw has max=N, factor=X and smooth, but got '{part}'")
        if argument in options:
            raise argparse.ArgumentTypeError(f"must have {name} once, but got '{text}'")
        options[argument] = converted
    return options


def _warmup_options(text: str, rest: str) -> dict[str, Any]:
    window, is_given, samples = rest.partition(":")
    first, is_range, last = window.partition("-")
    if not (is_given and is_range):
        raise argparse.ArgumentTypeError(
            f"must be such as warmup:1-8:20000, windows of 1 to 8 micro-batches over 20000 samples, but got '{text}'"
        )
    options = {"first": whole(1)(first), "last": whole(1)(last), "samples": whole(1)(samples)}
    if options["last"] < options["first"]:
        raise argparse.ArgumentTypeError(f"must grow from the first size to the last, but got '{text}'")
    return options


def schedule_of(schedule: BatchScheduleText, run: RunOfData) -> schedules.BatchSchedule:
    """Return the window sizes and the learning rates of a run.

    Of `updates`, `samples` and `tokens` the rate follows the window as --lr_scaling defines; of `seesaw` and `warmup`,
    without that flag, as their papers do: by its square root with optimizers of the Adam family, else in proportion.

    Raises:
        ValueError: If the schedule can't be used for the run.
    """
    if schedule.kind == "seesaw":
        if run.lr_decay == "none":
            raise ValueError("seesaw needs --lr_decay cosine or linear, whose rates it replaces")
        if schedule.options.get("most", run.mini_steps) < run.mini_steps:
            raise ValueError(f"max must be >= {run.mini_steps}, the --mini_steps")
        options = {"first": run.mini_steps, **schedule.options, **run.rates}
        return schedules.seesaw(run.lr, run.micro_batches, rule=run.rule, **options)
    if schedule.kind == "warmup":
        first, last, samples = (schedule.options[name] for name in ("first", "last", "samples"))
        over = max(1, round(samples / run.rows_per_epoch * run.per_epoch))
        rates = run.rates
        return schedules.batch_warmup(run.lr, first, last, run.micro_batches, over=over, rule=run.rule, **rates)
    mini_steps = _by_update(schedule, run)
    return schedules.batch_schedule(run.lr, mini_steps, run.micro_batches, rule=run.lr_scaling, **run.rates)


def _by_update(schedule: BatchScheduleText, run: RunOfData) -> dict[int, int]:
    if schedule.kind == "updates":
        return dict(schedule.sizes)
    if schedule.kind == "tokens" and run.tokens_per_row is None:
        raise ValueError("tokens is for text; images have samples")
    unit = run.tokens_per_row or 1 if schedule.kind == "tokens" else 1
    per_epoch = run.rows_per_epoch * unit
    ends: dict[str, Any] = {"micro_batches": run.micro_batches, "per_epoch": per_epoch, "tail": run.tail}
    return schedules.windows_by(schedule.sizes, run.rows * unit, **ends)
