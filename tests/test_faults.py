"""The faults of `faults.py` can still be planted."""

from __future__ import annotations

from pathlib import Path

import ms_accum
from faults import FAULTS


def test_each_fault_is_a_change_of_one_place():
    sources = {
        fault.file: (Path(ms_accum.__file__).parent / fault.file).read_text("utf-8") for fault in FAULTS.values()
    }
    places = {name: sources[fault.file].count(fault.old) for name, fault in FAULTS.items()}
    assert {name: count for name, count in places.items() if count != 1} == {}
