"""Draws the metrics of runs: python -m programs.plot RUN... [--output FILE]"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .command import FlagError, run, show
from .flags import Parser, path
from .folder import METRICS

PANELS = {"loss": "loss", "lr": "learning rate", "grad_norm": "norm of the gradient", "acc": "accuracy"}


def main(argv: Sequence[str]) -> None:
    """Draw loss, learning rate, gradient norm, and accuracy or the evaluations' loss, by update."""
    args = _flags(argv)
    runs = {folder: read(os.path.join(folder, METRICS)) for folder in args.runs}

    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, PANELS.items()):
        for folder, lines in runs.items():
            _draw(axes, name, folder, lines)
        axes.set_title(title)
        axes.set_xlabel("update")
    figure.axes[0].legend()
    figure.savefig(args.output)
    show("picture", args.output)


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("Draw the metrics of runs.", "python -m programs.plot RUN... [--output FILE]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/001")
    text = "the picture, .png, .svg or .pdf (default: metrics.png in the first folder)"
    parser.add_argument("--output", type=path, metavar="FILE", help=text)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    args.output = args.output or os.path.join(args.runs[0], "metrics.png")
    return args


def read(path: str) -> list[dict[str, Any]]:
    """Return the lines of the metrics of a run; a last one that was cut off is left out."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except OSError as error:
        raise FlagError(f"argument RUN: '{path}' can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FlagError(f"argument RUN: '{path}' does not hold metrics: {error}") from error


def _draw(axes: Any, name: str, label: str, lines: Sequence[dict[str, Any]]) -> None:
    """Draw a curve by update; the loss together with that of evaluations."""
    for name_in_file, style in ((name, "-"), (f"eval_{name}", "o--")):
        points = [
            (line.get("update", line.get("updates")), line[name_in_file]) for line in lines if name_in_file in line
        ]
        points = [point for point in points if point[1] is not None]
        if points:
            axes.plot(*zip(*points), "o-" if name == "acc" else style, label=f"{label} {name_in_file}", markersize=3)


if __name__ == "__main__":
    sys.exit(run(main))
