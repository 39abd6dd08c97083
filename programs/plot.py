"""Draws the metrics of runs: python -m programs.plot RUN... [--output FILE]"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ms_accum.saving.files import read_file, write_whole

from .command import run, show
from .flags import PATH, PROGRAM, Flag, Parser
from .folder import METRICS

MOST = 2**30
"""int, the bytes that the metrics of a run may have."""
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
    for text in figure.axes[0].legend().get_texts():
        text.set_parse_math(False)  # the name of a folder may be $x$
    picture = args.output or os.path.join(args.runs[0], "metrics.png")
    write_whole(picture, 0, figure.savefig)
    show("picture", picture)


def _lines(path: str) -> list[dict[str, Any]]:
    """Return the lines of the metrics of a run; a last one that was cut off is left out."""
    lines = []
    for number, line in enumerate(read_file(path, MOST).split(b"\n")[:-1], 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise ValueError(f"'{path}' does not hold metrics: line {number} is not an object of JSON")
        lines.append(content)
    return lines


if __name__ == "__main__":
    sys.exit(run(main))
