"""Which settings does an optimizer have?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from . import checks
from .parameters import as_array, digest_of, without

# What every Cell has is no setting, what it was made with may have changed since, and a rank's number may differ.
_OF_EVERY_CELL = {*vars(nn.Cell()), "cell_type"}
_BEFORE, _RANK = ("_", "init_"), "rank"
_LONG = 64


def settings_of(optimizer: Any) -> list[Any]:
    """Return the optimizer's Parameters that are settings: neither trained weights nor its state."""
    inner = checks.inner_of(optimizer)
    named = [getattr(inner, name, None) for name in ("learning_rate", "momentum")]
    held = parameters_in([*named, list(getattr(inner, "param_groups", ()))])
    unique = {id(parameter): parameter for parameter in held}.values()
    return without(unique, [*inner.parameters, *optimizer.parameters])


def parameters_in(value: Any) -> Iterator[Any]:
    """Yield the Parameters in nested containers, Cells and schedulers."""
    if isinstance(value, Parameter):
        yield value
    elif isinstance(value, nn.Cell):
        yield from value.get_parameters()
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from parameters_in(each)
    elif hasattr(value, "last_epoch"):  # a scheduler, which is not a Cell
        yield from parameters_in({name: each for name, each in vars(value).items() if name != "optimizer"})


def rates_of(optimizer: Any) -> dict[str, str]:
    """Return the current values of what the learning rate depends on, by name. Nothing of the optimizer is run."""
    inner = checks.inner_of(optimizer)
    held = {f"'{each.name}'": each for each in settings_of(optimizer)}
    step = getattr(inner, "global_step", None)
    if isinstance(step, Parameter):
        held["'global_step'"] = step
    return {name: _shown(as_array(each)) for name, each in held.items()} | _plain_rates(inner)


def _plain_rates(optimizer: Any) -> dict[str, str]:
    """Return the rates of parameter groups that are numbers instead of Parameters."""
    groups = enumerate(getattr(optimizer, "param_groups", ()))
    rates = {f"'lr' of group {number}": group.get("lr_float", group.get("lr")) for number, group in groups}
    return {name: repr(rate) for name, rate in rates.items() if isinstance(rate, float)}


def hyper_parameters(optimizer: Any, scheduler: Any = None) -> dict[str, str]:
    """Return the optimizer's settings, with those of its schedules and its scheduler, by name, as texts."""
    inner = checks.inner_of(optimizer)
    found: dict[str, str] = {}
    cells = inner.cells_and_names() if isinstance(inner, nn.Cell) else [("", inner)]
    for path, cell in cells:
        own = {name: each for name, each in vars(cell).items() if name not in _OF_EVERY_CELL}
        found |= _plain(own, f"{path}." if path else "")
    if scheduler is not None:
        own = {name: each for name, each in vars(scheduler).items() if name != "optimizer"}
        found |= {"scheduler": type(scheduler).__name__, **_plain(own, "scheduler.")}
    return found


def _plain(held: Mapping[str, Any], before: str) -> dict[str, str]:
    """Return the values that are numbers, words, or containers of these."""
    found = {f"{before}{name}": _text(each) for name, each in held.items() if not name.startswith(_BEFORE)}
    return {name: text for name, text in found.items() if text is not None and _RANK not in name}


def _text(value: Any) -> str | None:
    """Return a value as text; None if it is not a setting, such as an operator or a Parameter."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if isinstance(value, (Parameter, nn.Cell)):
        return None
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _shown(as_array(value) if isinstance(value, Tensor) else np.asarray(value))
    if isinstance(value, Mapping):
        named = [f"{name}: {text}" for name, each in value.items() if (text := _text(each)) is not None]
        return f"{{{', '.join(named)}}}" if named else None
    if isinstance(value, (list, tuple)):
        texts = [text for text in map(_text, value) if text is not None]
        return f"[{', '.join(texts)}]" if texts else None
    return None


def _shown(array: np.ndarray) -> str:
    """Return an array as text, exactly; a long one by its digest."""
    if array.size == 1:
        return str(array.ravel()[0])  # 0.1 in its own type, of which a Python float shows more digits
    if array.size <= _LONG:
        return f"[{', '.join(map(str, array.ravel()))}]"
    return f"{array.size:,} numbers with the digest {digest_of([array])[:12]}"
