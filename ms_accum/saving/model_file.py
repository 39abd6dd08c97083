"""Models on disk: the parameters of a network in a `.ckpt`, which MindSpore writes and reads, or in safetensors.

MindSpore's loader reads out of bounds on some files that are not its own, and loads a part of some that were cut off,
so the structure of a `.ckpt` is checked first.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import mindspore as ms
from google.protobuf.message import DecodeError
from mindspore import Parameter, Tensor, nn
from mindspore.train.checkpoint_pb2 import Checkpoint

from ..layers import COUNTER
from ..network.parameters import as_array
from .files import write_whole
from .training_state import CheckpointError as CheckpointError
from .training_state import check_file, differences_of, read_arrays, shortened, write_arrays

_FORMATS = ("ckpt", "safetensors")


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
    write_whole(path, size, partial(_write, network))


def _write(network: nn.Cell, path: str) -> None:
    if _format(path) == "safetensors":
        write_arrays(path, {parameter.name: as_array(parameter) for parameter in network.get_parameters()}, None)
    else:
        ms.save_checkpoint(network, path, crc_check=True)
        _check_ckpt(path)


def load_model(network: nn.Cell, path: str | os.PathLike[str]) -> None:
    """Load a model into `network`, completely or not at all.

    Raises:
        CheckpointError: If the file can't be read, or is of another architecture.
    """
    parameters = _read(os.fspath(path))
    expected = {parameter.name: _kind(parameter) for parameter in network.get_parameters()}
    differing = differences_of(expected, {name: _kind(parameter) for name, parameter in parameters.items()})
    if differing:
        raise CheckpointError(f"'{path}' is of another architecture: {shortened(differing)}.{_remedy(differing)}")
    ms.load_param_into_net(network, parameters)


def _read(path: str) -> Mapping[str, Parameter]:
    """Return the parameters in a file by name."""
    check_file(path)
    if _format(path) not in _FORMATS:
        raise CheckpointError(f"'{path}' is not a checkpoint: its name must end with '.ckpt' or '.safetensors'.")
    try:
        if _format(path) == "safetensors":
            return {name: Parameter(Tensor(array), name=name) for name, array in read_arrays(path)[0].items()}
        _check_ckpt(path)
        return ms.load_checkpoint(path)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"'{path}' is not a checkpoint that MindSpore can read.") from error


def _kind(parameter: Parameter) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)}"


def _remedy(differing: Sequence[str]) -> str:
    """Return what to do if the only difference is what `replace_dropout` adds to a network."""
    if not all(text.endswith(COUNTER) for text in differing):
        return ""
    if differing[0].startswith("unexpected"):
        return " It was trained after replace_dropout. Call replace_dropout on the network first."
    return " It was trained without replace_dropout. Load it before replace_dropout."


# The structure of a `.ckpt`

_ITEM_BYTES = {
    **dict.fromkeys(("Bool", "Int8", "UInt8"), 1),
    **dict.fromkeys(("Int16", "UInt16", "Float16", "BFloat16"), 2),
    **dict.fromkeys(("Int32", "UInt32", "Float32"), 4),
    **dict.fromkeys(("Int64", "UInt64", "Float64"), 8),
}
# MindSpore writes this word and ten bytes of CRC-32 after the protocol buffers.
_MARK, _CRC_BYTES = b"crc_num", 10


def _check_ckpt(path: str) -> None:
    """Raise an error for what is not a `.ckpt`, or whose parameters have not as many bytes as their shapes say."""
    content = Path(path).read_bytes()
    end = len(content) - _CRC_BYTES
    if content[:end].endswith(_MARK):
        crc = int.from_bytes(content[end:], "big")
        content = content[: end - len(_MARK)]
        if zlib.crc32(content) != crc:
            raise CheckpointError(f"'{path}' is damaged: its checksum does not match.")
    message = Checkpoint()
    names = []
    try:
        message.ParseFromString(content)
        # A large parameter is stored in consecutive slices.
        for name, values in groupby(message.value, lambda value: value.tag):
            slices = [value.tensor for value in values]
            if sum(len(part.tensor_content) for part in slices) != _bytes_of(slices[0].dims, slices[0].tensor_type):
                raise CheckpointError(f"'{path}' is not a valid checkpoint: its '{name}' is damaged.")
            names.append(name)
    except (DecodeError, UnicodeDecodeError) as error:  # some implementations decode texts only when they are read
        raise CheckpointError(f"'{path}' is not a checkpoint: it can't be parsed.") from error
    if not names or len(set(names)) < len(names):
        fault = "it has a parameter twice" if names else "it has no parameters"
        raise CheckpointError(f"'{path}' is not a checkpoint: {fault}.")


def _bytes_of(shape: Sequence[int], kind: str) -> int | None:
    """Return the bytes of a tensor; None if there is no such tensor."""
    if kind not in _ITEM_BYTES or min(shape, default=0) < 0:
        return None
    elements = 1 if list(shape) == [0] else math.prod(shape)  # a scalar in older files
    return elements * _ITEM_BYTES[kind]
