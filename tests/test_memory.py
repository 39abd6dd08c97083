"""Does the exact mean need no second set of gradients?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARAMETERS = 83  # MB: 21 million in float32


def peak(kind, folder):
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
    command = [sys.executable, str(tests / "peak_memory.py"), kind]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_the_mean_takes_no_more_than_the_sum(tmp_path):
    total = peak("sum", tmp_path)
    assert peak("mean", tmp_path) <= total + 0.75 * PARAMETERS
    assert peak("copied", tmp_path) > total + 1.5 * PARAMETERS
