"""What does training change, and whose is it?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mindspore import Parameter, nn

from . import _check
from .checkpoint import CheckpointError

SETTING = "setting"
"""str, whose Parameters of the optimizer are that a resumed run may have others of."""


class Trained:
    """A network, its optimizer, and what sets the learning rate after each update, if anything does.

    Args:
        network (Cell): from a micro-batch's columns to its loss.
        optimizer (Optimizer): updates it.
        scheduler (Optional[LRScheduler]): sets the optimizer's learning rate. Default: ``None``.
    """

    def __init__(self, network: nn.Cell, optimizer: Any, scheduler: Any = None):
        self._network, self._scheduler = network, scheduler
        self.optimizer = optimizer
        """Optimizer, what updates the network."""

    def step(self) -> None:
        """Set the learning rate of the next update."""
        if self._scheduler is not None:
            self._scheduler.step()

    def parameters(self) -> dict[str, Any]:
        """Return all of them, by whose they are and their names.

        Raises:
            CheckpointError: If two have the same.
        """
        trained, settings = list(self._network.get_parameters()), self._settings()
        own = _without(_held_by(self.optimizer), [*trained, *settings])
        found = {**_named("network", trained), **_named("optimizer", own), **_named(SETTING, settings)}
        # A scheduler's have the names of their kinds, of which there may be several.
        counters = _without(list(_parameters_in(self._scheduler)), found.values())
        return {**found, **{f"scheduler.{number}.{each.name}": each for number, each in enumerate(counters)}}

    def _settings(self) -> list[Any]:
        """Return those of the optimizer's Parameters that are settings, not what it trains or has learned."""
        optimizer = _check.inner_of(self.optimizer)
        named = [getattr(optimizer, name, None) for name in ("learning_rate", "momentum")]
        held = _parameters_in([*named, list(getattr(optimizer, "param_groups", ()))])
        unique = {id(parameter): parameter for parameter in held}.values()
        return _without(unique, [*optimizer.parameters, *self.optimizer.parameters])


def _named(owner: str, parameters: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in parameters:
        if found.setdefault(f"{owner}.{parameter.name}", parameter) is not parameter:
            raise CheckpointError(
                f"Two Parameters of the {owner} are named '{parameter.name}': a state could not tell them apart. "
                "Give one of them another name."
            )
    return found


def _without(parameters: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    known = {id(parameter) for parameter in others}
    return [parameter for parameter in parameters if id(parameter) not in known]


def _held_by(optimizer: Any) -> list[Any]:
    """Return its Parameters, also those in lists, which a Cell doesn't count among its own."""
    if hasattr(optimizer, "whole_state"):
        return list(optimizer.whole_state().values())
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
    elif hasattr(value, "last_epoch"):  # a scheduler, which is no Cell
        yield from _parameters_in({name: each for name, each in vars(value).items() if name != "optimizer"})
