"""The evaluations of a run: while it trains, for its best model, and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from mindspore.train import Callback, RunContext

from .._check import quantity
from ..engine.ema import averaged
from ..saving.checkpointer import Stopped
from .plan import print_line
from .tasks import Result

EPOCH, END = "epoch", "end"


class Evaluations(Callback):
    """Evaluate a network while it is trained, and each model once, whatever asks for its result.

    The last model of a run is evaluated after it, by `result`. A resumed run repeats an evaluation that was due where
    it resumes, because the run that it continues may have ended before it.

    Args:
        evaluate (Callable): returns the result; it gets a function that returns whether to stop, and then raises
            `Stopped`.
        model (GradientAccumulation): the driver, which counts updates, and whose average of the weights is evaluated.
        logs (Sequence): have a method `evaluated`, as `MetricsFile` has.
        every (Union[int, str]): the updates from one evaluation to the next; ``"epoch"``, or ``"end"`` for none.
        updates (int): the updates of the run, at which it ends.
        stop (Callable): returns whether the run is to stop.
    """

    def __init__(
        self,
        evaluate: Callable[[Callable[[], bool]], Result],
        model: Any,
        logs: Sequence[Any],
        *,
        every: int | str,
        updates: int,
        stop: Callable[[], bool],
    ):
        self._evaluate = evaluate
        self._model = model
        self._logs = logs
        self._every = every
        self._last = updates
        self._stop = stop
        self._evaluated: tuple[int, Result] | None = None

    def on_train_begin(self, run_context: RunContext) -> None:
        if run_context.original_args().cur_step_num:
            self._after_update("resumed")

    def on_train_step_end(self, run_context: RunContext) -> None:
        record = run_context.original_args().record
        if not record.skipped:
            self._after_update(f"epoch: {record.epoch}")

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        if self._every == EPOCH and args.cur_epoch_num < args.epoch_num:
            self._show(f"epoch: {args.cur_epoch_num}")

    def result(self, stop: Callable[[], bool] = lambda: False) -> Result:
        """Return the result of the present weights.

        Raises:
            Stopped: If `stop` returned true on any of the ranks.
        """
        updates = self._model.updates
        if self._evaluated is None or self._evaluated[0] != updates:
            with averaged(self._model.ema):
                result = self._evaluate(stop)
            self._evaluated = updates, result
            for log in self._logs:
                log.evaluated(updates, result.numbers)
        return self._evaluated[1]

    def _after_update(self, moment: str) -> None:
        updates = self._model.updates
        if isinstance(self._every, int) and updates and updates % self._every == 0:
            self._show(moment)

    def _show(self, moment: str) -> None:
        """Evaluate and print a line, unless this is the end of the run, or it is to stop before the result."""
        updates = self._model.updates
        if updates >= self._last:
            return
        try:
            result = self.result(self._stop)
        except Stopped:
            return
        print_line(f"{moment} evaluation: {result.name} {result.text} after {quantity(updates, 'update')}")
