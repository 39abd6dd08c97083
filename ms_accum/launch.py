"""Starts several processes of one program: python -m ms_accum.launch --nproc 2 train.py --epochs 3"""

import sys

from .app.launcher import main

if __name__ == "__main__":
    sys.exit(main())
