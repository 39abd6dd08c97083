"""Is a checkpoint file undamaged, and safe for MindSpore's loader?

MindSpore's loader reads out of bounds on a crafted `.ckpt`, and loads a truncated file as if it were complete.
Safetensors are checked without MindSpore.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from safetensors import SafetensorError, safe_open

from .. import _check
from .model_record import CheckpointError, fault_of_record, of_metadata

_KINDS = {
    1: ("Bool", "Int8", "UInt8"),
    2: ("Int16", "UInt16", "Float16", "BFloat16"),
    4: ("Int32", "UInt32", "Float32"),
    8: ("Int64", "UInt64", "Float64"),
}
_ITEM_BYTES = {kind: size for size, kinds in _KINDS.items() for kind in kinds}
# MindSpore writes this word and ten bytes of CRC-32 after the protocol buffers.
_MARK, _CRC_BYTES = b"crc_num", 10
_METADATA = {"format", "crc_num", "remove_redundancy", "record", "record_sha256"}
STATE_VERSION = 4
# The types of safetensors that a state may contain, all of which NumPy has.
_STATE_TYPES = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"}


def fault_of(path: str) -> str | None:
    """Return a short description of what is wrong with the file, or None."""
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
            return "its checksum does not match"
    message = _empty()
    try:
        message.ParseFromString(body)
        _ = [(value.tag, value.tensor.tensor_type) for value in message.value]
    except (DecodeError, UnicodeDecodeError):  # by the implementation: while it is parsed, or where a text is read
        return "it can't be parsed"
    message.DiscardUnknownFields()
    if message.ByteSize() != len(body):
        return "it contains other data"
    # A large parameter is stored in consecutive slices.
    parameters = [(name, list(slices)) for name, slices in groupby(message.value, lambda value: value.tag)]
    if len(dict(parameters)) < len(parameters):
        return "it contains a name twice"
    faults = (_fault_of_parameter(name, slices) for name, slices in parameters)
    return next((fault for fault in faults if fault), None)


def _fault_of_parameter(name: str, slices: list[Any]) -> str | None:
    kinds = {(each.tensor.tensor_type, tuple(each.tensor.dims)) for each in slices if each.HasField("tensor")}
    if len(kinds) != 1:
        return f"{_check.one_line(name)} is not a tensor"
    item, dims = kinds.pop()
    if item not in _ITEM_BYTES or min(dims, default=0) < 0:
        return f"{_check.one_line(name)} is of an unknown kind"
    elements = 1 if dims == (0,) else math.prod(dims)  # a scalar in older files
    if sum(len(each.tensor.tensor_content) for each in slices) != elements * _ITEM_BYTES[item]:
        return f"the size of {_check.one_line(name)} in bytes does not match its shape"
    return None


def _fault_of_safetensors(path: str) -> str | None:
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            crc = _crc_of(file) if "crc_num" in metadata else None
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        return f"it can't be parsed ({_first_line(error)})"
    of_mindspore = metadata.get("format") == "ms"
    if of_mindspore and set(metadata) - _METADATA:
        return "it contains other data"
    if "crc_num" in metadata and (metadata["crc_num"] != str(crc) or not of_mindspore):
        return "its checksum does not match"
    sealed = of_metadata(metadata)
    if sealed and (not sealed[1] or fault_of_record(sealed[0])):
        return "its record is damaged"
    return None


def _first_line(error: Exception) -> str:
    """Return the first line of an error, which may quote the file."""
    return _check.one_line((str(error).splitlines() or [type(error).__name__])[0])


def _crc_of(file: Any) -> int:
    crc = 0
    for name in sorted(file.keys()):
        crc = zlib.crc32(bytes(file.get_tensor(name)), zlib.crc32(name.encode(), crc))
    return crc


def tensors_of(path: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the names, shapes and types of the parameters in a file that `fault_of` has checked."""
    if path.endswith(".safetensors"):
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return [(name, tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()]
    message = _empty()
    with open(path, "rb") as stored:
        data = stored.read()
    end = len(data) - _CRC_BYTES - len(_MARK)
    message.ParseFromString(data[:end] if data[end : end + len(_MARK)] == _MARK else data)
    found = {each.tag: each.tensor for each in message.value}
    return [(name, tuple(each.dims), each.tensor_type) for name, each in found.items()]


def _empty() -> Any:
    from mindspore.train.checkpoint_pb2 import Checkpoint

    return Checkpoint()


def open_state(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the facts of a training state. The facts are not checked.

    Raises:
        CheckpointError: If the file is not a state, is damaged, or is of another version.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is not a training state: it is not a file.")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            strange = [name for name in file.keys() if file.get_slice(name).get_dtype() not in _STATE_TYPES]
            arrays = {} if strange else {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"'{path}' is not a training state: {_first_line(error)}.") from error
    if strange or not is_state(metadata):
        raise CheckpointError(f"'{path}' is not a training state.")
    if state_digest(arrays, metadata["facts"]) != metadata["sha256"]:
        raise CheckpointError(f"'{path}' is damaged: its SHA-256 does not match.")
    facts = _json(metadata["facts"])
    if facts.get("version") != STATE_VERSION:
        raise CheckpointError(f"'{path}' is a training state of another version of ms_accum.")
    return arrays, facts


def metadata_of(path: str) -> dict[str, str]:
    """Return the metadata of safetensors; an empty dict for other files."""
    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError, ValueError):
        return {}


def is_state(metadata: Mapping[str, str]) -> bool:
    """Return whether the metadata of safetensors are those of a training state."""
    return set(metadata) == {"facts", "sha256"}


def state_digest(arrays: Mapping[str, np.ndarray], facts: str) -> str:
    """Return the SHA-256 of a training state."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {kind_of(arrays[name])}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def kind_of(array: np.ndarray) -> str:
    """Return the type and shape of an array as text."""
    return f"{array.dtype} {array.shape}"


def _json(text: str) -> dict[str, Any]:
    """Return the JSON object of a text; an empty dict if it is not one."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
