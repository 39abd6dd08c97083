"""Checks that all ranks train the same thing, and makes them begin with the same weights.

Two collectives of different kinds or sizes pair up without an error, and so do those of ranks that train different
things. So every way to train begins with `agree`, whose first message has the same size for all of them, and
`check_drift` finds ranks that differ later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn

from .. import _check
from ..network.generators import offset_seeds_by_rank
from ..network.optimizers import is_sharded, kind_of, rates_of
from ..network.parameters import as_array, digest_of, excluding
from .group import Group, broadcast, gather, gather_arrays, gather_numbers

_MAX_LENGTH = 80  # of a value in a message
# Ranks on different machines may round differently: by how much weights may then differ, relative to their norm.
_TOLERANCE = 1e-5
_TOLERANCE_16_BITS = 1e-2
_NONE = "none"
# Here MindSpore itself sums gradients over the ranks, in the graph.
_SUMS_BY_ITSELF = ("semi_auto_parallel", "auto_parallel")


def agree(owner: str, group: Group | None, facts: Mapping[str, Any], remedy: str = "") -> None:
    """Raise an error on all ranks if they differ in one of the facts; it names the first one.

    Args:
        owner (str): what the ranks are about to do; the name used in the error message.
        group (Optional[Group]): the ranks.
        facts (Mapping): the facts by name, in words that follow "all ranks must have the same".
        remedy (str): a sentence for the error message. Default: none.
    """
    if group is None:
        return
    texts = _exchanged(json.dumps([owner, {name: _shown(value) for name, value in facts.items()}]), group)
    if texts is None:
        return
    owners, gathered = zip(*map(json.loads, texts))
    if len(set(owners)) > 1:
        name = "way to train"
        values = list(owners)
    else:
        name, values = next(_different(gathered))
    message = f"For '{owner}', all ranks must have the same {name}, but got {_by_rank(values)}. {remedy}"
    raise RuntimeError(message.rstrip())


def check_drift(
    owner: str,
    group: Group | None,
    parameters: Sequence[Parameter],
    optimizer: nn.Cell,
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
    texts = _exchanged(json.dumps([facts, digest_of(map(as_array, parameters))]), group)
    if texts is None:
        return
    gathered = [json.loads(text)[0] for text in texts]
    differences = [f"{name} is {_by_rank(values)}" for name, values in _different(gathered)]
    if not differences:  # then the weights differ
        ranks = " and ".join(f"rank {rank}" for rank in _far_from_rank_0(parameters, group))
        differences = [f"the weights of {ranks} are no longer those of rank 0"] if ranks else []
    if differences:
        remedy = "Change weights and learning rates on all ranks alike."
        raise RuntimeError(f"For '{owner}', the ranks have drifted apart: {differences[0]}. {remedy}")


def _far_from_rank_0(parameters: Sequence[Parameter], group: Group) -> list[int]:
    """Return the ranks whose weights differ from those of rank 0 by more than rounding does, seen by their norms."""
    arrays = list(map(as_array, parameters))
    own = np.array([np.linalg.norm(array.astype(np.float64)) for array in arrays])
    norms = gather_numbers(own, group)
    tolerances = np.where([array.dtype.itemsize > 2 for array in arrays], _TOLERANCE, _TOLERANCE_16_BITS)
    near = np.abs(norms - norms[0]) <= tolerances * np.maximum(norms[0], 1e-30)
    return [rank for rank in range(1, group.size) if not near[rank].all()]


def _different(gathered: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the facts that are not equal on all ranks, with the value on each rank."""
    for name in dict.fromkeys(name for facts in gathered for name in facts):
        values = [facts.get(name, _NONE) for facts in gathered]
        if len(set(values)) > 1:
            yield name, values


def _by_rank(values: Sequence[str]) -> str:
    cut = [value if len(value) <= _MAX_LENGTH else f"{value[:_MAX_LENGTH]}…" for value in values]
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(cut))


