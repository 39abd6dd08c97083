"""Training states: captured from a run, written to a file with one digest, read again, and restored.

A state is a safetensors file: its arrays are the Parameters, and its metadata are the other facts as JSON, with a
SHA-256 of both. Programs read states before they import MindSpore, so it is imported where Parameters are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .. import _check
from .model_file import (
    COUNT,
    CheckpointError,
    differences_of,
    first_line,
    has_shape,
    metadata_of,
    parsed_json,
    shortened,
)

if TYPE_CHECKING:
    from mindspore import nn

VERSION = 4
# The types of safetensors that a state may contain, all of which NumPy has.
_TYPES = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"}


class TrainingState(NamedTuple):
    """Everything that is needed to resume a run as if it had not stopped."""

    arrays: dict[str, np.ndarray]
    """The values of Parameters: of the network, of the optimizer, and the accumulators."""
    facts: dict[str, Any]
    """Everything else, in types that JSON supports."""


# From a run, and into one


def capture(parameters: Mapping[str, Any], facts: Mapping[str, Any], *, writes: bool = True) -> TrainingState:
    """Return the state, including that of the random number generators.

    With ``writes=False``, on a rank that does not write it, only what is gathered from all ranks is read.
    """
    from ..network.generators import random_state
    from ..network.parameters import as_array

    arrays = {}
    for name, parameter in parameters.items():
        if writes:
            arrays[name] = as_array(parameter)
        elif hasattr(parameter, "take_part"):
            parameter.take_part()
    return TrainingState(arrays, {**facts, "random": random_state(), "version": VERSION})


def restore(
    state: TrainingState,
    parameters: Mapping[str, Any],
    source: str,
    *,
    leave_out: str = "",
    optional: Collection[str] = (),
) -> None:
    """Load the state's arrays into the Parameters, all or none, and set the random number generators.

    Args:
        state (TrainingState): the state to restore.
        parameters (Mapping): the Parameters by owner and name.
        source (str): the path of the state, used in error messages.
        leave_out (str): the owner whose Parameters are not changed. Default: none.
        optional (Collection[str]): owners that only the state or only this run may have. Default: none.

    Raises:
        CheckpointError: If arrays and Parameters do not match.
    """
    from mindspore import Tensor, ops

    from ..network.generators import set_random_state
    from ..network.parameters import as_array

    unmatched = set(map(_owner_of, state.arrays)) ^ set(map(_owner_of, parameters))
    excluded = {leave_out, *unmatched.intersection(optional)}
    arrays = {name: array for name, array in state.arrays.items() if _owner_of(name) not in excluded}
    parameters = {name: parameter for name, parameter in parameters.items() if _owner_of(name) not in excluded}
    expected = {name: _kind_of(as_array(parameter)) for name, parameter in parameters.items()}
    differing = differences_of(expected, {name: _kind_of(array) for name, array in arrays.items()})
    if differing:
        raise CheckpointError(f"'{source}' belongs to another run: {shortened(differing)}.")
    for name, parameter in parameters.items():
        if hasattr(parameter, "put"):  # sharded over the ranks
            parameter.put(arrays[name])
        else:
            # `assign`, because a compiled graph does not see `set_data`.
            ops.assign(parameter, Tensor(arrays[name]).astype(parameter.dtype))
    set_random_state(state.facts["random"])


def warn_about_random_layers(network: nn.Cell) -> None:
    """Warn, once for a resumed network, that the state of its random layers is not accessible in MindSpore."""
    from ..network.generators import random_layers

    names = random_layers(network)
    if names:
        _check.warn(
            f"Random layers restart in a resumed run ({', '.join(names[:3])}), so it is not bit-identical to an "
            "uninterrupted run. With replace_dropout it is.",
        )


def _owner_of(name: str) -> str:
    return name.partition(".")[0]


def _kind_of(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"


# The file


def write(state: TrainingState, path: str) -> None:
    """Write a state, and read it back to verify it."""
    facts = json.dumps(state.facts, sort_keys=True)
    save_file(state.arrays, path, metadata={"facts": facts, "sha256": state_digest(state.arrays, facts)})
    read(path)


def read(path: str) -> TrainingState:
    """Read a state.

    Raises:
        CheckpointError: If the file is not a state, is damaged, of another version, or has facts that no run has.
    """
    state = open_state(path)
    faults = _faults_of(state.facts)
    if faults:
        raise CheckpointError(f"'{path}' is not a training state that a run can resume: {shortened(faults)}.")
    return state


def open_state(path: str) -> TrainingState:
    """Read a state whose facts are not checked.

    Raises:
        CheckpointError: If the file is not a state, is damaged, or is of another version.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is not a training state: it is not a file.")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if not _is_state(metadata) or any(file.get_slice(name).get_dtype() not in _TYPES for name in file.keys()):
                raise CheckpointError(f"'{path}' is not a training state.")
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except CheckpointError:
        raise
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"'{path}' is not a training state: {first_line(error)}.") from error
    if state_digest(arrays, metadata["facts"]) != metadata["sha256"]:
        raise CheckpointError(f"'{path}' is damaged: its SHA-256 does not match.")
    facts = parsed_json(metadata["facts"])
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        raise CheckpointError(f"'{path}' is a training state of another version of ms_accum.")
    return TrainingState(arrays, facts)


