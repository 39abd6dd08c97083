"""Models on disk: a network's parameters in a file, the record of how they were trained, and copies of both.

A model is a `.ckpt` or safetensors, which MindSpore writes and reads. MindSpore's loader reads out of bounds on a
crafted `.ckpt`, and loads a truncated one as if it were complete, so every file is checked here first.

The record is a JSON object: the model, its data, how it was trained, and its accuracy. Safetensors contain it in their
metadata; that of a `.ckpt` is a file next to it, `<name>.json`. A digest binds the record to the weights.

MindSpore and NumPy are imported where they are used: programs import this module before they block signals, and records
and safetensors are shown without MindSpore.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from google.protobuf.message import DecodeError
from safetensors import SafetensorError, safe_open

from .. import _check
from .files import as_given, write_bytes, write_whole

if TYPE_CHECKING:
    from mindspore import Parameter, nn

DEFAULT = "gradient_accumulation.ckpt"
"""str, the default path of the model, which is that of the tutorial."""
FORMATS = ("ckpt", "safetensors")


class CheckpointError(ValueError):
    """Raised when a checkpoint or a training state can't be read, or belongs to another network or run.

    Args:
        message (str): one line; control characters in it, which names in the file may contain, are escaped.
    """

    def __init__(self, message: str):
        super().__init__(_check.one_line(message, _check.LINE))


# Where a model may be saved


def check_name(owner: str, *paths: str | os.PathLike[str]) -> None:
    """Reject names that do not end like a checkpoint's, and paths that exist but are not files."""
    for name in [os.fspath(path) for path in paths]:
        if _format(name) not in FORMATS:
            raise ValueError(f"For '{owner}', 'ckpt_path' must end with '.ckpt' or '.safetensors', but got '{name}'.")
        if os.path.isdir(name):
            raise ValueError(f"For '{owner}', 'ckpt_path' must name a file, but got the folder '{name}'.")
        if os.path.exists(name) and not os.path.isfile(name):
            raise ValueError(f"For '{owner}', 'ckpt_path' must name a file, but got the device or pipe '{name}'.")


