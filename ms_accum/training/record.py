"""The record of a finished window, and the errors for too many windows without a finite gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from .. import _check

# One window without a finite gradient may be a bad batch; this number in a row means that nothing is learned.
SKIPPED_IN_A_ROW = 10
_OWNER = "GradientAccumulation"


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
    """The learning rate of this update (of the first parameter); NaN if only the optimizer knows it."""
    grad_norm: float
    """The norm of the window's gradient, before clipping; not finite if the gradient is not."""
    samples: int
    """The number of rows in the window."""
    seconds: float
    """The time since the end of the previous window, or of the evaluation after it, in seconds."""
    skipped: bool
    """Whether the optimizer was not called: the gradient was not finite, all weights were 0, or a stage skipped it."""
    overflow: bool = False
    """Whether the loss scale was too large and has been lowered."""
    bad: tuple[int, ...] = ()
    """The micro-batches of this process whose loss was not finite, or that were left out: their numbers in the epoch,
    from 1, or in the batch if each batch is a window. 0, -1, ... are the last of the previous epoch (tail="carry")."""
    terms: Mapping[str, float] = MappingProxyType({})
    """The mean of each term of a loss with several, by name; without terms that count nothing in this window."""

    @property
    def shown(self) -> dict[str, Any]:
        """dict, the fields by name, without `overflow` and `bad` if these are False and empty; terms one by one."""
        fields = self._asdict()
        terms = {f"loss_{name}": value for name, value in fields.pop("terms").items()}
        return {name: value for name, value in fields.items() if name not in _SPECIAL or value} | terms


_SPECIAL = ("overflow", "bad")


def check_skipped(record: UpdateRecord, skipped_in_a_row: int, *, at_once: bool) -> int:
    """Return the number of windows in a row without a finite gradient; raise an error if there are too many.

    A window that was skipped for another reason leaves the number unchanged.

    Args:
        record (UpdateRecord): the record of the last window.
        skipped_in_a_row (int): the number before that.
        at_once (bool): whether the first one ends the run.
    """
    if not is_not_finite(record.grad_norm, record.overflow, record.samples):
        return skipped_in_a_row if record.skipped or not record.samples else 0
    if at_once:
        micro_batches = f" (micro-batch {', '.join(map(str, record.bad))})" if record.bad else ""
        raise_not_finite(f"window {record.step} in epoch {record.epoch}{micro_batches}")
    if skipped_in_a_row + 1 >= SKIPPED_IN_A_ROW:
        raise RuntimeError(
            f"For '{_OWNER}', the gradients of {skipped_in_a_row + 1} windows in a row were not finite. "
            "Lower the learning rate or the loss scale, set 'clip_norm', or look for NaN in the data."
        )
    return skipped_in_a_row + 1


def is_not_finite(grad_norm: float, overflow: bool, samples: int) -> bool:
    """Return whether a window was skipped because its gradient is not finite.

    Not if all its weights are 0, or if it overflowed, so that the loss scale was lowered.
    """
    return not (math.isfinite(grad_norm) or overflow) and samples > 0


def raise_not_finite(window: str) -> NoReturn:
    """Raise the error of ``nonfinite="raise"``."""
    raise FloatingPointError(
        f"For '{_OWNER}', the gradient of {window} is not finite. nonfinite='skip_micro' leaves out such "
        "micro-batches, 'skip_window' skips their window."
    )
