"""Run a benchmark: python -m benchmarks NAME; --help lists them."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from typing import Any

from .process import ContenderError
from .results import RESULTS

# Each module has `run(arguments)`. It is imported when it is asked for: not all of them need the same libraries.
MODULES = {
    "setup": ("environments", "make the environments of PyTorch and JAX"),
    "speed": ("speed", "milliseconds per micro-batch, compared with the peers"),
    "memory": ("memory", "peak memory, compared with the peers"),
    "cost": ("cost", "what accumulating costs compared with a plain forward-backward"),
    "ranks": ("ranks", "what several ranks cost, compared with one process"),
    "lengths": ("lengths", "what padding costs, in micro-batches of one shape and of several"),
    "conformance": ("conformance.matrix", "does accumulating equal the large batch? for each library, in each case"),
    "tables": ("pages", "write the tables of the pages from the results"),
}
ALL, _ALL_HELP = "all", "every benchmark below, then the tables; it takes hours"
# Not about time: they have no sizes to choose, and are not part of `all`.
_WITHOUT_OPTIONS = ("setup", "conformance", "tables")


def parse() -> argparse.Namespace:
    """Return the command, and the options that all benchmarks have."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, description in ((ALL, _ALL_HELP), *((name, description) for name, (_, description) in MODULES.items())):
        add = commands.add_parser(name, help=description.replace("%", "%%"), description=description).add_argument
        if name == "conformance":
            add("--only", nargs="+", metavar="LIBRARY", help="default: all; the others' results are kept")
            add("--cases", nargs="+", metavar="CASE", help="default: all; the others' results are kept")
            add("--output", default=str(RESULTS), metavar="DIR", help="for the JSON, default: %(default)s")
        if name in _WITHOUT_OPTIONS:
            continue
        add("--short", action="store_true", help="the smallest sizes: does it run?")
        add("--output", default=str(RESULTS), metavar="DIR", help="for the JSON, default: %(default)s")
        add("--networks", nargs="+", metavar="NAME", help="default: all that the benchmark is about")
        add("--windows", nargs="+", type=int, metavar="N", help="sizes of the window")
        add("--contenders", nargs="+", metavar="NAME", help="default: all")
        add("--rounds", type=int, metavar="N", help="how often each is measured")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> None:
    """Run one benchmark, or all and then write the tables."""
    if arguments.command != ALL:
        _module(arguments.command).run(arguments)
        return
    for name in MODULES:
        if name in _WITHOUT_OPTIONS:
            continue
        print(f"\n== {name}", flush=True)
        _module(name).run(argparse.Namespace(**{**vars(arguments), "command": name}))
    _module("tables").run(arguments)


def _module(name: str) -> Any:
    return importlib.import_module(f".{MODULES[name][0]}", __package__)


def main() -> int:
    """Run the benchmark of the command line and return the exit code."""
    arguments = parse()
    # SIGTERM alone would end this process only, and not the contenders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ContenderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
