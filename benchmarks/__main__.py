"""Run a benchmark: python -m benchmarks NAME; --help lists them."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys

from .process import ContenderError
from .results import RESULTS

# Each module has `run(arguments)`. It is imported when it is asked for: not all of them need the same libraries.
MODULES = {
    "setup": ("environments", "make the environments of PyTorch and JAX"),
    "speed": ("speed", "milliseconds per micro-batch, beside the peers"),
    "memory": ("memory", "peak memory, beside the peers"),
    "data": ("data", "milliseconds per batch of the input pipelines"),
    "start": ("start", "seconds from the command to the first update"),
    "accuracy": ("accuracy", "seconds to an accuracy on MNIST or CIFAR-10"),
    "losses": ("losses", "the losses of ResNet-18's first updates on CIFAR-10, beside PyTorch's"),
    "cost": ("cost", "what accumulating costs beside a plain forward-backward"),
    "operators": ("operators", "the kernels in which a forward-backward spends its time, beside PyTorch's"),
    "forms": ("forms", "ways to write a block of a network, and what each takes on CPU"),
    "ranks": ("ranks", "what several ranks cost, beside one process"),
    "scaling": ("scaling_tables", "write the tables of docs/scaling.md: the measured ones, and the model's"),
}
_WITHOUT_OPTIONS = ("setup", "scaling")


def parse() -> argparse.Namespace:
    """Return the command, and the options that all benchmarks have."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, what) in MODULES.items():
        add = commands.add_parser(name, help=what.replace("%", "%%"), description=what).add_argument
        if name in _WITHOUT_OPTIONS:
            continue
        add("--short", action="store_true", help="the smallest sizes: does it run?")
        add("--output", default=str(RESULTS), metavar="DIR", help="for the JSON and the plot, default: %(default)s")
        add("--networks", nargs="+", metavar="NAME", help="default: all that the benchmark is about")
        add("--windows", nargs="+", type=int, metavar="N", help="sizes of the window")
        add("--contenders", nargs="+", metavar="NAME", help="default: all")
        add("--rounds", type=int, metavar="N", help="how often each is measured")
    return parser.parse_args()


def main() -> int:
    """Run a benchmark and return the exit code."""
    arguments = parse()
    # SIGTERM alone would end this process only: the contenders are stopped and could not notice.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    module = importlib.import_module(f".{MODULES[arguments.command][0]}", __package__)
    try:
        module.run(arguments)
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
