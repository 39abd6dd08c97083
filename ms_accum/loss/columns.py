"""How many columns does a loss take?"""

from __future__ import annotations

import inspect
from typing import Any

from mindspore import nn

from .. import _check

_MANY = 10**6


def taken(loss_fn: Any) -> range:
    """Return the allowed numbers of a dataset's columns: one for the network, and those that the loss takes."""
    if loss_fn is None:
        return range(1, _MANY)
    try:
        parameters = inspect.signature(
            loss_fn.construct if isinstance(loss_fn, nn.Cell) else loss_fn
        ).parameters.values()
    except (TypeError, ValueError):
        return range(2, _MANY)
    if any(each.kind == each.VAR_POSITIONAL for each in parameters):
        return range(2, _MANY)
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = max(2, sum(each.default is each.empty for each in places))  # arguments with defaults are not columns
    return range(needed, needed + 1)


def check(owner: str, micro_batch: tuple, allowed: range) -> None:
    """Raise an error if a micro-batch has another number of columns."""
    if len(micro_batch) not in allowed:
        most = "or more" if allowed.stop == _MANY else ""
        rule = (
            f"one that yields {allowed.start} {most}".rstrip()
            + " columns, data and what 'loss_fn' takes beside the output"
        )
        _check.refuse(ValueError, owner, "train_dataset", rule, f"{len(micro_batch)}")
