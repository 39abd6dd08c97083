"""The train step with which MindSpore's `Model` accumulates gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Callable

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.train import Model

from . import _check
from .engine.config import Options, checked, with_options
from .engine.ema import Ema, averaged, check_not_applied
from .loss.known_losses import loss_among, runnable
from .loss.objective import Objective
from .loss.terms import terms_of, total_of
from .network.compiled import Compiled, call
from .network.parameters import copied
from .network.training_mode import training_again
from .ranks.agreement import check_drift
from .ranks.zero import ZeroOptimizer
from .training.callbacks import is_not_finite
from .training.sizes import is_full, sizes_of, windows_by_epoch
from .training.step import Ended, ShowsWindows, Step, never

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OWNER = "AccumulatedTrainStep"
_SIZE = _check.Argument(_OWNER, "gradient_accumulation_steps")


@with_options
class AccumulatedTrainStep(ShowsWindows, Compiled):
    """A train step for `mindspore.train.Model` that accumulates gradients and updates once per window.

    The optimizer gets ``sum(w_i * g_i) / sum(w_i)``, the gradient of the mean loss over the window. This is exact also
    if micro-batches differ in size or the last window is short. Pass this Cell to `Model` without `loss_fn` and
    `optimizer`, and add the callback `FlushTail`.

    The micro-batches of a window wait on the host until the last of them comes; then they are run, each with its share
    of the window's weights. After an error or a stop inside a window everything is as at the end of the window before.

    Args:
        network (Union[Cell, tuple[Cell, Callable]]): a Cell that returns a micro-batch's loss from its columns, alone
            or as ``(loss, output, ...)``; or a network and its loss function, which gets the network's output and all
            columns after the first.
        optimizer (Optimizer): updates the parameters.
        gradient_accumulation_steps (Union[int, dict, Callable]): the number of micro-batches in a window, constant or
            changing, as for `Accumulator`; 1 needs no accumulators. Default: 4.

    Args: Windows and weights
        reduction (str): ``"mean"`` for the weighted mean of the gradients; ``"sum"`` for their sum, with losses that
            sum over rows. Default: ``"mean"``.
        weight (Union[None, float, Callable, dict]): the weight of a micro-batch: a number, or a function of its
            columns, run on the host, such as one that returns ``(y >= 0).sum()``; 0 skips the micro-batch. Default:
            ``None``, what MindSpore's losses average over (elements, or labels by class weight), and for other losses
            the rows. For a loss of several terms a dict, as for `GradientAccumulation`.
        coefficients (Optional[dict]): the factors of terms, as for `GradientAccumulation`. Default: ``None``.
        check (str): with ``"first"`` a warning if the loss is not the mean over rows that the default `weight` assumes;
            it comes with the first micro-batch that can tell. ``"off"``: no warning. Default: ``"first"``.
        inputs (Optional[int]): with a loss function the columns that the network gets, from the first; the loss gets
            its output and the others. Default: ``None``, one.

    Inputs:
        - **\\*columns** (tuple[Tensor]) - the columns of a micro-batch.

    With ``nonfinite="raise"`` it is `FlushTail` that ends the run with an error. The average of the weights (`ema`) is
    applied by `FlushTail` while `Model.fit` evaluates, and by `eval_network` in all evaluations. `Model.predict`, with
    the average, too, returns the network's output.

    Outputs:
        Tensor, the mean loss of the last complete window over all ranks; 0 before the first one.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the loss does not match `reduction`.
        RuntimeError: If ranks differ in a setting.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import AccumulatedTrainStep, FlushTail
        >>> net, loss_fn = MLP(), nn.CrossEntropyLoss()
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        >>> step = AccumulatedTrainStep((net, loss_fn), optimizer, gradient_accumulation_steps=4)
        >>> model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"acc"})
        >>> train, test = (create_dataset(image_size=28, usage=usage) for usage in ("train", "test"))
        >>> model.fit(1, train, test, callbacks=FlushTail())
        >>> step.updates, step.skipped
        (12, 0)
    """

    waits = True
    """bool, whether micro-batches wait for their window to be complete."""

    def __init__(
        self,
        network: nn.Cell | tuple[nn.Cell, Callable],
        optimizer: nn.Optimizer | ZeroOptimizer,
        gradient_accumulation_steps: int | Mapping[int, int] | Callable = 4,
        *surplus: Any,
        reduction: str = "mean",
        weight: float | Callable | Mapping[str, float | Callable] | None = None,
        coefficients: Mapping[str, float | Callable] | None = None,
        check: str = "first",
        inputs: int | None = None,
        **options: Unpack[Options],
    ):
        options = checked(_OWNER, options)
        super().__init__(_OWNER, options["compile"])
        network, loss_fn = _parts_of(network, gradient_accumulation_steps, surplus)
        self._sizes = sizes_of(*_SIZE, gradient_accumulation_steps)
        weights: Any = {"reduction": reduction, "weight": weight, "coefficients": coefficients}
        self._objective = Objective(_OWNER, network, loss_fn, options, check=check, inputs=inputs, **weights)
        sizes = {"gradient_accumulation_steps": self._sizes.settings}
        self._step = Step(_OWNER, self._objective, optimizer, options, sizes)
        self.group = self._step.group
        self.optimizer = optimizer
        self.contains(self._objective.evaluated)
        self.trained = self._objective.forward
        """Cell, returns the loss that is differentiated: `Model` sets it to training, and saves its Parameters."""
        self.stops = never
        """Callable, is asked inside a window whether to leave it, because its state is saved."""
        self.average = _AverageInEvaluations(options["ema"])
        # In a tuple, so that it is not a part of the step, whose Cells and parameters are saved.
        self._eval_network = (_Evaluate(self._objective, self.average, lambda: self.updates, self.compiles),)
        self._waiting: list[tuple] = []
        self._left, self._size, self._has_begun = 0, 0, False
        self._loss, self._grad_norm, self._updated, self._not_finite = 0.0, 0.0, False, 0
        self.terms: dict[str, float] = {}
        """dict, the mean of each term of the loss in the last window, without those that counted nothing."""
        self.clear()
        self.add_flags(training=True)  # for this Cell only; `Model.predict` sets it to False
        if self._sizes.constant != 1:
            self._objective.warn(training=True)  # `Model` sets it, for all layers

    def __call__(self, *columns: Tensor) -> Any:
        caller = _caller_in_model()
        if self.training and caller == "predict":  # which `Model` does not say after an evaluation
            self.add_flags(training=False)  # it does, before it trains again
        if not self.training:  # `Model.predict`
            with self.average.applied():
                return super().__call__(*columns)
        if not self._waiting:
            self._size, self._updated = self._sizes.size_after(self.updates), False
        if not self._has_begun:
            self._has_begun = True
            if caller:
                self._warn_without_flush_tail()
        self._left -= 1
        ends = is_full(len(self._waiting) + 1, self._size) or self._left == 0
        self._waiting.append(columns if ends else tuple(map(copied, columns)))  # loaders reuse their buffers
        if ends:
            self._run()
        return Tensor(self._loss, ms.float32)

    @staticmethod
    def _warn_without_flush_tail() -> None:
        """Warn that nothing will end the last window, which a loop of the user's ends with `flush`."""
        _check.warn(
            f"For '{_OWNER}', Model is run without the callback FlushTail: micro-batches that do not fill a window "
            "wait for the next epoch, and are lost after the last; callbacks do not get the optimizer. Give "
            "callbacks=[FlushTail(), ...]."
        )

    def construct(self, *columns: Tensor) -> Any:
        if self.training:
            raise ValueError("For 'AccumulatedTrainStep', 'dataset_sink_mode' must be False.")
        network = self._objective.network
        return call(network, columns if self._objective.loss_fn is None else columns[: self._objective.inputs])

    def _run(self) -> Ended | None:
        """Run the window that waits; None if no rank has one, or if it was left because of a request to stop."""
        if not self._waiting and self.group is None:
            return None
        check_not_applied(_OWNER, self.ema)
        waiting, self._waiting = self._waiting, []
        window = self._step.share(waiting or None)
        if not window.ranks:
            return None
        ended = self._step.run(window, self.stops if self.group is None else never)  # ranks finish it
        if ended is None:
            self._waiting = waiting
            return None
        self._updated, self._grad_norm, self.terms = ended.updated, ended.grad_norm, dict(ended.terms)
        left_out = self._step.config.skips is not None and not math.isfinite(ended.loss)
        self._loss = ended.loss if ended.samples and not left_out else 0.0
        self._not_finite += is_not_finite(ended)
        return ended

    def planned(self, micro_batches: int, epochs: int) -> int:
        """Return the number of updates of a run with so many micro-batches in an epoch, of which none is skipped."""
        return sum(windows_by_epoch(micro_batches, self._sizes, "flush", epochs, updates=self.updates))

    def epoch_begins(self, micro_batches: int) -> None:
        """Set the number of micro-batches after which the window ends even if it is not full; 0: only if it is."""
        self._left, self._has_begun = micro_batches, micro_batches > 0

    def clear(self) -> None:
        """Discard the micro-batches of an open window, and what is known of the last one."""
        self._waiting, self._left, self._loss, self.terms = [], 0, 0.0, {}
        self._has_begun = False
        self._step.open(self._sizes.constant or 0)

    def flush(self) -> bool:
        """Update with the micro-batches of an open window; return whether the parameters were updated.

        With several ranks call it on all of them, after the last micro-batch of each. A rank whose data are over takes
        part in the windows of the others.

        Raises:
            RuntimeError: If the averages of `ema` are applied, or the ranks have drifted apart.
        """
        updated = False
        with training_again(self._objective.network):  # a callback may have evaluated
            ended = self._run()
            while ended is not None:
                updated = updated or ended.updated
                ended = None if self.group is None else self._run()
        self.check_drift()
        return updated

    def check_drift(self) -> None:
        """Raise an error if the trained weights or the learning rates of ranks are not equal."""
        check_drift(_OWNER, self.group, self.optimizer.parameters, self.optimizer)

    @property
    def network(self) -> nn.Cell:
        """Cell, the network that is trained."""
        return self._objective.network

    @property
    def eval_network(self) -> nn.Cell:
        """Cell, the `eval_network` of `Model`, with ``eval_indexes=[0, 1, 2]``: returns loss, output and labels.

        Evaluations with it use the average of the weights (`ema`), also those of callbacks that call `Model.eval`. In
        a run with `FlushTail` the average stays applied until the next training step, so that a callback saves as the
        best weights those that it has evaluated.
        """
        return self._eval_network[0]

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run."""
        return self._step.settings

    @property
    def state(self) -> dict[str, Any]:
        """dict, its own Parameters in a training state, without those of the network and the optimizer."""
        return self._step.config.state

    @property
    def counters(self) -> dict[str, int]:
        """dict, the counters of past windows, for a training state."""
        return {**self._step.counters, "updated": self._updated}

    def load(self, counters: Mapping[str, Any]) -> None:
        """Continue from saved counters."""
        self._step.load(counters)
        self._updated = counters["updated"]

    @property
    def counts(self) -> tuple[int, int]:
        """tuple[int], the updates, and the windows skipped as non-finite, without those that overflowed."""
        return self.updates, self._not_finite

    @property
    def updated(self) -> bool:
        """bool, whether the last micro-batch ended a window and updated the parameters."""
        return self._updated

    @property
    def raises(self) -> bool:
        """bool, whether the first window without a finite gradient ends the run."""
        return self._step.raises

    @property
    def grad_norm(self) -> float:
        """float, the norm of the last window's gradient, before clipping."""
        return self._grad_norm


