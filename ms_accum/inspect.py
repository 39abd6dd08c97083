"""Shows what is in a checkpoint or a training state: python -m ms_accum.inspect gradient_accumulation.ckpt"""

import sys

from .app.inspection import flags, main
from .app.process import run

if __name__ == "__main__":
    sys.exit(run(main, flags()))
