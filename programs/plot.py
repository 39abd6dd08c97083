"""Draws the metrics of runs: python -m programs.plot RUN... [--output FILE]"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .command import run, show
from .flags import PATH, PROGRAM, Flag, Parser
from .folder import METRICS

PANELS = {"loss": "loss", "lr": "learning rate", "grad_norm": "norm of the gradient", "acc": "accuracy"}


def main(argv: Sequence[str]) -> None:
    """Draw loss, learning rate, gradient norm, and accuracy or the evaluations' loss, by update."""
    parser = Parser("Draw the metrics of runs.", "python -m programs.plot RUN... [--output FILE]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/001")
    output = Flag(PATH, "the picture, .png, .svg or .pdf (default: metrics.png in the first folder)")
    parser.add({"output": output, "debug": PROGRAM["debug"]})
    args = parser.parse_args(argv)
    runs = {folder: _lines(os.path.join(folder, METRICS)) for folder in args.runs}

    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, PANELS.items()):
        for folder, lines in runs.items():
            for field, style in ((name, "o-" if name == "acc" else "-"), (f"eval_{name}", "o--")):
                rows = [line for line in lines if line.get(field) is not None]
                updates = [line.get("update", line.get("updates")) for line in rows]
                if rows:
                    label = f"{folder} {field}"
                    axes.plot(updates, [line[field] for line in rows], style, label=label, markersize=3)
        axes.set_title(title)
        axes.set_xlabel("update")
    figure.axes[0].legend()
    picture = args.output or os.path.join(args.runs[0], "metrics.png")
    figure.savefig(picture)
    show("picture", picture)


def _lines(path: str) -> list[dict[str, Any]]:
    """Return the lines of the metrics of a run; a last one that was cut off is left out."""
    with open(path, encoding="utf-8") as file:
        try:
            return [json.loads(line) for line in file if line.endswith("\n")]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"'{path}' does not hold metrics: {error}") from error


if __name__ == "__main__":
    sys.exit(run(main))
