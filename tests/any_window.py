"""Random programs, compared with the simulator; see random_programs.py.

python tests/any_window.py WAY SEED [--compiled]    # run one again; if it fails, look for a smaller one that does
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also if it is run as a program

from random_programs import Program
from systems import check_program

SIMPLEST = {
    "clip": None,
    "policy": "skip_window",
    "scale": None,
    "ema": None,
    "optimizer": "SGD",
    "rates": 0.05,
    "stages": (),
    "groups": False,
    "half": False,
    "tail": "flush",
    "size": 2,
}


def check_seeds(way, seeds, folder, compiled=False):
    """Run the programs of these seeds, and say how to run the one that fails again."""
    for seed in seeds:
        program = Program(way, seed, compiled)
        try:
            check_program(program, Path(tempfile.mkdtemp(dir=folder)))
        except BaseException as error:
            command = f"python tests/any_window.py {way} {seed}{' --compiled' if compiled else ''}"
            raise AssertionError(f"{type(error).__name__} in {program!r}\nAgain: {command}") from error


def failure(program):
    """Return the error with which a program ends, or None."""
    try:
        check_program(program, Path(tempfile.mkdtemp()))
    except Exception as error:
        return error
    return None


def smaller(program):
    """Yield programs with one call, batch, epoch, stop or setting less."""
    for name, value in SIMPLEST.items():
        if getattr(program.settings, name) != value:
            less = copy.copy(program)
            less.settings = program.settings._replace(**{name: value})
            yield less
    for at, (name, *arguments) in enumerate(program.calls):
        calls = []
        if name == "train":
            batches, epochs, size, stops = arguments
            calls += [(name, batches[:one] + batches[one + 1 :], epochs, size, stops) for one in range(len(batches))]
            calls += [(name, batches, epochs - 1, size, stops)] if epochs > 1 else []
            calls += [(name, batches, epochs, size, stops[1:])] if stops else []
            calls += [(name, batches, epochs, None, stops)] if size else []
        for others in [[], *([call] for call in calls)]:
            less = copy.copy(program)
            less.calls = [*program.calls[:at], *others, *program.calls[at + 1 :]]
            yield less


def shrunk(program, error):
    """Return the smallest program that is found to fail with this kind of error."""
    for less in smaller(program):
        if less.calls and type(failure(less)) is type(error):
            return shrunk(less, error)
    return program


def main():
    """Run a program again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way")
    parser.add_argument("seed", type=int)
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    if not args.compiled:
        os.environ["MS_JIT"] = "0"
    program = Program(args.way, args.seed, args.compiled)
    error = failure(program)
    print(repr(program), "passes" if error is None else f"fails: {type(error).__name__}: {error}", sep="\n")
    if error is not None:
        least = shrunk(program, error)
        print("\nThe smallest that does:", repr(least), sep="\n")
        check_program(least, Path(tempfile.mkdtemp()))


if __name__ == "__main__":
    main()
