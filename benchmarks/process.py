"""The process of a contender: started, asked and ended.

Each is a program in a process of its own, which is sent requests and answers them in lines of JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).parent / "programs"

# A contender runs as its users run it. Ours sets these itself; the others do not use them.
_UNSET = ("ONEDNN_MAX_CPU_ISA", "MS_DEV_HOST_BLOCKING_RUN")
_STDERR_LINES = 12


class ContenderError(RuntimeError):
    """A contender died, took too long, or printed what is no answer."""


class Contender:
    """A running program. Use it in a `with` statement: its process ends with it, also after an error.

    Args:
        name (str): what tables and errors call it.
        python (Path): the interpreter of its environment.
        program (str): a file of `programs/`, or any path.
        flags (Sequence[str]): of the program.
        limit (float): the seconds that it may take to get ready, and for each answer.

    After `__enter__` it is ready, and `about` is what it printed about itself.
    """

    def __init__(
        self,
        name: str,
        python: str | Path,
        program: str | Path,
        flags: Sequence[str] = (),
        *,
        limit: float = 600,
    ):
        self.name = name
        self.limit = limit
        self.about: dict[str, Any] = {}
        self._command = [str(python), str(PROGRAMS / program), *flags]
        self._held = b""

    def __enter__(self) -> Contender:
        self._stderr = tempfile.TemporaryFile()
        self._scratch = tempfile.TemporaryDirectory()  # the program is killed, so it removes nothing itself
        # A group of its own, to be ended with all its children.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**_environment(), "TMPDIR": self._scratch.name},
            preexec_fn=os.setpgrp,
        )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        try:
            os.write(self._process.stdin.fileno(), json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
        except BrokenPipeError:
            raise self._error("died") from None
        return self._answer()

    def close(self) -> None:
        """End the program, with all its threads and children."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            stream.close()  # type: ignore[union-attr]
        self._scratch.cleanup()

    def _answer(self) -> dict[str, Any]:
        line = self._line(time.monotonic() + self.limit)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._error(f"said what is no answer: {line[:200]!r}")
        return answer

    def _line(self, deadline: float) -> bytes:
        """Return the next line of stdout. Not by `readline`, which can't be given a time limit."""
        stdout = self._process.stdout.fileno()  # type: ignore[union-attr]
        while b"\n" not in self._held:
            ready, _, _ = select.select([stdout], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise self._error(f"gave no answer within {self.limit:g} s")
            more = os.read(stdout, 65536)
            if not more:
                raise self._error("died")
            self._held += more
        line, self._held = self._held.split(b"\n", 1)
        return line

    def _error(self, problem: str) -> ContenderError:
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").splitlines()[-_STDERR_LINES:]
        output = "".join(f"\n    {line}" for line in last)
        return ContenderError(
            f"The contender '{self.name}' {problem}." + (f" Its last words:{output}" if output else "")
        )


def _environment() -> dict[str, str]:
    """Return the variables that a contender runs with."""
    kept = {name: value for name, value in os.environ.items() if name not in _UNSET}
    return {**kept, "PYTHONPATH": str(ROOT)}  # the project is not installed where it is benchmarked
