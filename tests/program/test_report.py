"""Does the user see what happened?"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import pty
import re
import struct
import termios
import warnings

import pytest

from ms_accum import UpdateRecord
from ms_accum.program.report import Bar, Lines, MetricsFile, progress
from ms_accum.window.callbacks import Callbacks, Facts

NAN = float("nan")


def record(update=1, *, epoch=1, loss=0.5, skipped=False, **others):
    values = {"step": update, "lr": 0.25, "grad_norm": 1.5, "samples": 128, "seconds": 0.125, **others}
    return UpdateRecord(epoch=epoch, update=update, loss=loss, skipped=skipped, **values)


def tell(reporter, *records, updates=None):
    """Do what the driver does."""
    with Callbacks([reporter], Facts()) as calls:
        calls("on_train_begin", planned=updates)
        for told in records:
            calls.step_end(told)


# Lines


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (record(1, loss=2.5), "epoch: 1 step: 1 loss is 2.5"),
        (record(470, epoch=2, step=1, loss=0.0123456789), "epoch: 2 step: 1 loss is 0.01234568"),
        (record(3, loss=1e-9), "epoch: 1 step: 3 loss is 1e-09"),
        (record(2, loss=NAN, skipped=True), "epoch: 1 step: 2 loss is nan (skipped: the gradient is not finite)"),
    ],
)
def test_a_line_is_the_tutorials(told, line, capsys):
    tell(Lines(), told)
    assert capsys.readouterr() == (line + "\n", "")


# The bar


def drawn(*records, updates=None):
    """Return what a Bar draws on a terminal of 100 columns, as the terminal gets it."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
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


def test_progress_is_lines_where_no_terminal_is(capsys):
    assert isinstance(progress(), Lines)


def test_the_bar_shows_how_far_the_run_is():
    text = drawn(*(record(n, epoch=1 + n // 7, loss=1 / n) for n in range(1, 13)), updates=12)
    first, *_, last = frames(text)
    assert first.startswith("0%|") and " 0/12 " in first
    assert last.startswith("100%|█") and " 12/12 " in last and last.endswith("epoch 2, loss 0.0833]")
    assert "update/s" in last and len(last) <= 100 and text.endswith("\n")


def test_the_bar_counts_where_the_end_is_unknown():
    last = frames(drawn(record(1), record(2)))[-1]
    assert last.startswith("2update [") and last.endswith("epoch 1, loss 0.5000]")


def test_a_skipped_window_gets_a_line_above_the_bar():
    text = frames(drawn(record(1), record(2, loss=NAN, skipped=True), record(3), updates=3))
    assert text.count("epoch: 1 step: 2 loss is nan (skipped: the gradient is not finite)") == 1
    assert text[-1].startswith("100%|") and " 3/3 " in text[-1]


def test_a_run_that_breaks_off_leaves_the_bar_where_it_was():
    text = frames(drawn(record(1), updates=4))
    assert text[-1].startswith("25%|") and " 1/4 " in text[-1]


# The metrics file


def rows_of(path):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_metrics_are_one_object_a_window(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tell(MetricsFile(str(path)), record(1), record(2, loss=0.25))
    first = {"epoch": 1, "update": 1, "loss": 0.5, "lr": 0.25, "grad_norm": 1.5, "samples": 128}
    first.update(seconds=0.125, skipped=False)
    assert rows_of(path) == [first, {**first, "update": 2, "loss": 0.25}]


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_json_has_no_nan(tmp_path, value):
    tell(MetricsFile(str(tmp_path / "m")), record(loss=value, grad_norm=value, skipped=True))
    (row,) = rows_of(tmp_path / "m")
    assert row["loss"] is row["grad_norm"] is None and row["skipped"] is True and row["lr"] == 0.25


def test_a_run_that_goes_on_keeps_the_lines_it_goes_on_from(tmp_path):
    path = tmp_path / "m"
    tell(MetricsFile(str(path)), *(record(update) for update in (1, 2, 3)))
    lines = path.read_text().splitlines()
    tell(MetricsFile(str(path), lambda: 2), record(7))
    assert path.read_text().splitlines()[:2] == lines[:2]
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 2, 7]


def test_a_file_that_is_no_text_is_given_up_with_a_warning(tmp_path):
    (tmp_path / "m").write_bytes(b"\xff\xfe\n" * 3)
    with pytest.warns(RuntimeWarning, match="metrics are no longer written"):
        tell(MetricsFile(str(tmp_path / "m"), lambda: 2), record(1))


def test_metrics_can_be_read_while_the_run_goes_on(tmp_path):
    with Callbacks([MetricsFile(str(tmp_path / "m"))], Facts()) as calls:
        calls("on_train_begin", planned=None)
        calls.step_end(record(1))
        assert [row["update"] for row in rows_of(tmp_path / "m")] == [1]


def test_an_old_file_is_replaced(tmp_path):
    for update in (1, 2):
        tell(MetricsFile(str(tmp_path / "m")), record(update))
    assert [row["update"] for row in rows_of(tmp_path / "m")] == [2]


def test_a_file_that_cannot_be_opened_is_one_warning(tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tell(MetricsFile(str(tmp_path / "none" / "m")), record(1), record(2))
    (warning,) = seen
    assert warning.category is RuntimeWarning and "metrics are no longer written to" in str(warning.message)
    assert os.path.join("none", "m") in str(warning.message)


@pytest.fixture
def full(tmp_path):
    """A file on a disk that is full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    os.symlink("/dev/full", tmp_path / "m")
    return str(tmp_path / "m")


def test_a_disk_that_gets_full_is_one_warning(full):
    with pytest.warns(RuntimeWarning, match="no longer written to '.*m': .*No space left") as seen:
        tell(MetricsFile(full), record(1), record(2))
    assert sum(warning.category is RuntimeWarning for warning in seen) == 1


def test_a_disk_that_gets_full_leaves_no_open_file(full):
    before = set(os.listdir("/proc/self/fd"))
    with Callbacks([MetricsFile(full)], Facts()) as calls, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        calls("on_train_begin", planned=None)
        calls.step_end(record(1))
        gc.collect()
    assert [str(w.message) for w in seen if w.category is ResourceWarning] == []
    assert set(os.listdir("/proc/self/fd")) == before
