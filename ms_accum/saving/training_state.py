"""What is in a training state, and how is it written and read?"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Callable, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from safetensors.numpy import save_file

from .. import _check
from ..network.generators import is_random_state, random_layers, random_state, set_random_state
from ..network.parameters import as_array
from ..training.data import Position
from .checkpoint import differences_of, shortened
from .checkpoint_file import STATE_VERSION as VERSION
from .checkpoint_file import kind_of, open_state, state_digest
from .model_record import CheckpointError

Rule = Callable[[Any], bool]


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
    if not writes:
        for parameter in parameters.values():
            if hasattr(parameter, "take_part"):
                parameter.take_part()
        parameters = {}
    arrays = {name: as_array(parameter) for name, parameter in parameters.items()}
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
    both = [{name.partition(".")[0] for name in named} for named in (state.arrays, parameters)]
    left = {leave_out, *(owner for owner in optional if (owner in both[0]) != (owner in both[1]))}
    arrays, parameters = (
        {name: each for name, each in named.items() if name.partition(".")[0] not in left}
        for named in (state.arrays, parameters)
    )
    expected = {name: kind_of(as_array(parameter)) for name, parameter in parameters.items()}
    wrong = differences_of(expected, {name: kind_of(array) for name, array in arrays.items()})
    if wrong:
        raise CheckpointError(f"'{source}' belongs to another run: {shortened(wrong)}.")
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
    save_file(state.arrays, path, metadata={"facts": facts, "sha256": state_digest(state.arrays, facts)})
    read(path)


def read(path: str) -> TrainingState:
    """Read a state.

    Raises:
        CheckpointError: If the file is not a state, is damaged, or is of another version.
    """
    arrays, facts = open_state(path)
    wrong = wrong_facts(facts)
    if wrong:
        raise CheckpointError(f"'{path}' is not a training state that a run can resume: {shortened(wrong)}.")
    return TrainingState(arrays, facts)


def warn_about_random_layers(network: nn.Cell) -> None:
    """Warn, once for a resumed network, that the state of its random layers is not accessible in MindSpore."""
    names = random_layers(network)
    if names:
        _check.warn(
            f"Random layers restart in a resumed run ({', '.join(names[:3])}), so it is not bit-identical to an "
            "uninterrupted run. With replace_dropout it is.",
        )


def wrong_facts(facts: Mapping[str, Any]) -> list[str]:
    """Return which facts are missing or invalid; a SHA-256 detects damage, but not a crafted file."""
    wrong = [name for name, fits in _RULES.items() if name not in facts or not fits(facts[name])]
    wrong += [name for name, fits in _OPTIONAL.items() if name in facts and not fits(facts[name])]
    if not wrong and not _fits_the_counters(facts["at"], facts["updates"] + facts["skipped"]):
        wrong = ["at"]
    return [_in_words(name, facts) for name in wrong]


def _fits_the_counters(at: Mapping[str, Any], windows: int) -> bool:
    """Return whether a position does not say more than there was."""
    total = at["batches"] if at["total"] is None else at["total"]
    return at["step"] <= at["windows"] <= windows and at["batches"] <= total


def _in_words(name: str, facts: Mapping[str, Any]) -> str:
    return f"'{name}' is wrong" if name in facts else f"'{name}' is missing"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_place(value: Any) -> bool:
    """Return whether a value is a count that MindSpore's data sets, which count in 32 bits, can reach."""
    return _is_count(value) and value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_count(value)


def _is_score(value: Any) -> bool:
    return _is_number(value) and not math.isnan(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def _list_of(*rules: Rule) -> Rule:
    """Return the rule for a list with one element for each of these rules."""
    return lambda value: (
        isinstance(value, list) and len(value) == len(rules) and all(fits(each) for fits, each in zip(rules, value))
    )


def _dict_of(**rules: Rule) -> Rule:
    """Return the rule for a dict with exactly these names, and values that follow their rules."""
    return lambda value: (
        isinstance(value, dict) and set(value) == set(rules) and all(fits(value[name]) for name, fits in rules.items())
    )


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


_POSITION = {
    **{field.name: _or_none(_is_place) for field in fields(Position)},
    **dict.fromkeys(("batches", "step", "held"), _is_place),
    **dict.fromkeys(("rows", "windows"), _is_count),
    **dict.fromkeys(("epoch", "ranks"), lambda value: _is_place(value) and value > 0),
    "random": _or_none(is_random_state),
}
_is_window = _dict_of(
    micro_batches=_is_count,
    loss=_list_of(_is_number, _is_number, _is_count),
    unit=_or_none(_is_number),
    bad=lambda value: isinstance(value, list) and all(map(_is_count, value)),
)
_is_noise = _dict_of(
    every=lambda value: _is_count(value) and value > 0,
    decay=lambda value: _is_number(value) and 0 <= value < 1,
    **dict.fromkeys(("variance", "square"), _is_finite),
    **dict.fromkeys(("samples", "rows", "windows", "seen", "left_out"), _is_count),
    first=_or_none(_list_of(lambda value: _is_number(value) and value >= 0, _is_count)),
)
_RULES: dict[str, Rule] = {
    "version": _is_count,
    "updates": _is_count,
    "skipped": _is_count,
    "updated": lambda value: isinstance(value, bool),
    "skips": _is_count,
    "at": _dict_of(**_POSITION),
    "window": lambda value: _is_window({"bad": [], **value} if isinstance(value, dict) else value),
    "random": is_random_state,
    "noise": _or_none(_is_noise),
    "config": lambda value: isinstance(value, dict),
    "planned": _is_count,
    "best": _list_of(_or_none(_is_score), _or_none(_is_text)),
}
_OPTIONAL: dict[str, Rule] = {
    "scored": lambda value: isinstance(value, bool),
    "kept": lambda value: isinstance(value, list) and all(map(_is_text, value)),
}