def _caller_in_model() -> str:
    """Return which function of MindSpore's Model calls the step; "" if something else does."""
    caller = sys._getframe(2)
    return caller.f_code.co_name if caller.f_globals.get("__name__") == Model.__module__ else ""


class _Evaluate(Compiled):
    """Returns a batch's loss, the network's output and the labels, with averaged weights.

    Of a network that returns its loss alone it is three times the loss.

    The loss of several terms is their sum, times the coefficients of now.

    Args:
        objective (Objective): the network, its loss, and the terms of the loss.
        average (_AverageInEvaluations): applies the average of the weights.
        updates (Callable): returns the number of updates so far.
        compiles (bool): whether it is compiled in PyNative mode.
    """

    def __init__(
        self, objective: Objective, average: _AverageInEvaluations, updates: Callable[[], int], compiles: bool
    ):
        network, loss_fn = objective.network, objective.loss_fn
        super().__init__(_OWNER, compiles, network, loss_fn)
        self.eval_of, self.loss_fn, self.average, self.updates = network, runnable(loss_fn), average, updates
        self.inputs = objective.inputs
        self.terms: Any = objective.terms
        self.names: Any = None if objective.terms is None else objective.terms.names

    def __call__(self, *columns: Tensor) -> Any:
        inputs = columns
        if self.terms is not None:
            coefficients = Tensor(self.terms.coefficients(self.updates()), ms.float32)
            inputs = (*columns, coefficients, tuple(divisor > 0 for divisor in self.terms.counted(columns)))
        with self.average.applied():
            return super().__call__(*inputs)

    def construct(self, *inputs: Any) -> Any:
        columns = inputs if self.names is None else inputs[:-2]
        output = call(self.eval_of, columns if self.loss_fn is None else columns[: self.inputs])
        loss = output if self.loss_fn is None else call(self.loss_fn, (output, *columns[self.inputs :]))
        if self.names is not None:
            loss = total_of(terms_of(self.owner, self.names, loss), inputs[-2], inputs[-1])
        if self.loss_fn is not None:
            return (loss, output, *columns[self.inputs :])
        if self.names is None and isinstance(loss, tuple) and len(loss) > 1:  # the loss, the output, and others
            return loss[0], loss[1], columns[-1]
        loss = loss_among(loss)
        return loss, loss, loss  # `Model` expects at least three outputs


