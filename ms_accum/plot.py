"""Draws the metrics of one or several runs of `train.py`, and writes them as tables.

python -m ms_accum.plot out/ [other/ ...] [--output DIR]
"""

import sys

from .app.plots import flags, main
from .app.process import run

if __name__ == "__main__":
    sys.exit(run(main, flags()))
