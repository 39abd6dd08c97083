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
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
