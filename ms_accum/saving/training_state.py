"""Training states: captured from a run, written to one file with one SHA-256, read again, and restored.

The SHA-256 finds damage, and proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Callable, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .. import _check
from ..network.generators import is_random_state, random_layers, random_state, set_random_state
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


def read_arrays(path: str, most: float = math.inf) -> tuple[dict[str, np.ndarray], Any]:
    """Return the arrays and the metadata of a file; the metadata are None in a file that another program wrote.

    Args:
        path (str): the file.
        most (float): the most bytes of a file that is read. Default: no limit.

    Raises:
        CheckpointError: If it can't be read, is damaged, or larger.
    """
    with _opened(path) as file:
        if os.path.getsize(path) > most:
            size = f"{os.path.getsize(path):,} bytes, more than this run's state can have"
            raise CheckpointError(f"'{path}' belongs to another network: it has {size}.")
        entry = (file.metadata() or {}).get(_ENTRY)
        arrays = {name: file.get_tensor(name) for name in file.keys()}
    if entry is None:
        return arrays, None
    digest, _, text = entry.partition(" ")
    if digest != digest_of(arrays, text):
        raise CheckpointError(f"'{path}' is damaged: its SHA-256 does not match.")
    try:
        return arrays, json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, a number of too many digits, too many brackets
        raise CheckpointError(f"'{path}' can't be read: {error}.") from error


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
_OF_THE_REST = 2**27


@dataclass
class Position:
    """The position of a run in its data."""

    first: int | None = None
    """The dataset's number of the run's first epoch, if the dataset numbers epochs."""
    epoch: int = 1
    """The epoch, from 1."""
    batches: int = 0
    """The number of finished batches of the epoch."""
    rows: int = 0
    """The number of finished rows of the epoch."""
    step: int = 0
    """The number of finished windows of the epoch."""
    windows: int = 0
    """The number of finished windows of the run."""
    size: int | None = None
    """The rows of a batch, if the dataset provides this number."""
    total: int | None = None
    """The batches of an epoch, if the dataset provides this number."""
    ranks: int = 1
    """The number of processes that read one batch each."""
    reported: int = 0
    """The last epoch whose end was reported: a tail that is carried is read again, but its epoch does not end again."""
    of_ranks: list[int] | None = None
    """The number of finished batches of each rank, where these may differ: windows end by weight."""
    random: dict[str, Any] | None = None
    """The state of the random number generators at the start of the epoch."""
    evaluated: int | None = None
    """The number of updates at the last evaluation."""

    @property
    def epochs_begun(self) -> int:
        """int, the number of epochs that have begun."""
        return self.epoch if self.batches else self.epoch - 1

    def next_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.epoch, self.batches, self.rows, self.step, self.of_ranks = self.epoch + 1, 0, 0, 0, None


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


def most_bytes(parameters: Mapping[str, Any]) -> int:
    """Return the most bytes that a state with these Parameters can have, with room for what else is in it."""
    return 8 * sum(math.prod(parameter.shape) for parameter in parameters.values()) + _OF_THE_REST


def read(path: str, most: float = math.inf) -> TrainingState:
    """Read a state of at most so many bytes.

    Raises:
        CheckpointError: If the file is not a state, is damaged, larger, or is of another version.
    """
    state = TrainingState(*read_arrays(path, most))
    if not isinstance(state.metadata, dict) or _VERSION not in state.metadata:
        raise CheckpointError(f"'{path}' is not a training state.")
    if state.metadata[_VERSION] != VERSION:
        raise CheckpointError(f"'{path}' is a training state of another version of ms_accum.")
    wrong = [name for name, is_valid in _METADATA.items() if not is_valid(state.metadata.get(name))]
    if wrong:
        raise CheckpointError(f"'{path}' is not a training state of a run: its '{wrong[0]}' is none that a run writes.")
    return state


# What a run writes. Whoever makes up a file can give it the right digest.

_DEEPEST = 50  # brackets in each other, of a setting


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _or_none(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


def _is_position(at: Any) -> bool:
    if not isinstance(at, dict) or at.keys() != _POSITION.keys():
        return False
    if not all(is_valid(at[name]) for name, is_valid in _POSITION.items()):
        return False
    of_ranks = at["of_ranks"] is None or len(at["of_ranks"]) == at["ranks"]
    return of_ranks and at["epoch"] > 0 and at["ranks"] > 0 and at["size"] != 0


def _is_score(best: Any) -> bool:
    """Return whether it is the best score and the name of its state, or None twice."""
    if not isinstance(best, list) or len(best) != 2:
        return False
    score, name = best
    return best == [None, None] or (type(score) is float and not math.isnan(score) and type(name) is str)


def _is_plain(value: Any, levels: int = _DEEPEST) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_plain(each, levels - 1) for each in inside)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))


_KINDS = {
    "int": _is_count,
    "int | None": _or_none(_is_count),
    "list[int] | None": _or_none(_are_counts),
    "dict[str, Any] | None": _or_none(is_random_state),
}
_POSITION = {field.name: _KINDS[str(field.type)] for field in fields(Position)}
_METADATA: dict[str, Callable[[Any], bool]] = {
    "updates": _is_count,
    "skipped": _is_count,
    "updated": lambda value: type(value) is bool,
    "skips": _or_none(_is_count),  # not of an Accumulator
    "micro_batches": _or_none(_is_count),  # not of the driver
    "at": _is_position,
    "random": is_random_state,
    "config": lambda value: isinstance(value, dict) and _is_plain(value),
    "best": _is_score,
}
