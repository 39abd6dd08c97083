"""What do the ranks send to each other, and when?"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, communication, nn, ops
from mindspore.communication import GlobalComm
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer

from .. import _check
from ..network.generators import draw_apart
from ..network.parameters import as_array, without
from .heartbeat import exchange, heartbeat

AUTO = "auto"
_OPTIMIZERS = (nn.Optimizer, ExperimentalOptimizer)
# Parameters are sent in chunks of this number of bytes, so that one compiled graph is enough for all of them.
_CHUNK = 2**20
# CPU sums only float32, which is exact for integers up to 2**24. So counts are sent 12 bits at a time, for 4,096 ranks.
_BITS, _DIGITS = 12, 5


@_check.documented
class Group(NamedTuple):
    """The processes that train together, and the rank of this one."""

    rank: int
    """The rank of this process, from 0."""
    size: int
    """The number of processes."""


def own_group() -> Group:
    """Return the group of this process; its size is 1 in a single process. A launched process joins its group here.

    Returns:
        Group, with `rank` and `size`.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from ms_accum import own_group
        >>> own_group()
        Group(rank=0, size=1)
    """
    if is_launched() and not GlobalComm.INITED:
        with exchange():
            communication.init()
        heartbeat()
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        sys.exit()  # the scheduler process of a launcher that runs the same program: its work is done
    if not GlobalComm.INITED:
        _check_single()
        return Group(rank=0, size=1)
    return Group(communication.get_rank(), communication.get_group_size())


def _check_single() -> None:
    """Raise an error if a rank table or mpirun started this process as one of several, and it joined no group."""
    for variable in ("RANK_SIZE", "OMPI_COMM_WORLD_SIZE"):  # what MindSpore reads for these two
        size = os.environ.get(variable, "")
        if size.isdecimal() and int(size) > 1:
            raise RuntimeError(
                f"For 'own_group', a process that was started as one of {size} ({variable}) must join their group "
                "first, but it did not. Start it with 'python -m ms_accum.launch' or msrun, or call "
                f"mindspore.communication.init() first; if it is a single process, unset {variable}."
            )


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    return os.environ.get("MS_ROLE") in ("MS_WORKER", "MS_SCHED")


def comes_first() -> bool:
    """Return, before the group is joined, whether this process will be rank 0 or is a single process."""
    return os.environ.get("RANK_ID", "0") == "0" and os.environ.get("MS_ROLE") != "MS_SCHED"


def group_of(owner: str, group: Any) -> Group | None:
    """Convert the argument `group` to a Group, or to None for a single process."""
    if isinstance(group, str) and group == AUTO:
        group = own_group()
    if group is not None and not isinstance(group, Group):
        _check.refuse(TypeError, owner, "group", "'auto', None or what 'own_group' returns", repr(group))
    return None if group is None or group.size == 1 else group


@exchange()
@ms.jit
def _sum(values: Any) -> Any:
    return ops.AllReduce()(values)


@exchange()
@ms.jit
def _gather(values: Any) -> Any:
    return ops.AllGather()(values)


@exchange()
@ms.jit
def _of_rank_0(values: Any) -> Any:
    return ops.Broadcast(0)((values,))


def total(counts: Sequence[int], group: Group | None) -> list[int]:
    """Sum counts over the ranks, such as correct predictions and rows of an evaluation.

    All ranks must call it, with the same number of counts.

    Args:
        counts (Sequence[int]): this rank's counts, each >= 0 and < 2**60.
        group (Optional[Group]): the ranks, the result of `own_group`; ``None`` for a single process.

    Returns:
        list[int], the sums; in a single process, the counts.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from ms_accum import own_group, total
        >>> total([359, 360], own_group())
        [359, 360]
    """
    if group is None or group.size == 1:
        return list(counts)
    return _whole(_sum(Tensor(_digits(counts))).asnumpy())


def wait_for_all(group: Group | None) -> None:
    """Wait until all ranks have called this. On CPU MindSpore raises an error after half a minute."""
    total([0], group)


def is_first(group: Group | None) -> bool:
    """Return whether this process prints and writes files for all ranks."""
    return group is None or group.rank == 0


def check_together(owner: str, group: Group | None, windows: int | None, *, splits_in_step: bool) -> None:
    """Raise an error for settings that several ranks do not support, before they communicate.

    Raises:
        ValueError: If the number of windows is unknown, or if every micro-batch is summed but batches are split, which
            may give ranks different numbers of micro-batches.
    """
    if group is None:
        return
    if windows is None:
        rule = "one with a known size if several processes train"
        _check.refuse(ValueError, owner, "train_dataset", rule, "one without '__len__'")
    if splits_in_step:
        rule = "given, with the same number of micro-batches on all ranks, for sync_every_micro_batch=True"
        _check.refuse(ValueError, owner, "mini_steps", rule, None)


def meet(owner: str, group: Group | None, facts: Mapping[str, int | None], network: nn.Cell) -> None:
    """Check that the ranks agree, so that none waits forever; then give all ranks the parameters of rank 0.

    Each rank then draws different random numbers.

    Raises:
        RuntimeError: If the ranks differ in one of the facts.
    """
    if group is None:
        return
    agree(owner, group, {name: fact or 0 for name, fact in facts.items()})
    take_from_rank_0(network.get_parameters())
    draw_apart([network], group.rank)


def agree(owner: str, group: Group | None, facts: Mapping[str, int]) -> None:
    """Raise an error if the ranks differ in one of the facts."""
    if group is None:
        return
    told = gather(_digits(list(facts.values())), group)
    ranks = [_whole(digits) for digits in np.split(told, group.size)]
    for name, each in zip(facts, zip(*ranks)):
        if len(set(each)) > 1:
            shown = ", ".join(f"{value:,} on rank {rank}" for rank, value in enumerate(each))
            raise RuntimeError(f"For '{owner}', all ranks must have the same number of {name}, but got {shown}.")


def gather(row: np.ndarray, group: Group | None) -> np.ndarray:
    """Return the rows of all ranks, concatenated; in a single process, the row."""
    return row if group is None else _gather(Tensor(row)).asnumpy()


def take_from_rank_0(parameters: Iterable[Parameter]) -> None:
    """Set the Parameters to their values on rank 0."""
    for parameter in parameters:
        ops.assign(parameter, Tensor(_sent(as_array(parameter))).astype(parameter.dtype))


def as_on_rank_0(value: Any, group: Group | None) -> Any:
    """Return rank 0's value of a number. Anything else, which can't be sent, is returned unchanged."""
    if group is None or not isinstance(value, (int, float, np.number)):
        return value
    return type(value)(_sent(np.array([value], np.float64))[0])


def begin_with(network: nn.Cell, trained: Iterable[Parameter], group: Group | None) -> None:
    """Set the network's untrained Parameters to rank 0's values, and make each rank draw different random numbers."""
    if group is not None:
        take_from_rank_0(without(network.get_parameters(), trained))
        draw_apart([network], group.rank)


def begin_with_networks_of(owner: str, parameters: Sequence[Parameter], group: Group | None) -> None:
    """Do what `begin_with` does if only the trained parameters are given, and set these to rank 0's values.

    Raises:
        RuntimeError: If ranks differ in other Parameters of the networks, such as those of a frozen backbone.
    """
    if group is not None:
        networks = networks_of(parameters)
        take_from_rank_0(parameters)
        _check_alike(owner, parameters, networks, group)
        draw_apart(networks, group.rank)


def _check_alike(owner: str, parameters: Sequence[Parameter], networks: Iterable[nn.Cell], group: Group) -> None:
    others = {id(each): each for network in networks for each in _beside(parameters, network)}
    by_name = sorted(others.values(), key=lambda parameter: parameter.name)
    digest = hashlib.sha256()
    for parameter in by_name:
        digest.update(parameter.name.encode() + as_array(parameter).tobytes())
    told = gather(_digits([int.from_bytes(digest.digest()[:7], "little")]), group)
    if len({digits.tobytes() for digits in np.split(told, group.size)}) > 1:
        raise RuntimeError(
            f"For '{owner}', all ranks must have equal values of Parameters that the optimizer does not train, such as "
            f"'{by_name[0].name if by_name else ''}', but they differ. Use the same seed on all ranks, or load them."
        )


def networks_of(parameters: Iterable[Parameter]) -> list[nn.Cell]:
    """Return the networks that contain some of these parameters, found among the objects that Python's `gc` tracks."""
    known = {id(parameter) for parameter in parameters}
    cells = [each for each in gc.get_objects() if issubclass(type(each), nn.Cell)]
    having = [each for each in cells if any(id(parameter) in known for parameter in each.get_parameters())]
    return [each for each in having if not any(map(_keeps_books, each.cells_and_names()))]


