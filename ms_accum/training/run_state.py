"""What a training state of a run contains, and how a run is resumed from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from mindspore import nn

from ..engine.config import OPTIONAL_PREFIXES
from ..network.optimizers import all_parameters, parameters_in, settings_of
from ..network.parameters import excluding
from ..saving.checkpointer import FoundState
from ..saving.model_file import CheckpointError
from ..saving.training_state import TrainingState, capture, restore, warn_about_random_layers
from .data import Data, Position
from .step import Step

SETTING = "setting"
"""str, the owner of the optimizer's settings, such as the learning rate, which may differ in a resumed run."""


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
        return capture(self.parameters(), {"at": asdict(at), **self._step.counters}, writes=self._step.is_first)

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
        facts = found_state.state.facts
        if "micro_batches" in facts:
            raise CheckpointError(f"'{found_state.path}' is a training state of a loop of your own, or of Model.")
        at = Position(**facts["at"])
        if at.epochs_begun > epochs:
            got = f"but got {epochs}: '{found_state.path}' has begun epoch {at.epochs_begun}"
            raise CheckpointError(f"For 'train_process', 'epoch' must be at least {at.epochs_begun}, {got}.")
        warn_about_random_layers(self._network)
        if found_state.changed:
            restore(found_state.state, parameters, found_state.path, leave_out=SETTING, optional=OPTIONAL_PREFIXES)
        else:
            restore(found_state.state, parameters, found_state.path)
        self._step.load(facts)
        return data.convert(at) if found_state.changed else at
