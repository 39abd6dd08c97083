"""The protocol between a benchmark and the programs it measures: flags, then lines of JSON.

A program prints one line of JSON when it is ready, and then one for each line it gets. A rank, whose streams are its
launcher's, does the same on a socket. Every program imports this module, in environments that have little in common: it
needs the standard library only.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any, Callable, Literal, TextIO, get_args, get_origin, get_type_hints

Build = Callable[..., "tuple[dict, Callable[..., dict]]"]


def flags_of(function: Callable) -> dict[str, Any]:
    """Read from the command line a flag for each parameter of a function, of the type that it is annotated with."""
    kinds = get_type_hints(function)
    parser = argparse.ArgumentParser()
    for name, parameter in inspect.signature(function).parameters.items():
        parser.add_argument(f"--{name}", **_flag_options(kinds[name], parameter.default))
    return vars(parser.parse_args())


def _flag_options(kind: Any, default: Any) -> dict[str, Any]:
    if kind is bool:
        return {"action": "store_true"}
    options = {"required": True} if default is inspect.Parameter.empty else {"default": default}
    if kind is list:
        return {**options, "nargs": "+"}
    return {**options, "choices": get_args(kind)} if get_origin(kind) is Literal else {**options, "type": kind}


def serve(build: Build, *, address: str = "", **flags: Any) -> None:
    """Build what is measured, print that it is ready, and answer requests until there are no more.

    `build` is called with the flags and returns what to print about the program, and a function that gets a request's
    fields as its arguments and returns the answer's. Requests are read from stdin, or from the socket of this address.
    """
    requests, answers = _connected(address) if address else (sys.stdin, _take_stdout())
    about, answer = build(**flags)
    _send(answers, {"ready": True, **about})
    for line in requests:
        request = json.loads(line)
        _send(answers, {"peak_mib": peak_mib()} if "peak" in request else answer(**request))


def _connected(address: str) -> tuple[TextIO, TextIO]:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection.makefile("r", encoding="utf-8"), connection.makefile("w", encoding="utf-8")


def timed(run: Callable, *arguments: Any, **named: Any) -> tuple[float, Any]:
    """Call a function, and return the seconds it took and what it returned."""
    began = time.perf_counter()
    result = run(*arguments, **named)
    return time.perf_counter() - began, result


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