def check_folder(owner: str, path: str | os.PathLike[str]) -> None:
    """Raise an error before training if the folder of `path` can't be written to."""
    folder = os.path.dirname(os.path.realpath(path))  # the target of a link
    if not os.path.isdir(folder):
        rule = "the folder of 'ckpt_path' must exist"
        raise ValueError(f"For '{owner}', {rule}, but got '{os.path.relpath(folder)}'. Create it first.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"For '{owner}', the folder of 'ckpt_path' must be writable, but got '{path}'.")


def check_path(owner: str, path: str | os.PathLike[str] | None, network: nn.Cell) -> None:
    """Raise an error before training if the network can't be saved to `path`; None means that it is not saved."""
    import mindspore as ms

    if path is None:
        return
    check_name(owner, path)
    check_folder(owner, path)
    names = [parameter.name for parameter in network.get_parameters() if parameter.dtype == ms.bfloat16]
    if names and _format(path) == "safetensors":
        raise ValueError(
            f"For '{owner}', 'ckpt_path' must end with '.ckpt' for a network with bfloat16 parameters, such as "
            f"'{names[0]}', but got '{path}'."
        )


def _format(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(path)[1][1:]


# Saving


def save_model(network: nn.Cell, path: str | os.PathLike[str], record: Mapping[str, Any] | None = None) -> None:
    """Write only the network's parameters to `path`, in the format of its extension, and then their record.

    Raises:
        OSError: If the file can't be written; an existing file is unchanged.
    """
    size = sum(parameter.nbytes for parameter in network.get_parameters())
    os.makedirs(os.path.dirname(os.path.realpath(path)), exist_ok=True)  # it may have been removed during the run
    write_whole(path, size, partial(_save_and_verify, network))
    if record is None or _format(path) == "safetensors":
        _remove_sidecar(path)
    if record is not None:
        write_record(path, record)


def _save_and_verify(network: nn.Cell, path: str) -> None:
    import mindspore as ms

    ms.save_checkpoint(network, path, format=_format(path), crc_check=True)
    tensors_of(path)


def save_trained(network: nn.Cell, path: str | os.PathLike[str], at: str | None = None) -> None:
    """Do what `save_model` does. An existing model under the default name is kept under another name, with a warning.

    Args:
        network (Cell): the network to save.
        path (str): the path as the user gave it.
        at (Optional[str]): the absolute path, if the program may have changed its working directory since then.
            Default: ``None``, `path`.

    Raises:
        OSError: If the file can't be written; an existing file is unchanged.
    """
    target = os.fspath(path) if at is None else as_given(at, path)
    previous = keep_previous(target) if os.fspath(path) == DEFAULT else None
    save_model(network, target)
    if previous:
        # Printed to stderr where a program has not set up logging.
        message = "'%s' is replaced; the model that it held is kept as '%s'."
        logging.getLogger("ms_accum").warning(message, target, previous)


# Loading


def load_parameters(path: str | os.PathLike[str]) -> dict[str, Parameter]:
    """Read a checkpoint's parameters by name.

    Raises:
        CheckpointError: If there is no such file, or it is not a checkpoint.
    """
    import mindspore as ms

    path = os.fspath(path)
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is not a file. Give the path of a checkpoint that train.py wrote.")
    try:
        tensors_of(path)
        return ms.load_checkpoint(path, format=_format(path))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"'{path}' is not a checkpoint that MindSpore can read.") from error


def load_model(network: nn.Cell, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint into `network`, completely or not at all.

    Raises:
        CheckpointError: If the checkpoint can't be read, or is of another architecture.
    """
    import mindspore as ms

    parameters = load_parameters(path)
    differing = differences(network, parameters)
    if differing:
        raise CheckpointError(f"'{path}' is of another architecture: {shortened(differing)}.{_remedy(differing)}")
    ms.load_param_into_net(network, parameters)


def differences(network: nn.Cell, parameters: Mapping[str, Parameter]) -> list[str]:
    """Return one text for each difference between `parameters` and those of `network`."""
    expected = {parameter.name: _kind(parameter) for parameter in network.get_parameters()}
    return differences_of(expected, {name: _kind(parameter) for name, parameter in parameters.items()})


def differences_of(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Return one text for each name whose description differs, is missing or is unexpected."""
    shown = {name: _check.one_line(name) for name in (*expected, *actual)}
    missing = [f"missing {shown[name]}" for name in expected if name not in actual]
    unexpected = [f"unexpected {shown[name]}" for name in actual if name not in expected]
    differing = [name for name in expected if name in actual and actual[name] != expected[name]]
    return missing + unexpected + [f"{shown[name]} is {actual[name]} instead of {expected[name]}" for name in differing]


def shortened(texts: Sequence[str]) -> str:
    """Return the first texts as one line."""
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def _kind(parameter: Parameter) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)}"


def _remedy(differing: Sequence[str]) -> str:
    """Return what to do if the only difference is what `replace_dropout` adds to a network."""
    from ..layers.dropout import COUNTER

    if not all(text.endswith(COUNTER) for text in differing):
        return ""
    if differing[0].startswith("unexpected"):
        return " It was trained after replace_dropout. Call replace_dropout on the network first."
    return " It was trained without replace_dropout. Load it before replace_dropout."


# Checking a file

_ITEM_BYTES = {
    **dict.fromkeys(("Bool", "Int8", "UInt8"), 1),
    **dict.fromkeys(("Int16", "UInt16", "Float16", "BFloat16"), 2),
    **dict.fromkeys(("Int32", "UInt32", "Float32"), 4),
    **dict.fromkeys(("Int64", "UInt64", "Float64"), 8),
}
# MindSpore writes this word and ten bytes of CRC-32 after the protocol buffers.
_MARK, _CRC_BYTES = b"crc_num", 10
_METADATA = {"format", "crc_num", "remove_redundancy", "record", "record_sha256"}


