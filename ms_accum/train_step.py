"""How does MindSpore's `Model` accumulate gradients?"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from . import _check
from .accumulator import Accumulator
from .loss.first_look import check_compiles
from .loss.forms import runnable
from .loss.gradients import LossAndGradients
from .loss.objective import Objective
from .loss.weights import weight_in_graph
from .network import tree
from .network.accumulators import loss_scale as scale_of_optimizer
from .network.accumulators import state, unique_name
from .network.optimizers import check_optimizer
from .numerics.collaborators import numerics_of
from .numerics.ema import AverageInEvaluations, Ema
from .numerics.nonfinite import RAISE, SKIP_WINDOW, policy_of
from .numerics.sizes import sizes_of
from .ranks.agreement import agree, facts_of, prepare_on_ranks
from .ranks.group import AUTO, group_of
from .window.in_graph import Notes

_OWNER = "AccumulatedTrainStep"


class AccumulatedTrainStep(nn.Cell):
    """A train step for `mindspore.train.Model` that accumulates gradients and updates once per window.

    The optimizer gets ``sum(w_i * g_i) / sum(w_i)``, the gradient of the mean loss over the window. This is exact also
    if micro-batches differ in size or the last window is short. Pass this Cell to `Model` without `loss_fn` and
    `optimizer`, and add the callback `FlushTail`.

    Args:
        network (Union[Cell, tuple[Cell, Callable]]): a Cell that returns a micro-batch's loss from its columns; or a
            network and its loss function, which gets the network's output and all columns after the first.
        optimizer (Optimizer): updates the parameters.
        gradient_accumulation_steps (Union[int, dict, Callable]): the number of micro-batches in a window, constant or
            changing, as for `Accumulator`; 1 needs no accumulators. Default: 4.
        clip_norm (Optional[float]): the maximum global norm of the window's gradient. Default: ``None``, no clipping.
        reduction (str): ``"mean"`` for the weighted mean of the gradients; ``"sum"`` for their sum, with losses that
            sum over rows. Default: ``"mean"``.
        weight (Union[None, float, Callable]): the weight of a micro-batch: a number, or a function of its columns,
            which is compiled, such as one that returns ``(y >= 0).sum()``; 0 skips the micro-batch. Default: ``None``,
            what MindSpore's losses average over (elements, or labels by class weight), and for other losses the rows.
        check (str): with ``"first"``, `FlushTail` runs two rows of the first micro-batch to find errors early, and
            warns if the loss is not the mean that the default `weight` assumes. ``"off"``: no checks.
            Default: ``"first"``.
        group (Union[str, None, Group]): the processes that train together, each on its own data: ``"auto"`` for all
            that a launcher started, ``None`` for this process alone. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether to sum gradients over the ranks in every micro-batch instead of once per
            window. With a `ZeroOptimizer` each rank then stores only its part of the sums (ZeRO-2). Default: ``False``.
        loss_scale (Union[None, float, LossScaler, LossScaleManager]): the factor for the loss in float16: a number, or
            an object of `mindspore.amp`. A dynamic one is lowered after an overflow; that window is skipped and counted
            in `overflows`. Default: ``None``, no scaling.
        nonfinite (str): what to do with gradients that are not finite: ``"skip_window"`` skips the window;
            ``"skip_micro"`` leaves out the micro-batch, with its weight; with ``"raise"`` `FlushTail` ends the run with
            an error. Default: ``"skip_window"``.
        ema (Optional[Ema]): maintains an average of the weights, which `FlushTail` applies while `Model.fit` evaluates,
            and `eval_network` in all evaluations. Default: ``None``.

    Inputs:
        - **\\*columns** (tuple[Tensor]) - the columns of a micro-batch.

    Outputs:
        Tensor, the mean loss of the window so far; at the end of the window its mean loss over all ranks.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the loss does not match `reduction`.
        RuntimeError: If ranks differ in a setting.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from ms_accum import AccumulatedTrainStep, FlushTail
        >>> from ms_accum.zoo import MLP, create_dataset
        >>> net, loss_fn = MLP(), nn.CrossEntropyLoss()
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        >>> step = AccumulatedTrainStep((net, loss_fn), optimizer, gradient_accumulation_steps=4)
        >>> model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"acc"})
        >>> train, test = (create_dataset(image_size=28, usage=usage) for usage in ("train", "test"))
        >>> model.fit(1, train, test, callbacks=FlushTail())
        >>> step.updates, step.skipped
        (12, 0)
    """

    def __init__(
        self,
        network: Any,
        optimizer: Any,
        gradient_accumulation_steps: Any = 4,
        *,
        clip_norm: float | None = None,
        reduction: str = "mean",
        weight: Any = None,
        check: str = "first",
        group: Any = AUTO,
        sync_every_micro_batch: bool = False,
        loss_scale: Any = None,
        nonfinite: str = SKIP_WINDOW,
        ema: Ema | None = None,
    ):
        super().__init__(auto_prefix=False)
        network, loss_fn = _parts_of(network, gradient_accumulation_steps)
        sizes = sizes_of(_OWNER, "gradient_accumulation_steps", gradient_accumulation_steps)
        self.group = group_of(_OWNER, group)
        self.optimizer = check_optimizer(_OWNER, optimizer)
        self._objective = Objective(_OWNER, network, loss_fn, reduction, weight, check, self.group)
        check_compiles(weight, "weight", _OWNER)
        check_compiles(sizes.function, "gradient_accumulation_steps", _OWNER)
        if ms.get_context("mode") == ms.GRAPH_MODE:
            check_compiles(loss_fn, owner=_OWNER)
        self.weigh, self.may_be_empty = weight_in_graph(_OWNER, weight, loss_fn)
        self.raises = policy_of(_OWNER, nonfinite) == RAISE
        """bool, whether the first non-finite window ends the run."""
        numerics = numerics_of(_OWNER, optimizer, loss_scale=loss_scale, nonfinite=nonfinite, ema=ema)
        sens = scale_of_optimizer(optimizer) * numerics.scale
        self.loss_and_gradients = LossAndGradients(_OWNER, self._objective.forward, optimizer, sens, numerics.changing)
        if self.group is not None:
            settings = {"'gradient_accumulation_steps'": sizes.settings, "'clip_norm'": clip_norm}
            settings |= {"'reduction'": reduction, "'sync_every_micro_batch'": sync_every_micro_batch}
            agree(_OWNER, self.group, {**settings, **numerics.equal_on_ranks, **facts_of(optimizer, network)})
        prepare_on_ranks(network, optimizer.parameters, self.group)
        how: Any = {"group": self.group, "sync_every_micro_batch": sync_every_micro_batch, **numerics.shared}
        how |= {"reduction": reduction, "ema": ema}
        self.accumulator = Accumulator(optimizer, sizes, clip_norm, **how)
        self.mean, self.summing = reduction == "mean", self._objective.loss.summing
        self.own = _own_parameters()
        self.average = AverageInEvaluations(ema)
        """AverageInEvaluations, applies the average of the weights."""
        # In a tuple, so that it is not a part of the step, whose Cells and parameters are saved.
        self._evaluates = (_Evaluate(network, loss_fn, self.average),)
        self.resumed = False
        """bool, whether the open window has just been loaded from a training state."""
        self.add_flags(training=True)  # for this Cell only; `Model.predict` sets it to False
        if sizes.constant != 1:
            self._objective.warn()

    def construct(self, *columns: Any) -> Any:
        if not self.training:
            return self.loss_and_gradients.network(*columns)
        loss_sums, left, empty = self.own
        weight = ops.cast(self.weigh(*columns), ms.float32)
        loss, grads = self.loss_and_gradients(1.0, *columns)
        loss = ops.cast(loss, ms.float32)
        term, counted = loss if self.summing else loss * weight, weight
        if self.accumulator.skips is not None:
            # By index: MindSpore warns about a result that a graph takes and does not use.
            filtered = self.accumulator.skips(grads, loss, weight)
            grads, term, counted = filtered[0], tree.no_nan(term, filtered[1]), weight * filtered[1]
        elif self.may_be_empty:  # a loss over no labels is 0/0
            kept = ops.cast(weight > 0, ms.float32)
            grads, term = tree.multiply_no_nan(grads, kept), tree.no_nan(term, kept)
        now = left - 1
        ops.assign(left, now)
        sums = loss_sums + ops.stack((term, counted, weight))
        ended, sums = self.accumulator.add(grads, counted if self.mean else None, now == 0, sums)
        ops.assign(loss_sums, ops.where(ended, ops.zeros_like(sums), sums))
        if self.may_be_empty and self.mean:  # a sum of nothing is 0, and updates
            ops.assign_add(empty, ops.cast(ops.logical_and(ended, sums[2] == 0), ms.int32))
        return sums[0] / ops.maximum(sums[1], Tensor(1e-30, ms.float32))  # 0 if all weights so far are 0

    def epoch_begins(self, micro_batches: int) -> None:
        """Set the number of micro-batches after which the window ends even if it is not full."""
        ops.assign(self.own[1], Tensor(micro_batches, ms.int32))

    def clear(self) -> None:
        """Discard an open window, unless it has just been loaded from a training state."""
        if not self.resumed:
            self.accumulator.clear()
            ops.assign(self.own[0], _no_losses())
        self.resumed = False

    def flush(self) -> bool:
        """Update with the micro-batches of an open window; return whether the parameters were updated.

        With several ranks as `Accumulator.flush`.

        Raises:
            RuntimeError: If the averages of `ema` are applied, or the ranks have drifted apart.
        """
        sums = Tensor(self.own[0].asnumpy())
        skipped, weights = self.skipped, float(sums.asnumpy()[2])
        updated = self.accumulator.flush_with(None if self.group is None else sums)
        if self.group is None and self.mean and not weights:  # other ranks may have weights
            ops.assign(self.own[2], Tensor(int(self.own[2].asnumpy()) + self.skipped - skipped, ms.int32))
        ops.assign(self.own[0], _no_losses())
        self.check_drift()
        return updated

    def check_drift(self) -> None:
        """Raise an error if the trained weights, the learning rates or the window sizes of ranks are not equal."""
        self.accumulator.check_drift(_OWNER)

    @property
    def notes(self) -> Notes | None:
        """Optional[Notes], what ranks send with the sums of a window; None for a single process."""
        return self.accumulator.notes

    def look_at(self, micro_batch: tuple) -> None:
        """Reject an invalid micro-batch; check with the first ones whether the loss is a weighted mean."""
        self._objective.look_at(micro_batch, self.accumulator.accumulate_step == 1, self.optimizer.parameters)

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
        return self._evaluates[0]

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run."""
        return self.accumulator.settings

    @property
    def state(self) -> dict[str, Any]:
        """dict, its own Parameters in a training state, without those of the network and the optimizer."""
        return {**self.accumulator.state, "loss_sums": self.own[0]}

    @property
    def counts(self) -> tuple[int, int]:
        """tuple[int], the updates, and the windows skipped as non-finite, without those that overflowed."""
        return self.updates, self.skipped - self.overflows - int(self.own[2].asnumpy())

    @property
    def updated(self) -> bool:
        """bool, whether the last micro-batch ended a window and updated the parameters."""
        return self.accumulator.updated

    @property
    def micro_batches(self) -> int:
        """int, the number of micro-batches in the open window."""
        return self.accumulator.micro_batches

    @property
    def updates(self) -> int:
        """int, the number of updates so far."""
        return self.accumulator.updates

    @property
    def skipped(self) -> int:
        """int, the number of windows so far without an update: gradient not finite, or all weights 0."""
        return self.accumulator.skipped

    @property
    def ema(self) -> Ema | None:
        """Optional[Ema], the average of the weights."""
        return self.accumulator.numerics.ema

    @property
    def loss_scale(self) -> float:
        """float, the current loss scale; 1 if there is none."""
        return self.accumulator.numerics.value

    @property
    def overflows(self) -> int:
        """int, the number of windows so far that overflowed, so that the dynamic loss scale was lowered."""
        return self.accumulator.numerics.overflows

    @property
    def left_out(self) -> int:
        """int, the number of micro-batches that ``nonfinite="skip_micro"`` left out, on all ranks."""
        return self.accumulator.numerics.left_out

    @property
    def grad_norm(self) -> float:
        """float, the norm of the last window's gradient, before clipping."""
        return self.accumulator.grad_norm


