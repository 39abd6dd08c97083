"""Training states: captured from a run, written to one file with one SHA-256, read again, and restored.

The SHA-256 finds damage, and proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .. import _check
from ..network.generators import random_layers, random_state, set_random_state
from ..network.parameters import as_array

SETTING = "setting"
"""str, the owner of the optimizer's settings, such as the learning rate, which may differ in a resumed run."""
_ALWAYS = {"network", "optimizer", "scheduler", "window"}
# The only entry of the metadata: the library writes several in an order of chance, and equal runs write equal files.
_ENTRY = "ms_accum"


class CheckpointError(ValueError):
    """Raised when a checkpoint or a training state can't be read, or belongs to another network or run.

    Args:
        message (str): one line; control characters in it, which names in the file may contain, are escaped.
    """

    def __init__(self, message: str):
        super().__init__(_check.one_line(message, _check.LINE))


def write_arrays(path: str, arrays: Mapping[str, np.ndarray], metadata: Any) -> None:
    """Write arrays, and metadata in types that JSON supports; then read them back, because disks fail silently."""
    text = json.dumps(metadata, sort_keys=True)
    save_file(dict(arrays), path, metadata={_ENTRY: f"{digest_of(arrays, text)} {text}"})
    read_arrays(path)


def read_arrays(path: str) -> tuple[dict[str, np.ndarray], Any]:
    """Return the arrays and the metadata of a file; the metadata are None in a file that another program wrote.

    Raises:
        CheckpointError: If it can't be read, or is damaged.
    """
    with _opened(path) as file:
        entry = (file.metadata() or {}).get(_ENTRY)
        arrays = {name: file.get_tensor(name) for name in file.keys()}
    if entry is None:
        return arrays, None
    digest, _, text = entry.partition(" ")
    if digest != digest_of(arrays, text):
        raise CheckpointError(f"'{path}' is damaged: its SHA-256 does not match.")
    return arrays, json.loads(text)


def kinds_of_arrays(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each array in a file, from its header.

    Raises:
        CheckpointError: If it can't be read.
    """
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open a file in safetensors."""
    check_file(path)
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:  # the last: types NumPy lacks
        raise CheckpointError(f"'{path}' can't be read: {error}.") from error


def check_file(path: str) -> None:
    """Raise an error for what is not a file: a program would wait for ever for the other end of a pipe."""
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is not a file.")


def kind_of(array: np.ndarray) -> str:
    """Return the type and the shape of an array as text."""
    return f"{array.dtype} {array.shape}"


def digest_of(arrays: Mapping[str, np.ndarray], metadata: str) -> str:
    """Return the SHA-256 of arrays and metadata."""
    digest = hashlib.sha256(metadata.encode())
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


VERSION = 6
_VERSION = "state_version"


class TrainingState(NamedTuple):
    """Everything that is needed to resume a run as if it had not stopped."""

    arrays: dict[str, np.ndarray]
    """The values of Parameters: of the network, of the optimizer, and the accumulators."""
    metadata: dict[str, Any]
    """Everything else, in types that JSON supports."""


def capture(parameters: Mapping[str, Any], metadata: Mapping[str, Any], *, writes: bool = True) -> TrainingState:
    """Return the state, including that of the random number generators.

    With ``writes=False``, on a rank that does not write it, only what is gathered from all ranks is read.
    """
    arrays = {}
    for name, parameter in parameters.items():
        if writes:
            arrays[name] = as_array(parameter)
        elif hasattr(parameter, "take_part"):
            parameter.take_part()
    return TrainingState(arrays, {**metadata, "random": random_state()})


def restore(state: TrainingState, parameters: Mapping[str, Any], source: str, *, changed: bool = False) -> None:
    """Load the state's arrays into the Parameters, all or none, and set the random number generators.

    Args:
        state (TrainingState): the state to restore.
        parameters (Mapping): the Parameters by owner and name.
        source (str): the path of the state, used in error messages.
        changed (bool): whether the run has other settings than the state: then those of the optimizer are not loaded,
            and what is optional, such as an average of the weights, may be in one of the two only. Default: ``False``.

    Raises:
        CheckpointError: If arrays and Parameters do not match.
    """
    excluded = set()
    if changed:
        unmatched = set(map(_owner_of, state.arrays)) ^ set(map(_owner_of, parameters))
        excluded = {SETTING, *(unmatched - _ALWAYS)}
    arrays = {name: array for name, array in state.arrays.items() if _owner_of(name) not in excluded}
    parameters = {name: parameter for name, parameter in parameters.items() if _owner_of(name) not in excluded}
    expected = {name: kind_of(as_array(parameter)) for name, parameter in parameters.items()}
    differing = differences_of(expected, {name: kind_of(array) for name, array in arrays.items()})
    if differing:
        raise CheckpointError(f"'{source}' belongs to another run: {shortened(differing)}.")
    for name, parameter in parameters.items():
        if hasattr(parameter, "put"):  # sharded over the ranks
            parameter.put(arrays[name])
        else:
            # `assign`, because a compiled graph does not see `set_data`.
            ops.assign(parameter, Tensor(arrays[name]).astype(parameter.dtype))
    set_random_state(state.metadata["random"])


def warn_about_random_layers(network: nn.Cell) -> None:
    """Warn, once for a resumed network, that the state of its random layers is not accessible in MindSpore."""
    names = random_layers(network)
    if names:
        _check.warn(
            f"Random layers restart in a resumed run ({', '.join(names[:3])}), so it is not bit-identical to an "
            "uninterrupted run. With replace_dropout it is.",
        )


def _owner_of(name: str) -> str:
    return name.partition(".")[0]


def write(state: TrainingState, path: str) -> None:
    """Write a state, and read it back to verify it."""
    write_arrays(path, state.arrays, {**state.metadata, _VERSION: VERSION})


def read(path: str) -> TrainingState:
    """Read a state.

    Raises:
        CheckpointError: If the file is not a state, is damaged, or is of another version.
    """
    state = TrainingState(*read_arrays(path))
    if not isinstance(state.metadata, dict) or _VERSION not in state.metadata:
        raise CheckpointError(f"'{path}' is not a training state.")
    if state.metadata[_VERSION] != VERSION:
        raise CheckpointError(f"'{path}' is a training state of another version of ms_accum.")
    return state
