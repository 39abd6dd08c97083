"""Checks on this device what ms_accum promises: python -m ms_accum.selftest [--device_target Ascend] [--full]"""

import argparse
import sys

from . import __version__
from .app.flags import Parser, path
from .app.process import begin, run


def flags() -> Parser:
    """Return the flags."""
    text = "Check on this device what ms_accum promises, in about two minutes."
    parser = Parser(text, prog="python -m ms_accum.selftest")
    add = parser.add_argument
    text = "the device; auto is the default of this MindSpore (default: auto)"
    add("--device_target", choices=("auto", "CPU", "GPU", "Ascend"), default="auto", help=text)
    add("--full", action="store_true", help="run more checks, with more optimizers, which takes twice the time")
    add("--json", type=path, metavar="FILE", help="also write the results to this file")
    add("--debug", action="store_true", help="show tracebacks, and MindSpore's log")
    return parser


def main() -> int:
    """Run the checks; return 1 if one has failed."""
    begin(flags(), __version__)
    return run(_checked, flags())


def _checked(args: argparse.Namespace) -> None:
    """Import MindSpore, after `begin`, and run the checks. An import that fails is one line, as all errors."""
    from .app.self_test import main

    main(args)


if __name__ == "__main__":
    sys.exit(main())
