"""The plot of runs, and the report of a model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from programs import plot
from programs.command import run
from programs.tasks import write_report
from running import error_of

pytestmark = pytest.mark.usefixtures("eager")
PNG = b"\x89PNG"
LINES = [
    {"epoch": 1, "update": 1, "loss": 2.0, "lr": 0.1, "grad_norm": 3.0},
    {"epoch": 1, "update": 2, "loss": None, "lr": 0.1, "grad_norm": None},
    {"epoch": 1, "updates": 2, "acc": 0.5, "eval_loss": 1.5},
    {"epoch": 1, "update": 3, "loss": 1.0, "lr": 0.05, "grad_norm": 2.0},
]


def test_plot_draws_runs(monkeypatch, capsys):
    from matplotlib.axes import Axes

    drawn, draws = [], Axes.plot

    def plot_points(axes, updates, values, *how, **options):
        drawn.append((updates, values))
        return draws(axes, updates, values, *how, **options)

    monkeypatch.setattr(Axes, "plot", plot_points)
    lines = "".join(json.dumps(line) + "\n" for line in LINES) + '{"update": 4, "lo'
    for folder in ("a", "b"):
        os.mkdir(folder)
        Path(folder, "metrics.jsonl").write_text(lines)
    assert run(plot.main, ["a", "b"]) == 0
    assert Path("a/metrics.png").read_bytes()[:4] == PNG
    loss, rate, norm = ([1, 3], [2.0, 1.0]), ([1, 2, 3], [0.1, 0.1, 0.05]), ([1, 3], [3.0, 2.0])
    assert sorted(drawn) == sorted([loss, ([2], [1.5]), rate, norm, ([2], [0.5])] * 2)
    assert run(plot.main, ["a", "--output=x.svg"]) == 0 and "<svg" in Path("x.svg").read_text()
    capsys.readouterr()
    assert run(plot.main, ["none"]) == 1
    assert error_of(capsys) == "'none/metrics.jsonl': No such file or directory"


@pytest.mark.parametrize(
    ("lines", "panels"),
    [
        (LINES, ["loss", "learning rate", "norm of the gradient", "accuracy"]),
        (LINES[:2], ["loss", "norm of the gradient"]),
        ([], ["loss"]),
        ([{"update": 1, "loss": [1]}], ["loss"]),
    ],
)
def test_what_stays_the_same_has_no_panel(lines, panels, monkeypatch):
    from matplotlib.axes import Axes

    seen = []
    monkeypatch.setattr(Axes, "set_ylabel", lambda axes, label: seen.append(label))
    Path("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(plot.main, ["."]) == 0
    assert seen == panels


@pytest.mark.parametrize("line", ["no metrics", "3", "[1]", "null", "[" * 9999])
def test_line_that_is_no_object_is_named(line, capsys):
    Path("metrics.jsonl").write_text(f'{{"update": 1, "loss": 1.0}}\n{line}\n')
    assert run(plot.main, ["."]) == 1
    assert error_of(capsys) == "'./metrics.jsonl' does not hold metrics: line 2 is not an object of JSON"


@pytest.mark.parametrize("line", ['{"update": {"a": 1}, "loss": 1}', '{"update": 1, "loss": 1%s}' % ("0" * 400)])
def test_line_that_cannot_be_drawn_is_named(line, capsys):
    Path("metrics.jsonl").write_text(f'{{"update": 1, "loss": NaN}}\n{line}\n')
    assert run(plot.main, ["."]) == 1
    fault = "line 2 has what is no number, or too large a one"
    assert error_of(capsys) == f"'./metrics.jsonl' does not hold metrics: {fault}"


def test_metrics_are_a_file(capsys):
    os.mkfifo("metrics.jsonl")
    assert run(plot.main, ["."]) == 1 and error_of(capsys) == "'./metrics.jsonl': not a file"


def test_name_of_a_folder_is_no_formula():
    os.mkdir("d$x^$")
    Path("d$x^$/metrics.jsonl").write_text('{"update": 1, "loss": 1.0}\n')
    assert run(plot.main, ["d$x^$"]) == 0


def test_picture_replaces_a_link():
    """In a stranger's folder it may lead to any file."""
    Path("mine").write_text("precious")
    Path("metrics.png").symlink_to("mine")
    Path("metrics.jsonl").write_text('{"update": 1, "loss": 1.0}\n')
    assert run(plot.main, ["."]) == 0
    assert Path("mine").read_text() == "precious" and not Path("metrics.png").is_symlink()


class Brightness(nn.Cell):
    """Finds the class of an image, which is the value of its pixels, except that it takes 2 for 0."""

    def construct(self, image):
        value = image[:, 0, 0, 0]
        return ms.ops.stack(
            (ms.ops.where(value == 2, 9.0, -ms.ops.abs(value)), 1 - ms.ops.abs(value - 1), value - 3), 1
        )


def test_report_has_classes_and_a_confusion_matrix(monkeypatch):
    from sklearn.metrics import ConfusionMatrixDisplay

    shown, show = [], ConfusionMatrixDisplay.plot
    monkeypatch.setattr(
        ConfusionMatrixDisplay, "plot", lambda matrix, **how: shown.append(matrix) or show(matrix, **how)
    )
    labels = np.array([0, 1, 2, 1, 2], np.int32)
    images = np.ones((5, 1, 4, 4), np.float32) * labels[:, None, None, None]
    test = ms.dataset.NumpySlicesDataset((images, labels), ["image", "label"], shuffle=False).batch(2)
    os.mkdir("out")
    Path("mine").write_text("precious")
    for name in ("report.txt", "confusion_matrix.png"):
        Path("out", name).symlink_to("../mine")
    assert write_report("out", Brightness(), test) == "out"
    assert Path("mine").read_text() == "precious"
    text = Path("out/report.txt").read_text()
    assert "precision" in text and text.split("accuracy")[1].split()[:2] == ["0.6000", "5"]
    assert shown[0].confusion_matrix.tolist() == [[1, 0, 0], [0, 2, 0], [2, 0, 0]]
    assert Path("out/confusion_matrix.png").read_bytes()[:4] == PNG
