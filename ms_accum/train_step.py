"""How does MindSpore's `Model` accumulate gradients?"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train import Callback, RunContext

from . import _check
from .accumulator import Accumulator
from .loss.first_look import check_compiles
from .loss.gradients import LossAndGradients
from .loss.objective import Objective
from .loss.weights import weight_in_graph
from .network import checks, tree
from .network.accumulators import loss_scale, state, unique_name
from .ranks.parallel import AUTO, agree, begin_with, group_of
from .window.record import SKIPPED_IN_A_ROW

_OWNER = "AccumulatedTrainStep"


class AccumulatedTrainStep(nn.Cell):
    r"""A train step for `mindspore.train.Model` that accumulates gradients and updates once per window.

    The optimizer gets :math:`\sum_i w_i g_i / \sum_i w_i`, the gradient of the mean over the window, also if
    micro-batches differ in size or the last window is short. Give `Model` this Cell without `loss_fn` and `optimizer`,
    and use the callback :class:`FlushTail`.

    Args:
        network (Union[Cell, tuple[Cell, Callable]]): a Cell from a micro-batch's columns to its loss; or a network and
            its loss function, which gets the network's output and the columns after the first.
        optimizer (Optimizer): updates the parameters.
        gradient_accumulation_steps (int): micro-batches in a window. 1 allocates nothing. Default: 4.
        clip_norm (Optional[float]): bound of the global norm of the window's gradient. Default: ``None``, no clipping.
        reduction (str): ``"mean"``, or ``"sum"`` for losses that sum. Default: ``"mean"``.
        weight (Union[None, float, Callable]): the weight of a micro-batch: a number, or a function of its columns,
            which is compiled and may return ``(y >= 0).sum()``; 0 skips the micro-batch. Default: ``None``, what
            MindSpore's losses average over (elements, or labels by their class weights), and rows for other losses.
        check (str): ``"first"``: :class:`FlushTail` splits the first micro-batch in two parts if `weight` is a guess;
            a warning follows if its loss is not the weighted mean of theirs. ``"off"``: no check. Default: ``"first"``.
        group (Union[str, None, Group]): the processes that train together: ``"auto"``, all that a launcher started;
            ``None``, only this. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether gradients are summed over the processes in every micro-batch.
            Default: ``False``.

    Inputs:
        - **\\*columns** (tuple[Tensor]) - the columns of a micro-batch.

    Outputs:
        Tensor, the mean loss of the window so far; at its end the loss of the window, of all processes.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the loss does not fit `reduction`.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from ms_accum import AccumulatedTrainStep, FlushTail
        >>> from model_zoo import MLP, create_dataset
        >>> net, loss_fn = MLP(), nn.CrossEntropyLoss()
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        >>> step = AccumulatedTrainStep((net, loss_fn), optimizer, gradient_accumulation_steps=4)
        >>> model = Model(step, eval_network=nn.WithEvalCell(net, loss_fn), eval_indexes=[0, 1, 2], metrics={"acc"})
        >>> train, test = (create_dataset(image_size=28, usage=usage) for usage in ("train", "test"))
        >>> model.fit(1, train, test, callbacks=FlushTail())
        >>> step.updates, step.skipped
        (12, 0)
    """

    def __init__(
        self,
        network: Any,
        optimizer: Any,
        gradient_accumulation_steps: int = 4,
        *,
        clip_norm: float | None = None,
        reduction: str = "mean",
        weight: Any = None,
        check: str = "first",
        group: Any = AUTO,
        sync_every_micro_batch: bool = False,
    ):
        super().__init__(auto_prefix=False)
        network, loss_fn = network if isinstance(network, (tuple, list)) and len(network) == 2 else (network, None)
        _check.instance(_OWNER, "network", network, nn.Cell, "a Cell, or a Cell and its loss function")
        window = _check.positive_int(_OWNER, "gradient_accumulation_steps", gradient_accumulation_steps)
        self.group = group_of(_OWNER, group)
        self.optimizer = checks.optimizer(_OWNER, optimizer)
        self._objective = Objective(_OWNER, network, loss_fn, reduction, weight, check, self.group)
        check_compiles(weight, "weight", _OWNER)
        self.weigh, self.may_be_empty = weight_in_graph(_OWNER, weight, loss_fn)
        self.loss_and_gradients = LossAndGradients(_OWNER, self._objective.forward, optimizer, loss_scale(optimizer))
        begin_with(network, optimizer.parameters, self.group)
        how: Any = {"group": self.group, "sync_every_micro_batch": sync_every_micro_batch}
        self.accumulator = Accumulator(optimizer, window, clip_norm, reduction=reduction, **how)
        self.mean, self.summing = reduction == "mean", self._objective.loss.summing
        name = unique_name("train_step")
        # In a tuple, so that they are not saved with the model.
        self.own = (
            Parameter(Tensor([0.0, 0.0], ms.float32), name=f"{name}.loss_sums", requires_grad=False),
            state(f"{name}.left", 0, ms.int32),
        )
        self.resumed = False
        """bool, whether the open window has just been loaded from a training state."""
        self.add_flags(training=True)  # of this Cell alone: `Model.predict`, which does not train, sets it to False
        if window > 1:
            self._objective.warn()

    def construct(self, *columns: Any) -> Any:
        if not self.training:
            return self.loss_and_gradients.network(*columns)
        loss_sums, left = self.own
        weight = ops.cast(self.weigh(*columns), ms.float32)
        loss, grads = self.loss_and_gradients(1.0, *columns)
        loss = ops.cast(loss, ms.float32)
        terms = ops.stack((loss if self.summing else loss * weight, weight))
        if self.may_be_empty:  # a loss over no labels is 0/0
            terms = ops.where(weight > 0, terms, ops.zeros_like(terms))
            grads = tree.kept(grads, weight > 0)
        now = left - 1
        ops.assign(left, now)
        ended, sums = self.accumulator.add(grads, weight if self.mean else None, now == 0, loss_sums + terms)
        ops.assign(loss_sums, ops.where(ended, ops.zeros_like(sums), sums))
        return sums[0] / ops.maximum(sums[1], Tensor(1e-30, ms.float32))  # 0 if nothing counts so far

    def epoch_begins(self, micro_batches: int) -> None:
        """End the window after this number of micro-batches, also if it is not full then."""
        ops.assign(self.own[1], Tensor(micro_batches, ms.int32))

    def clear(self) -> None:
        """Discard an open window, unless it has just been loaded from a training state."""
        if not self.resumed:
            self.accumulator.clear()
            ops.assign(self.own[0], Tensor([0.0, 0.0], ms.float32))
        self.resumed = False

    def flush(self) -> bool:
        """Update with the micro-batches of an open window; return whether there was an update."""
        ops.assign(self.own[0], Tensor([0.0, 0.0], ms.float32))
        return self.accumulator.flush()

    def look_at(self, micro_batch: tuple) -> None:
        """Reject an invalid micro-batch, and check with the first ones whether the loss is a mean by weight."""
        self._objective.look_at(micro_batch, self.accumulator.accumulate_step == 1, self.optimizer.parameters)

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that a resumed run must have in common with this one."""
        return self.accumulator.settings

    @property
    def state(self) -> dict[str, Any]:
        """dict, its Parameters that are saved in a training state, without those of network and optimizer."""
        return {**self.accumulator.state, "loss_sums": self.own[0]}

    @property
    def updated(self) -> bool:
        """bool, whether the last micro-batch ended with an update."""
        return self.accumulator.updated

    @property
    def micro_batches(self) -> int:
        """int, the micro-batches in the window."""
        return self.accumulator.micro_batches

    @property
    def updates(self) -> int:
        """int, the updates so far."""
        return self.accumulator.updates

    @property
    def skipped(self) -> int:
        """int, the windows so far whose gradient was not finite."""
        return self.accumulator.skipped

    @property
    def grad_norm(self) -> float:
        """float, the norm of the last window's gradient, before clipping."""
        return self.accumulator.grad_norm