def _keeps_books(named: tuple[str, nn.Cell]) -> bool:
    """Return whether a Cell is an optimizer or of this package; such Parameters may differ between ranks."""
    kind = type(named[1])
    own = kind.__module__.startswith("ms_accum.") and not kind.__module__.startswith("ms_accum.layers.")
    return issubclass(kind, _OPTIMIZERS) or own


def _beside(parameters: Iterable[Parameter], network: nn.Cell) -> list[Parameter]:
    """Return the network's other Parameters, except BatchNorm's statistics, which each rank computes from its data."""
    statistics = [
        parameter
        for _, cell in network.cells_and_names()
        for name in ("moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked")
        if isinstance(parameter := getattr(cell, name, None), Parameter)
    ]
    return without(network.get_parameters(), [*parameters, *statistics])


def _sent(array: np.ndarray) -> np.ndarray:
    """Return rank 0's array. Its bytes, whatever the type, are sent as float32, which every device supports."""
    sent = np.frombuffer(array.tobytes(), np.uint8)
    chunks = np.pad(sent, (0, -len(sent) & _CHUNK - 1)).reshape(-1, _CHUNK).view(np.float32)
    came = np.concatenate([_of_rank_0(Tensor(chunk))[0].asnumpy() for chunk in chunks]).view(np.uint8)
    return came[: len(sent)].view(array.dtype).reshape(array.shape)


def _digits(counts: Sequence[int]) -> np.ndarray:
    mask = 2**_BITS - 1
    shifts = [_BITS * digit for digit in range(_DIGITS)]
    return np.array([[count >> shift & mask for shift in shifts] for count in counts], np.float32)


def _whole(digits: np.ndarray) -> list[int]:
    places = [1 << _BITS * digit for digit in range(_DIGITS)]
    return [sum(int(digit) * place for digit, place in zip(row, places)) for row in digits]
