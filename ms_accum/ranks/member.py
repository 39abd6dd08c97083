"""How is a process of a MindSpore cluster started, and how did it end?"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import _check
from .end_with import end_with
from .heartbeat import VARIABLE

HOST = "127.0.0.1"
# The program of the scheduler process: it runs the cluster inside `init`, and exits there.
SCHEDULER = ("-c", "from mindspore.communication import init; init()")
# Defaults for variables that the user has not set: seconds for forming the cluster, as in `msrun`; seconds between
# attempts to connect (MindSpore's default is random, 3 to 5); unbuffered output.
DEFAULTS = {
    "MS_TOPO_TIMEOUT": "600",
    "MS_RETRY_INTERVAL_LOWER": "1",
    "MS_RETRY_INTERVAL_UPPER": "1",
    "PYTHONUNBUFFERED": "1",
}
# Lines that explain why a process ended, best first: our error line, Python's, any line that is not MindSpore's log.
_WORDS = (r"^error: (.+)$", r"^((?:\w+\.)*\w+(?:Error|Exception|Interrupt|Exit)\b.*)$", r"^(?!\[[A-Z]+\] )(.*\S.*)$")
_HEADING = re.compile(r"- .*:$|- C\+\+ Call Stack|- The ")
_TAIL, _MOST = 65536, 300


class Member(NamedTuple):
    """A process of the job."""

    name: str
    process: subprocess.Popen
    log: Path

    def running(self) -> bool:
        """Return whether the process is running."""
        return self.process.poll() is None

    def failed(self) -> bool:
        """Return whether it ended with an error."""
        return bool(self.process.poll())

    def code(self) -> int:
        """Return its exit code as a shell reports it."""
        return self.process.returncode if self.process.returncode >= 0 else 128 - self.process.returncode

    def end(self, shown: bool = False) -> str:
        """Return one line about how it ended, without its last words if they have been `shown`."""
        code = self.process.returncode
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            what = f"was killed by {known.get(-code, f'signal {-code}')}"
        else:
            what = f"ended with exit code {code}{'' if shown else f': {last_words(self.log)}'}"
        return f"{self.name} {what}; its log is {self.log}"


def free_port() -> socket.socket:
    """Return a socket that reserves a free port for the scheduler.

    It does not listen, and allows address reuse: the scheduler, which sets the same option, can bind the port, but the
    system does not give it to another process. On systems where this does not work another process may get the port.
    """
    keeper = socket.socket()
    keeper.bind((HOST, 0))
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return keeper


def cluster(nproc: int, port: int) -> dict[str, str]:
    """Return the environment variables common to all processes of a cluster."""
    where = {"MS_SCHED_HOST": HOST, "MS_SCHED_PORT": str(port)}
    return {**DEFAULTS, **os.environ, **where, "MS_WORKER_NUM": str(nproc), "RANK_SIZE": str(nproc)}


def scheduler_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the scheduler."""
    return {**environment, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}


def worker_of(environment: Mapping[str, str], rank: int, log: Path) -> dict[str, str]:
    """Return the environment of a rank."""
    names = ("MS_NODE_ID", "RANK_ID", "DEVICE_ID")
    own = {**dict.fromkeys(names, str(rank)), VARIABLE: str(heartbeat_of(log).absolute())}
    return {**environment, "MS_ROLE": "MS_WORKER", **own}


def heartbeat_of(log: Path) -> Path:
    """Return the heartbeat file that belongs to a rank's log."""
    return log.with_suffix(".beat")


def start(name: str, command: Sequence[str], environment: dict[str, str], log: Path, *, piped: bool = False) -> Member:
    """Start a process in its own session; it ends with the launcher, even if the launcher is killed."""
    with open(log, "wb") as file:
        out, err = (subprocess.PIPE, subprocess.PIPE) if piped else (file, subprocess.STDOUT)
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with(os.getpid()),
        )
    return Member(name, process, log)


def first_words(text: str) -> str:
    """Return the first line of an error message that says something.

    Messages of MindSpore's kernels begin with an empty line, rules of dashes and headings.
    """
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if line.strip("- ") and not _HEADING.match(line)), "")


def last_words(log: Path) -> str:
    """Return the line of a log that best explains why its process ended."""
    text = ""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - _TAIL))
        text = file.read().decode(errors="replace").replace("\r", "\n")
    for pattern in _WORDS:
        if found := list(re.finditer(pattern, text, re.MULTILINE)):
            last = found[-1]
            said = last[1].strip()
            said = f"{said} {first_words(text[last.end() :])}".strip() if said.endswith(":") else said
            return _check.one_line(said, _MOST)
    return "it printed nothing"
