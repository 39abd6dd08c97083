"""What is recorded when a window ends?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _check

# One window without a finite gradient may be a bad batch; this number in a row means that nothing is learned.
SKIPPED_IN_A_ROW = 10


@_check.documented
class UpdateRecord(NamedTuple):
    """The record of a finished window, which reporters and callbacks get."""

    epoch: int
    """The epoch, from 1."""
    step: int
    """The number of the window in its epoch, from 1; the tutorial's printed line calls it `step`."""
    update: int
    """The number of updates so far, including this one."""
    loss: float
    """The mean loss of the window: the sum of weight times loss, divided by the sum of weights."""
    lr: float
    """The learning rate of this update (of the first parameter group)."""
    grad_norm: float
    """The norm of the window's gradient, before clipping."""
    samples: int
    """The number of rows in the window."""
    seconds: float
    """The time since the end of the previous window, in seconds."""
    skipped: bool
    """Whether the optimizer was not called, because the gradient was not finite or all weights were 0."""
    overflow: bool = False
    """Whether the loss scale was too large and has been lowered."""
    bad: tuple[int, ...] = ()
    """The micro-batches of this process whose loss was not finite, or that were left out: their numbers in the epoch,
    from 1, or in the batch if each batch is a window. 0, -1, ... are the last of the previous epoch (tail="carry")."""

    @property
    def shown(self) -> dict[str, Any]:
        """dict, the fields by name, without `overflow` and `bad` if these are False and empty."""
        held = self._asdict()
        return {name: value for name, value in held.items() if name not in _SPECIAL or value}


_SPECIAL = ("overflow", "bad")


class Counters:
    """The counters of a driver.

    Args:
        at_once (bool): whether the first gradient that is not finite ends the run.
    """

    def __init__(self, *, at_once: bool = False):
        self._at_once = at_once
        self.updates = self.skipped = 0
        self.updated = False
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self.skips = SkippedInARow("GradientAccumulation", at_once=self._at_once)

    def add(self, updated: bool) -> None:
        """Count a finished window."""
        self.updated = updated
        self.updates += updated
        self.skipped += not updated

    @property
    def state(self) -> dict[str, Any]:
        """dict, its values in a training state."""
        held = {"updates": self.updates, "skipped": self.skipped, "updated": self.updated}
        return {**held, "skips": self.skips.count}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.updates, self.skipped, self.updated = (state[name] for name in ("updates", "skipped", "updated"))
        self.skips.count = state["skips"]


class SkippedInARow:
    """Counts windows in a row without a finite gradient; too many end the run.

    Args:
        owner (str): the name used in the error message.
        at_once (bool): whether the first one ends the run. Default: ``False``.
    """

    def __init__(self, owner: str, *, at_once: bool = False):
        self._owner, self._at_once = owner, at_once
        self.count = 0
        """int, the current number of such windows in a row."""

    def flushed(self, updated: bool, overflow: bool) -> None:
        """Raise an error if a window that the user flushed is not finite and the first one ends the run."""
        if self._at_once and not (updated or overflow):
            self._raise("the open window")

    def _raise(self, window: str) -> None:
        raise FloatingPointError(
            f"For '{self._owner}', the gradient of {window} is not finite. nonfinite='skip_micro' leaves out such "
            "micro-batches, 'skip_window' skips their window."
        )

    def add(self, record: UpdateRecord) -> None:
        """Count a window, unless all its weights are 0, or it overflowed and the loss scale was lowered."""
        if not record.samples or record.overflow:
            return
        self.count = self.count + 1 if record.skipped else 0
        if self._at_once and record.skipped:
            which = f" (micro-batch {', '.join(map(str, record.bad))})" if record.bad else ""
            self._raise(f"window {record.step} in epoch {record.epoch}{which}")
        if self.count >= SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"For '{self._owner}', the gradients of {self.count} windows in a row were not finite. "
                "Lower the learning rate or the loss scale, set 'clip_norm', or look for NaN in the data."
            )
