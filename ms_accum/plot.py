"""How did runs proceed, as a picture and as a table?

    python -m ms_accum.plot out/ [other/ ...] [--output DIR]

Draws the metrics of one or several runs of `train.py` into `metrics.png` and `metrics.svg`, and writes `metrics.csv` to
the folder of each. Needs matplotlib, and does not import MindSpore.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from . import _check
from .app.flags import Parser
from .app.process import DATA, DISK, USAGE, Failure, exit_code, quiet, run
from .results import plots
from .results.series import Metrics, read, table_of
from .saving.files import check_inside, write_bytes


def flags() -> Parser:
    """Return the flags."""
    what = "Draw the metrics of runs into metrics.png and metrics.svg, and write metrics.csv beside each metrics.jsonl."
    parser = Parser(what, prog="python -m ms_accum.plot")
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
        tables = {str(each.path.with_suffix(".csv")): table_of(each) for each in runs}
    output = args.output or args.folders[0]
    try:
        paths = written(runs, tables, output)
    except OSError as error:
        what = f"'{error.filename}' can't be written: {error.strerror}" if error.filename else str(error)
        raise Failure(what, DISK) from error
    for path in paths:
        print(f"{'written':16} {_check.one_line(path, _check.LINE)}")


def written(runs: Sequence[Metrics], tables: Mapping[str, str], output: str) -> list[str]:
    """Write the pictures and the tables, given by their paths, and return all paths. No link out of a folder is used.

    Raises:
        OSError: If one of them can't be written.
    """
    os.makedirs(output, exist_ok=True)
    pictures = plots.pictures_in(output)
    check_inside(output, *pictures.values())
    for path in tables:
        check_inside(os.path.dirname(path), path)
    with quiet():  # matplotlib's log is about fonts
        plots.draw(runs, pictures)
    for path, table in tables.items():
        write_bytes(path, table.encode())
    return [*pictures.values(), *tables]


if __name__ == "__main__":
    sys.exit(run(main, flags()))
