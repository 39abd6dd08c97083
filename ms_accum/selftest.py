"""Checks on this device what ms_accum promises: python -m ms_accum.selftest [--device_target Ascend] [--full]"""

import sys

from . import __version__
from .app.flags import Parser, path
from .app.process import begin, run


def flags() -> Parser:
    """Return the flags."""
    parser = Parser(
        "Check on this device what ms_accum promises, in about two minutes.", prog="python -m ms_accum.selftest"
    )
    add = parser.add_argument
    add("--device_target", choices=("auto", "CPU", "GPU", "Ascend"), default="auto", help="default: %(default)s")
    add("--full", action="store_true", help="more checks and more optimizers, which takes twice the time")
    add("--json", type=path, metavar="FILE", help="also write the results to this file")
    add("--debug", action="store_true", help="show tracebacks, and MindSpore's log")
    return parser


def main() -> int:
    """Run the checks; return 1 if one has failed."""
    begin(flags(), __version__)
    from .app.self_test import main as program  # imports MindSpore, after `begin`

    return run(program, flags())


if __name__ == "__main__":
    sys.exit(main())
