"""What callbacks get: the record of a finished window; and how the driver calls those of MindSpore."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from mindspore import Tensor
from mindspore.train import Callback, EarlyStopping, ReduceLROnPlateau, RunContext, TimeMonitor

from .. import _check

# One window without a finite gradient may be a bad batch; this number in a row means that nothing is learned.
SKIPPED_IN_A_ROW = 10
_OWNER = "GradientAccumulation"


class UpdateRecord(NamedTuple):
    """The record of a finished window, which reporters and callbacks get.

    Attributes:
        epoch (int): the epoch, from 1.
        step (int): the number of the window in its epoch, from 1; the tutorial's printed line calls it `step`.
        update (int): the number of updates so far, including this one.
        loss (float): the mean loss of the window: the sum of weight times loss, divided by the sum of weights.
        lr (float): the learning rate of this update (of the first parameter); NaN if only the optimizer knows it.
        grad_norm (float): the norm of the window's gradient, before clipping; not finite if the gradient is not.
        samples (int): the number of rows in the window.
        seconds (float): the time since the end of the previous window, or of the evaluation after it, in seconds.
        skipped (bool): whether the optimizer was not called: the gradient was not finite, all weights were 0, or a
            stage skipped it.
        overflow (bool): whether the loss scale was too large and has been lowered.
        bad (tuple[int, ...]): the micro-batches of this process whose loss was not finite, or that were left out: their
            numbers in the epoch, from 1, or in the batch if each batch is a window. 0, -1, ... are the last of the
            previous epoch (tail="carry").
        terms (Mapping[str, float]): the mean of each term of a loss with several, by name; without terms that count
            nothing in this window.
    """

    epoch: int
    step: int
    update: int
    loss: float
    lr: float
    grad_norm: float
    samples: int
    seconds: float
    skipped: bool
    overflow: bool = False
    bad: tuple[int, ...] = ()
    terms: Mapping[str, float] = MappingProxyType({})

    @property
    def shown(self) -> dict[str, Any]:
        """dict, the fields by name, without `overflow` and `bad` if these are False and empty; terms one by one."""
        fields = self._asdict()
        terms = {f"loss_{name}": value for name, value in fields.pop("terms").items()}
        return {name: value for name, value in fields.items() if name not in _SPECIAL or value} | terms


_SPECIAL = ("overflow", "bad")


def check_skipped(record: UpdateRecord, skipped_in_a_row: int, *, raises: bool) -> int:
    """Return the number of windows in a row without a finite gradient; raise an error if there are too many.

    A window that was skipped for another reason leaves the number unchanged.

    Args:
        record (UpdateRecord): the record of the last window.
        skipped_in_a_row (int): the number before that.
        raises (bool): whether the first one ends the run.
    """
    if not is_not_finite(record):
        return skipped_in_a_row if record.skipped or not record.samples else 0
    if raises:
        micro_batches = f" (micro-batch {', '.join(map(str, record.bad))})" if record.bad else ""
        raise_not_finite(f"window {record.step} in epoch {record.epoch}{micro_batches}")
    if skipped_in_a_row + 1 >= SKIPPED_IN_A_ROW:
        raise RuntimeError(
            f"For '{_OWNER}', the gradients of {skipped_in_a_row + 1} windows in a row were not finite. "
            "Lower the learning rate or the loss scale, set 'clip_norm', or look for NaN in the data."
        )
    return skipped_in_a_row + 1


def is_not_finite(window: Any) -> bool:
    """Return whether a window, an `Ended` or an `UpdateRecord`, was skipped because its gradient is not finite.

    Not if all its weights are 0, or if it overflowed, so that the loss scale was lowered.
    """
    return not (math.isfinite(window.grad_norm) or window.overflow) and window.samples > 0


def raise_not_finite(window: str) -> NoReturn:
    """Raise the error of ``nonfinite="raise"``."""
    raise FloatingPointError(
        f"For '{_OWNER}', the gradient of {window} is not finite. nonfinite='skip_micro' leaves out such "
        "micro-batches, 'skip_window' skips their window."
    )


UNKNOWN = sys.maxsize
"""int, the number of steps that callbacks get for an epoch of unknown length."""


def callbacks_of(owner: str, name: str, argument: Any) -> list[Callback]:
    """Return the callbacks of an argument: one, several or None."""
    callbacks = argument if isinstance(argument, (list, tuple)) else () if argument is None else (argument,)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            value = getattr(callback, "__name__", type(callback).__name__)
            _check.raise_invalid(TypeError, owner, name, "callbacks of mindspore.train", value)
    return list(callbacks)


class RunArguments(dict):
    """What `RunContext.original_args` returns: a dict whose entries are also attributes, as in MindSpore."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Callbacks:
    """The callbacks of a run. A step is a window: `cur_step_num` counts windows, `net_outputs` is a window's loss.

    Args:
        callbacks (Sequence[Callback]): the callbacks, called in this order.
        arguments (RunArguments): the content of `RunContext.original_args`; `record` is the last `UpdateRecord`.
    """

    def __init__(self, callbacks: Sequence[Callback], arguments: RunArguments):
        self._callbacks, self.arguments = list(callbacks), arguments
        self._context = RunContext(arguments)
        arguments.list_callback = self._callbacks

    def __enter__(self) -> Callbacks:
        with ExitStack() as entered:
            targets = [entered.enter_context(callback) for callback in self._callbacks]
            self._entered = entered.pop_all()
        pairs = zip(self._callbacks, targets)
        self._callbacks[:] = [target if isinstance(target, Callback) else callback for callback, target in pairs]
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def __call__(self, moment: str, callbacks: Sequence[Callback] | None = None, **arguments: Any) -> None:
        """Call a method, such as ``"on_train_step_end"``, of these or all callbacks, after setting these arguments."""
        self.arguments.update(arguments)
        for callback in self._callbacks if callbacks is None else callbacks:
            getattr(callback, moment)(self._context)

    def step_end(self, record: UpdateRecord) -> None:
        """Call the callbacks after a window."""
        if self._callbacks:
            # A window whose weights are all 0 has no loss; NaN would end a run with LossMonitor.
            self("on_train_step_end", record=record, net_outputs=Tensor(record.loss if record.samples else 0.0))

    def epoch_end(self, results: dict[str, Any] | None, *, evaluates_inside: bool = False) -> None:
        """Call the callbacks after an epoch.

        Args:
            results (Optional[dict]): those of the evaluation at its end, if there was one.
            evaluates_inside (bool): whether `evaluated_inside` calls those that act on evaluations. Default: ``False``.
        """
        monitors = self._monitors if evaluates_inside else []
        self._with_results(results, [callback for callback in self._callbacks if callback not in monitors])

    def evaluated_inside(self, results: dict[str, Any] | None) -> None:
        """Let MindSpore's callbacks that act on evaluations do so: they only have the method for an epoch's end."""
        self._with_results(results, self._monitors)

    def _with_results(self, results: dict[str, Any] | None, callbacks: Sequence[Callback]) -> None:
        measured: dict[str, Any] = {}
        if results is not None:
            metrics = {name: value for name, value in results.items() if name != "eval_loss"}
            measured = {"metrics": metrics, "eval_results": results}
        self("on_train_epoch_end", callbacks, **measured)
        for name in measured:
            self.arguments.pop(name, None)

    @property
    def _monitors(self) -> list[Callback]:
        kinds = (EarlyStopping, ReduceLROnPlateau)
        return [callback for callback in self._callbacks if isinstance(callback, kinds) and callback.monitor != "loss"]

    def evaluating(self, **arguments: Any) -> Callbacks:
        """Return the callbacks that `Model.fit` would call during an evaluation: the user's and `TimeMonitor`."""
        timers_and_users = [
            callback
            for callback in self._callbacks
            if isinstance(callback, TimeMonitor) or not _is_from_mindspore(callback)
        ]
        return Callbacks(timers_and_users, RunArguments(self.arguments, mode="eval", cur_step_num=0, **arguments))

    def request_stop(self) -> None:
        """Request a stop, as a callback does."""
        self._context.request_stop()

    @property
    def stopping(self) -> bool:
        """bool, whether a callback has requested a stop."""
        return self._context.get_stop_requested()


def may_change_parameters(callbacks: Sequence[Callback]) -> bool:
    """Return whether there are callbacks of the user, which may load weights or set the learning rate."""
    return any(not type(callback).__module__.startswith("ms_accum.") for callback in callbacks)


def warn_about_counters(callbacks: Sequence[Callback]) -> None:
    """Warn, once for a resumed run, about callbacks with counters, which restart."""
    counting = [callback for callback in callbacks if isinstance(callback, (EarlyStopping, ReduceLROnPlateau))]
    names = sorted({type(callback).__name__ for callback in counting})
    if names:
        _check.warn(
            f"{' and '.join(names)} restart in a resumed run: their best value and patience are not in the training "
            "state, so it may differ from an uninterrupted run."
        )


def _is_from_mindspore(callback: Callback) -> bool:
    return type(callback).__module__.partition(".")[0] == "mindspore"