class FlushTail(Callback):
    """End a window with the last micro-batch of each epoch, for :class:`AccumulatedTrainStep` in `Model`.

    So the update with the tail is made before `Model.fit` evaluates and before a checkpoint is saved, in any order of
    the callbacks. It also gives callbacks the optimizer, which `ReduceLROnPlateau` and `LearningRateScheduler` need,
    checks the first micro-batch, and checks that several processes have the same number of micro-batches. If a callback
    stops the run inside an epoch, it updates with the open window, unless `SaveStates` keeps it. It discards a window
    that an interrupted run has left, and warns if windows were skipped.

    Raises:
        TypeError: If the network of `Model` is not an `AccumulatedTrainStep`.
        RuntimeError: If processes differ in their number of micro-batches, or an epoch had no finite gradient.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        See :class:`AccumulatedTrainStep`.
    """

    def on_train_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._step = step_of(args)
        self._step.clear()  # left over by a run that was interrupted
        args["optimizer"] = self._step.optimizer
        self._counts = (self._step.updates, self._step.skipped)
        agree(_OWNER, self._step.group, {"micro-batches in an epoch": args["batch_num"]})

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        done = args.get("batches_done", 0)  # by SaveStates, in a run that was resumed inside an epoch
        self._step.epoch_begins(args["batch_num"] - done)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        micro_batch = run_context.original_args().get("train_dataset_element")
        if micro_batch is not None:  # in sink mode the host does not have it
            self._step.look_at(tuple(micro_batch))

    def on_train_step_end(self, run_context: RunContext) -> None:
        if run_context.get_stop_requested():
            self._flush(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        self._flush(run_context)  # an epoch may have another number of micro-batches than the data set says

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._flush(run_context)
        before, self._counts = self._counts, (self._step.updates, self._step.skipped)
        updated, skipped = (now - then for now, then in zip(self._counts, before))
        if skipped:
            epoch = run_context.original_args()["cur_epoch_num"]
            _check.warn(f"For 'AccumulatedTrainStep', {skipped} windows of epoch {epoch} were skipped: not finite.")
        if skipped >= SKIPPED_IN_A_ROW and not updated:
            raise RuntimeError(
                f"For 'AccumulatedTrainStep', the gradients of all {skipped} windows of an epoch were not finite. "
                "Lower the learning rate or the loss scale, set 'clip_norm', or look for NaN in the data."
            )

    def on_train_end(self, run_context: RunContext) -> None:
        self._flush(run_context)

    def _flush(self, run_context: RunContext) -> None:
        """Update with an open window, unless `SaveStates` keeps it for a run that was asked to stop."""
        kept = run_context.get_stop_requested() and "batches_done" in run_context.original_args()
        if hasattr(self, "_step") and not kept:
            self._step.flush()


def step_of(args: Any) -> AccumulatedTrainStep:
    """Return the train step of a run of `Model`."""
    found = [cell for _, cell in args["train_network"].cells_and_names() if isinstance(cell, AccumulatedTrainStep)]
    alone = found and args.get("optimizer") in (None, found[0].optimizer) and args.get("loss_fn") is None
    if not alone:
        got = type(args["network"]).__name__ + (" with loss_fn or optimizer" if found else "")
        remedy = "Give Model(AccumulatedTrainStep(...)) no loss_fn and no optimizer; the driver needs no FlushTail."
        _check.refuse(TypeError, "FlushTail", "network", "an AccumulatedTrainStep alone", got, remedy)
    return found[0]
