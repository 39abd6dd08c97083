"""A program continues if its output can't be written."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ms_accum.app.process import MindSporeLog
from ms_accum.ranks import lifetime
from programs import process

FOLDER = Path(__file__).resolve().parents[2]
PROGRAM = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})  # without MindSpore
from ms_accum.app.process import lasting_streams

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
def test_closed_reader_does_not_end_program(redirected):
    assert ended(redirected) == (7, "\\u53f7 error\n")


@pytest.mark.parametrize("redirected", CLOSED)
def test_closed_reader_ends_program_without_lasting_streams(redirected):
    assert ended(redirected, BROKEN)[0] != 7


def test_closed_stderr_does_not_end_program():
    assert ended(">&- 2>&-") == (7, "")


# MindSpore's log


def diverted(folder, monkeypatch, logged, path):
    """Run a program that logs, to its end; its creator removes the folder afterwards."""
    monkeypatch.setattr(lifetime, "scratch_folder", lambda: folder.mkdir() or str(folder))
    monkeypatch.setattr(atexit, "register", lambda function, *arguments: ended.append((function, arguments)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLOG_")}
    monkeypatch.setattr(os, "environ", environment)
    log, ended = MindSporeLog(), []
    log.divert()
    assert environment["GLOG_log_dir"] == str(folder)
    (folder / "rank_0" / "logs").mkdir(parents=True)
    (folder / "rank_0" / "logs" / "mindspore.log.7").write_text(logged)
    log.path = path
    ((function, arguments),) = ended
    function(*arguments)


@pytest.mark.parametrize("logged", ["a warning\n", ""])
def test_mindspore_log_is_kept_in_file(tmp_path, monkeypatch, logged):
    kept = tmp_path / "mindspore.log"
    diverted(tmp_path / "temporary", monkeypatch, logged, str(kept))
    assert kept.read_text() == logged if logged else not kept.exists()


@pytest.mark.parametrize("path", [None, "/nowhere/mindspore.log"])
def test_unwritable_log_does_not_end_program(tmp_path, monkeypatch, path):
    diverted(tmp_path / "temporary", monkeypatch, "a warning\n", path)
    assert path is None or not os.path.exists(path)


def test_full_temporary_folder_limits_log_to_critical(monkeypatch):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLOG_")}
    monkeypatch.setattr(os, "environ", environment)

    def full():
        raise OSError("No space left on device")

    monkeypatch.setattr(lifetime, "scratch_folder", full)
    MindSporeLog().divert()
    assert environment["GLOG_v"] == "4" and "GLOG_log_dir" not in environment


@pytest.mark.parametrize("name", ["GLOG_v", "MS_ROLE"])
def test_log_settings_of_user_and_launcher_are_kept(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    before = dict(os.environ)
    MindSporeLog().divert()
    assert dict(os.environ) == before


@pytest.mark.slow
def test_mindspore_warnings_are_not_on_terminal(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLOG_")}
    flags = ("--epochs=1", "--model=mlp", "--optimizer=adam", "--output_dir=out")
    done = process("train.py", *flags, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "'FusedSparseAdam' is deprecated" in (tmp_path / "out" / "mindspore.log").read_text()
