"""Arrays and facts in one safetensors file, with a SHA-256 of both: it finds damage, and proves nothing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .. import _check

# The only entry of the metadata: the library writes several in an order of chance, and equal runs write equal files.
_ENTRY = "ms_accum"


class CheckpointError(ValueError):
    """Raised when a checkpoint or a training state can't be read, or belongs to another network or run.

    Args:
        message (str): one line; control characters in it, which names in the file may contain, are escaped.
    """

    def __init__(self, message: str):
        super().__init__(_check.one_line(message, _check.LINE))


def write_arrays(path: str, arrays: Mapping[str, np.ndarray], facts: Any) -> None:
    """Write arrays, and facts in types that JSON supports; then read them back, because disks fail silently."""
    text = json.dumps(facts, sort_keys=True)
    save_file(dict(arrays), path, metadata={_ENTRY: f"{digest_of(arrays, text)} {text}"})
    read_arrays(path)


def read_arrays(path: str) -> tuple[dict[str, np.ndarray], Any]:
    """Return the arrays and the facts of a file; the facts are None in a file that another program wrote.

    Raises:
        CheckpointError: If it can't be read, or is damaged.
    """
    check_file(path)
    try:
        with safe_open(path, framework="np") as file:
            entry = (file.metadata() or {}).get(_ENTRY)
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:  # the last: types NumPy lacks
        raise CheckpointError(f"'{path}' can't be read: {error}.") from error
    if entry is None:
        return arrays, None
    digest, _, text = entry.partition(" ")
    if digest != digest_of(arrays, text):
        raise CheckpointError(f"'{path}' is damaged: its SHA-256 does not match.")
    return arrays, json.loads(text)


def check_file(path: str) -> None:
    """Raise an error for what is not a file: a program would wait for ever for the other end of a pipe."""
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is not a file.")


def kind_of(array: np.ndarray) -> str:
    """Return the type and the shape of an array as text."""
    return f"{array.dtype} {array.shape}"


def digest_of(arrays: Mapping[str, np.ndarray], facts: str) -> str:
    """Return the SHA-256 of arrays and facts."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {kind_of(arrays[name])}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def differences_of(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Return one text for each name whose description differs, is missing or is unexpected."""
    missing = [f"missing {name}" for name in expected if name not in actual]
    unexpected = [f"unexpected {name}" for name in actual if name not in expected]
    differing = [name for name in expected if name in actual and actual[name] != expected[name]]
    return missing + unexpected + [f"{name} is {actual[name]} instead of {expected[name]}" for name in differing]


def shortened(texts: Sequence[str]) -> str:
    """Return the first texts as one line."""
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(map(_check.one_line, texts[:3])) + more
