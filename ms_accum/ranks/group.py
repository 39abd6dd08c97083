"""The group of a process, and what its ranks send to each other: sums, rows, and the values of rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Callable, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, communication, ops
from mindspore.communication import GlobalComm

from .. import _check
from ..network.parameters import as_array

AUTO = "auto"
# Parameters are sent in chunks of this number of bytes, so that few compiled graphs are enough for all of them.
_CHUNK_BYTES = 2**20
_MIN_CHUNK_BYTES = 2**12  # of the last chunk, which is padded to a power of two
_BATCH_BYTES = 2**26  # copied before they are sent
_COUNT_RULE = "ints >= 0 and < 2**63"
_FLOAT_BYTES = 4


class Group(NamedTuple):
    """The processes that train together, and the rank of this one.

    Attributes:
        rank (int): the rank of this process in the group, from 0.
        size (int): the number of processes.
        name (Optional[str]): the name under which `mindspore.communication.create_group` made it. Default: ``None``,
            all processes that a launcher started.
    """

    rank: int
    size: int
    name: str | None = None

    def collective(self, kind: Callable, *arguments: Any) -> Any:
        """Return one of MindSpore's collectives over these processes."""
        return kind(*arguments) if self.name is None else kind(*arguments, group=self.name)


def own_group(name: str | None = None) -> Group:
    """Return the group of this process; its size is 1 in a single process. A launched process joins its group here.

    Args:
        name (Optional[str]): the name of a group that `mindspore.communication.create_group` has made, for programs in
            which not all processes train with each other's gradients: with tensor, pipeline or context parallelism
            those that hold the same weights. In a single process it has no effect. Default: ``None``, all processes.

    Returns:
        Group, with `rank`, `size` and `name`.

    Raises:
        TypeError: If `name` is not a str.
        ValueError: If this process is not in a group of this name.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from ms_accum import own_group
        >>> own_group()
        Group(rank=0, size=1, name=None)
    """
    if name is not None:
        _check.instance("own_group", "name", name, str, "a str")
    if is_launched() and not GlobalComm.INITED:
        communication.init()
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        sys.exit()  # the scheduler process of a launcher that runs the same program: its work is done
    if not GlobalComm.INITED:
        _check_single()
        return Group(rank=0, size=1)
    if name is None:
        return Group(communication.get_rank(), communication.get_group_size())
    try:
        return Group(communication.get_rank(name), communication.get_group_size(name), name)
    except (RuntimeError, ValueError) as error:
        rule = "a group of this process, made by mindspore.communication.create_group"
        raise ValueError(f"For 'own_group', 'name' must be {rule}, but got {name!r}.") from error


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
        _check.raise_invalid(TypeError, owner, "group", "'auto', None or what 'own_group' returns", repr(group))
    return None if group is None or group.size == 1 else group


def total(counts: Sequence[int], group: Group | None) -> list[int]:
    """Sum counts over the ranks, such as correct predictions and rows of an evaluation.

    All ranks must call it, with the same number of counts.

    Args:
        counts (Sequence[int]): this rank's counts, each >= 0 and < 2**63.
        group (Optional[Group]): the ranks, the result of `own_group`; ``None`` for a single process.

    Returns:
        list[int], the sums; in a single process, the counts.

    Raises:
        TypeError: If a count is not an int.
        ValueError: If a count is out of range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from ms_accum import own_group, total
        >>> total([359, 360], own_group())
        [359, 360]
    """
    for count in counts:
        if not isinstance(count, (int, np.integer, np.bool_)):
            _check.raise_invalid(TypeError, "total", "counts", _COUNT_RULE, repr(count))
        if not 0 <= count < 2**63:
            _check.raise_invalid(ValueError, "total", "counts", _COUNT_RULE, count)
    if group is None or group.size == 1:
        return list(counts)
    return [sum(column) for column in zip(*gather_numbers(np.array(counts, np.int64), group).tolist())]


def is_first(group: Group | None) -> bool:
    """Return whether this process prints and writes files for all ranks."""
    return group is None or group.rank == 0


# What the ranks send. Every function is called by all ranks of the group.


@ms.jit
def _all_gather(values: Any) -> Any:
    return ops.AllGather()(values)


@ms.jit
def _broadcast(values: Any) -> Any:
    return ops.Broadcast(0)((values,))


@cache
def _all_reduce(name: str) -> Callable:
    @ms.jit
    def all_reduce(values: Any) -> Any:
        return ops.AllReduce(group=name)(values)

    return all_reduce


