"""Shows what is in a checkpoint or a training state: python -m ms_accum.inspect gradient_accumulation.ckpt"""

import sys

from .app import inspection
from .app.process import run


def main() -> int:
    """Run the program with the arguments of this process, and return its exit code."""
    return run(inspection.main, inspection.flags())


if __name__ == "__main__":
    sys.exit(main())