class _AverageInEvaluations:
    """Applies the averages in evaluations of a run of `Model`.

    During a run they stay applied until the next training step, so that a callback which evaluates and then saves the
    best weights saves those that it has evaluated. Outside of runs they are applied for each batch.

    Args:
        ema (Optional[Ema]): the averages.
    """

    def __init__(self, ema: Ema | None):
        self._ema, self._in_run = ema, False
        self._block: AbstractContextManager[None] | None = None

    def begin_run(self) -> None:
        """Let the averages stay applied after an evaluation."""
        self._in_run = True

    def end_run(self) -> None:
        """Restore the weights, after the last evaluation of a run."""
        self._in_run = False
        self.restore()

    def applied(self) -> AbstractContextManager[None]:
        """Apply the averages inside the block, or in a run from now on."""
        if not self._in_run:
            return averaged(self._ema)
        if self._block is None:
            self._block = averaged(self._ema)
            self._block.__enter__()
        return nullcontext()

    def restore(self) -> None:
        """Restore the weights, before they are trained or saved in a training state."""
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)


def _parts_of(network: Any, steps: Any, surplus: tuple) -> tuple[nn.Cell, Any]:
    """Return the network and its loss function, None if it returns the loss itself."""
    if hasattr(steps, "parameters"):  # an optimizer, as for the driver: network, loss, optimizer
        _check.raise_invalid(TypeError, _OWNER, "network", "one tuple (network, loss_fn)", "two arguments")
    if surplus:
        given = _check.quantity(3 + len(surplus), "argument")
        rule, remedy = "the last argument without a name", "Name the others, such as clip_norm=1.0."
        _check.raise_invalid(TypeError, *_SIZE, rule, given, remedy)
    network, loss_fn = network if isinstance(network, (tuple, list)) and len(network) == 2 else (network, None)
    return _check.instance(_OWNER, "network", network, nn.Cell, "a Cell, or a Cell and its loss function"), loss_fn
