"""The faults of `faults.py` can still be planted, and the tests that find them are there."""

from __future__ import annotations

import re
from pathlib import Path

from faults import FAULTS, ROOT

TESTS = Path(__file__).parent


def test_each_fault_is_a_change_of_one_place():
    sources = {fault.file: fault.path_in(ROOT).read_text("utf-8") for fault in FAULTS.values()}
    places = {name: sources[fault.file].count(fault.old) for name, fault in FAULTS.items()}
    assert {name: count for name, count in places.items() if count != 1} == {}


def is_there(test):
    """Return whether a test, `FILE` or `FILE::NAME[PARAMETERS]` below tests/, has a file with such a function."""
    file, _, name = test.partition("::")
    function = name.partition("[")[0]
    path = TESTS / file
    return path.exists() and (not name or bool(re.search(rf"^def {function}\(", path.read_text("utf-8"), re.MULTILINE)))


def test_tests_of_each_fault_are_there():
    missing = {name: [test for test in fault.tests.split() if not is_there(test)] for name, fault in FAULTS.items()}
    assert {name: tests for name, tests in missing.items() if tests} == {}
    assert is_there(f"{Path(__file__).name}::test_each_fault_is_a_change_of_one_place[eager]")
    assert not is_there(f"{Path(__file__).name}::test_each_fault") and not is_there("test_nothing.py")
