"""The number of functions, files and classes that a micro-batch passes through."""

from __future__ import annotations

import pytest

from walk import THIRD_END, WAYS, walk

# What is allowed at most. `python tests/walk.py --list` shows what it is, and where.
BOUNDS = {
    "driver": {"stops": 48, "files": 17, "rooms": 39, "classes": 21},
    "accumulator": {"stops": 21, "files": 6, "rooms": 14, "classes": 6},
    "step": {"stops": 25, "files": 9, "rooms": 18, "classes": 9},
}

pytestmark = pytest.mark.host


@pytest.mark.parametrize("way", WAYS)
def test_call_path_is_short(way):
    counts = walk(way).counts
    too_many = {name: count for name, count in counts.items() if count > BOUNDS[way][name]}
    assert not too_many, f"{way} has {too_many}, more than {BOUNDS[way]}: see python tests/walk.py {way} --list"


@pytest.mark.parametrize("way", WAYS)
def test_call_path_is_deterministic(way):
    first, second = walk(way), walk(way)
    assert first.calls == second.calls and first.classes == second.classes


@pytest.mark.parametrize("way", WAYS)
def test_call_path_inside_window_is_shorter(way):
    assert 0 < len(walk(way, watched=THIRD_END - 1).stops) < len(walk(way).stops)
