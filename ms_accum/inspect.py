"""Shows what is in a checkpoint or a training state: python -m ms_accum.inspect gradient_accumulation.ckpt"""

import sys

from .app import inspection
from .app.process import run


def main() -> int:
    """Show it, and return the exit code."""
    return run(inspection.main, inspection.flags())


if __name__ == "__main__":
    sys.exit(main())
