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

pytestmark = pytest.mark.host
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
    Path("a/metrics.jsonl").write_text("no metrics\n")
    assert run(plot.main, ["a"]) == 1 and "'a/metrics.jsonl' does not hold metrics" in error_of(capsys)


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
    assert write_report("out", Brightness(), test) == "out"
    text = Path("out/report.txt").read_text()
    assert "precision" in text and text.split("accuracy")[1].split()[:2] == ["0.6000", "5"]
    assert shown[0].confusion_matrix.tolist() == [[1, 0, 0], [0, 2, 0], [2, 0, 0]]
    assert Path("out/confusion_matrix.png").read_bytes()[:4] == PNG
