"""Draws the metrics of runs: python -m programs.plot RUN... [--output FILE]"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ms_accum.saving.files import read_file, write_whole

from .command import run, show
from .flags import PATH, PROGRAM, Flag, Parser
from .folder import METRICS

MOST = 2**30
"""int, the bytes that the metrics of a run may have."""
_LARGEST = 1e300  # the ends of an axis lie beyond its values
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

    values = {name: _values(runs, name) | _values(runs, f"eval_{name}") for name in PANELS}
    panels = [name for name in PANELS if len(values[name]) > (name == "lr")] or ["loss"]
    figure = Figure(figsize=(10, 1 + 2.5 * len(panels)), layout="constrained")
    for name, (axes,) in zip(panels, figure.subplots(len(panels), squeeze=False, sharex=True)):
        for folder, lines in runs.items():
            for field, style in ((name, "o-" if name == "acc" else "-"), (f"eval_{name}", "o--")):
                rows = [line for line in lines if isinstance(line.get(field), (int, float))]
                updates = [line.get("update", line.get("updates")) for line in rows]
                if rows:
                    label = f"{folder} {field}"
                    axes.plot(updates, [line[field] for line in rows], style, label=label, markersize=3)
        axes.set_ylabel(PANELS[name])
        legend = axes.legend(handles=axes.lines, loc="center left", bbox_to_anchor=(1, 0.5))
        for text in legend.get_texts():
            text.set_parse_math(False)  # the name of a folder may be $x$
    axes.set_xlabel("update")
    picture = args.output or os.path.join(args.runs[0], "metrics.png")
    write_whole(picture, 0, figure.savefig)
    show("picture", picture)


def _values(runs: Mapping[str, Sequence[Mapping[str, Any]]], field: str) -> set[Any]:
    """Return the values of a field in all runs: a rate that is always the same needs no picture."""
    found = (line.get(field) for lines in runs.values() for line in lines)
    return {value for value in found if isinstance(value, (int, float))}


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
        if not all(_is_drawn(name, value) for name, value in content.items()):
            raise ValueError(f"'{path}' does not hold metrics: line {number} has what is no number, or too large a one")
        lines.append(content)
    return lines


def _is_drawn(name: str, value: Any) -> bool:
    """Return whether a value can be drawn, or is left out."""
    if isinstance(value, (int, float)):
        return not abs(value) > _LARGEST  # NaN is left out
    return value is None or name not in ("update", "updates")


if __name__ == "__main__":
    sys.exit(run(main))
