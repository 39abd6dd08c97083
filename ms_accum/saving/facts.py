"""Which facts of a training state are valid?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Callable

from ..network.generators import is_random_state
from ..window.batches import Position

Rule = Callable[[Any], bool]


def wrong_facts(facts: Mapping[str, Any]) -> list[str]:
    """Return which facts are missing or invalid: a SHA-256 detects damage, not a crafted file."""
    wrong = [name for name, fits in _RULES.items() if name not in facts or not fits(facts[name])]
    if not wrong and not facts["at"]["step"] <= facts["at"]["windows"] <= facts["updates"] + facts["skipped"]:
        wrong = ["at"]
    return [_in_words(name, facts) for name in wrong]


def _in_words(name: str, facts: Mapping[str, Any]) -> str:
    return f"'{name}' is wrong" if name in facts else f"'{name}' is missing"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


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


_POSITION = {
    **{field.name: _or_none(_is_count) for field in fields(Position)},
    **dict.fromkeys(("batches", "rows", "step", "windows", "held"), _is_count),
    **dict.fromkeys(("epoch", "ranks"), lambda value: _is_count(value) and value > 0),
    "random": _or_none(is_random_state),
}
_RULES: dict[str, Rule] = {
    "version": _is_count,
    "updates": _is_count,
    "skipped": _is_count,
    "updated": lambda value: isinstance(value, bool),
    "skips": _is_count,
    "at": _dict_of(**_POSITION),
    "window": _dict_of(
        micro_batches=_is_count,
        loss=_list_of(_is_number, _is_number, _is_count),
        unit=_or_none(_is_number),
    ),
    "random": is_random_state,
    "config": lambda value: isinstance(value, dict),
    "planned": _is_count,
    "best": _list_of(_or_none(_is_score), _or_none(_is_text)),
}
