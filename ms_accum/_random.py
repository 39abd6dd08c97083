"""What state are the random number generators in?"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

# Each rank's own part of a layer's second seed, and of the seed of MindSpore's generator.
_LAYERS, _GENERATORS = 16, 48
_SEEDS = (("Seed0", "Seed1"), ("seed", "seed2"))


def random_state() -> dict[str, Any]:
    """Return that of Python's, NumPy's and MindSpore's, of what JSON knows."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "mindspore": ms.get_rng_state().asnumpy().tolist(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put them into a state that was returned before."""
    _set(random, np.random, state)
    ms.set_rng_state(Tensor(np.array(state["mindspore"], np.uint8)))


def draw_apart(networks: Iterable[nn.Cell], rank: int) -> None:
    """Let random layers, and MindSpore's generator, draw numbers of their own on this rank; twice is once.

    Ranks that begin with one seed would drop the same neurons. Layers without a seed do not; functions, such as
    `ops.dropout`, take MindSpore's global seed, from which whatever is made next comes too: that stays.
    """
    for network in networks:
        for _, cell in network.cells_and_names():
            for primitive in cell._primitives.values():
                _draw_apart(primitive, rank)
    seed, offset = ms.get_rng_state().asnumpy().view(np.uint64).tolist()
    own = np.array([_own(seed, rank, _GENERATORS), offset], np.uint64)
    ms.set_rng_state(Tensor(own.view(np.uint8)))


def _draw_apart(primitive: Any, rank: int) -> None:
    seeds = getattr(primitive, "attrs", {})
    for first, second in _SEEDS:
        if seeds.get(first) or seeds.get(second):
            primitive.add_prim_attr(second, _own(seeds[second], rank, _LAYERS))


def _own(seed: int, rank: int, bits: int) -> int:
    """Return a seed with this rank's number above its lower bits."""
    return seed & (1 << bits) - 1 | rank << bits


def is_random_state(state: Any) -> bool:
    """Return whether they can be put into it."""
    try:
        _set(random.Random(), np.random.RandomState(), state)
        np.frombuffer(bytes([*state["mindspore"]]), np.uint64).reshape(2)
        return 0 <= state["numpy"][2] <= len(state["numpy"][1])  # NumPy would read beyond its numbers
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return False


def _set(python: Any, numpy: Any, state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    python.setstate((version, tuple(numbers), gauss))
    numpy.set_state(tuple(state["numpy"]))
