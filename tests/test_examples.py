"""Do the tutorials' two programs run on the public API?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


UPDATES = {
    "tutorial_cells": 11,
    "tutorial_driver": 12,
    "tutorial_functional": 23,
}  # of 45 micro-batches in windows of 4, the Cells without a tail, or of 2


def run(program, folder):
    """Run an example as the README says, but in a folder of its own."""
    command = [sys.executable, "-m", f"examples.{program}", "--epochs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_no_example_is_left_out():
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.py")) == sorted(UPDATES)


@pytest.mark.parametrize(("program", "updates"), UPDATES.items())
def test_example(program, updates, tmp_path):
    done = run(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    accuracy = re.fullmatch(rf"{updates} updates, accuracy (\d+\.\d)%", done.stdout.splitlines()[-1])
    assert 0 < float(accuracy[1]) <= 100
