"""Runs the self-test: python -m ms_accum.selftest

It runs the checks of `checks.py` one after the other, prints a table while it does so, then a block of text for an
issue. Under a launcher every rank runs all checks, those of several processes as well, and rank 0 prints the worst
result of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
import numpy as np

from .. import __version__, _check, native
from ..ranks.group import AUTO, Group, gather_arrays, group_of, is_first
from ..saving.files import write_bytes
from . import checks, steps
from .process import DISK, SIGNALS, TRAINING, Failure, exit_code, quiet

PASSED, FAILED, NOT_RUN, MEASURED = "ok", "FAILED", "not run", "measured"
_CANN = ("version.cfg", "/usr/local/Ascend/ascend-toolkit/latest/version.cfg")
_PADDED = 2048  # bytes: ranks exchange results of one size, because each size is a compiled graph


class Row(NamedTuple):
    """The result of a check."""

    name: str
    status: str
    error: float | None
    tolerance: float | None
    seconds: float
    note: str
    details: Mapping[str, str]

    @property
    def line(self) -> str:
        """str, the line of the table after the name."""
        note = f": {self.note}" if self.note else ""
        return f"{_figure(self.error):>9}{_figure(self.tolerance):>11}{self.seconds:7.1f} s  {self.status}{note}"

    @property
    def short(self) -> str:
        """str, the same for the block."""
        figures = "" if self.error is None else f" {_figure(self.error)}/{_figure(self.tolerance)}"
        return f"{self.name}{figures}" + (f" ({self.note})" if self.note else "")


def main(args: argparse.Namespace) -> None:
    """Run the checks, print the table and the block; raise a `Failure` if a check has failed."""
    gc.freeze()  # MindSpore makes a full collection at each compilation, which would look at all that was imported
    device = steps.choose_device(args.device_target)
    ms.set_context(mode=ms.PYNATIVE_MODE)  # MindSpore's default
    group = group_of("selftest", AUTO)
    if not is_first(group):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # rank 0 prints for all
    report = Report(facts_of(device, group), args.full, args.json if is_first(group) else None)
    for check in chosen(args.full, group):
        SIGNALS.raise_pending()  # most of a check's time is inside MindSpore, where a signal does not interrupt it
        report.begin(check.name)
        try:
            report.add(worst(run_check(check), group))
        except KeyboardInterrupt:
            print("stopped")
            raise
    report.end()
    failed = [row.name for row in report.rows if row.status == FAILED]
    if failed:
        raise Failure(f"{len(failed)} of {len(report.rows)} checks failed: {', '.join(failed)}", TRAINING)


def chosen(full: bool, group: Group | None) -> list[checks.Check]:
    """Return the checks to run, those of several processes with their group."""
    run = [*checks.CHECKS, *(checks.MORE_CHECKS if full else ())]
    if group is not None:
        of_ranks = [*checks.RANK_CHECKS, *(checks.MORE_RANK_CHECKS if full else ())]
        run += [checks.Check(check.name, partial(check.run, group)) for check in of_ranks]
    return run


def run_check(check: checks.Check) -> Row:
    """Run a check, which fails if it raises an error."""
    began, result, status = time.perf_counter(), checks.Measured(None, None), FAILED
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = check.run()
        status = MEASURED if result.tolerance is None else PASSED if result.passed else FAILED
    except checks.NotHere as error:
        result, status = result._replace(note=f"MindSpore: {error}"), NOT_RUN
        checks.forget_recording()
    except Exception as error:
        result = result._replace(note=f"{type(error).__name__}: {checks.reason_of(error)}")
        checks.forget_recording()
    return Row(check.name, status, *result[:2], time.perf_counter() - began, *result[2:])


def worst(row: Row, group: Group | None) -> Row:
    """Return the worst of all ranks' results, in which a rank other than 0 is named."""
    if group is None:
        return row
    content = json.dumps([row.status, row.error, row.note, row.seconds]).encode()
    content = content.ljust(-(-len(content) // _PADDED) * _PADDED)
    arrays = gather_arrays(np.frombuffer(content, np.uint8), group)
    results = [json.loads(array.tobytes()) for array in arrays]
    order = (FAILED, NOT_RUN, MEASURED, PASSED)
    rank = min(range(group.size), key=lambda rank: (order.index(results[rank][0]), -(results[rank][1] or 0.0)))
    status, error, note, _ = results[rank]
    note = ": ".join(filter(None, [f"rank {rank}", note])) if rank and status != PASSED else note
    seconds = max(result[3] for result in results)
    return row._replace(status=status, error=error, note=note, seconds=seconds)


# What is printed


class Report:
    """The table, the block for an issue and the JSON file, which is written again after each check.

    Args:
        facts (Mapping): the device and the versions, by name.
        full (bool): whether --full was given.
        path (Optional[str]): the path of the JSON file.
    """

    def __init__(self, facts: Mapping[str, str], full: bool, path: str | None):
        self.rows: list[Row] = []
        self._facts, self._full, self._path, self._began = facts, full, path, time.perf_counter()
        self._save(complete=False)  # an error of the file comes before the work
        for name, value in facts.items():
            print(f"{name:16} {value}")
        print(f"\n{'check':36}{'error':>9}{'tolerance':>11}{'time':>9}  result", flush=True)

    def begin(self, name: str) -> None:
        """Print the name of a check before it runs: should the process crash, the last line shows where."""
        print(f"{name:36}", end="", flush=True)

    def add(self, row: Row) -> None:
        """Print the result of a check."""
        self.rows.append(row)
        print(row.line)
        for name, text in row.details.items():
            if text != PASSED:
                print(f"  {name:34}{text}")
        self._save(complete=False)

    def end(self) -> None:
        """Print the summary and the block."""
        self._save(complete=True)
        print(f"\n{self.summary}\n\nTo report the result, paste this into an issue:\n\n```text")
        print(*self.block(), "```", sep="\n", flush=True)

    @property
    def summary(self) -> str:
        """str, the number of checks by status."""
        counts = {
            status: sum(row.status == status for row in self.rows) for status in (PASSED, NOT_RUN, MEASURED, FAILED)
        }
        shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{_check.quantity(len(self.rows), 'check')} in {time.perf_counter() - self._began:.0f} s: {shown}"

    def block(self) -> Iterable[str]:
        """Yield the lines for an issue."""
        yield f"ms_accum self-test{' --full' * self._full}: {self.summary}"
        yield from (f"{name}: {value}" for name, value in self._facts.items())
        for status in (FAILED, PASSED, NOT_RUN):
            rows = [row.short for row in self.rows if row.status == status]
            if rows:
                yield f"{status}: {'; '.join(rows)}"
        for row in self.rows:
            passed = ", ".join(name for name, text in row.details.items() if text == PASSED)
            others = [f"{name}: {text}" for name, text in row.details.items() if text != PASSED]
            if others:
                yield f"{row.name}: {'; '.join(filter(None, [f'ok {passed}' if passed else '', *others]))}"

    def _save(self, *, complete: bool) -> None:
        if self._path is None:
            return
        rows = [{**row._asdict(), "error": _finite(row.error), "details": dict(row.details)} for row in self.rows]
        content = {
            "ok": complete and all(row.status != FAILED for row in self.rows),
            "complete": complete,
            "full": self._full,
            "seconds": time.perf_counter() - self._began,
            "facts": dict(self._facts),
            "checks": rows,
        }
        with exit_code(DISK, OSError):
            write_bytes(self._path, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")


def facts_of(device: str, group: Group | None) -> dict[str, str]:
    """Return the device and the versions, by name."""
    versions = {"mindspore": ms.__version__, "numpy": np.__version__, "python": platform.python_version()}
    return {
        "ms_accum": __version__,
        "device": _device_text(device),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "system": platform.platform(),
        "C++ operators": "used" if native.available() else "not used",
        "processes": "1" if group is None else str(group.size),
    }


def _device_text(device: str) -> str:
    if device == "CPU":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return f"CPU, {platform.machine()}, {_check.quantity(cores, 'core')}"
    try:
        name = f"{device}, {_check.one_line(ms.hal.get_device_name(0))}"
    except Exception:  # an interface that MindSpore will remove
        name = device
    cann = _cann_version() if device == "Ascend" else ""
    return f"{name}, CANN {cann}" if cann else name


def _cann_version() -> str:
    """Return the version of Ascend's toolkit, as its file has it; "" if there is none."""
    for name in _CANN:
        try:
            text = Path(os.environ.get("ASCEND_TOOLKIT_HOME", "/"), name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(r"running_version=\[([^\]]*)\]", text)
        if match:
            return _check.one_line(match[1])
    return ""


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else "inf"
