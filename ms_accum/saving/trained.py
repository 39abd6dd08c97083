"""Which Parameters does training change, and to which object do they belong?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mindspore import Parameter, nn

from ..network import checks
from ..network.parameters import without
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
        trained, settings = list(self._network.get_parameters()), self._settings()
        own = without(_held_by(self.optimizer), [*trained, *settings])
        found = {**_named("network", trained), **_named("optimizer", own), **_named(SETTING, settings)}
        found |= self._numerics.state
        # A scheduler's Parameters are named by kind. Names may repeat, so they are numbered.
        counters = without(list(_parameters_in(self._scheduler)), found.values())
        return {**found, **{f"scheduler.{number}.{each.name}": each for number, each in enumerate(counters)}}

    def _settings(self) -> list[Any]:
        """Return the optimizer's Parameters that are settings: neither trained weights nor its state."""
        optimizer = checks.inner_of(self.optimizer)
        named = [getattr(optimizer, name, None) for name in ("learning_rate", "momentum")]
        held = _parameters_in([*named, list(getattr(optimizer, "param_groups", ()))])
        unique = {id(parameter): parameter for parameter in held}.values()
        return without(unique, [*optimizer.parameters, *self.optimizer.parameters])


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
    held = [*optimizer.get_parameters(), *_parameters_in([vars(cell) for _, cell in optimizer.cells_and_names()])]
    return list({id(parameter): parameter for parameter in held}.values())


def _parameters_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Parameter):
        yield value
    elif isinstance(value, nn.Cell):
        yield from value.get_parameters()
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _parameters_in(each)
    elif hasattr(value, "last_epoch"):  # a scheduler, which is not a Cell
        yield from _parameters_in({name: each for name, each in vars(value).items() if name != "optimizer"})