class _Evaluate(nn.Cell):
    """Returns a batch's loss, the network's output and the labels, with averaged weights; or three times the loss.

    Args:
        network (Cell): the network.
        loss_fn (Union[Cell, Callable, None]): its loss; None if the network returns the loss.
        average (AverageInEvaluations): applies the average of the weights.
    """

    def __init__(self, network: nn.Cell, loss_fn: Any, average: AverageInEvaluations):
        super().__init__(auto_prefix=False)
        self.eval_of, self.loss_fn, self.average = network, runnable(loss_fn), average

    def __call__(self, *columns: Any) -> Any:
        with self.average.applied():
            return super().__call__(*columns)

    def construct(self, *columns: Any) -> Any:
        if self.loss_fn is None:
            loss = self.eval_of(*columns)
            return loss, loss, loss  # `Model` expects at least three outputs
        output = self.eval_of(columns[0])
        return (self.loss_fn(output, *columns[1:]), output, *columns[1:])


def _own_parameters() -> tuple[Parameter, ...]:
    """Return the window's sums, the micro-batches left, and the number of windows skipped because all weights are 0.

    The sums are those of losses, of weights, and of weights with those of micro-batches that were left out. They are in
    a tuple, so that they are not saved with the model.
    """
    name = unique_name("train_step")
    loss_sums = Parameter(_no_losses(), name=f"{name}.loss_sums", requires_grad=False)
    return loss_sums, state(f"{name}.left", 0, ms.int32), state(f"{name}.empty", 0, ms.int32)


def _no_losses() -> Tensor:
    return Tensor([0.0, 0.0, 0.0], ms.float32)


def _parts_of(network: Any, steps: Any) -> tuple[nn.Cell, Any]:
    """Return the network and its loss function, None if it returns the loss itself."""
    if isinstance(steps, nn.Optimizer):  # as for the driver: network, loss, optimizer
        _check.refuse(TypeError, _OWNER, "network", "one tuple (network, loss_fn)", "two arguments")
    network, loss_fn = network if isinstance(network, (tuple, list)) and len(network) == 2 else (network, None)
    return _check.instance(_OWNER, "network", network, nn.Cell, "a Cell, or a Cell and its loss function"), loss_fn
