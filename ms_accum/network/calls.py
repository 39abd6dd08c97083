"""Calls inside graphs after which MindSpore frees what was called."""

from __future__ import annotations

from typing import Any, Callable


def call(function: Callable, inputs: tuple, **named: Any) -> Any:
    """Return ``function(*inputs)``.

    In a method, ``self.network(*inputs)`` and ``self.window.operator()`` make MindSpore keep the object, its networks
    and all their graphs until the process ends. In a function that is no method, neither does.
    """
    return function(*inputs, **named)
