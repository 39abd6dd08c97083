"""Does a program survive what it prints?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "ms_accum" / "program"
PROGRAM = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})  # without MindSpore
from streams import lasting_streams

with lasting_streams():
    assert sys.stdout.isatty() is False
    for number in range(20_000):
        print(number, flush=number % 100 == 0)
    print("\u53f7", "error", file=sys.stderr)
    print("done")
sys.exit(7)
"""
BROKEN = PROGRAM.replace("with lasting_streams():", "if True:")


def ended(redirected, program=PROGRAM):
    """Return the exit code and what stderr got."""
    command = ["bash", "-c", f'"{sys.executable}" -c "$1" {redirected}', "bash", program]
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


CLOSED = [">&-", "| head -n 1; exit ${PIPESTATUS[0]}", "> /dev/full"]


@pytest.mark.parametrize("redirected", CLOSED)
def test_whoever_stops_reading_does_not_end_it(redirected):
    assert ended(redirected) == (7, "\\u53f7 error\n")


@pytest.mark.parametrize("redirected", CLOSED)
def test_without_it_that_ends_a_program(redirected):
    assert ended(redirected, BROKEN)[0] != 7


def test_without_stderr_either():
    assert ended(">&- 2>&-") == (7, "")


PASSING = PROGRAM.replace("assert sys.stdout.isatty() is False", "print('before', flush=True)").replace(
    "for number in range(20_000):",
    """import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    print("lost", flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for number in range(2):""",
)


def test_a_disk_that_is_full_for_a_moment_costs_a_moment(tmp_path):
    """A limit of file sizes stands for the disk."""
    assert ended(f"> {tmp_path / 'out'}", PASSING)[0] == 7
    assert (tmp_path / "out").read_text().endswith("0\n1\ndone\n")
