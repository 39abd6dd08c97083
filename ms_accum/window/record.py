"""What is recorded when a window ends?"""

from __future__ import annotations

from typing import NamedTuple

from .. import _check

# One window without a finite gradient may be a bad batch; this many in a row mean that nothing is learned.
SKIPPED_IN_A_ROW = 10


@_check.documented
class UpdateRecord(NamedTuple):
    """The record of a window that has ended."""

    epoch: int
    """The epoch, from 1."""
    step: int
    """The number of the window in its epoch, from 1; the tutorial's printed line calls it `step`."""
    update: int
    """Updates so far, including this one."""
    loss: float
    """The mean loss of the window: the sum of weight times loss, divided by the sum of weights."""
    lr: float
    """The learning rate of this update (of the first parameter group)."""
    grad_norm: float
    """The norm of the window's gradient, before clipping."""
    samples: int
    """Rows in the window."""
    seconds: float
    """Time since the previous update."""
    skipped: bool
    """True if the gradient was not finite and the optimizer was not called."""


class SkippedInARow:
    """Counts windows in a row without a finite gradient; too many end the run.

    Args:
        owner (str): the name used in the error message.
    """

    def __init__(self, owner: str):
        self._owner = owner
        self.count = 0
        """int, the current number."""

    def add(self, record: UpdateRecord) -> None:
        """Count a window, unless all its weights are 0: it has no gradient."""
        if not record.samples:
            return
        self.count = self.count + 1 if record.skipped else 0
        if self.count >= SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"For '{self._owner}', the gradients of {self.count} windows in a row were not finite. "
                "Lower the learning rate or the loss scale, set 'clip_norm', or look for NaN in the data."
            )
