"""What is recorded about a model in addition to its weights?

The record is a JSON object: the model, its data, how it was trained, and its accuracy. Safetensors contain it in their
metadata; that of a `.ckpt` is a file next to it, `<name>.json`. A digest binds the record to the weights. This module
does not import MindSpore.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .. import _check
from .files import write_whole

DEFAULT = "gradient_accumulation.ckpt"
"""str, the default path of the model, which is that of the tutorial."""
VERSION = 1
_MOST_BYTES = 2**16
_TEXT, _COUNT, _NUMBER, _NUMBERS, _NONE = "text", "count", "number", "numbers", "None"
# Every record has exactly these fields, of one of these kinds.
_FIELDS = {
    "version": (_COUNT,),
    **dict.fromkeys(("model", "dataset", "data", "test_data"), (_TEXT,)),
    **dict.fromkeys(("rows", "image_size", "channels", "classes"), (_COUNT,)),
    **dict.fromkeys(("mean", "std"), (_NUMBER, _NUMBERS)),
    **dict.fromkeys(("optimizer", "reduction", "tail"), (_TEXT,)),
    **dict.fromkeys(("lr", "momentum", "weight_decay"), (_NUMBER,)),
    "clip_norm": (_NUMBER, _NONE),
    **dict.fromkeys(("batch_size", "ranks", "seed", "epochs", "updates", "skipped"), (_COUNT,)),
    **dict.fromkeys(("mini_steps", "effective_batch", "zero", "correct", "total"), (_COUNT, _NONE)),
    **dict.fromkeys(("ms_accum", "mindspore", "python"), (_TEXT,)),
}


class CheckpointError(ValueError):
    """Raised when a checkpoint or a training state can't be read, or belongs to another network or run.

    Args:
        message (str): one line; control characters in it, such as those of names in the file, are shown, not obeyed.
    """

    def __init__(self, message: str):
        super().__init__(_check.one_line(message, _check.LINE))


def sidecar(path: str | os.PathLike[str]) -> str:
    """Return the path of the record that belongs to a `.ckpt`."""
    return f"{os.fspath(path)}.json"


def write_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write the record of an existing model file, in place of an earlier record.

    Raises:
        OSError: If it can't be written; the model is unchanged.
    """
    path, record = os.fspath(path), {"version": VERSION, **record}
    fault = fault_of_record(record)
    if fault:
        raise ValueError(f"For 'write_record', 'record' must have the fields of a record, but {fault}.")
    if path.endswith(".safetensors"):
        write_whole(path, os.path.getsize(path), partial(_write_with_header, path, _text_of(record)))
        return
    sealed = {"record": record, "sha256": _digest_with_file(path, _text_of(record))}
    text = json.dumps(sealed, indent=1) + "\n"
    write_whole(sidecar(path), len(text), partial(_write_text, text))