def is_state(path: str) -> bool:
    """Return whether a file is a training state; it may be damaged."""
    return _is_state(metadata_of(path))


def _is_state(metadata: Mapping[str, str]) -> bool:
    return set(metadata) == {"facts", "sha256"}


def state_digest(arrays: Mapping[str, np.ndarray], facts: str) -> str:
    """Return the SHA-256 of a training state."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {_kind_of(arrays[name])}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


# The facts: a digest finds damage, but not crafted values

_POSITION = range(2**31)  # MindSpore's data sets count in 32 bits
_NUMBER = (float, COUNT)


def _is_random_state(value: Any) -> bool:
    from ..network.generators import is_random_state

    return is_random_state(value)


def _is_number(value: Any) -> bool:
    return has_shape(value, _NUMBER) and not math.isnan(value)


_WINDOW = {"micro_batches": COUNT, "loss": [_NUMBER, _NUMBER, COUNT], "unit": (_NUMBER, None)}
_FACTS: dict[str, Any] = {
    "version": COUNT,
    "updates": COUNT,
    "skipped": COUNT,
    "updated": bool,
    "skips": COUNT,
    "at": {
        "first": (_POSITION, None),
        "epoch": range(1, 2**31),
        "batches": _POSITION,
        "rows": COUNT,
        "step": _POSITION,
        "windows": COUNT,
        "size": (_POSITION, None),
        "total": (_POSITION, None),
        "ranks": range(1, 2**31),
        "held": _POSITION,
        "random": (_is_random_state, None),
        "evaluated": (COUNT, None),
    },
    "window": (_WINDOW, {**_WINDOW, "bad": [COUNT, ...]}),
    "random": _is_random_state,
    "config": dict,
    "planned": COUNT,
    "best": [(_is_number, None), (str, None)],
    "scored": bool,
    "kept": [str, ...],
}


def _faults_of(facts: Mapping[str, Any]) -> list[str]:
    """Return one text for each fact that is missing or invalid."""
    faults = [f"'{name}' is missing" for name in _FACTS if name not in facts]
    faults += [f"'{name}' is wrong" for name in _FACTS if name in facts and not has_shape(facts[name], _FACTS[name])]
    if faults:
        return faults
    at = facts["at"]
    is_within_epoch = at["total"] is None or at["batches"] <= at["total"]
    is_within_run = at["step"] <= at["windows"] <= facts["updates"] + facts["skipped"]
    return [] if is_within_epoch and is_within_run else ["'at' is wrong"]
