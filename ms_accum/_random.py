"""What state are the random number generators in?"""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def random_state() -> dict[str, Any]:
    """Return that of Python's and NumPy's, of what JSON knows."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {"python": [version, list(numbers), gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def set_random_state(state: dict[str, Any]) -> None:
    """Put them into a state that was returned before."""
    _set(random, np.random, state)


def is_random_state(state: Any) -> bool:
    """Return whether they can be put into it."""
    try:
        _set(random.Random(), np.random.RandomState(), state)
        return 0 <= state["numpy"][2] <= len(state["numpy"][1])  # NumPy would read beyond its numbers
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return False


def _set(python: Any, numpy: Any, state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    python.setstate((version, tuple(numbers), gauss))
    numpy.set_state(tuple(state["numpy"]))
