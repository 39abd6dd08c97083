"""Do lines and the bar show the progress of a run?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios

import pytest

from ms_accum.ranks.heartbeat import COLUMNS
from ms_accum.training.callbacks import UNKNOWN, Callbacks, Facts
from ms_accum.training.progress import Bar, Lines, progress
from update_records import record, tell

NAN = float("nan")


# Lines


@pytest.mark.parametrize(
    ("window", "line"),
    [
        (record(1, loss=2.5), "epoch: 1 step: 1 loss is 2.5, lr 0.25"),
        (record(470, epoch=2, step=1, loss=0.0123456789), "epoch: 2 step: 1 loss is 0.01234568, lr 0.25"),
        (record(3, loss=1e-9, lr=NAN), "epoch: 1 step: 3 loss is 1e-09"),
        (
            record(2, loss=NAN, skipped=True),
            "epoch: 1 step: 2 loss is nan (skipped: the gradient is not finite), lr 0.25",
        ),
    ],
)
def test_line_has_form_of_tutorial(window, line, capsys):
    tell(Lines(), window)
    assert capsys.readouterr() == (line + "\n", "")


def printed(count, capsys, windows=None, **options):
    """Return the steps of which an epoch of this many windows prints a line."""
    facts = Facts(batch_num=count if windows is None else windows)
    with Callbacks([Lines(**options)], facts) as calls:
        for step in range(1, count + 1):
            calls.step_end(record(step))
        calls.epoch_end(None)
    return [int(line.split()[3]) for line in capsys.readouterr().out.splitlines()]


def test_an_epoch_has_about_20_lines(capsys):
    assert printed(12, capsys) == list(range(1, 13))
    assert printed(469, capsys) == [*range(24, 469, 24), 469]
    assert printed(45, capsys, windows=UNKNOWN) == [20, 40, 45]


def test_lines_every_n_windows(capsys):
    assert printed(10, capsys, every=4) == [4, 8, 10]
    assert printed(4, capsys, every=9) == [4]
    assert printed(8, capsys, every=4) == [4, 8]  # the last one is not printed twice


def test_speed_excludes_compilation(capsys):
    seconds = [9.0, 0.125, 7.0, 0.125, 0.125]
    tell(Lines(1), *(record(step, seconds=duration) for step, duration in enumerate(seconds, 1)))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "rows/s" not in first and last.endswith(", lr 0.25, 1,024 rows/s")


def test_evaluation_prints_one_line(capsys):
    with Callbacks([Lines()], Facts(cur_epoch_num=3)) as calls:
        calls.epoch_end({"acc": 0.5, "confused": [1, 2]})
    assert capsys.readouterr().out == "epoch: 3 evaluation: acc 0.5, confused [1, 2]\n"


def test_bar_if_launcher_has_terminal(monkeypatch):
    monkeypatch.setenv(COLUMNS, "75")
    assert isinstance(progress(), Bar)
    for value in ("", "0", "x", "-3"):
        monkeypatch.setenv(COLUMNS, value)
        assert isinstance(progress(), Lines)


# The bar


def drawn(*records, updates=None, size=(30, 80)):
    """Return what a Bar draws on a terminal of 80 columns, as the terminal gets it."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
    with os.fdopen(end, "w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        bar = progress()
        assert isinstance(bar, Bar)
        tell(bar, *records, updates=updates)
    text = b""
    with os.fdopen(screen, "rb", buffering=0) as file, contextlib.suppress(OSError):  # OSError is a terminal's end
        while part := file.read(65536):
            text += part
    return text.decode()


def frames(text):
    """Split what a terminal got into the states of its last line, and the lines above."""
    return [frame.strip() for frame in re.split(r"[\r\n]+", text) if frame.strip()]


def test_progress_prints_lines_without_terminal(capsys):
    assert isinstance(progress(), Lines)


def test_bar_shows_progress_of_run():
    text = drawn(*(record(n, epoch=1 + n // 7, loss=1 / n) for n in range(1, 13)), updates=12)
    first, *_, last = frames(text)
    assert first.startswith("0%|") and " 0/12 " in first
    assert last.startswith("epoch 2/2 100%|█") and " 12/12 [" in last and len(last) <= 80 and text.endswith("\n")
    assert last.endswith("loss 0.0833, lr 0.25, 1,024 rows/s]")


@pytest.mark.parametrize("columns", [0, 80])
def test_bar_on_terminal_that_reports_no_height(columns):
    last = frames(drawn(record(1), record(2), updates=2, size=(0, columns)))[-1]
    assert " 2/2 [" in last and len(last) <= 80


def test_output_after_run_is_below_bar(capsys):
    bar = Bar(80)
    with Callbacks([bar], Facts()) as calls:
        calls("on_train_begin", planned=1)
        calls.step_end(record(1))
        calls("on_train_end")
        print("saved")
    assert capsys.readouterr().out.endswith("\nsaved\n")


def test_bar_counts_updates_if_total_is_unknown():
    last = frames(drawn(record(1), record(2)))[-1]
    assert last.startswith("epoch 1/1 2 updates [") and last.endswith("loss 0.5000, lr 0.25, 1,024 rows/s]")


def test_skipped_window_prints_line_above_bar():
    text = frames(drawn(record(1), record(2, loss=NAN, skipped=True), record(3), updates=3))
    assert text.count("epoch: 1 step: 2 loss is nan (skipped: the gradient is not finite)") == 1
    assert text[-1].startswith("epoch 1/1 100%|") and " 3/3 " in text[-1]


def test_interrupted_run_leaves_bar_unfinished():
    text = frames(drawn(record(1), updates=4))
    assert text[-1].startswith("epoch 1/1  25%|") and " 1/4 " in text[-1]
