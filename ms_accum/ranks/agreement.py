"""Do all ranks train the same thing?

Two collectives of different kinds or sizes pair up without an error, and so do those of ranks that train different
things. So every way to train begins with `agree`, whose first message has the same size whatever it is about; and
`check_drift` finds ranks that have become different since.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from mindspore import Parameter, nn

from ..network import checks
from ..network.generators import draw_apart
from ..network.hyper_parameters import hyper_parameters, rates_of
from ..network.parameters import as_array, digest_of, without
from .parallel import Group, beside, gather, networks_of, of_rank_0
from .rows import gather_rows

_LONGEST = 80
# Ranks on different machines may round differently, which keeps weights this close, relative to their norm.
_CLOSE, _CLOSE_HALF = 1e-5, 1e-2
_NONE = "none"
_OF_OPTIMIZER = "Set it alike on all ranks; what may differ needs a name that begins with '_'."


def agree(
    owner: str, group: Group | None, facts: Mapping[str, Any], remedies: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise an error on all ranks if they differ in one of the facts; it names the first one.

    Args:
        owner (str): what the ranks are about to do; the name used in the error message.
        group (Optional[Group]): the ranks.
        facts (Mapping): the facts by name, in words that follow "all ranks must have the same".
        remedies (Mapping): sentences for the error message, by the name of a fact. Default: none.
    """
    if group is None:
        return
    said = _exchanged(json.dumps([owner, {name: _shown(value) for name, value in facts.items()}]), group)
    if said is None:
        return
    owners, every = zip(*map(json.loads, said))
    name, values = next(_different(every)) if len(set(owners)) == 1 else ("way to train", list(owners))
    shown = ", ".join(f"{_cut(value)} on rank {rank}" for rank, value in enumerate(values))
    remedy = remedies.get(name, _OF_OPTIMIZER if name.endswith("' of the optimizer") else "")
    raise RuntimeError(f"For '{owner}', all ranks must have the same {name}, but got {shown}. {remedy}".rstrip())


