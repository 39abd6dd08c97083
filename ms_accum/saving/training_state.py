"""What is in a training state, and how is it written and read?"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .. import _check
from ..network.generators import random_state, set_random_state
from ..network.parameters import as_array
from .checkpoint import CheckpointError, differences_of, shortened
from .facts import wrong_facts

VERSION = 3
# The types of safetensors that NumPy has and a state may contain.
_DTYPES = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"}
# Compared by name: the classes of `mindspore.mint` and of `nn` have no common base.
_RANDOM = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"}


class TrainingState(NamedTuple):
    """All that is needed to resume a run as if it had never stopped."""

    arrays: dict[str, np.ndarray]
    """The values of Parameters: the network's, the optimizer's, the accumulators."""
    facts: dict[str, Any]
    """Everything else, in types that JSON supports."""


def capture(parameters: Mapping[str, Any], facts: Mapping[str, Any]) -> TrainingState:
    """Return the state, including that of the random number generators."""
    arrays = {name: as_array(parameter) for name, parameter in parameters.items()}
    return TrainingState(arrays, {**facts, "random": random_state(), "version": VERSION})


def restore(state: TrainingState, parameters: Mapping[str, Any], source: str, *, leave_out: str = "") -> None:
    """Load the state's arrays into the Parameters, all or none, and set the random number generators.

    Args:
        state (TrainingState): the state to restore.
        parameters (Mapping): the Parameters by owner and name.
        source (str): the path of the state, used in error messages.
        leave_out (str): the owner whose Parameters are not changed. Default: none.

    Raises:
        CheckpointError: If arrays and Parameters do not match.
    """
    arrays, parameters = (
        {name: each for name, each in named.items() if name.partition(".")[0] != leave_out}
        for named in (state.arrays, parameters)
    )
    expected = {name: _kind(as_array(parameter)) for name, parameter in parameters.items()}
    wrong = differences_of(expected, {name: _kind(array) for name, array in arrays.items()})
    if wrong:
        raise CheckpointError(f"'{source}' is of another run: {shortened(wrong)}.")
    for name, parameter in parameters.items():
        _put(parameter, arrays[name])
    set_random_state(state.facts["random"])


def _put(parameter: Any, array: np.ndarray) -> None:
    if hasattr(parameter, "put"):  # sharded over the ranks
        parameter.put(array)
    else:
        # `assign`, because a compiled graph does not see `set_data`.
        ops.assign(parameter, Tensor(array).astype(parameter.dtype))


def write(state: TrainingState, path: str) -> None:
    """Write a state, and read it back to verify it."""
    facts = json.dumps(state.facts, sort_keys=True)
    save_file(state.arrays, path, metadata={"facts": facts, "sha256": _digest(state.arrays, facts)})
    read(path)


def read(path: str) -> TrainingState:
    """Read a state.

    Raises:
        CheckpointError: If the file is not a state, is damaged, or is of another version.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is no training state: it is no file.")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            strange = [name for name in file.keys() if file.get_slice(name).get_dtype() not in _DTYPES]
            arrays = {} if strange else {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"'{path}' is no training state: {what}.") from error
    if strange or set(metadata) != {"facts", "sha256"}:
        raise CheckpointError(f"'{path}' is no training state.")
    if _digest(arrays, metadata["facts"]) != metadata["sha256"]:
        raise CheckpointError(f"'{path}' is damaged: its SHA-256 does not fit.")
    facts = _json(metadata["facts"])
    if facts.get("version") != VERSION:
        raise CheckpointError(f"'{path}' is a training state of another version of ms_accum.")
    wrong = wrong_facts(facts)
    if wrong:
        raise CheckpointError(f"'{path}' is no training state that a run can go on from: {shortened(wrong)}.")
    return TrainingState(arrays, facts)


def _json(text: str) -> dict[str, Any]:
    """Return the JSON object of a text; an empty dict if it is not one."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _digest(arrays: Mapping[str, np.ndarray], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {_kind(arrays[name])}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"


def warn_about_random_layers(network: nn.Cell) -> None:
    """Warn, once for a resumed network, that MindSpore gives no access to the state of its random layers."""
    cells = network.cells_and_names()
    names = [name for name, cell in cells if type(cell).__name__ in _RANDOM and cell.p != 0]
    if names:
        _check.warn(
            f"Random layers start anew in a run that is resumed ({', '.join(names[:3])}): "
            "it is not, bit for bit, the run that was stopped.",
        )
