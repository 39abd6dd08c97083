"""A program ends with an exit code, and with one line if it fails."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

import pytest

from ms_accum.app import process
from ms_accum.app.flags import Parser, whole
from ms_accum.app.process import (
    CHECKPOINT,
    DATA,
    DISK,
    INTERRUPTED,
    OK,
    TRAINING,
    USAGE,
    Failure,
    exit_code,
    run,
    without_native_log,
)
from programs import one_line, raising, refused
from programs import process as program


def parser():
    parser = Parser("A program for the tests.")
    parser.add_program()
    parser.add_argument("--epochs", type=whole(1), default=3)
    return parser


# Exit codes


def test_exit_codes_are_the_documented_ones():
    assert (OK, TRAINING, USAGE, DATA, CHECKPOINT, DISK, INTERRUPTED) == (0, 1, 2, 3, 4, 5, 130)


def test_successful_program_exits_with_0(capfd):
    seen = []
    assert run(seen.append, parser(), ["--epochs", "7"]) == OK
    assert seen[0].epochs == 7 and capfd.readouterr() == ("", "")


def test_command_line_is_parsed_by_default(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["program.py", "--epochs", "8"])
    assert run(seen.append, parser()) == OK and seen[0].epochs == 8


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Failure("no such data", DATA), DATA, "no such data"),
        (RuntimeError("diverged"), TRAINING, "diverged"),
        (ValueError("\n  first\nsecond\n"), TRAINING, "first"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
    ],
)
def test_error_becomes_one_line_and_exit_code(error, code, line, capfd):
    assert refused(parser(), [], capfd, main=raising(error)) == (code, line)


def test_error_without_text_shows_its_type(capfd):
    assert "MemoryError" in refused(parser(), [], capfd, main=raising(MemoryError()))[1]


def test_debug_shows_traceback_and_keeps_exit_code(capfd):
    assert run(raising(Failure("broken", DATA)), parser(), ["--debug"]) == DATA
    err = capfd.readouterr().err
    assert err.startswith("Traceback") and err.endswith("\nerror: broken\n")


def test_warning_is_one_line():
    def warn(arguments):
        shown.append(warnings.formatwarning("two\n lines", UserWarning, "file.py", 7, "its_line()"))

    shown, before = [], warnings.formatwarning
    assert run(warn, parser(), []) == OK
    assert shown == ["warning: two lines\n"] and warnings.formatwarning is before


def test_exit_code_converts_only_its_kinds():
    with pytest.raises(Failure, match="gone") as failure, exit_code(DATA, OSError):
        raise FileNotFoundError("gone")
    assert failure.value.code == DATA
    with pytest.raises(KeyError), exit_code(DATA, OSError, ValueError):
        raise KeyError("other")


def test_the_innermost_exit_code_wins():
    with pytest.raises(Failure) as failure, exit_code(TRAINING, Exception), exit_code(DISK, OSError):
        raise OSError("full")
    assert failure.value.code == DISK


# The first line


@pytest.mark.parametrize(
    ("terminal", "argv", "message"),
    [
        (True, [], "ms_accum         1.2.3, starting MindSpore ...\n"),
        (False, [], ""),
        (True, ["--epochs=0"], ""),
    ],
)
def test_terminal_shows_line_before_mindspore_import(terminal, argv, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program.py", *argv])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(process, "block_signals", lambda: None)
    with pytest.raises(SystemExit) if argv else contextlib.nullcontext():
        process.begin(parser(), "1.2.3")
    assert capsys.readouterr().out == message


# What libraries write themselves


def test_native_log_is_lost_with_an_error_and_kept_without(capfd):
    with pytest.raises(ValueError, match="mine"), without_native_log():
        os.write(2, b"[CRITICAL] a block of C++\n")
        raise ValueError("mine")
    with without_native_log():
        os.write(2, b"a warning\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "a warning\nafter\n"


def test_missing_device_is_one_line_on_stderr(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLOG_")}  # as a user's
    done = program("train.py", "--device_target=Ascend", cwd=tmp_path, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert one_line(done.stderr) == "argument --device_target: Ascend is not available here, CPU is"
