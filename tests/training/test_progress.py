"""Do lines and the bar show the progress of a run?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from ms_accum import UpdateRecord
from ms_accum.training.callbacks import UNKNOWN, Callbacks, RunArguments
from ms_accum.training.progress import Bar, Lines, progress

NAN = float("nan")


def record(update=1, *, epoch=1, loss=0.5, skipped=False, **others):
    norm = float("nan") if skipped else 1.5
    values = {"step": update, "lr": 0.25, "grad_norm": norm, "samples": 128, "seconds": 0.125, **others}
    return UpdateRecord(epoch=epoch, update=update, loss=loss, skipped=skipped, **values)


def facts_of(**facts):
    numbers = {"batch_num": 1, "cur_step_num": 0, "cur_epoch_num": 1, "epoch_num": 1, "initial_epoch": 0}
    return RunArguments({**numbers, **facts})


def tell(reporter, *records, updates=None, **facts):
    """Do what the driver does."""
    with Callbacks([reporter], facts_of(**facts)) as calls:
        calls("on_train_begin", planned=updates)
        for entry in records:
            calls.step_end(entry)


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
    facts = facts_of(batch_num=count if windows is None else windows)
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


@pytest.mark.parametrize("display", [lambda: Lines(9), Bar])
def test_evaluation_prints_one_line(display, capsys):
    with Callbacks([display()], facts_of()) as calls:
        calls("on_train_begin", planned=2)
        calls.step_end(record(2))
        calls.evaluating(updates=2)("on_eval_end", eval_results={"acc": 0.5, "confused": [1, 2]})
        calls("on_train_end", stopped=False)
    printed = capsys.readouterr().out
    line = "epoch: 1 update: 2 evaluation: acc 0.5, confused [1, 2]\n"
    assert printed.count(line) == 1
    if "\r" not in printed:  # lines: after that of the evaluated window
        assert printed == "epoch: 1 step: 2 loss is 0.5, lr 0.25\n" + line


@pytest.mark.parametrize("display", [Lines, Bar])
def test_stop_by_a_callback_prints_one_line(display, capsys):
    for stopped in (True, False):
        with Callbacks([display()], facts_of(cur_epoch_num=4, epoch_num=7, initial_epoch=2)) as calls:
            calls("on_train_begin", planned=1)
            calls("on_train_end", stopped=stopped)
        assert ("stopped by a callback in epoch 4 of 9\n" in capsys.readouterr().out) is stopped


# The bar


def drawn(*records, updates=None, size=(30, 80), **facts):
    """Return what a Bar draws on a terminal of 80 columns, as the terminal gets it."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
    with os.fdopen(end, "w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        bar = progress()
        assert isinstance(bar, Bar)
        tell(bar, *records, updates=updates, **facts)
    text = b""
    with os.fdopen(screen, "rb", buffering=0) as file, contextlib.suppress(OSError):  # OSError is a terminal's end
        while part := file.read(65536):
            text += part
    return text.decode()


def frames(text):
    """Split what a terminal got into the states of its last line, and the lines above."""
    return [frame.strip() for frame in re.split(r"[\r\n]+", text) if frame.strip()]


def test_bar_shows_progress_of_run():
    text = drawn(*(record(n, epoch=1 + n // 7, loss=1 / n) for n in range(1, 13)), updates=12, epoch_num=2)
    first, *_, last = frames(text)
    assert first.startswith("0%|") and " 0/12 " in first
    assert last.startswith("epoch 2/2 100%|█") and " 12/12 [" in last and len(last) <= 80 and text.endswith("\n")
    assert last.endswith("loss 0.0833, lr 0.25, 1,024 rows/s]")


def test_bar_counts_samples_if_updates_are_unknown():
    last = frames(drawn(record(1), record(2)))[-1]
    assert last.startswith("epoch 1/1 256 samples [") and last.endswith("loss 0.5000, lr 0.25, 1,024 rows/s]")


def test_skipped_window_prints_line_above_bar():
    text = frames(drawn(record(1), record(2, loss=NAN, skipped=True), record(3), updates=3))
    assert text.count("epoch: 1 step: 2 loss is nan (skipped: the gradient is not finite)") == 1
    assert text[-1].startswith("epoch 1/1 100%|") and " 3/3 " in text[-1]


def test_interrupted_run_leaves_bar_unfinished():
    text = frames(drawn(record(1), updates=4))
    assert text[-1].startswith("epoch 1/1  25%|") and " 1/4 " in text[-1]


def in_notebook_without_widgets(monkeypatch):
    """Make this process look like the kernel of a notebook in which ipywidgets are not installed."""
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", ModuleType("ipykernel.zmqshell"))
    shell = SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    for name in ("auto", "autonotebook", "notebook"):
        monkeypatch.delitem(sys.modules, f"tqdm.{name}", raising=False)


def test_notebook_without_widgets_gets_a_bar_and_no_warning(monkeypatch, capsys):
    in_notebook_without_widgets(monkeypatch)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        bar = progress()
        assert isinstance(bar, Bar)
        tell(bar, record(1), record(2), updates=2)
    assert " 2/2 [" in frames(capsys.readouterr().out)[-1] and not warned


def test_bar_of_resumed_run_continues():
    text = frames(drawn(record(371), updates=4320, cur_step_num=370))
    assert text[0].startswith("8%|") and " 370/4690 " in text[0] and " 371/4690 " in text[-1]
    assert frames(drawn(record(371), cur_step_num=370))[-1].startswith("epoch 1/1 128 samples [")