def _exchanged(text: str, group: Group) -> list[str] | None:
    """Return the texts of all ranks; None if they are equal, which one message of a fixed size shows."""
    encoded = text.encode()
    digest = np.frombuffer(hashlib.sha256(encoded).digest(), np.uint8).astype(np.float32)
    digests = gather(digest, group).reshape(group.size, -1)
    if (digests == digests[0]).all():
        return None
    return [array.tobytes().decode() for array in gather_arrays(np.frombuffer(encoded, np.uint8), group)]


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def facts_of(optimizer: nn.Cell, network: nn.Cell | None = None) -> dict[str, Any]:
    """Return the facts about an optimizer and the Parameters: rates, and names, shapes and types in their order."""
    facts: dict[str, Any] = {"optimizer": kind_of(optimizer), "sharding": is_sharded(optimizer)}
    facts |= _layout("parameter {} of the optimizer", optimizer.parameters)
    if network is not None:
        untrained = excluding(network.get_parameters(), optimizer.parameters)
        facts |= {"network": type(network).__name__, **_layout("untrained Parameter {} of the network", untrained)}
    return {**facts, **rate_facts(optimizer)}


def name_of(value: Any) -> str:
    """Return the name of a function, or of the class of an object, to compare it on all ranks."""
    return str(getattr(value, "__qualname__", type(value).__name__))


def warn_if_data_are_equal(owner: str, group: Group, micro_batch: Iterable[Any]) -> None:
    """Warn if all ranks begin with the same rows: each of them would be trained as many times as there are ranks."""
    own = np.array([int(digest_of(map(as_array, micro_batch))[:15], 16)], np.int64)
    if len(set(gather_numbers(own, group).ravel().tolist())) == 1 and group.rank == 0:
        _check.warn(
            f"For '{owner}', all {group.size} ranks begin with the same rows, so each row counts {group.size} times. "
            "Give each rank its own, such as num_shards=group.size, shard_id=group.rank, or samples[rank::size]."
        )


def rate_facts(optimizer: Any) -> dict[str, Any]:
    """Return the facts about the learning rate."""
    return {f"{name} of the optimizer": text for name, text in rates_of(optimizer).items()}


def _layout(name: str, parameters: Iterable[Parameter]) -> dict[str, str]:
    kinds = [f"'{parameter.name}' {_kind(parameter)}" for parameter in parameters]
    return {name.format(number): kind for number, kind in enumerate(kinds)}


def _kind(parameter: Parameter) -> str:
    return f"{tuple(parameter.shape)} {parameter.dtype}"


def take_from_rank_0(parameters: Iterable[Parameter], group: Group | None) -> None:
    """Set the Parameters to their values on rank 0. Nothing but a digest is sent if they are equal already."""
    parameters = list(parameters)
    if group is None or not parameters or _exchanged(digest_of(map(as_array, parameters)), group) is None:
        return
    broadcast(parameters, group)


def begin_together(
    owner: str, group: Group | None, facts: Mapping[str, Any], optimizer: nn.Cell, network: nn.Cell | None
) -> None:
    """Begin with equal facts, also about the optimizer and the network, and with rank 0's Parameters.

    Each rank then draws different random numbers.
    """
    if group is None:
        return
    mode = ms.get_auto_parallel_context("parallel_mode")
    cells = [] if network is None else [type(cell).__name__ for _, cell in network.cells_and_names()]
    if mode in _SUMS_BY_ITSELF or "AutoParallel" in cells:
        what = f"parallel_mode='{mode}'" if mode in _SUMS_BY_ITSELF else "a network in AutoParallel"
        raise RuntimeError(
            f"For '{owner}', gradients would be summed over the ranks twice, because MindSpore does so by itself with "
            f"{what}. Train there with its own step, and multiply losses by 'window_factors'."
        )
    agree(owner, group, {**facts, **facts_of(optimizer, network)})
    take_from_rank_0(optimizer.parameters, group)
    if network is not None:
        take_from_rank_0(excluding(network.get_parameters(), optimizer.parameters), group)
        offset_seeds_by_rank([network], group.rank)