def check_drift(
    owner: str,
    group: Group | None,
    parameters: Sequence[Parameter],
    optimizer: Any,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise an error on all ranks if their trained weights or their learning rates are no longer equal.

    Args:
        owner (str): the name used in the error message.
        group (Optional[Group]): the ranks.
        parameters (Sequence[Parameter]): the trained weights.
        optimizer (Optimizer): has the learning rates.
        settings (Mapping): other settings that may have changed, by name. Default: none.
    """
    if group is None:
        return
    facts = {**rate_facts(optimizer), **{name: _shown(value) for name, value in settings.items()}}
    said = _exchanged(json.dumps([facts, digest_of(map(as_array, parameters))]), group)
    if said is None:
        return
    every = [json.loads(text)[0] for text in said]
    for name, values in _different(every):
        shown = ", ".join(f"{_cut(value)} on rank {rank}" for rank, value in enumerate(values))
        _raise_drifted(owner, f"{name} is {shown}")
    others = _far_from_rank_0(parameters, group)
    if others:
        who = " and ".join(f"rank {rank}" for rank in others)
        _raise_drifted(owner, f"the weights of {who} are no longer those of rank 0")


def _raise_drifted(owner: str, what: str) -> None:
    remedy = "Change weights and learning rates on all ranks alike."
    raise RuntimeError(f"For '{owner}', the ranks have drifted apart: {what}. {remedy}")


def _far_from_rank_0(parameters: Sequence[Parameter], group: Group) -> list[int]:
    """Return the ranks whose weights differ from those of rank 0 by more than rounding does."""
    signs = np.random.RandomState(0)
    rows = np.array([_outline(as_array(each), signs) for each in parameters], np.float64)
    every = gather_rows(rows, group)[0].reshape(group.size, *rows.shape)
    close = [_CLOSE if as_array(each).dtype.itemsize > 2 else _CLOSE_HALF for each in parameters]
    bounds = np.array(close) * np.maximum(every[0, :, 1], 1e-30)
    return [rank for rank in range(1, group.size) if not np.all(np.abs(every[rank, :, 0] - every[0, :, 0]) <= bounds)]


def _outline(array: np.ndarray, signs: np.random.RandomState) -> tuple[float, float]:
    """Return the sum of the elements with random signs, equal on all ranks, and their norm."""
    row = array.astype(np.float64).ravel()
    both = signs.randint(0, 2, row.size, np.int8) * 2 - 1
    return float(both @ row), float(np.sqrt(row @ row))


def _different(every: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the facts that are not equal on all ranks, with the value on each rank."""
    for name in dict.fromkeys(name for facts in every for name in facts):
        values = [facts.get(name, _NONE) for facts in every]
        if len(set(values)) > 1:
            yield name, values


def _exchanged(text: str, group: Group) -> list[str] | None:
    """Return the texts of all ranks; None if they are equal, which one message of a fixed size shows."""
    sent = text.encode()
    size = [len(sent) >> 12 * digit & 4095 for digit in range(3)]
    row = np.array([*hashlib.sha256(sent).digest(), *size], np.float32)
    rows = gather(row, group).reshape(group.size, -1)
    if (rows == rows[0]).all():
        return None
    sizes = [sum(int(digit) << 12 * place for place, digit in enumerate(row[-3:])) for row in rows]
    every, ends = gather_rows(np.frombuffer(sent, np.uint8), group)[0].tobytes(), np.cumsum(sizes).tolist()
    return [every[end - size : end].decode() for end, size in zip(ends, sizes)]


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def facts_of(optimizer: Any, network: nn.Cell | None = None, scheduler: Any = None) -> dict[str, Any]:
    """Return the facts about an optimizer and the Parameters: their names, shapes and types in their order."""
    facts: dict[str, Any] = {"optimizer": checks.kind_of(optimizer), "sharding": checks.is_sharded(optimizer)}
    facts |= _layout("parameter {} of the optimizer", optimizer.parameters)
    if network is not None:
        others = without(network.get_parameters(), optimizer.parameters)
        facts |= {"network": type(network).__name__, **_layout("untrained Parameter {} of the network", others)}
    settings = {f"'{name}' of the optimizer": text for name, text in hyper_parameters(optimizer, scheduler).items()}
    return {**facts, **rate_facts(optimizer), **settings}


def rate_facts(optimizer: Any) -> dict[str, Any]:
    """Return the facts about the learning rate."""
    return {f"{name} of the optimizer": text for name, text in rates_of(optimizer).items()}


def _layout(words: str, parameters: Iterable[Parameter]) -> dict[str, str]:
    kinds = [f"'{each.name}' {tuple(each.shape)} {each.dtype}" for each in parameters]
    return {words.format(number): kind for number, kind in enumerate(kinds)}


def take_from_rank_0(parameters: Iterable[Parameter], group: Group | None) -> None:
    """Set the Parameters to their values on rank 0. Nothing but a digest is sent if they are equal already."""
    parameters = list(parameters)
    if group is None or not parameters or _exchanged(digest_of(map(as_array, parameters)), group) is None:
        return
    of_rank_0(parameters)


def begin_with(network: nn.Cell, trained: Iterable[Parameter], group: Group | None) -> None:
    """Set the network's untrained Parameters to rank 0's values, and make each rank draw different random numbers."""
    if group is not None:
        take_from_rank_0(without(network.get_parameters(), trained), group)
        draw_apart([network], group.rank)


def begin_with_networks_of(owner: str, optimizer: Any, group: Group | None, facts: Mapping[str, Any]) -> None:
    """Do what `agree` and `begin_with` do if only the optimizer is given; its parameters become those of rank 0.

    Raises:
        RuntimeError: If ranks differ in a fact, or in other Parameters of the networks, such as a frozen backbone.
    """
    if group is None:
        return
    parameters = list(optimizer.parameters)
    networks = networks_of(parameters)
    others = {id(each): each for network in networks for each in beside(parameters, network)}
    by_name = sorted(others.values(), key=lambda parameter: parameter.name)
    named = {f"untrained Parameter '{each.name}'": f"{tuple(each.shape)} {each.dtype}" for each in by_name}
    agree(owner, group, {**facts, **facts_of(optimizer), **named})
    such = f", such as '{by_name[0].name}'" if by_name else ""
    name = f"values of Parameters that the optimizer does not train{such}"
    remedy = {name: "Use the same seed on all ranks, or load them."}
    agree(owner, group, {name: f"the digest {digest_of(map(as_array, by_name))[:12]}"}, remedy)
    take_from_rank_0(parameters, group)
    draw_apart(networks, group.rank)
