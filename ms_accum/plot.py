"""How did runs proceed, as a picture and as a table?

    python -m ms_accum.plot out/ [other/ ...] [--output DIR]

Draws the metrics of one or several runs of `train.py` into `metrics.png` and `metrics.svg`, and writes `metrics.csv` to
the folder of each. Needs matplotlib, and does not import MindSpore.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import _check
from .inspect import Parser
from .program.main import DATA, DISK, USAGE, Failure, exit_code, quiet, run
from .results import plots
from .results.series import Metrics, read, write_table


def flags() -> Parser:
    """Return the flags."""
    what = "Draw the metrics of runs into metrics.png and metrics.svg, and write metrics.csv beside each metrics.jsonl."
    parser = Parser("python -m ms_accum.plot", description=what)
    what = "folder of a run of train.py; several are drawn into one picture"
    parser.add_argument("folders", nargs="+", type=os.path.expanduser, metavar="DIR", help=what)
    what = "folder of the pictures, default: the first run's"
    parser.add_argument("--output", type=os.path.expanduser, metavar="DIR", help=what)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(args: argparse.Namespace) -> None:
    """Read the metrics, draw them, and write the tables."""
    with exit_code(USAGE, ImportError):
        plots.check_installed()
    with exit_code(DATA, OSError, ValueError):
        runs = [read(folder) for folder in {os.path.realpath(folder): folder for folder in args.folders}.values()]
    output = args.output or args.folders[0]
    try:
        paths = written(runs, output)
    except OSError as error:
        what = f"'{error.filename}' can't be written: {error.strerror}" if error.filename else str(error)
        raise Failure(what, DISK) from error
    for path in paths:
        print(f"{'written':16} {_check.one_line(path, _check.LINE)}")


def written(runs: Sequence[Metrics], output: str) -> list[str]:
    """Write the pictures and the tables, and return their paths."""
    os.makedirs(output, exist_ok=True)
    pictures = plots.pictures_in(output)
    with quiet():  # matplotlib's log is about fonts
        plots.draw(runs, pictures)
    tables = [str(each.path.with_suffix(".csv")) for each in runs]
    for each, table in zip(runs, tables):
        write_table(each, table)
    return [*pictures.values(), *tables]


if __name__ == "__main__":
    sys.exit(run(main, flags()))
