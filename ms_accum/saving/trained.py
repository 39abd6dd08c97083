"""Which Parameters does training change, and to which object do they belong?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspore import nn

from ..network.optimizers import parameters_in, settings_of
from ..network.parameters import excluding
from ..numerics.collaborators import NONE, Numerics
from .model_record import CheckpointError

SETTING = "setting"
"""str, the owner of the optimizer's settings, such as the learning rate, which may differ in a resumed run."""


class Trained:
    """A network, its optimizer, and the scheduler that sets the learning rate after each update, if there is one.

    Args:
        network (Cell): returns a micro-batch's loss from its columns.
        optimizer (Optimizer): updates the network.
        scheduler (Optional[LRScheduler]): sets the optimizer's learning rate. Default: ``None``.
        numerics (Numerics): the collaborators. Default: none.
    """

    def __init__(self, network: nn.Cell, optimizer: Any, scheduler: Any = None, numerics: Numerics = NONE):
        self._network, self._scheduler, self._numerics = network, scheduler, numerics
        self.optimizer = optimizer
        """Optimizer, updates the network."""

    def step(self) -> None:
        """Set the learning rate of the next update."""
        if self._scheduler is not None:
            self._scheduler.step()

    @property
    def facts(self) -> dict[str, Any]:
        """dict, what a training state holds that is not a Parameter."""
        return self._numerics.facts

    def load(self, facts: Mapping[str, Any]) -> None:
        """Continue from the facts of a training state, whose Parameters have been loaded."""
        self._numerics.load(facts)

    def parameters(self) -> dict[str, Any]:
        """Return all Parameters by owner and name.

        Raises:
            CheckpointError: If two have the same owner and name.
        """
        trained, settings = list(self._network.get_parameters()), settings_of(self.optimizer)
        own = excluding(_held_by(self.optimizer), [*trained, *settings])
        found = {**_named("network", trained), **_named("optimizer", own), **_named(SETTING, settings)}
        found |= self._numerics.state
        # A scheduler's Parameters are named by kind. Names may repeat, so they are numbered.
        counters = excluding(list(parameters_in(self._scheduler)), found.values())
        return {**found, **{f"scheduler.{number}.{each.name}": each for number, each in enumerate(counters)}}


def _named(owner: str, parameters: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in parameters:
        if found.setdefault(f"{owner}.{parameter.name}", parameter) is not parameter:
            raise CheckpointError(
                f"Two Parameters of the {owner} are named '{parameter.name}', so a state can't be saved. "
                "Give one of them another name."
            )
    return found


def _held_by(optimizer: Any) -> list[Any]:
    """Return the optimizer's Parameters, including those in lists, which `get_parameters` does not return."""
    if hasattr(optimizer, "complete_state"):
        return list(optimizer.complete_state().values())
    held = [*optimizer.get_parameters(), *parameters_in([vars(cell) for _, cell in optimizer.cells_and_names()])]
    return list({id(parameter): parameter for parameter in held}.values())
