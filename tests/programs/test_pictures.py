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
from programs.report import write_report
from running import error_of

LINES = [
    {"epoch": 1, "update": 1, "loss": 2.0, "lr": 0.1, "grad_norm": 3.0},
    {"epoch": 1, "update": 2, "loss": None, "lr": 0.1, "grad_norm": None},
    {"epoch": 1, "updates": 2, "acc": 0.5, "eval_loss": 1.5},
    {"epoch": 1, "update": 3, "loss": 1.0, "lr": 0.05, "grad_norm": 2.0},
]


@pytest.mark.host
def test_plot_draws_runs(monkeypatch, capsys):
    from matplotlib.axes import Axes

    drawn = []
    draws = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda axes, *points, **how: drawn.append(points[:2]) or draws(axes, *points, **how)
    )
    for folder in ("a", "b"):
        os.mkdir(folder)
        Path(folder, "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in LINES) + '{"update": 4, "lo'
        )
    assert run(plot.main, ["a", "b"]) == 0
    assert Path("a/metrics.png").read_bytes()[:4] == b"\x89PNG"
    expected = [
        ((1, 3), (2.0, 1.0)),
        ((2,), (1.5,)),
        ((1, 2, 3), (0.1, 0.1, 0.05)),
        ((1, 3), (3.0, 2.0)),
        ((2,), (0.5,)),
    ]
    assert sorted(drawn) == sorted(expected * 2)
    assert run(plot.main, ["a", "--output=x.svg"]) == 0 and "<svg" in Path("x.svg").read_text()
    capsys.readouterr()
    assert run(plot.main, ["none"]) == 2
    assert error_of(capsys) == "argument RUN: 'none/metrics.jsonl' can't be read: No such file or directory"
    Path("a/metrics.jsonl").write_text("no metrics\n")
    assert run(plot.main, ["a"]) == 2 and "does not hold metrics" in error_of(capsys)


class Brightness(nn.Cell):
    """Finds the class of an image, which is the value of its pixels, except that it takes 2 for 0."""

    def construct(self, image):
        value = image[:, 0, 0, 0]
        return ms.ops.stack(
            (ms.ops.where(value == 2, 9.0, -ms.ops.abs(value)), 1 - ms.ops.abs(value - 1), value - 3), 1
        )


@pytest.mark.host
def test_report_has_classes_matrix_and_wrong_images():
    labels = np.array([0, 1, 2, 1, 2], np.int32)
    images = np.ones((5, 1, 4, 4), np.float32) * labels[:, None, None, None]
    test = ms.dataset.NumpySlicesDataset((images, labels), ["image", "label"], shuffle=False).batch(2)
    path = write_report("out", "<script>.ckpt", Brightness(), test)
    page = Path(path).read_text(encoding="utf-8")
    assert path == "out/report.html" and "60.00% of 5 images are classified correctly" in page
    assert page.count("2, taken for 0 (") == page.count("<figure>") == 2 and page.count("<img ") == 3
    assert "precision" in page and "<script>" not in page and "http" not in page