def read_record(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the record of a model; None if it has none.

    Raises:
        CheckpointError: If the record is damaged, of another version, or belongs to another file.
    """
    path = os.fspath(path)
    own = path.endswith(".safetensors")
    found = _in_header(path) if own else _in_sidecar(path)
    if found is None:
        return None
    record, fits = found
    fault = fault_of_record(record)
    if fault:
        raise CheckpointError(f"The record of '{path}' can't be used: {fault}.")
    if not fits:
        where = "in its metadata" if own else f"'{sidecar(path)}'"
        raise CheckpointError(
            f"The record of '{path}', {where}, is damaged or belongs to another file: its SHA-256 does not match. "
            f"{'Train it again.' if own else 'Remove the record to use the model without it.'}"
        )
    return record


def fault_of_record(record: Any) -> str | None:
    """Return a short description of what is wrong with the content of a record, or None."""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    if record.get("version") != VERSION:
        return "it is of another version of ms_accum"
    missing, unknown = sorted(_FIELDS.keys() - record), sorted(record.keys() - _FIELDS)
    if missing or unknown:
        return f"'{missing[0]}' is missing" if missing else "it has unknown fields"
    wrong = [name for name, kinds in _FIELDS.items() if not any(_is(kind, record[name]) for kind in kinds)]
    if not wrong and not _are_counts_of_answers(record["correct"], record["total"]):
        wrong = ["correct"]
    return f"'{wrong[0]}' is wrong" if wrong else None


def _are_counts_of_answers(correct: int | None, total: int | None) -> bool:
    """Return whether these are the right answers and all answers of an evaluation; both are None if there was none."""
    return correct is total is None or (correct is not None and total is not None and correct <= total)


def copy_model(source: str, target: str) -> None:
    """Copy a model and its record; existing files are replaced."""
    write_whole(target, os.path.getsize(source), partial(shutil.copyfile, source))
    if os.path.isfile(sidecar(source)):
        write_whole(sidecar(target), os.path.getsize(sidecar(source)), partial(shutil.copyfile, sidecar(source)))
    else:
        remove_record(target)


def keep_previous(path: str | os.PathLike[str]) -> str | None:
    """Keep the model at `path` as `<stem>.previous<ext>`, and return that path; None if there is no model.

    At every moment there is a complete file under one of the two names.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        return None
    previous = previous_of(path)
    for old, new in ((path, previous), (sidecar(path), sidecar(previous))):
        if os.path.isfile(old):
            write_whole(new, os.path.getsize(old), partial(_link, old))
    if not os.path.isfile(sidecar(path)):
        remove_record(previous)
    return previous


def previous_of(path: str) -> str:
    """Return the path under which the model at `path` is kept."""
    return "{}.previous{}".format(*os.path.splitext(path))


def remove_record(path: str | os.PathLike[str]) -> None:
    """Remove the sidecar of a model whose record has changed or is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(sidecar(path))


def remove_model(path: str | os.PathLike[str]) -> None:
    """Remove a model and its record."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    remove_record(path)


def _link(old: str, new: str) -> None:
    """Give a file a second name, or copy it if the file system has no links."""
    try:
        os.link(os.path.realpath(old), new)
    except OSError:
        shutil.copyfile(old, new)


def _text_of(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True)


def _write_text(text: str, name: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


def _digest_with_file(path: str, text: str) -> str:
    digest = hashlib.sha256(text.encode())
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _digest_with_crc(metadata: Mapping[str, str], text: str) -> str:
    return hashlib.sha256(f"{text}{metadata.get('crc_num')}".encode()).hexdigest()


def _in_sidecar(path: str) -> tuple[Any, bool] | None:
    name = sidecar(path)
    if not os.path.exists(name):
        return None
    if not os.path.isfile(name) or os.path.getsize(name) > _MOST_BYTES:
        return "not a record", False
    sealed = _parsed(Path(name).read_bytes())
    if not isinstance(sealed, dict) or set(sealed) != {"record", "sha256"}:
        return "not a record", False
    record = sealed["record"]
    # The digest reads all weights, so it is computed only if the content is valid.
    fits = fault_of_record(record) is None and _digest_with_file(path, _text_of(record)) == sealed["sha256"]
    return record, fits


def _in_header(path: str) -> tuple[Any, bool] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return of_metadata(file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return None  # not a checkpoint; the error is raised when it is read


def of_metadata(metadata: Mapping[str, str]) -> tuple[Any, bool] | None:
    """Return the record in the metadata of safetensors, and whether its digest matches; None if there is none."""
    if metadata.get("format") != "ms" or "record" not in metadata:
        return None
    text = metadata["record"]
    record = _parsed(text.encode()) if len(text) <= _MOST_BYTES else None
    return record, _digest_with_crc(metadata, text) == metadata.get("record_sha256")


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _write_with_header(path: str, text: str, name: str) -> None:
    """Copy safetensors with a record in the header. Offsets count from the header's end, so they do not change."""
    with open(path, "rb") as old, open(name, "wb") as new:
        header = json.loads(old.read(int.from_bytes(old.read(8), "little")))
        metadata = header["__metadata__"]
        header["__metadata__"] = {**metadata, "record": text, "record_sha256": _digest_with_crc(metadata, text)}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) & 7)  # tensors are aligned to 8 bytes
        new.write(len(raw).to_bytes(8, "little") + raw)
        shutil.copyfileobj(old, new)


def _is(kind: str, value: Any) -> bool:
    """Return whether a value is of a kind: values of untrusted files are printed, and used as sizes."""
    if kind == _TEXT:
        return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()
    if kind == _COUNT:
        return type(value) is int and 0 <= value < 2**53
    if kind == _NUMBER:
        return type(value) in (int, float) and -(2**128) < value < 2**128  # not for NaN, and any int may be compared
    if kind == _NUMBERS:
        return isinstance(value, list) and len(value) <= 16 and all(_is(_NUMBER, each) for each in value)
    return value is None
