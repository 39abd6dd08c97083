"""Checks on this device what ms_accum promises: python -m ms_accum.selftest [--device_target Ascend] [--json FILE]"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Callable, NamedTuple

from . import __version__
from ._check import first_words, one_line
from .programs.command import run, show, silence, use_device
from .programs.flags import Parser, add_program, path

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"


class Result(NamedTuple):
    """What a check has found."""

    name: str
    status: str
    """``"ok"``, ``"FAILED"``, or ``"not run"`` if plain MindSpore does not run it here."""
    error: float | None
    """The largest difference, relative to the largest change that is expected."""
    tolerance: float
    seconds: float
    note: str

    @property
    def line(self) -> str:
        """str, a line of the table."""
        error = "-" if self.error is None else f"{self.error:.1e}"
        return f"{self.name:46}{error:>9}{self.tolerance:>9.0e}{self.seconds:7.1f} s  {self.status}{self.note}"


def main(argv: Sequence[str]) -> None:
    """Run the checks, and print a table and a text for an issue. An error ends it if a check has failed."""
    args = _flags(argv)

    import mindspore as ms
    import numpy as np

    from .programs.checks import checks_of
    from .ranks.group import own_group

    device = use_device(args.device_target)
    group = own_group()
    if group.rank != 0:
        silence()
    facts = f"ms_accum {__version__}, {device}, mindspore {ms.__version__}, numpy {np.__version__}, "
    facts += f"python {platform.python_version()}, {platform.platform()}, ranks {group.size}"
    show("self-test", facts)
    print(f"{'check':46}{'error':>9}{'at most':>9}{'time':>9}")
    results = []
    for name, check, tolerance in checks_of(group):
        results.append(run_check(name, check, tolerance))
        print(results[-1].line, flush=True)
    failed = [result.name for result in results if result.status == FAILED]
    if group.rank == 0 and args.json is not None:
        content = {"ok": not failed, "facts": facts, "checks": [result._asdict() for result in results]}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("\nTo report the result, paste this into an issue:\n\n```text", facts, sep="\n")
    print(*(result.line for result in results), "```", sep="\n", flush=True)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")


def run_check(name: str, check: Callable[[], float], tolerance: float) -> Result:
    """Return the result of a check, which fails if it raises an error."""
    from .programs.checks import NotHere

    began, error, note = time.perf_counter(), None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = check()
        status = OK if error <= tolerance else FAILED  # NaN is not
    except NotHere as reason:
        status, note = NOT_RUN, f": {one_line(reason)}"
    except Exception as reason:
        status, note = FAILED, f": {type(reason).__name__}: {one_line(first_words(str(reason)))}"
    return Result(name, status, error, tolerance, time.perf_counter() - began, note)


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("Check on this device what ms_accum promises.", "python -m ms_accum.selftest [flags]")
    add_program(parser)
    parser.add_argument("--json", type=path, metavar="FILE", help="also write the results to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run(main))
