"""Models on disk: the parameters of a network in a `.ckpt`, which MindSpore writes and reads, or in safetensors.

MindSpore's loader reads out of bounds on some files that are not its own, and loads a part of some that were cut off,
so the structure of a `.ckpt` is checked first.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

import mindspore as ms
from google.protobuf.message import DecodeError
from mindspore import Parameter, Tensor, nn

from ..layers import COUNTER
from ..network.parameters import as_array
from ..network.private import Checkpoint
from .files import write_whole
from .training_state import CheckpointError as CheckpointError
from .training_state import check_file, differences_of, kinds_of_arrays, read_arrays, shortened, write_arrays

_FORMATS = ("ckpt", "safetensors")
_LEFT_OVER = 2**28  # bytes of a file that a network begins with, in addition to four times those of the network


def check_path(owner: str, path: str | os.PathLike[str], network: nn.Cell) -> None:
    """Raise an error before training if the network can't be saved to `path`."""
    if _format(path) not in _FORMATS:
        raise ValueError(f"For '{owner}', 'ckpt_path' must end with '.ckpt' or '.safetensors', but got '{path}'.")
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "folder" if os.path.isdir(path) else "device or pipe"
        raise ValueError(f"For '{owner}', 'ckpt_path' must name a file, but got the {kind} '{path}'.")
    folder = os.path.dirname(os.path.realpath(path))  # the target of a link
    if not os.path.isdir(folder):
        rule = "the folder of 'ckpt_path' must exist"
        raise ValueError(f"For '{owner}', {rule}, but got '{os.path.relpath(folder)}'. Create it first.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"For '{owner}', the folder of 'ckpt_path' must be writable, but got '{path}'.")
    names = [parameter.name for parameter in network.get_parameters() if parameter.dtype == ms.bfloat16]
    if names and _format(path) == "safetensors":
        rule = f"end with '.ckpt' for a network with bfloat16 parameters, such as '{names[0]}'"
        raise ValueError(f"For '{owner}', 'ckpt_path' must {rule}, but got '{path}'.")


def _format(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(path)[1][1:]


def save_model(network: nn.Cell, path: str | os.PathLike[str]) -> None:
    """Write only the network's parameters to `path`, in the format of its extension.

    Raises:
        OSError: If the file can't be written; an existing file is unchanged.
    """
    size = sum(parameter.nbytes for parameter in network.get_parameters())
    write_whole(path, size, partial(_write, network), keeps_link=True)


def _write(network: nn.Cell, path: str) -> None:
    if _format(path) == "safetensors":
        write_arrays(path, {parameter.name: as_array(parameter) for parameter in network.get_parameters()}, None)
    else:
        ms.save_checkpoint(network, path, crc_check=True)
        _kinds_in_ckpt(path)  # reads it back


def load_model(network: nn.Cell, path: str | os.PathLike[str]) -> None:
    """Load a model into `network`, completely or not at all.

    Raises:
        CheckpointError: If the file can't be read, or is of another architecture.
    """
    path = os.fspath(path)
    expected = {parameter.name: _text(str(parameter.dtype), parameter.shape) for parameter in network.get_parameters()}
    # Before the values are read: a file of another architecture may have any size.
    differing = differences_of(expected, {name: _text(*kind) for name, kind in kinds_in(path).items()})
    if differing:
        raise CheckpointError(f"'{path}' is of another architecture: {shortened(differing)}.{_remedy(differing)}")
    ms.load_param_into_net(network, _read(path))


class Common(NamedTuple):
    """The names of the parameters of a network and of a file."""

    loaded: list[str]
    """Those in both, which were loaded."""
    new: list[str]
    """Those that only the network has; they are as they were."""
    other_classes: list[str]
    """Those of the last layer, if the file has another number of classes; they are as they were, too."""
    left_over: list[str]
    """Those that only the file has."""


def load_common(network: nn.Cell, path: str | os.PathLike[str]) -> Common:
    """Load what a model of another network has of this one's parameters, in their types, to train on from there.

    Raises:
        CheckpointError: If the file can't be read, has no parameter of the network, or one of another shape, except for
            the number of classes in the last layer, or is much larger than the network: all of it is read. Then the
            network is unchanged.
    """
    path = os.fspath(path)
    own = {parameter.name: parameter for parameter in network.get_parameters()}
    there = {name: shape for name, (_, shape) in kinds_in(path).items()}
    common = [name for name in own if name in there]
    if not common:
        texts = (shortened([*own]), shortened([*there]))
        raise CheckpointError(f"'{path}' has none of the network's parameters, {texts[0]}: it has {texts[1]}.")
    others = [name for name in common if there[name] != own[name].shape]
    last_layer = [*own][-1].rpartition(".")[0]
    wrong = [
        f"{name} is {there[name]} instead of {own[name].shape}"
        for name in others
        if name.rpartition(".")[0] != last_layer or there[name][1:] != own[name].shape[1:]
    ]
    if wrong:
        rule = "only the number of classes in the last layer may differ"
        raise CheckpointError(f"'{path}' is of another architecture: {shortened(wrong)}; {rule}.")
    size, most = os.path.getsize(path), 4 * sum(each.nbytes for each in own.values()) + _LEFT_OVER
    if size > most:
        fault = f"it must have at most {most:,} bytes for this network, but has {size:,}"
        raise CheckpointError(f"'{path}' has too much that is left over: {fault}. Save only what is loaded.")
    loaded, values = [name for name in common if name not in others], _read(path)
    for name in loaded:
        own[name].set_data(values[name].astype(own[name].dtype))
    return Common(loaded, [name for name in own if name not in there], others, [n for n in there if n not in own])


def kinds_in(path: str | os.PathLike[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each parameter in a file, by name; a file of any size takes little memory.

    Raises:
        CheckpointError: If it is not a model, or is damaged.
    """
    path = os.fspath(path)
    check_file(path)
    if _format(path) not in _FORMATS:
        raise CheckpointError(f"'{path}' is not a checkpoint: its name must end with '.ckpt' or '.safetensors'.")
    if _format(path) == "ckpt":
        return _kinds_in_ckpt(path)
    return {name: (_TYPES.get(kind, kind), shape) for name, (kind, shape) in kinds_of_arrays(path).items()}


def _read(path: str) -> Mapping[str, Parameter]:
    """Return the parameters by name of a file whose structure is checked."""
    if _format(path) == "safetensors":
        return {name: Parameter(Tensor(array), name=name) for name, array in read_arrays(path)[0].items()}
    try:
        return ms.load_checkpoint(path)
    except Exception as error:
        raise CheckpointError(f"'{path}' is not a checkpoint that MindSpore can read.") from error


def _text(kind: str, shape: Sequence[int]) -> str:
    return f"{kind} {tuple(shape)}"


def _remedy(differing: Sequence[str]) -> str:
    """Return what to do if the only difference is what `replace_dropout` adds to a network."""
    if not all(text.endswith(COUNTER) for text in differing):
        return ""
    if differing[0].startswith("unexpected"):
        return " It was trained after replace_dropout. Call replace_dropout on the network first."
    return " It was trained without replace_dropout. Load it before replace_dropout."


_TYPES = {
    **{f"{name[0]}{bits}": f"{name}{bits}" for name in ("Int", "UInt") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"Float{bits}" for bits in (16, 32, 64)},
    "BOOL": "Bool",
    "BF16": "BFloat16",
}
"""dict[str, str], MindSpore's names of the types in safetensors."""


# The structure of a `.ckpt`

_ITEM_BYTES = {
    **dict.fromkeys(("Bool", "Int8", "UInt8"), 1),
    **dict.fromkeys(("Int16", "UInt16", "Float16", "BFloat16"), 2),
    **dict.fromkeys(("Int32", "UInt32", "Float32"), 4),
    **dict.fromkeys(("Int64", "UInt64", "Float64"), 8),
}
# MindSpore writes this word and ten bytes of CRC-32 after the protocol buffers.
_MARK, _CRC_BYTES = b"crc_num", 10
_PIECE = 2**20
_VALUE = b"\x0a"  # in protocol buffers: what follows is a value of the list, its length first
_LARGEST = 2**30  # MindSpore writes a parameter in slices of half of it


def _kinds_in_ckpt(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each parameter.

    Raises:
        CheckpointError: If it is not a `.ckpt`, or a parameter has not as many bytes as its shape says.
    """
    if Checkpoint is None:
        return {name: (str(each.dtype), each.shape) for name, each in _read(path).items()}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        with open(path, "rb") as file:
            end = _end_of_values(file, path)
            # A large parameter is stored in consecutive slices.
            for name, values in groupby(_values(file, end), lambda value: value.tag):
                slices = [
                    (value.tensor.tensor_type, list(value.tensor.dims), len(value.tensor.tensor_content))
                    for value in values
                ]
                kind, shape, _ = slices[0]
                if sum(size for *_, size in slices) != _bytes_of(shape, kind):
                    raise CheckpointError(f"'{path}' is not a valid checkpoint: its '{name}' is damaged.")
                if name in kinds:
                    raise CheckpointError(f"'{path}' is not a checkpoint: it has a parameter twice.")
                kinds[name] = kind, () if shape == [0] else tuple(shape)
    except (DecodeError, UnicodeDecodeError) as error:  # some implementations decode texts only when they are read
        raise CheckpointError(f"'{path}' is not a checkpoint: it can't be parsed.") from error
    if not kinds:
        raise CheckpointError(f"'{path}' is not a checkpoint: it has no parameters.")
    return kinds


def _end_of_values(file: BinaryIO, path: str) -> int:
    """Return where the values end, after a comparison with the checksum, if there is one; leave the file at 0."""
    size = file.seek(0, os.SEEK_END)
    tail = len(_MARK) + _CRC_BYTES
    file.seek(max(0, size - tail))
    mark, crc = file.read(len(_MARK)), int.from_bytes(file.read(), "big")
    file.seek(0)
    if mark != _MARK:
        return size
    found = 0
    for start in range(0, size - tail, _PIECE):
        found = zlib.crc32(file.read(min(_PIECE, size - tail - start)), found)
    if found != crc:
        raise CheckpointError(f"'{path}' is damaged: its checksum does not match.")
    file.seek(0)
    return size - tail


def _values(file: BinaryIO, end: int) -> Iterator[Any]:
    """Yield the values one by one."""
    while file.tell() < end:
        if file.read(1) != _VALUE:
            raise DecodeError("no value begins here")
        size = _varint(file)
        if size > min(_LARGEST, end - file.tell()):
            raise DecodeError("a value is longer than its file, or than MindSpore writes")
        yield Checkpoint.Value.FromString(file.read(size))


def _varint(file: BinaryIO) -> int:
    """Return a number in the form that protocol buffers have: seven bits in a byte, the lowest first."""
    number = 0
    for shift in range(0, 64, 7):
        (byte,) = file.read(1) or b"\0"  # at the end of the file the number ends
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return number


def _bytes_of(shape: Sequence[int], kind: str) -> int | None:
    """Return the bytes of a tensor; None if there is no such tensor."""
    if kind not in _ITEM_BYTES or min(shape, default=0) < 0:
        return None
    elements = 1 if list(shape) == [0] else math.prod(shape)  # a scalar in older files
    return elements * _ITEM_BYTES[kind]
