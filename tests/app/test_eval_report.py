"""eval.py writes a report, and rejects an unusable report path before it evaluates."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

import eval as evaluation
from model_zoo import MLP
from model_zoo.data.classes import class_names
from ms_accum.app import tasks
from ms_accum.app.process import DISK, OK, TRAINING, USAGE
from ms_accum.saving.files import remove_leftovers
from ms_accum.saving.model_file import save_model
from programs import closing, evaluate, one_line, plan, process

LINE = {"epoch": 1, "update": 1, "loss": 2.25, "lr": 0.04, "grad_norm": 0.5, "samples": 128, "seconds": 1.0}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An untrained model without a record."""
    path = tmp_path_factory.mktemp("model") / "plain.ckpt"
    save_model(MLP(), path)
    return path


@pytest.fixture
def model(plain, tmp_path):
    shutil.copy(plain, tmp_path)
    return tmp_path


@pytest.fixture
def unevaluated(monkeypatch):
    """Fail the test if anything is evaluated."""
    monkeypatch.setattr(tasks, "evaluate_together", lambda *arguments: pytest.fail("it was evaluated"))


def rejected(capfd, *argv, code):
    assert evaluate("--ckpt_path=plain.ckpt", *argv) == code
    out, err = capfd.readouterr()
    assert out == ""
    return one_line(err)


def test_report_has_the_printed_figures(model, capfd, monkeypatch):
    calls = []
    once = tasks.evaluate_together
    monkeypatch.setattr(tasks, "evaluate_together", lambda *arguments: calls.append(arguments) or once(*arguments))
    (model / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    assert evaluate("--ckpt_path=plain.ckpt", "--report=a/b") == OK
    out, err = capfd.readouterr()
    _, correct, total = closing(out)
    assert err == "" and plan(out)["report"] == "a/b/report.html" and len(calls) == 1
    text = Path("a/b/report.html").read_text(encoding="utf-8")
    assert f"({correct:,} of {total:,} images)" in text
    assert "mlp on embedded digits, 360 test images of 28x28; plain.ckpt" in text
    matrix = text[text.index('class="matrix"') :]
    assert sum(int(number) for number in re.findall(r'<td class="right"[^>]*>(\d+)<', matrix)) == correct
    assert (
        sum(int(number) for number in re.findall(r'<td class="\w+"[^>]*>(\d+)<', matrix[: matrix.index("</table>")]))
        == 360
    )
    assert text.count("<img") == min(24, total - correct) + 1  # the curves
    assert "has no record" in text
    assert evaluate("--ckpt_path=plain.ckpt", "--report=a/b") == OK  # replaces its own


def test_without_flag_no_report_is_written(model, capfd):
    assert evaluate("--ckpt_path=plain.ckpt") == OK
    without = capfd.readouterr().out
    assert evaluate("--ckpt_path=plain.ckpt", "--report=out") == OK
    lines = capfd.readouterr().out.splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("report ")) == without
    assert sorted(os.listdir()) == ["out", "plain.ckpt"]


@pytest.mark.usefixtures("unevaluated")
def test_file_that_is_not_a_report_is_not_replaced(model, capfd):
    Path("report.html").write_text("mine")
    message = rejected(capfd, "--report=.", code=USAGE)
    assert message == "argument --report: './report.html' exists and is no report of eval.py; give another folder"
    assert Path("report.html").read_text() == "mine"


@pytest.mark.usefixtures("unevaluated")
@pytest.mark.parametrize(
    ("folder", "mentioned"),
    [
        ("plain.ckpt", "'plain.ckpt' can't be made: File exists"),
        ("plain.ckpt/x", "'plain.ckpt/x' can't be made: Not a directory"),
        pytest.param(
            "/proc/self",
            "'/proc/self' can't be written to: ",
            marks=pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder in which nobody can write"),
        ),
    ],
)
def test_unwritable_folder_is_rejected_before_evaluation(folder, mentioned, model, capfd):
    assert rejected(capfd, f"--report={folder}", code=DISK).startswith(f"argument --report: {mentioned}")


def test_without_the_check_the_error_follows_the_evaluation(model, capfd, monkeypatch):
    """Without it the evaluation runs, and the error comes after it."""
    monkeypatch.setattr(evaluation, "report_path", lambda folder: os.path.join(folder, "report.html"))
    assert evaluate("--ckpt_path=plain.ckpt", "--report=none") == DISK
    out, err = capfd.readouterr()
    closing(out)  # the accuracy is not lost
    assert "can't be written" in one_line(err)
    remove_leftovers(".")


@pytest.mark.parametrize(("workers", "code"), [("2", USAGE), ("1", TRAINING)])
def test_several_processes_are_rejected_first(workers, code, model, capfd, monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", workers)
    monkeypatch.setattr(evaluation, "choose_device", lambda device: 1 / 0)  # the first thing that main does
    message = rejected(capfd, "--report=out", code=code)
    refused = message == "argument --report: needs a single process; start eval.py without a launcher"
    assert refused == (code == USAGE) and not os.path.exists("out")
    assert evaluate("--ckpt_path=plain.ckpt") == TRAINING  # without the flag there is no such check


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "there is no metrics.jsonl beside the model, as there is in the folder of a run"),
        ("", "'metrics.jsonl' has no updates"),
        ("<script>\n", "line 1 of 'metrics.jsonl' is damaged"),
    ],
)
def test_unusable_metrics_are_not_an_error(content, why, model):
    if content is not None:
        Path("metrics.jsonl").write_text(content)
    assert evaluation.metrics_beside("plain.ckpt") == why


@pytest.mark.slow
def test_eval_program_writes_report(model):
    done = process("eval.py", "--ckpt_path=plain.ckpt", "--report=我的 报告", cwd=model)
    assert (done.returncode, done.stderr) == (OK, "")
    assert (model / "我的 报告" / "report.html").stat().st_size < 500_000
    environment = {**os.environ, "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2"}
    several = process("eval.py", "--ckpt_path=plain.ckpt", "--report=x", cwd=model, env=environment)
    assert several.returncode == USAGE and one_line(several.stderr).startswith("argument --report: ")


def test_each_class_has_a_name():
    assert class_names("mnist") == class_names("digits") == tuple("0123456789")
    assert [class_names("cifar10")[label] for label in (0, 3, 5, 9)] == ["airplane", "cat", "dog", "truck"]
    assert len(set(class_names("cifar10"))) == 10
