"""The driver: trains a network with one update per window of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

from mindspore import Tensor, nn

from . import _check
from .engine.config import Options, checked, with_options
from .engine.ema import check_not_applied
from .network.optimizers import warn_if_rate_vanishes, warn_if_rates_are_of_micro_batches
from .network.training_mode import training_again
from .ranks.agreement import agree
from .ranks.group import is_first, total
from .ranks.zero import ZeroOptimizer
from .saving.checkpointer import Checkpointer
from .saving.files import absolute
from .saving.model_file import check_path
from .training.callbacks import callbacks_of, is_not_finite, raise_not_finite
from .training.coupled import objective_of
from .training.data import Data
from .training.evaluation import evaluation_of
from .training.progress import progress
from .training.run import SAME_ON_ALL, Plan, Run, arguments_equal_on_ranks, epochs_of
from .training.sizes import TAILS, ByWeight, Sizes, planned, sizes_of, warn_if_never_full
from .training.step import ShowsWindows, Step

if TYPE_CHECKING:
    from mindspore.dataset import Dataset
    from mindspore.experimental.optim.lr_scheduler import LRScheduler
    from mindspore.train import Callback
    from typing_extensions import Unpack

_OWNER = "GradientAccumulation"


@with_options
class GradientAccumulation(ShowsWindows):
    """Train a network with gradient accumulation: one update per window of micro-batches.

    The optimizer gets ``sum(w_i * g_i) / sum(w_i)``, the gradient of the mean loss over the window. This is exact also
    if micro-batches differ in size or the last window is short. A window whose gradient is not finite is skipped and
    counted in `skipped`; after 10 skipped windows in a row the run stops with an error.

    The micro-batches of a window wait on the host until it is complete; then they are run, each with its share of the
    window's weights. After an error or a stop inside a window everything is as at the end of the window before.

    Args:
        network (Cell): the network to train.
        loss_fn (Union[Cell, Callable, None]): returns a scalar loss from the network's output and all columns after the
            first, usually the label, or a dict or tuple of several terms; or a `CoupledLoss`. ``None``: the network
            returns the loss, from all columns; alone, or as ``(loss, output, ...)``.
        optimizer (Optimizer): updates the parameters.

    Args: Windows and weights
        reduction (str): ``"mean"`` for the weighted mean of the gradients; ``"sum"`` for their sum, as in the tutorial,
            or for losses that sum over rows. Default: ``"mean"``.
        tail (str): what to do with a short last window: ``"flush"`` updates with it, ``"carry"`` lets its
            micro-batches wait for the next epoch or call (or `flush`), ``"drop"`` discards it. Default: ``"flush"``.
        weight (Union[None, float, Tensor, Callable]): the weight of a micro-batch: a number, or a function of its
            columns, run on the host, such as ``lambda x, y: (y >= 0).sum()``; 0 skips the micro-batch. Default:
            ``None``, what MindSpore's losses average over (elements, or labels by class weight); else the rows. For a
            loss of several terms a dict, from each term's name to what it averages over: such a function, a number,
            ``"rows"``, ``"elements"``, or one of MindSpore's losses.
        coefficients (Optional[dict]): the factors of terms, 1 for those that are not in it: numbers, or functions of
            the number of updates so far. Default: ``None``.
        check (str): with ``"first"`` a warning if the loss is not the mean over rows that the default `weight` assumes;
            it comes with the first micro-batch that can tell. ``"off"``: no warning. Default: ``"first"``.
        inputs (Optional[int]): with a `loss_fn` the columns that the network gets, from the first; the loss gets its
            output and the others. Default: ``None``, one.
        scheduler (Optional[LRScheduler]): a `mindspore.experimental` one, stepped after each update, not after each
            epoch: give its periods in updates. Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the loss does not match `reduction`.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import GradientAccumulation
        >>> net = MLP()
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        >>> model = GradientAccumulation(net, nn.CrossEntropyLoss(), optimizer)
        >>> model.train_process(1, create_dataset(image_size=28), mini_steps=4, report=(), ckpt_path=None)
        >>> model.updates, model.skipped
        (12, 0)
    """

    def __init__(
        self,
        network: nn.Cell,
        loss_fn: Callable | None,
        optimizer: nn.Optimizer | ZeroOptimizer,
        *,
        reduction: str = "mean",
        tail: str = "flush",
        weight: float | Tensor | Callable | Mapping[str, float | Callable] | None = None,
        coefficients: Mapping[str, float | Callable] | None = None,
        check: str = "first",
        inputs: int | None = None,
        scheduler: LRScheduler | None = None,
        **options: Unpack[Options],
    ):
        self._network = _check.instance(_OWNER, "network", network, nn.Cell, "a Cell")
        self._tail = _check.one_of(_OWNER, "tail", tail, TAILS)
        options = checked(_OWNER, options)
        weights = {"reduction": reduction, "weight": weight, "coefficients": coefficients}
        objective = objective_of(_OWNER, network, loss_fn, options, check=check, inputs=inputs, **weights)
        self._step = Step(_OWNER, objective, optimizer, options, {"tail": tail}, scheduler)
        self._group = self._step.group
        self._waiting: list[tuple] = []  # micro-batches of a tail that is carried

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._step.settings.items())
        return f"{_OWNER}({type(self._network).__name__}, {shown}, updates={self.updates}, skipped={self.skipped})"

    def train_process(
        self,
        epoch: int,
        train_dataset: Dataset | Iterable[Any],
        mini_steps: int | Mapping[int, int] | Callable[[int], int] | None = None,
        *,
        micro_batch_size: int | None = None,
        window_weight: float | None = None,
        report: Callback | Sequence[Callback] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        valid_dataset: Dataset | Iterable[Any] | None = None,
        metrics: Mapping[str, Any] | Set[str] | None = None,
        eval_every: int | None = None,
        initial_epoch: int = 0,
        max_updates: int | None = None,
        ckpt_path: str | None = "gradient_accumulation.ckpt",
        checkpointer: Checkpointer | None = None,
    ) -> None:
        """Train for a number of epochs, then save the model.

        Args:
            epoch (int): the last epoch, which is the number of epochs unless `initial_epoch` is given.
            train_dataset (Union[Dataset, Iterable]): yields micro-batches, or complete batches with `micro_batch_size`:
                tuples, or dicts in the key order of the first dict.
            mini_steps (Union[None, int, dict, Callable]): the number of micro-batches in a window; 1 accumulates
                nothing. A dict maps the first update of each size to the size, such as ``{0: 1, 100: 4}`` or that of
                `ramp_up`; a function gets the number of updates, also of updates to come, for the plan: it must not
                count its calls. Default: ``None``, `micro_batch_size` is given.
            micro_batch_size (Optional[int]): instead of `mini_steps`, the rows of a micro-batch: each batch of the
                dataset is a window and is split. Default: ``None``.
            window_weight (Optional[float]): instead of `mini_steps`, what a window counts for: it ends with the
                micro-batch with which its weights reach this number, such as 32768 tokens with a `weight` that counts
                them (of several terms, the first counts). With several ranks each fills an equal part of it. How many
                updates there will be is then unknown. Default: ``None``.

        Args: Progress
            report (Union[None, Callback, Sequence[Callback]]): shows progress, on rank 0 only. Default: ``None``, a
                progress bar in a terminal or a notebook, and elsewhere about 20 lines per epoch. ``()``: no reports.
            callbacks (Union[None, Callback, list[Callback]]): MindSpore's callbacks, given on all ranks. A step is a
                window: `cur_step_num` counts windows, `net_outputs` is the window's mean loss, and `record` its
                `UpdateRecord`. `request_stop` ends the run; with several ranks, after the epoch, or after the next
                evaluation inside it. Default: ``None``.

        Args: Evaluation
            valid_dataset (Union[None, Dataset, Iterable]): what to evaluate, read anew each time. `on_eval_end` of
                callbacks gets the results as `eval_results`. Default: ``None``.
            metrics (Union[None, dict, set]): MindSpore's metrics for the evaluation, as for `mindspore.train.Model`,
                such as ``{"acc"}``; of a network that returns ``(loss, output, ...)`` they get the output and the last
                column. The mean loss is always computed, as ``"eval_loss"``. Default: ``None``.
            eval_every (Optional[int]): the number of updates from one evaluation to the next, also inside an epoch;
                there is also one at the end of the run. `EarlyStopping` and `ReduceLROnPlateau` then count evaluations
                instead of epochs. Default: ``None``, an evaluation at the end of each epoch.

        Args: Begin and end
            initial_epoch (int): the number of epochs counted as done before this call. Default: 0.
            max_updates (Optional[int]): ends the run, also inside an epoch, when `updates` has reached this number.
                Default: ``None``, the run ends with the last epoch.

        Args: Saving
            ckpt_path (Optional[str]): where to save the model; an existing file is replaced. ``None``: do not save.
                Default: the tutorial's name, ``gradient_accumulation.ckpt``.
            checkpointer (Optional[Checkpointer]): saves training states, and resumes a run. A run that
                ``nonfinite="raise"`` ended resumes after the window that was not finite; with a `ZeroOptimizer` on
                several ranks, from the last state saved before. Not while micro-batches of an earlier call wait.
                Default: ``None``.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range, the dataset is empty, or no window would ever fill.
            RuntimeError: If micro-batches of an earlier call wait and this call can't continue their window, gradients
                stay non-finite, or ranks differ or drift apart.
            CheckpointError: If the state to resume can't be read, or belongs to another run.
            Stopped: If the `checkpointer` received a request to stop; the state is saved.
        """
        step, ranks = self._step, self._group.size if self._group else 1
        sizes: Sizes | ByWeight | None = None
        epochs = epochs_of(epoch, initial_epoch)
        if max_updates is not None:
            _check.positive_int("train_process", "max_updates", max_updates)
        ways = {"mini_steps": mini_steps, "micro_batch_size": micro_batch_size, "window_weight": window_weight}
        if sum(value is not None for value in ways.values()) != 1:
            given = " and ".join(f"{name}={value}" for name, value in ways.items() if value is not None) or "none"
            raise ValueError(
                "For 'train_process', one of 'mini_steps', 'micro_batch_size' and 'window_weight' must be given, but "
                f"got {given}. Give 'mini_steps' if the dataset yields micro-batches."
            )
        if micro_batch_size is not None:
            micro_batch_size = _check.positive_int("train_process", "micro_batch_size", micro_batch_size)
        elif mini_steps is not None:
            sizes = sizes_of("train_process", "mini_steps", mini_steps)
        else:
            sizes = ByWeight("train_process", "window_weight", window_weight, ranks, step.objective.weight_of)
            if step.is_coupled:
                rule = "None with a CoupledLoss, whose micro-batches count nothing alone"
                _check.raise_invalid(ValueError, "train_process", "window_weight", rule, window_weight)
            if ranks > 1 and self._tail == "carry" and checkpointer is not None:
                rule, remedy = "None with tail='carry' and a checkpointer on several ranks", "Use tail='flush'."
                _check.raise_invalid(ValueError, "train_process", "window_weight", rule, window_weight, remedy)
        self._check_waiting(sizes, checkpointer)
        data = Data(train_dataset, ranks)
        batches = data.batches
        updates = planned(  # a resumed run may have another number
            "train_process",
            batches,
            sizes,
            self._tail,
            epochs,
            open_micro_batches=self.micro_batches,
            updates=self.updates,
            may_have_none=self._group is not None,  # another rank may have windows
        )
        if is_first(self._group):
            warn_if_rate_vanishes("train_process", step.scheduler, updates)
            if isinstance(sizes, Sizes) and batches is not None:
                if max_updates is None:
                    planned_updates = partial(int, updates or 0)
                    warn_if_rates_are_of_micro_batches(
                        "train_process", step.optimizer, epochs * batches, planned_updates
                    )
                if self._tail == "flush":
                    warn_if_never_full("train_process", sizes, batches)
        if ckpt_path is not None:
            check_path("train_process", ckpt_path, self._network)
        if self._group is not None:
            arguments = arguments_equal_on_ranks(valid_dataset, metrics, eval_every, checkpointer, callbacks)
            arguments |= {"'max_updates'": max_updates, "'mini_steps'": sizes and sizes.settings}
            agree("train_process", self._group, arguments, SAME_ON_ALL)
        reports = callbacks_of("train_process", "report", progress() if report is None else report)
        plan = Plan(
            epochs=epochs,
            initial_epoch=initial_epoch,
            max_updates=max_updates,
            data=data,
            sizes=sizes,
            micro_batch_size=micro_batch_size,
            tail=self._tail,
            settings=step.settings,
            reports=reports if is_first(self._group) else (),
            callbacks=callbacks_of("train_process", "callbacks", callbacks),
            states=checkpointer,
            evaluate=evaluation_of(step, valid_dataset, metrics, eval_every),
            ckpt_path=None if ckpt_path is None else absolute(ckpt_path),
        )
        self._settings_of_waiting = sizes and sizes.settings
        Run(self._network, step, self._waiting, plan).train()

    def _check_waiting(self, sizes: Sizes | ByWeight | None, checkpointer: Checkpointer | None) -> None:
        """Raise an error if this call can't continue what an earlier one left over."""
        if not self._waiting:
            return
        held = f"{_check.quantity(len(self._waiting), 'micro-batch')} of an earlier call that tail='carry' left over"
        if checkpointer is not None:
            raise RuntimeError(
                f"For 'train_process', a training state can't contain {held}. Call 'flush()' or 'clear()' first."
            )
        if sizes is None or sizes.settings != self._settings_of_waiting:
            raise RuntimeError(
                f"For 'train_process', the size of windows can't change while one holds {held}. "
                "Call 'flush()' or 'clear()' first."
            )

    def planned_updates(
        self,
        epoch: int,
        train_dataset: Dataset | Iterable[Any],
        mini_steps: int | Mapping[int, int] | Callable[[int], int] | None = None,
    ) -> int | None:
        """Return the number of updates that `train_process` would make with these arguments.

        Without `mini_steps` each batch is a window.

        Returns:
            Optional[int], None if the size of the dataset is unknown.

        Raises:
            ValueError: If the dataset is empty, or no window would ever fill.
        """
        _check.positive_int("planned_updates", "epoch", epoch)
        batches = Data(train_dataset).batches
        waiting, updates = self.micro_batches, self.updates
        return planned(
            "planned_updates", batches, mini_steps, self._tail, epoch, open_micro_batches=waiting, updates=updates
        )

    def flush(self) -> bool:
        """Update with the micro-batches that ``tail="carry"`` left over; return whether the parameters were updated.

        Raises:
            RuntimeError: If the averages of `ema` are applied.
        """
        if total([self.micro_batches], self._group) == [0]:
            return False
        check_not_applied("flush", self.ema)
        waiting = list(self._waiting)
        self._waiting.clear()
        with training_again(self._network):
            ended: Any = self._step.run(self._step.share(waiting or None))
        if self._step.raises and is_not_finite(ended):
            raise_not_finite("the open window")
        return ended.updated

    def clear(self) -> None:
        """Discard the micro-batches that ``tail="carry"`` left over."""
        self._waiting.clear()

    @property
    def updated(self) -> bool:
        """bool, whether the last window updated the parameters."""
        return self._step.updated
