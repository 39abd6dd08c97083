"""Training states of runs: what they contain, and how a run is resumed from them; also a loop of the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from mindspore import nn

from .. import _check
from ..network.optimizers import all_parameters, kind_of, parameters_in, settings_of
from ..network.parameters import excluding
from ..ranks.agreement import agree
from ..ranks.group import Group, gather_numbers, is_first
from ..saving.checkpointer import Checkpointer, FoundState, find_together
from ..saving.model_file import CheckpointError
from ..saving.training_state import SETTING, TrainingState, capture, restore, warn_about_random_layers
from .data import Data, Position
from .step import Step


def trained_parameters(network: nn.Cell, optimizer: Any, scheduler: Any = None) -> dict[str, Any]:
    """Return all Parameters of a network, its optimizer and the scheduler by owner and name.

    Raises:
        CheckpointError: If two have the same owner and name.
    """
    of_network = list(network.get_parameters())
    settings = settings_of(optimizer)
    optimizer_state = excluding(_parameters_of(optimizer), [*of_network, *settings])
    parameters = {**_named("network", of_network), **_named("optimizer", optimizer_state), **_named(SETTING, settings)}
    # A scheduler's Parameters are named by kind. Names may repeat, so they are numbered.
    counters = excluding(list(parameters_in(scheduler)), parameters.values())
    named = {f"scheduler.{number}.{counter.name}": counter for number, counter in enumerate(counters)}
    return {**parameters, **named}


def _named(owner: str, parameters: Iterable[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for parameter in parameters:
        if named.setdefault(f"{owner}.{parameter.name}", parameter) is not parameter:
            raise CheckpointError(
                f"Two Parameters of the {owner} are named '{parameter.name}', so a state can't be saved. "
                "Give one of them another name."
            )
    return named


def _parameters_of(optimizer: Any) -> list[Any]:
    if hasattr(optimizer, "complete_state"):
        return list(optimizer.complete_state().values())
    return all_parameters(optimizer)


class RunState:
    """The state of a run between two windows: everything that training changes, the counters, and the position.

    Args:
        network (Cell): the user's network.
        step (Step): the driver's step.
    """

    def __init__(self, network: nn.Cell, step: Step):
        self._network = network
        self._step = step

    def take(self, at: Position) -> TrainingState:
        """Return the state."""
        return capture(self.parameters(), {"at": asdict(at), **self._step.counters}, writes=is_first(self._step.group))

    def parameters(self) -> dict[str, Any]:
        """Return the Parameters that are saved, by name.

        Raises:
            CheckpointError: If two have the same name, so that a state can't be saved.
        """
        step = self._step
        return {**trained_parameters(step.objective.forward, step.optimizer, step.scheduler), **step.config.state}

    def restore(self, found_state: FoundState, parameters: Mapping[str, Any], epochs: int, data: Data) -> Position:
        """Load a state into a run of `epochs` epochs, and return its position.

        Args:
            found_state (FoundState): the state.
            parameters (Mapping): what `parameters` returned.
            epochs (int): the epochs of the run.
            data (Data): the data set of the run.

        Raises:
            CheckpointError: If it belongs to another network or optimizer, or this run can't continue it.
        """
        metadata = found_state.state.metadata
        if "micro_batches" in metadata:
            raise CheckpointError(f"'{found_state.path}' is a training state of a loop of your own, or of Model.")
        at = Position(**metadata["at"])
        if at.epochs_begun > epochs:
            got = f"but got {epochs}: '{found_state.path}' has begun epoch {at.epochs_begun}"
            raise CheckpointError(f"For 'train_process', 'epoch' must be at least {at.epochs_begun}, {got}.")
        at = data.convert(at) if found_state.changed else at
        warn_about_random_layers(self._network)
        restore(found_state.state, parameters, found_state.path, changed=bool(found_state.changed))
        self._step.load(metadata)
        return at


_OF_SUMS = ("loss_scale", "nonfinite", "reduction")  # the settings on which the sums of an open window depend


class Accumulates(Protocol):
    """An `Accumulator` or an `AccumulatedTrainStep`: what of it is saved."""

    optimizer: Any
    group: Group | None
    waits: bool
    micro_batches: Any

    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def state(self) -> Mapping[str, Any]: ...
    @property
    def counters(self) -> Mapping[str, Any]: ...
    def load(self, counters: Mapping[str, Any]) -> None: ...


class ResumableLoop:
    """Save the training state of your own training loop, and resume it exactly, even inside a window.

    Use it in a ``with`` statement. Call `after_micro_batch` with the position in the data, start from `epoch` and
    `batches`, and make the order of the batches a function of the seed and the epoch. A state is also saved at the end
    of the ``with`` block, but not after an error, when the Parameters may be ahead of the position.

    Args:
        checkpointer (Checkpointer): defines when and where states are saved, and which one to resume.
        network (Cell): the network to train.
        accumulator (Union[Accumulator, AccumulatedTrainStep]): accumulates its gradients.

    Raises:
        TypeError: If `checkpointer` or `network` has the wrong type.
        CheckpointError: If the state to resume can't be read, or belongs to another run.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn
        >>> from ms_accum import Accumulator, Checkpointer, ResumableLoop
        >>> def train(epochs, folder):
        ...     net, loss_fn = nn.Dense(4, 2), nn.CrossEntropyLoss()
        ...     optimizer = nn.SGD(net.trainable_params(), 0.1)
        ...     accumulator = Accumulator(optimizer, 2, reduction="mean")
        ...     def forward(x, y):
        ...         return loss_fn(net(x), y)
        ...     grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
        ...     x, y = Tensor(np.ones((8, 4)), ms.float32), Tensor(np.zeros(8), ms.int32)
        ...     with ResumableLoop(Checkpointer(folder, every=1, resume="auto"), net, accumulator) as loop:
        ...         for epoch in range(loop.epoch, epochs + 1):
        ...             for number in range(loop.batches + 1, 4):
        ...                 accumulator(grad_fn(x, y)[1], 8)
        ...                 loop.after_micro_batch(epoch, number)
        ...             accumulator.flush()
        ...             loop.after_micro_batch(epoch + 1, 0)
        ...     return int(accumulator.updates)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(train(1, folder), train(2, folder))
        2 4
    """

    def __init__(self, checkpointer: Checkpointer, network: nn.Cell, accumulator: Accumulates):
        owner = "ResumableLoop"
        self._states = _check.instance(owner, "checkpointer", checkpointer, Checkpointer, "a Checkpointer")
        self._network = _check.instance(owner, "network", network, nn.Cell, "a Cell")
        self._accumulator = accumulator
        self._group = accumulator.group
        self._at, self._is_resumed = Position(), False
        self._reading = (1, 0)  # epoch and batches; those of `_at` are before the micro-batches that wait

    @property
    def epoch(self) -> int:
        """int, the epoch in which to start or resume, from 1."""
        return self._reading[0]

    @property
    def batches(self) -> int:
        """int, the number of finished batches of this epoch."""
        return self._reading[1]

    def __enter__(self) -> ResumableLoop:
        if self._accumulator.waits and self._accumulator.micro_batches:
            held = _check.quantity(self._accumulator.micro_batches, "micro-batch")
            raise RuntimeError(
                f"For 'ResumableLoop', a training state can't contain {held} of an open window. Call 'flush()' or "
                "'clear()' first."
            )
        self._states.for_group(self._group).__enter__()
        try:
            # Also because rank 0 may still be writing the state to resume.
            agree("ResumableLoop", self._group, self._states.facts)
            self._resume()
        except BaseException:
            self._states.__exit__()
            raise
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        try:
            if kind is None:
                self._states.save_at_the_end(self._capture)
        finally:
            self._states.__exit__(kind, *error)

    @property
    def is_resumed(self) -> bool:
        """bool, whether the loop resumed from a state."""
        return self._is_resumed

    def set_epoch_size(self, batches: int) -> None:
        """Set the number of batches in an epoch, which must be equal in a resumed run."""
        self._at.total = batches

    def move_to(self, epoch: int) -> None:
        """Move to the beginning of an epoch; callbacks may have changed Parameters at the end of the last one."""
        self._move(epoch, 0)
        self._states.changed()

    def _move(self, epoch: int, batches: int) -> int:
        """Move to a position in the data, and return the number of micro-batches in the open window.

        Those that wait are before the position of a state, which stays where it is if their window began in an epoch
        before.
        """
        self._reading = epoch, batches
        held, waits = int(self._accumulator.micro_batches), self._accumulator.waits
        if not (waits and held > batches):
            self._at.epoch, self._at.batches = epoch, batches - held if waits else batches
        return held

    def after_micro_batch(self, epoch: int, batches: int) -> None:
        """Save a state if one is due. Call it after each micro-batch, and at the end of each epoch.

        Args:
            epoch (int): the current epoch, from 1.
            batches (int): the number of finished batches of this epoch; 0 at its beginning.

        Raises:
            TypeError: If an argument is not an int.
            ValueError: If `epoch` is less than 1, or `batches` less than 0.
            Stopped: If the `Checkpointer` received a request to stop; the state is saved.
        """
        epoch = _check.positive_int("after_micro_batch", "epoch", epoch)
        batches = _check.count("after_micro_batch", "batches", batches)
        held, requests = self._move(epoch, batches), self._states.requests()
        if self._group is not None:
            if held:
                return  # ranks save and stop together, between windows
            requests = self._together(self._group, requests)
        self._states.after_micro_batch(self._updates, held > 0, self._capture, requests)

    def _together(self, group: Group, requests: Sequence[float]) -> list[float]:
        """Return the requests of all ranks, which must be at the same position."""
        of_ranks = gather_numbers(np.array([self._at.epoch, self._at.batches, *requests], np.float64), group)
        if (of_ranks[:, :2] != of_ranks[0, :2]).any():
            at = ", ".join(f"epoch {epoch:.0f}, batch {batch:.0f}" for epoch, batch, *_ in of_ranks)
            raise RuntimeError(
                f"For 'ResumableLoop', all ranks must run the same number of micro-batches, but they are at {at}."
            )
        return of_ranks[:, 2:].sum(0).tolist()

    @property
    def _updates(self) -> int:
        return int(self._accumulator.counters["updates"])

    def _parameters(self) -> dict[str, Any]:
        return {**trained_parameters(self._network, self._accumulator.optimizer), **self._accumulator.state}

    def _capture(self) -> TrainingState:
        held = 0 if self._accumulator.waits else int(self._accumulator.micro_batches)
        metadata = {"at": asdict(self._at), "micro_batches": held, **self._accumulator.counters}
        return capture(self._parameters(), metadata, writes=is_first(self._group))

    def _resume(self) -> None:
        parameters = self._parameters()  # raises an error before training if a state can't be saved
        ranks = self._group.size if self._group else 1
        optimizer = kind_of(self._accumulator.optimizer)
        config = {**self._accumulator.settings, "optimizer": optimizer, "ranks": ranks}
        found_state = find_together("ResumableLoop", self._states, config, parameters, self._group)
        if found_state is None:
            return
        warn_about_random_layers(self._network)
        if "micro_batches" not in found_state.state.metadata:
            raise CheckpointError(f"'{found_state.path}' is a training state of GradientAccumulation.")
        micro_batches = found_state.state.metadata["micro_batches"]
        has_sums = any(name.startswith("window.grad_sum") for name in parameters)
        changed = [text for name, text in found_state.changed.items() if name in _OF_SUMS]
        if micro_batches and changed:
            raise CheckpointError(
                f"'{found_state.path}' holds {_check.quantity(micro_batches, 'micro-batch')} of an open window, whose "
                f"sums do not fit: {', '.join(changed)}. Resume from a state between two windows."
            )
        if micro_batches and (self._group is not None or not has_sums):
            raise CheckpointError(
                f"'{found_state.path}' holds {_check.quantity(micro_batches, 'micro-batch')} of an open window, which "
                "windows of 1 and several ranks can't continue. Resume with the settings it was saved with, or from a "
                "state between two windows."
            )
        at = Position(**found_state.state.metadata["at"])
        if at.total != self._at.total:
            reason = f"has epochs of {_check.quantity(at.total or 0, 'batch')}, but this data set has {self._at.total}"
            raise CheckpointError(f"The run of '{found_state.path}' {reason}. Resume it with batches of the same size.")
        micro_batches_done = (at.total or 0) * (at.epoch - 1) + at.batches
        if at.total and (at.batches > at.total or micro_batches_done >= 2**31):  # MindSpore counts in 32 bits
            reason = f"has finished {micro_batches_done:,} micro-batches, which a data set of MindSpore can't skip"
            raise CheckpointError(f"The run of '{found_state.path}' {reason}.")
        restore(found_state.state, parameters, found_state.path, changed=bool(found_state.changed))
        self._accumulator.load(found_state.state.metadata)
        self._at, self._reading, self._is_resumed = at, (at.epoch, at.batches), True
