"""The random number generators: their state is saved, restored, and made different on each rank."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .private import primitives_of

# The rank is written above this number of bits of a layer's second seed, and of the seed of MindSpore's generator.
_LAYERS = 16
_GENERATORS = 48
# Layers whose masks are drawn from a state inside MindSpore's kernels.
_RANDOM_LAYERS = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"}
_SEEDS = (("Seed0", "Seed1"), ("seed", "seed2"))


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and MindSpore's generators, in types that JSON supports."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "mindspore": ms.get_rng_state().asnumpy().tolist(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state that `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    ms.set_rng_state(Tensor(np.array(state["mindspore"], np.uint8)))


def is_random_state(state: Any) -> bool:
    """Return whether `set_random_state` can restore it: NumPy and MindSpore would also take what is none."""
    try:
        (version, numbers, gauss), numpy = state["python"], state["numpy"]
        name, keys, position, has_gauss, cached = numpy
        of_mindspore = state["mindspore"]
    except (TypeError, ValueError, KeyError):
        return False
    now = random_state()
    return (
        [version, type(gauss) in (float, type(None))] == [now["python"][0], True]
        and _are_numbers(numbers, len(now["python"][1]), 2**32)
        and numbers[-1] <= len(numbers) - 1
        and name == now["numpy"][0]
        and _are_numbers(keys, len(now["numpy"][1]), 2**32)
        and _are_numbers([position, has_gauss], 2, len(keys) + 1)
        and type(cached) is float
        and _are_numbers(of_mindspore, len(now["mindspore"]), 2**8)
    )


def _are_numbers(values: Any, length: int, below: int) -> bool:
    """Return whether it is a list with so many ints below a number."""
    is_list = isinstance(values, list) and len(values) == length
    return is_list and all(type(value) is int and 0 <= value < below for value in values)


def offset_seeds_by_rank(networks: Iterable[nn.Cell], rank: int) -> None:
    """Make random layers and MindSpore's generator draw different numbers on each rank; a second call changes nothing.

    Ranks that start from the same seed would otherwise drop the same neurons. Layers without a seed already differ.
    MindSpore's global seed, which functions such as `ops.dropout` and later initializations use, is not changed.
    """
    for network in networks:
        for _, cell in network.cells_and_names():
            if hasattr(cell, "offset_seeds_by_rank"):  # a CountedDropout, whose room is above this one
                cell.offset_seeds_by_rank(rank)
            for primitive in primitives_of(cell):
                _offset_seeds(primitive, rank)
    seed, offset = ms.get_rng_state().asnumpy().view(np.uint64).tolist()
    state = np.array([_with_rank(seed, rank, _GENERATORS), offset], np.uint64)
    ms.set_rng_state(Tensor(state.view(np.uint8)))


def _offset_seeds(primitive: Any, rank: int) -> None:
    seeds = getattr(primitive, "attrs", {})
    for first, second in _SEEDS:
        if seeds.get(first) or seeds.get(second):
            primitive.add_prim_attr(second, _with_rank(seeds[second], rank, _LAYERS))


def _with_rank(seed: int, rank: int, bits: int) -> int:
    """Return a seed with the rank above its lower bits."""
    return seed & (1 << bits) - 1 | rank << bits


def random_layers(network: nn.Cell) -> list[str]:
    """Return the names of the network's layers whose random state can't be read from MindSpore."""
    cells = network.cells_and_names()
    return [name for name, cell in cells if type(cell).__name__ in _RANDOM_LAYERS and cell.p != 0]
