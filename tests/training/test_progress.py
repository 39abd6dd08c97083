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
from mindspore.train import Callback, EarlyStopping, History

from ms_accum.training.callbacks import UNKNOWN, Callbacks, Facts
from ms_accum.training.progress import Bar, Lines, Stop, progress
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
    facts = Facts(batch_num=count if windows is None else windows, cur_epoch_num=1)
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


def test_bar_of_resumed_run_continues():
    text = frames(drawn(record(371), updates=4320, cur_step_num=370))
    assert text[0].startswith("8%|") and " 370/4690 " in text[0] and " 371/4690 " in text[-1]
    assert frames(drawn(record(371), cur_step_num=370))[-1].startswith("epoch 1/1 371 updates [")


def test_remaining_time_of_resumed_run_counts_only_its_windows(capsys):
    bar = Bar(80)
    with Callbacks([bar], Facts(cur_step_num=370)) as calls:
        calls("on_train_begin", planned=4320)
        calls.step_end(record(371))
        known = bar._bar.format_dict
    assert (known["initial"], known["n"], known["total"]) == (370, 371, 4690)  # tqdm divides n - initial by the time


# A run that a callback stops


class Plateau(Callback):
    """Stops after the epoch."""

    def on_train_epoch_end(self, run_context):
        run_context.request_stop()


def run_shown(display, stopper, accuracies, *, epochs=9, until=None):
    """Train one window per epoch with these evaluations, as the driver does, until the run is stopped.

    After epoch `until` a callback of another rank stops it.
    """
    callbacks = [display, *([stopper] if stopper else [])]
    with Callbacks(callbacks, Facts(epoch_num=epochs, train_network=None)) as calls:
        calls("on_train_begin", planned=epochs)
        for epoch, accuracy in enumerate(accuracies, 1):
            calls("on_train_epoch_begin", cur_epoch_num=epoch)
            calls.step_end(record(12 * epoch, epoch=epoch, step=12))
            calls.epoch_end(None if accuracy is None else {"accuracy": accuracy, "eval_loss": 1 - accuracy})
            if calls.stopping or epoch == until:
                break
        calls("on_train_end", stopped=calls.stopping or until is not None)


def last_line(capsys, *arguments, display=Lines, **options):
    run_shown(display(), *arguments, **options)
    return capsys.readouterr().out.rstrip("\n").rpartition("\n")[2]


FALLS = [0.25, 0.5, 0.75, 0.625, 0.625, 0.875]
STOPPED = "stopped early by EarlyStopping: epoch 5 of 9, update 60; best accuracy: 0.75 in epoch 3"


@pytest.mark.parametrize("display", [Lines, lambda: Bar(80)])
def test_line_about_early_stop(display, capsys):
    assert last_line(capsys, EarlyStopping("accuracy", patience=2), FALLS, display=display) == STOPPED


def test_wrong_best_epoch_is_detected(capsys, monkeypatch):
    note = Stop.epoch_begin
    monkeypatch.setattr(Stop, "epoch_begin", lambda self, args: self._best.clear() or note(self, args))
    assert last_line(capsys, EarlyStopping("accuracy", patience=2), FALLS) != STOPPED


def test_line_about_early_stop_counts_epochs_without_evaluation(capsys):
    accuracies = [None, 0.75, None, 0.625, None, 0.5]
    line = last_line(capsys, EarlyStopping("accuracy", patience=2), accuracies)
    assert line == "stopped early by EarlyStopping: epoch 6 of 9, update 72; best accuracy: 0.75 in epoch 2"


def test_line_about_stop_in_last_epoch(capsys):
    line = last_line(capsys, EarlyStopping("accuracy", patience=2), FALLS, epochs=5)
    assert line == "stopped by EarlyStopping: epoch 5 of 5, update 60; best accuracy: 0.75 in epoch 3"


def test_line_about_stop_without_finite_value_has_no_best_epoch(capsys):
    line = last_line(capsys, EarlyStopping("accuracy", patience=1), [NAN])
    assert line == "stopped early by EarlyStopping: epoch 1 of 9, update 12"


def test_line_about_stop_by_own_callback_has_lowest_loss(capsys):
    class Third(Plateau):
        def on_train_epoch_end(self, run_context):
            if run_context.original_args().cur_epoch_num == 3:
                super().on_train_epoch_end(run_context)

    line = last_line(capsys, Third(), [0.25, 0.75, 0.5])
    assert line == "stopped early by Third: epoch 3 of 9, update 36; lowest eval_loss: 0.25 in epoch 2"
    assert last_line(capsys, Plateau(), [None]) == "stopped early by Plateau: epoch 1 of 9, update 12"


def test_line_about_stop_by_other_rank(capsys):
    line = last_line(capsys, None, [0.5, 0.75], until=2)
    assert line == (
        "stopped early by a callback of another rank: epoch 2 of 9, update 24; lowest eval_loss: 0.25 in epoch 2"
    )


def test_no_line_about_run_that_was_not_stopped(capsys):
    for callback in (None, History(), EarlyStopping("accuracy", patience=9)):
        assert last_line(capsys, callback, FALLS, epochs=6).startswith("epoch: 6 evaluation: ")


def test_second_run_with_same_display_forgets_the_first(capsys):
    display = Lines()
    run_shown(display, Plateau(), [0.75])
    run_shown(display, Plateau(), [0.5])
    assert capsys.readouterr().out.endswith("lowest eval_loss: 0.5 in epoch 1\n")
