"""Which state of a run is saved, and how is the run resumed?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mindspore import nn

from ..numerics.collaborators import OWNERS
from ..window.batches import Data, Position
from ..window.open_window import OpenWindow
from .checkpointer import FoundState
from .model_file import CheckpointError
from .trained import SETTING, Trained
from .training_state import TrainingState, capture, restore, warn_about_random_layers


class RunState:
    """The state of a run: everything that training changes, the open window with its counters, and the position.

    Args:
        network (Cell): the user's network.
        trained (Trained): the network with its loss, and the optimizer.
        window (OpenWindow): the driver's window.
    """

    def __init__(self, network: nn.Cell, trained: Trained, window: OpenWindow):
        self._network, self._trained, self._window = network, trained, window

    def take(self, at: Position) -> TrainingState:
        """Return the state."""
        accumulators, window = self._window.state()
        facts = {"at": asdict(at), "window": window, **self._window.counters.state, **self._trained.facts}
        return capture({**self._trained.parameters(), **accumulators}, facts, writes=self._window.is_first)

    def parameters(self) -> dict[str, Any]:
        """Return the Parameters that are saved, by name.

        Raises:
            CheckpointError: If two have the same name, so that a state can't be saved.
        """
        return self._trained.parameters()

    def put_back(self, found: FoundState, parameters: Mapping[str, Any], epochs: int, data: Data) -> Position:
        """Load a state into a run of `epochs` epochs, and return its position.

        Args:
            found (FoundState): the state.
            parameters (Mapping): what `parameters` returned.
            epochs (int): the epochs of the run.
            data (Data): the data set of the run.

        Raises:
            CheckpointError: If it belongs to another network or optimizer, or this run can't continue it.
        """
        facts, window = found.state.facts, found.state.facts["window"]
        at, held = Position(**facts["at"]), window["micro_batches"]
        if at.begun > epochs:
            what = f"but got {epochs}: '{found.path}' has begun epoch {at.begun}"
            raise CheckpointError(f"For 'train_process', 'epoch' must be at least {at.begun}, {what}.")
        warn_about_random_layers(self._network)
        if not self._window.holds(held):
            who = "windows of 1" if self._window.size == 1 else "several ranks or a CoupledLoss"
            raise CheckpointError(
                f"The state holds {held} micro-batches of an open window, which {who} can't continue. "
                "Resume with the settings it was saved with, or from a state between two windows."
            )
        parameters = {**parameters, **self._window.accumulators(held)}
        changed: dict[str, Any] = {"leave_out": SETTING, "optional": OWNERS} if found.changed else {}
        restore(found.state, parameters, found.path, **changed)
        self._window.load(window)
        self._window.counters.load(facts)
        self._trained.load(facts)
        if not found.changed:
            return at
        if self._window.size is None:  # it may contain a part of a batch, and batches may be different now
            self._window.clear()
        return data.place(at)
