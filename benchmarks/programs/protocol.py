"""What do the benchmarks and the programs they measure say to each other?

A program prints one line of JSON when it is ready, and then one for each line it gets. A rank, whose streams are its
launcher's, does the same on a socket. Every program imports this module, in environments that have little in common: it
needs the standard library only.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable, TextIO

Build = Callable[[], tuple[dict, Callable[..., dict]]]


def serve(build: Build) -> None:
    """Build what is measured, say that it is ready, and answer requests until stdin ends.

    `build` returns what to say about the program, and a function that gets a request's fields as its
    arguments and returns the answer's.
    """
    _serve(build, sys.stdin, _take_stdout())


def serve_at(path: str, build: Build) -> None:
    """Do the same with whoever listens at the socket of this path."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("r", encoding="utf-8") as requests, connection.makefile("w") as answers:
            _serve(build, requests, answers)


def _serve(build: Build, requests: Iterable[str], answers: TextIO) -> None:
    about, answer = build()
    _send(answers, {"ready": True, **about})
    for line in requests:
        request = json.loads(line)
        _send(answers, {"peak_mib": peak_mib()} if "peak" in request else answer(**request))


def peak_mib() -> float:
    """Return the most memory that this process ever held.

    Not `ru_maxrss`: a process inherits that of the one that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def _take_stdout() -> TextIO:
    """Return stdout, and send to stderr what anything else prints: libraries would print between the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _send(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)
