"""`python -m ms_accum.plot` writes its files, or prints a one-line error."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ms_accum._check import one_line as shown
from ms_accum.app import plots as plotting
from ms_accum.app.process import DATA, DISK, OK, USAGE, run
from ms_accum.app.series import read
from programs import ROOT, one_line

pytestmark = pytest.mark.host
PICTURES = ["metrics.png", "metrics.svg"]
_TEXT = '{"update": 1, "loss": 1, "skipped": "abc"}\n'


def plot(*argv):
    return run(plotting.main, plotting.flags(), argv)


@pytest.fixture
def runs(tmp_path):
    """Two folders of runs."""
    for name, loss in (("a", 2.5), ("b", 1.5)):
        (tmp_path / name).mkdir()
        line = {"epoch": 1, "update": 1, "loss": loss, "samples": 8, "seconds": 0.5}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


def files(folder):
    return sorted(os.listdir(folder))


def started(folder, *argv, **modules):
    """Run it as a person does, with other modules in the place of some."""
    for name, text in {"mindspore": "raise AssertionError('it is imported')", **modules}.items():
        (folder / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "ms_accum.plot", *argv]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


# With matplotlib


@pytest.fixture
def matplotlib():
    pytest.importorskip("matplotlib", reason="needs matplotlib")


def test_pictures_and_tables_are_written(runs, capfd, matplotlib):
    assert plot("a/", "b", "a") == OK
    out, err = capfd.readouterr()
    written = ["a/metrics.png", "a/metrics.svg", "a/metrics.csv", "b/metrics.csv"]
    assert (out.splitlines(), err) == ([f"written          {path}" for path in written], "")
    assert files("a") == ["metrics.csv", "metrics.jsonl", *PICTURES] and files("b") == ["metrics.csv", "metrics.jsonl"]
    assert Path("b/metrics.csv").read_text() == "epoch,update,loss,samples,seconds\n1,1,1.5,8,0.5\n"


def test_pictures_are_written_to_output_folder(runs, matplotlib):
    assert plot("a", "--output", "new/folder") == OK
    assert files("new/folder") == PICTURES and files("a") == ["metrics.csv", "metrics.jsonl"]


def test_plot_does_not_import_mindspore(runs, matplotlib):
    done = started(runs, "a")
    assert (done.returncode, done.stderr) == (OK, "") and files(runs / "a")[2:] == PICTURES


@pytest.mark.parametrize("output", ["file", "file/folder"])
def test_unwritable_output_is_one_line_error(runs, capfd, output, matplotlib):
    Path("file").touch()
    assert plot("a", f"--output={output}") == DISK
    assert one_line(capfd.readouterr().err).startswith("'file")


def test_unwritable_table_is_one_line_error(runs, capfd, matplotlib):
    Path("a/metrics.csv").mkdir()
    assert plot("a") == DISK
    assert one_line(capfd.readouterr().err) == "'a/metrics.csv' can't be written: it is a folder"


@pytest.mark.parametrize("name", [*PICTURES, "metrics.csv"])
def test_full_disk_keeps_earlier_files(runs, capfd, name, matplotlib, monkeypatch):
    assert plot("a") == OK
    before = Path("a", name).read_bytes()

    def full(path, content):
        with open(path, "wb") as file:
            file.write(content[:9])
            if path.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    Path("a/metrics.jsonl").write_text('{"update": 1, "loss": 9.0}\n')
    capfd.readouterr()
    assert plot("a") == DISK
    assert name in (error := one_line(capfd.readouterr().err)) and "No space left on device" in error
    assert Path("a", name).read_bytes() == before
    assert not list(Path("a").glob(".saving-*"))


def test_pipe_is_not_replaced(runs, capfd, matplotlib):
    os.mkfifo("a/metrics.csv")
    assert plot("a") == DISK
    assert one_line(capfd.readouterr().err) == "'a/metrics.csv' can't be written: it is not a regular file"
    assert not os.path.isfile("a/metrics.csv")


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.png", "metrics.svg"])
@pytest.mark.parametrize("target", ["precious", "not there"])
def test_link_out_of_folder_is_not_followed(runs, capfd, matplotlib, name, target):
    Path("precious").write_text("mine")
    os.symlink(f"../{target}", f"a/{name}")
    assert plot("a") == DISK
    message = f"'a/{name}' can't be written: it leads to '{runs}/{target}', out of its folder. Remove the link."
    assert one_line(capfd.readouterr().err) == message
    assert Path("precious").read_text() == "mine" and files("a") == sorted(["metrics.jsonl", name])
    assert not os.path.exists("not there")


def test_links_within_folder_and_linked_folder_are_followed(runs, matplotlib):
    os.symlink("a", "linked")
    os.symlink("table", "a/metrics.csv")
    assert plot("linked") == OK
    assert files("a") == sorted([*PICTURES, "metrics.jsonl", "metrics.csv", "table"]) and os.path.islink(
        "a/metrics.csv"
    )


def test_too_many_value_names_are_one_line_error(runs, capfd, matplotlib):
    line = {"update": 1, "loss": 1.0, **{f"n{number}": 1 for number in range(200)}}
    Path("a", "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert plot("a") == DATA
    assert one_line(capfd.readouterr().err) == "'a/metrics.jsonl' has 202 names of values; a table has at most 200"
    assert files("a") == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["n\udcffx", "c\x01tl", "e\x1b[1m"])
def test_unprintable_folder_names_are_escaped(runs, capfd, name, matplotlib):
    os.rename("a", name)
    assert plot(name, "--output=b") == OK
    ElementTree.parse("b/metrics.svg")  # a browser shows it
    assert all(map(str.isprintable, capfd.readouterr().out.splitlines()))
    assert plotting.run_names([read(name)]) == [shown(name)] and shown(name).isprintable()


@pytest.mark.parametrize(
    "lines",
    [
        [{"loss": 1e308}, {"loss": -1e308}],
        [{"loss": 1e-320}, {"loss": 1.0}],
        [{"grad_norm": 5e-324}],
        [{"loss": 1.0, "x\ud800": "\ud800"}],
        [{"lr": 1e300, "samples": 1e-300, "seconds": 1e-310}],
    ],
    ids=("large", "small", "one", "half a character", "others"),
)
def test_extreme_numbers_are_drawn_or_left_out(runs, capfd, lines, matplotlib):
    text = "".join(json.dumps({"update": number, **line}) + "\n" for number, line in enumerate(lines, 1))
    text += json.dumps({"updates": 1, "accuracy": 1e308}) + "\n" + json.dumps({"updates": 2, "accuracy": -1e308}) + "\n"
    Path("a/metrics.jsonl").write_text(text)
    assert plot("a") == OK, capfd.readouterr().err
    assert Path("a/metrics.csv").read_bytes()


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("none", "'none' is not a folder; give the folder of a run"),
        ("a/metrics.jsonl", "'a/metrics.jsonl' is not a folder; give the folder of a run"),
        (".", "'.' has no metrics.jsonl; give the folder of a run"),
        ("bad", "line 2 of 'bad/metrics.jsonl' is damaged"),
        ("gap", "line 1 of 'gap/metrics.jsonl' is empty"),
        ("new", "'new/metrics.jsonl' has no updates"),
        ("text", "line 1 of 'text/metrics.jsonl' is damaged"),
    ],
)
def test_unreadable_metrics_are_one_line_error(runs, capfd, folder, message, matplotlib):
    good = Path("a/metrics.jsonl").read_text()
    for name, text in {"bad": good + good[9:], "gap": "\n" + good, "new": "", "text": _TEXT}.items():
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text(text)
    before = files("a")
    assert plot("a", folder) == DATA
    out, err = capfd.readouterr()
    assert (out, one_line(err)) == ("", message) and files("a") == before


# Without


def test_wrong_flags_exit_with_usage_code(capfd):
    assert plot() == USAGE and "DIR" in one_line(capfd.readouterr().err)


def test_missing_matplotlib_is_one_line_error(runs):
    done = started(runs, "a", matplotlib="raise ImportError")
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert one_line(done.stderr) == "matplotlib is not installed. Run: pip install matplotlib"
    assert files(runs / "a") == ["metrics.jsonl"]


def test_help_lists_every_flag(capfd):
    with pytest.raises(SystemExit):
        plot("--help")
    shown = capfd.readouterr().out
    assert [flag for flag in plotting.flags()._option_string_actions if flag not in shown] == []
