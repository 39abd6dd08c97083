"""The flag --batch_schedule: window sizes that change during a run, and the learning rates that go with them."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from ..engine.ends import ramp_up
from ..schedules import BatchSchedule, seesaw, windows_by_samples

SEESAW, WARMUP, SAMPLES, TOKENS = "seesaw", "warmup", "samples", "tokens"
_RULE = (
    "must be seesaw, seesaw:MAX, warmup:FIRST-LAST:SAMPLES, samples:0:N,SAMPLES:N or tokens:0:N,TOKENS:N, but got '{}'"
)


class ScheduleText(NamedTuple):
    """What the flag's text says; the schedule needs the number of micro-batches, too."""

    kind: str
    sizes: tuple[tuple[int, int], ...] = ()
    """The sizes by samples or tokens; of a warm-up the first and the last one, and the samples."""
    largest: int | None = None
    """The largest window of ``"seesaw"``."""

    @property
    def sets_rates(self) -> bool:
        """bool, whether the schedule has learning rates of its own."""
        return self.kind == SEESAW

    def windows(self, rows: int, tokens: int, micro_batches: int) -> dict[int, int]:
        """Return the window sizes by update.

        Args:
            rows (int): the rows of a micro-batch on all ranks together.
            tokens (int): the tokens of a row; 1 for images.
            micro_batches (int): those of an epoch.
        """
        if self.kind == WARMUP:
            (first, last), (samples, _) = self.sizes
            return ramp_up(first, last, samples, micro_batch_size=rows)
        count = rows * tokens if self.kind == TOKENS else rows
        return windows_by_samples(dict(self.sizes), micro_batch_size=count, micro_batches=micro_batches)

    def with_rates(
        self, lr: float, mini_steps: int, decay: str, warmup_updates: int, *, micro_batches: int, epochs: int
    ) -> BatchSchedule:
        """Return the windows and the rates of ``"seesaw"``, whose windows begin with `mini_steps` micro-batches."""
        return seesaw(
            lr,
            micro_batches,
            mini_steps,
            epochs=epochs,
            decay=decay,
            warmup_updates=warmup_updates,
            max_mini_steps=self.largest,
        )


def schedule(text: str) -> ScheduleText:
    """Convert a flag's text to a schedule."""
    kind, _, rest = text.partition(":")
    try:
        if kind == SEESAW:
            return ScheduleText(kind, largest=_size(rest) if rest or text.endswith(":") else None)
        if kind == WARMUP:
            ends, _, samples = rest.partition(":")
            first, _, last = ends.partition("-")
            return ScheduleText(kind, ((_size(first), _size(last)), (_size(samples), 0)))
        if kind in (SAMPLES, TOKENS):
            pairs = [part.split(":") for part in rest.split(",")]
            sizes = tuple((int(seen), _size(size)) for seen, size in pairs)
            if sizes[0][0] == 0 and [seen for seen, _ in sizes] == sorted({seen for seen, _ in sizes}):
                return ScheduleText(kind, sizes)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(_RULE.format(text))


def _size(text: str) -> int:
    """Return an int >= 1, or raise a ValueError."""
    size = int(text)
    if not 1 <= size < 2**31:
        raise ValueError
    return size
