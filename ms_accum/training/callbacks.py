"""How does the driver call MindSpore's callbacks?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from mindspore import Tensor
from mindspore.train import Callback, EarlyStopping, ReduceLROnPlateau, RunContext, TimeMonitor

from .. import _check
from .record import UpdateRecord

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


class Facts(dict):
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
        arguments (Facts): the content of `RunContext.original_args`; `record` is the last `UpdateRecord`.
    """

    def __init__(self, callbacks: Sequence[Callback], arguments: Facts):
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
        return Callbacks(timers_and_users, Facts(self.arguments, mode="eval", cur_step_num=0, **arguments))

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