def tensors_of(path: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Check that MindSpore's loader can read a file safely, and return the names, shapes and types of its parameters.

    Raises:
        CheckpointError: If it is damaged, or not a checkpoint.
    """
    tensors = _tensors_of_safetensors(path) if _format(path) == "safetensors" else _tensors_of_ckpt(path)
    if not tensors:
        raise CheckpointError(f"'{path}' is not a checkpoint: it contains no parameters.")
    return tensors


def _invalid(path: str, fault: str) -> CheckpointError:
    return CheckpointError(f"'{path}' is not a valid checkpoint: {fault}.")


def _tensors_of_ckpt(path: str) -> list[tuple[str, tuple[int, ...], str]]:
    from mindspore.train.checkpoint_pb2 import Checkpoint

    content = Path(path).read_bytes()
    end = len(content) - _CRC_BYTES
    if content[:end].endswith(_MARK):
        crc = int.from_bytes(content[end:], "big")
        content = content[: end - len(_MARK)]
        if zlib.crc32(content) != crc:
            raise _invalid(path, "its checksum does not match")
    message = Checkpoint()
    tensors: dict[str, tuple[str, tuple[int, ...], str]] = {}
    try:
        message.ParseFromString(content)
        # A large parameter is stored in consecutive slices.
        for name, values in groupby(message.value, lambda value: value.tag):
            slices = [value.tensor for value in values]
            shape, kind = tuple(slices[0].dims), slices[0].tensor_type
            size = sum(len(part.tensor_content) for part in slices)
            is_same = all((tuple(part.dims), part.tensor_type) == (shape, kind) for part in slices)
            if name in tensors or not is_same or size != _bytes_of(shape, kind):
                raise _invalid(path, f"its {_check.one_line(name)} is damaged")
            tensors[name] = (name, shape, kind)
    except (DecodeError, UnicodeDecodeError) as error:  # some implementations decode texts only when they are read
        raise _invalid(path, "it can't be parsed") from error
    message.DiscardUnknownFields()
    if message.ByteSize() != len(content):
        raise _invalid(path, "it contains other data")
    return list(tensors.values())


def _bytes_of(shape: tuple[int, ...], kind: str) -> int | None:
    """Return the bytes of a tensor; None if there is no such tensor."""
    if kind not in _ITEM_BYTES or min(shape, default=0) < 0:
        return None
    elements = 1 if shape == (0,) else math.prod(shape)  # a scalar in older files
    return elements * _ITEM_BYTES[kind]


def _tensors_of_safetensors(path: str) -> list[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}
            tensors = [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()]
            crc = None
            if "crc_num" in metadata:
                crc = 0
                for name in sorted(slices):
                    crc = zlib.crc32(bytes(file.get_tensor(name)), zlib.crc32(name.encode(), crc))
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise _invalid(path, f"it can't be parsed ({first_line(error)})") from error
    of_mindspore = metadata.get("format") == "ms"
    if of_mindspore and set(metadata) - _METADATA:
        raise _invalid(path, "it contains other data")
    if crc is not None and (metadata["crc_num"] != str(crc) or not of_mindspore):
        raise _invalid(path, "its checksum does not match")
    sealed = _in_metadata(metadata)
    if sealed and (not sealed.is_intact or fault_of_record(sealed.record)):
        raise _invalid(path, "its record is damaged")
    return tensors


def metadata_of(path: str) -> dict[str, str]:
    """Return the metadata of safetensors; an empty dict for other files."""
    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError, ValueError):
        return {}


def first_line(error: Exception) -> str:
    """Return the first line of an error, which may quote the file."""
    return _check.one_line((str(error).splitlines() or [type(error).__name__])[0])


# Check values that were read from JSON


def parsed_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def has_shape(value: Any, shape: Any) -> bool:
    """Return whether a value that was read from JSON is as described: a checksum finds damage, not crafted values.

    Args:
        value (Any): the value.
        shape (Any): a type; a range, for an int in it; None; a function that returns whether a value is valid; a list
            of shapes, or ``[shape, ...]`` for any length; a dict of shapes; a tuple of shapes, one of which must match.
    """
    if isinstance(shape, tuple):
        return any(has_shape(value, choice) for choice in shape)
    if isinstance(shape, dict):
        return (
            isinstance(value, dict)
            and value.keys() == shape.keys()
            and all(has_shape(value[name], inner) for name, inner in shape.items())
        )
    if isinstance(shape, list):
        if not isinstance(value, list):
            return False
        if shape[-1] is ...:
            return all(has_shape(item, shape[0]) for item in value)
        return len(value) == len(shape) and all(map(has_shape, value, shape))
    if isinstance(shape, range):
        return type(value) is int and value in shape
    if isinstance(shape, type):
        return type(value) is shape
    return value is None if shape is None else shape(value)


COUNT = range(2**53)
"""range, the shape of a count."""

# The record

VERSION = 1
_MAX_RECORD_BYTES = 2**20


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -(2**128) < value < 2**128  # not for NaN, and any int may be compared


def _is_numbers(value: Any) -> bool:
    return has_shape(value, [_is_number, ...]) and len(value) <= 16


def _is_vocabulary(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CHARACTERS and value == "".join(sorted(set(value)))


_MAX_CHARACTERS = 2**16
_SIZE = range(1, 2**16)
# Every record has exactly these fields, and those of a text or of images. Records of untrusted files are printed, and
# some fields are used as sizes.
_FIELDS: dict[str, Any] = {
    "version": COUNT,
    **dict.fromkeys(("model", "dataset", "data", "test_data"), _is_text),
    "rows": COUNT,
    **dict.fromkeys(("optimizer", "reduction", "tail"), _is_text),
    **dict.fromkeys(("lr", "momentum", "weight_decay"), _is_number),
    "clip_norm": (_is_number, None),
    **dict.fromkeys(("batch_size", "ranks", "seed", "epochs", "updates", "skipped"), COUNT),
    **dict.fromkeys(("mini_steps", "effective_batch", "zero"), (COUNT, None)),
    **dict.fromkeys(("ms_accum", "mindspore", "python"), _is_text),
}
_FIELDS_OF_IMAGES: dict[str, Any] = {
    **dict.fromkeys(("image_size", "channels", "classes"), COUNT),
    **dict.fromkeys(("mean", "std"), (_is_number, _is_numbers)),
    **dict.fromkeys(("correct", "total"), (COUNT, None)),
}
_FIELDS_OF_TEXT: dict[str, Any] = {
    "level": _is_text,
    "vocabulary": _is_vocabulary,
    "tokens": COUNT,
    **dict.fromkeys(("context", "layers", "width", "heads"), _SIZE),
    "untied_head": bool,
    "loss": (_is_number, None),
    **dict.fromkeys(("predicted", "characters"), (COUNT, None)),
}


class _Sealed(NamedTuple):
    """A record as it was read, and whether its digest matches it and the weights."""

    record: Any
    is_intact: bool


def sidecar(path: str | os.PathLike[str]) -> str:
    """Return the path of the record that belongs to a `.ckpt`."""
    return f"{os.fspath(path)}.json"


def write_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write the record of an existing model file, in place of an earlier record.

    Raises:
        OSError: If it can't be written; the model is unchanged.
    """
    path = os.fspath(path)
    record = {"version": VERSION, **record}
    fault = fault_of_record(record)
    if fault:
        raise ValueError(f"For 'write_record', 'record' must have the fields of a record, but {fault}.")
    text = _text_of(record)
    if _format(path) == "safetensors":
        write_whole(path, os.path.getsize(path), partial(_write_with_record, path, text))
    else:
        sealed = json.dumps({"record": record, "sha256": _digest_with_file(path, text)}, indent=1) + "\n"
        write_bytes(sidecar(path), sealed.encode())


def read_record(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the record of a model; None if it has none.

    Raises:
        CheckpointError: If the record is damaged, of another version, or belongs to another file.
    """
    path = os.fspath(path)
    is_in_metadata = _format(path) == "safetensors"
    sealed = _in_metadata(metadata_of(path)) if is_in_metadata else _in_sidecar(path)
    if sealed is None:
        return None
    fault = fault_of_record(sealed.record)
    if fault:
        raise CheckpointError(f"The record of '{path}' can't be used: {fault}.")
    if not sealed.is_intact:
        where = "in its metadata" if is_in_metadata else f"'{sidecar(path)}'"
        raise CheckpointError(
            f"The record of '{path}', {where}, is damaged or belongs to another file: its SHA-256 does not match. "
            f"{'Train it again.' if is_in_metadata else 'Remove the record to use the model without it.'}"
        )
    return sealed.record


def fault_of_record(record: Any) -> str | None:
    """Return a short description of what is wrong with the content of a record, or None."""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    if record.get("version") != VERSION:
        return "it is of another version of ms_accum"
    fields = {**_FIELDS, **(_FIELDS_OF_TEXT if "vocabulary" in record else _FIELDS_OF_IMAGES)}
    missing = sorted(fields.keys() - record)
    if missing:
        return f"'{missing[0]}' is missing"
    if record.keys() - fields:
        return "it has unknown fields"
    for name, shape in fields.items():
        if not has_shape(record[name], shape):
            return f"'{name}' is wrong"
    return _fault_of_result(record)


def _fault_of_result(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the result of an evaluation, whose fields are all None if there was none."""
    part, whole = ("characters", "predicted") if "vocabulary" in record else ("correct", "total")
    if (record[part] is None) != (record[whole] is None) or (
        record[whole] is not None and record[part] > record[whole]
    ):
        return f"'{part}' is wrong"
    return None


def _in_sidecar(path: str) -> _Sealed | None:
    name = sidecar(path)
    if not os.path.exists(name):
        return None
    readable = os.path.isfile(name) and os.path.getsize(name) <= _MAX_RECORD_BYTES
    content = parsed_json(Path(name).read_bytes()) if readable else None
    if not isinstance(content, dict) or set(content) != {"record", "sha256"}:
        return _Sealed("not a record", False)
    record = content["record"]
    # The digest reads all weights, so it is computed only if the content is valid.
    is_intact = fault_of_record(record) is None and _digest_with_file(path, _text_of(record)) == content["sha256"]
    return _Sealed(record, is_intact)


def _in_metadata(metadata: Mapping[str, str]) -> _Sealed | None:
    if metadata.get("format") != "ms" or "record" not in metadata:
        return None
    text = metadata["record"]
    record = parsed_json(text) if len(text) <= _MAX_RECORD_BYTES else None
    return _Sealed(record, _digest_with_crc(metadata, text) == metadata.get("record_sha256"))


def _write_with_record(path: str, text: str, copy: str) -> None:
    """Copy safetensors with a record in the header. Offsets count from the header's end, so they do not change."""
    with open(path, "rb") as old, open(copy, "wb") as new:
        header = json.loads(old.read(int.from_bytes(old.read(8), "little")))
        metadata = header["__metadata__"]
        header["__metadata__"] = {**metadata, "record": text, "record_sha256": _digest_with_crc(metadata, text)}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # tensors are aligned to 8 bytes
        new.write(len(raw).to_bytes(8, "little") + raw)
        shutil.copyfileobj(old, new)


def _text_of(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True)


def _digest_with_file(path: str, text: str) -> str:
    digest = hashlib.sha256(text.encode())
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _digest_with_crc(metadata: Mapping[str, str], text: str) -> str:
    return hashlib.sha256(f"{text}{metadata.get('crc_num')}".encode()).hexdigest()


# A model together with its record


def copy_model(source: str, target: str) -> None:
    """Copy a model and its record; existing files are replaced."""
    _copy_both(source, target, shutil.copyfile)


def keep_previous(path: str | os.PathLike[str]) -> str | None:
    """Keep the model at `path` as `<stem>.previous<ext>`, and return that path; None if there is no model.

    At every moment there is a complete file under one of the two names.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        return None
    _copy_both(path, previous_of(path), _link)
    return previous_of(path)


def previous_of(path: str) -> str:
    """Return the path under which the model at `path` is kept."""
    stem, extension = os.path.splitext(path)
    return f"{stem}.previous{extension}"


def remove_model(path: str | os.PathLike[str]) -> None:
    """Remove a model and its record."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    _remove_sidecar(path)


def _copy_both(source: str, target: str, copy: Callable[[str, str], Any]) -> None:
    write_whole(target, os.path.getsize(source), partial(copy, source))
    if os.path.isfile(sidecar(source)):
        write_whole(sidecar(target), os.path.getsize(sidecar(source)), partial(copy, sidecar(source)))
    else:
        _remove_sidecar(target)


def _link(old: str, new: str) -> None:
    """Give a file a second name, or copy it if the file system has no links."""
    try:
        os.link(os.path.realpath(old), new)
    except OSError:
        shutil.copyfile(old, new)


def _remove_sidecar(path: str | os.PathLike[str]) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(sidecar(path))
