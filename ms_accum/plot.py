"""Draws the metrics of one or several runs of `train.py`, and writes them as tables.

python -m ms_accum.plot out/ [other/ ...] [--output DIR]
"""

import sys

from .app import plots
from .app.process import run


def main() -> int:
    """Draw, and return the exit code."""
    return run(plots.main, plots.flags())


if __name__ == "__main__":
    sys.exit(main())