def _added(values: np.ndarray, group: Group) -> np.ndarray:
    """Return the sum over the ranks of a named group, of which all but one have zeros, so that no bit changes.

    MindSpore's CPU gathers and broadcasts over all processes only, and adds float32 only, with small numbers flushed
    to zero. So each number is sent as two whole ones.
    """
    halves = Tensor(values.view(np.uint16).astype(np.float32))
    return _all_reduce(str(group.name))(halves).asnumpy().astype(np.uint16).view(np.float32)


def gather(row: np.ndarray, group: Group | None) -> np.ndarray:
    """Return the rows of all ranks, of float32, concatenated; in a single process, the row."""
    if group is None:
        return row
    if group.name is None:
        return _all_gather(Tensor(row)).asnumpy()
    rows = np.zeros((group.size, row.size), np.float32)
    rows[group.rank] = row
    return _added(rows, group).reshape(-1)


def gather_numbers(numbers: np.ndarray, group: Group) -> np.ndarray:
    """Return the numbers of all ranks, of a type of 4 or 8 bytes, in a row for each rank.

    The bytes are sent as float32, the only type that every device gathers; nothing is computed with them.
    """
    return gather(numbers.view(np.float32), group).view(numbers.dtype).reshape(group.size, -1)


def gather_rows(rows: np.ndarray, group: Group | None) -> tuple[np.ndarray, int]:
    """Return the rows of all ranks, in the order of the ranks, and the number of rows before those of this rank."""
    if group is None:
        return rows, 0
    arrays = gather_arrays(rows, group)
    return np.concatenate(arrays), sum(len(array) for array in arrays[: group.rank])


def gather_arrays(rows: np.ndarray, group: Group) -> list[np.ndarray]:
    """Return the array of each rank. They may have different numbers of rows, but not row shapes or types.

    The bytes are sent as float32.
    """
    counts = gather_numbers(np.array([len(rows)], np.int64), group)[:, 0].tolist()
    padded = np.zeros((max(counts), *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    content = np.frombuffer(padded.tobytes(), np.uint8)
    content = np.pad(content, (0, -content.size % _FLOAT_BYTES)).view(np.float32)
    received = gather_numbers(content, group).view(np.uint8)[:, : padded.nbytes]
    arrays = [np.frombuffer(row.tobytes(), rows.dtype).reshape(padded.shape) for row in received]
    return [array[:count] for array, count in zip(arrays, counts)]


def broadcast(parameters: Iterable[Parameter], group: Group) -> None:
    """Set the Parameters to their values on rank 0. They are sent in batches, because each one is copied before."""
    batch: list[tuple[Parameter, np.ndarray]] = []
    size = 0
    for parameter in parameters:
        array = as_array(parameter)
        batch.append((parameter, array))
        size += array.nbytes
        if size >= _BATCH_BYTES:
            _broadcast_batch(batch, group)
            batch = []
            size = 0
    _broadcast_batch(batch, group)


def _broadcast_batch(batch: Sequence[tuple[Parameter, np.ndarray]], group: Group) -> None:
    received = memoryview(_broadcast_bytes(b"".join(array.tobytes() for _, array in batch), group))
    start = 0
    for parameter, array in batch:
        values = np.frombuffer(received[start : start + array.nbytes], array.dtype).reshape(array.shape)
        ops.assign(parameter, Tensor(values.copy()).astype(parameter.dtype))
        start += array.nbytes


def broadcast_number(value: Any, group: Group | None) -> Any:
    """Return rank 0's value of a number. Anything else, which can't be sent, is returned unchanged."""
    if group is None or not isinstance(value, (int, float, np.number)):
        return value
    return type(value)(np.frombuffer(_broadcast_bytes(np.float64(value).tobytes(), group), np.float64)[0])


def _broadcast_bytes(content: bytes, group: Group) -> bytes:
    """Return rank 0's bytes. They are sent as float32, which every device supports; nothing is computed with them."""
    return b"".join(_of_rank_0(chunk, group).tobytes() for chunk in _chunks(content))[: len(content)]


def _of_rank_0(chunk: np.ndarray, group: Group) -> np.ndarray:
    if group.name is None:
        return _broadcast(Tensor(chunk))[0].asnumpy()
    return _added(chunk if group.rank == 0 else np.zeros_like(chunk), group)


def _chunks(content: bytes) -> Iterator[np.ndarray]:
    """Yield full chunks and the rest, padded to a power of two: each size is a compiled graph."""
    for start in range(0, len(content), _CHUNK_BYTES):
        chunk = content[start : start + _CHUNK_BYTES]
        size = max(_MIN_CHUNK_BYTES, 1 << (len(chunk) - 1).bit_length())
        yield np.frombuffer(chunk.ljust(size, b"\0"), np.float32)
