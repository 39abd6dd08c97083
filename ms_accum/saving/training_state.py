"""Training states: captured from a run, written to a file, read again, and restored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops

from .. import _check
from ..network.generators import random_layers, random_state, set_random_state
from ..network.parameters import as_array
from .arrays import CheckpointError, differences_of, kind_of, read_arrays, shortened, write_arrays

VERSION = 6
_VERSION = "state_version"


class TrainingState(NamedTuple):
    """Everything that is needed to resume a run as if it had not stopped."""

    arrays: dict[str, np.ndarray]
    """The values of Parameters: of the network, of the optimizer, and the accumulators."""
    facts: dict[str, Any]
    """Everything else, in types that JSON supports."""


def capture(parameters: Mapping[str, Any], facts: Mapping[str, Any], *, writes: bool = True) -> TrainingState:
    """Return the state, including that of the random number generators.

    With ``writes=False``, on a rank that does not write it, only what is gathered from all ranks is read.
    """
    arrays = {}
    for name, parameter in parameters.items():
        if writes:
            arrays[name] = as_array(parameter)
        elif hasattr(parameter, "take_part"):
            parameter.take_part()
    return TrainingState(arrays, {**facts, "random": random_state()})


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
    unmatched = set(map(_owner_of, state.arrays)) ^ set(map(_owner_of, parameters))
    excluded = {leave_out, *unmatched.intersection(optional)}
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
    set_random_state(state.facts["random"])


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
    write_arrays(path, state.arrays, {**state.facts, _VERSION: VERSION})


def read(path: str) -> TrainingState:
    """Read a state.

    Raises:
        CheckpointError: If the file is not a state, is damaged, or is of another version.
    """
    state = TrainingState(*read_arrays(path))
    if not isinstance(state.facts, dict) or _VERSION not in state.facts:
        raise CheckpointError(f"'{path}' is not a training state.")
    if state.facts[_VERSION] != VERSION:
        raise CheckpointError(f"'{path}' is a training state of another version of ms_accum.")
    return state
