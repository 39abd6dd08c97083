"""Is a checkpoint file undamaged, and safe for MindSpore's loader?

The loader reads out of bounds on a crafted `.ckpt`, and loads a truncated file as if it were complete.
"""

from __future__ import annotations

import math
import zlib
from itertools import groupby
from typing import Any

from google.protobuf.message import DecodeError
from mindspore.train.checkpoint_pb2 import Checkpoint
from safetensors import SafetensorError, safe_open

_KINDS = {
    1: ("Bool", "Int8", "UInt8"),
    2: ("Int16", "UInt16", "Float16", "BFloat16"),
    4: ("Int32", "UInt32", "Float32"),
    8: ("Int64", "UInt64", "Float64"),
}
_ITEM_BYTES = {kind: size for size, kinds in _KINDS.items() for kind in kinds}
# MindSpore writes this word and ten bytes of CRC-32 after the protocol buffers.
_MARK, _CRC_BYTES = b"crc_num", 10
_METADATA = {"format", "crc_num", "remove_redundancy"}


def fault_of(path: str) -> str | None:
    """Return a short description of the file's fault, or None."""
    if path.endswith(".safetensors"):
        return _fault_of_safetensors(path)
    with open(path, "rb") as file:
        return _fault_of_ckpt(file.read())


def _fault_of_ckpt(data: bytes) -> str | None:
    end = len(data) - _CRC_BYTES
    body = data
    if data[end - len(_MARK) : end] == _MARK:
        body = data[: end - len(_MARK)]
        if zlib.crc32(body) != int.from_bytes(data[end:], "big"):
            return "its checksum does not fit"
    message = Checkpoint()
    try:
        message.ParseFromString(body)
    except DecodeError:
        return "it can't be parsed"
    message.DiscardUnknownFields()
    if message.ByteSize() != len(body):
        return "it holds something else too"
    # A large parameter is stored in consecutive slices.
    parameters = [(name, list(slices)) for name, slices in groupby(message.value, lambda value: value.tag)]
    if len(dict(parameters)) < len(parameters):
        return "it holds a name twice"
    faults = (_fault_of_parameter(name, slices) for name, slices in parameters)
    return next((fault for fault in faults if fault), None)


def _fault_of_parameter(name: str, slices: list[Any]) -> str | None:
    kinds = {(each.tensor.tensor_type, tuple(each.tensor.dims)) for each in slices if each.HasField("tensor")}
    if len(kinds) != 1:
        return f"{name} is no tensor"
    item, dims = kinds.pop()
    if item not in _ITEM_BYTES or min(dims, default=0) < 0:
        return f"{name} is of an unknown kind"
    elements = 1 if dims == (0,) else math.prod(dims)  # a scalar in older files
    if sum(len(each.tensor.tensor_content) for each in slices) != elements * _ITEM_BYTES[item]:
        return f"{name} has not as many bytes as its shape says"
    return None


def _fault_of_safetensors(path: str) -> str | None:
    crc = 0
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            for name in sorted(file.keys()):
                crc = zlib.crc32(bytes(file.get_tensor(name)), zlib.crc32(name.encode(), crc))
    except (SafetensorError, OSError, ValueError) as error:
        return f"it can't be parsed ({str(error).splitlines()[0]})"
    of_mindspore = metadata.get("format") == "ms"
    if of_mindspore and set(metadata) - _METADATA:
        return "it holds something else too"
    if "crc_num" in metadata and (metadata["crc_num"] != str(crc) or not of_mindspore):
        return "its checksum does not fit"
    return None
