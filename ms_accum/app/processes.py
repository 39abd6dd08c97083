"""The processes of a MindSpore cluster: how they are started, how their output is shown, and how they ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TextIO

from .. import _check
from ..ranks.heartbeat import COLUMNS, VARIABLE
from ..ranks.lifetime import end_with

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
_REASONS = (r"^error: (.+)$", r"^((?:\w+\.)*\w+(?:Error|Exception|Interrupt|Exit)\b.*)$", r"^(?!\[[A-Z]+\] )(.*\S.*)$")
_TAIL_BYTES = 65536
_LONGEST_REASON = 300
_ERROR_LINE = re.compile(rb"error: (.+)$")
# How the output of rank 0 is shown.
_PREFIX = b"[0] "
_CHUNK = 65536
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")
_MINDSPORE_LOG = re.compile(rb"\[(INFO|WARNING)\] [A-Z_]+\(\d+,")


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

    def end(self, reason: str) -> str:
        """Return one line about how it ended; an empty reason has been shown."""
        code = self.process.returncode
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            end = f"was killed by {names.get(-code, f'signal {-code}')}"
        else:
            end = f"ended with exit code {code}" + (f": {reason}" if reason else "")
        return f"{self.name} {end}; its log is {self.log}"


class Machine(NamedTuple):
    """Which ranks of a job this machine runs, and where the scheduler is: on machine 0."""

    nproc: int
    """The number of ranks on each machine."""
    nnodes: int = 1
    """The number of machines."""
    node_rank: int = 0
    """The number of this machine."""
    address: str = HOST
    """The address of machine 0."""
    port: int = 0
    """The scheduler's port; 0 for a free one, on a single machine."""

    @property
    def has_scheduler(self) -> bool:
        """bool, whether the scheduler runs on this machine."""
        return self.node_rank == 0

    @property
    def world_size(self) -> int:
        """int, the number of ranks on all machines."""
        return self.nproc * self.nnodes

    @property
    def ranks(self) -> range:
        """range, the ranks on this machine."""
        return range(self.node_rank * self.nproc, (self.node_rank + 1) * self.nproc)


def reserve_port(address: str = HOST, port: int = 0) -> socket.socket:
    """Return a socket that reserves the scheduler's port, or a free one, on an address of this machine.

    It does not listen, and allows address reuse: the scheduler, which sets the same option, can bind the port, but the
    system does not give it to another process. On systems where this does not work another process may get the port.
    """
    reserved = socket.socket()
    try:
        if port:  # connections of an earlier job may still be closing
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        reserved.close()
        raise
    return reserved


def cluster(machine: Machine) -> dict[str, str]:
    """Return the environment variables common to all processes of a cluster."""
    address = {"MS_SCHED_HOST": machine.address, "MS_SCHED_PORT": str(machine.port)}
    sizes = dict.fromkeys(("MS_WORKER_NUM", "RANK_SIZE"), str(machine.world_size))
    return {**DEFAULTS, **os.environ, **address, **sizes}


def scheduler_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the scheduler."""
    return {**environment, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}


def worker_of(environment: Mapping[str, str], rank: int, device: int, log: Path) -> dict[str, str]:
    """Return the environment of a rank, which uses a device of its machine."""
    numbers = {"MS_NODE_ID": str(rank), "RANK_ID": str(rank), "DEVICE_ID": str(device)}
    return {**environment, "MS_ROLE": "MS_WORKER", **numbers, VARIABLE: str(heartbeat_of(log).absolute())}


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


def failure_reason(log: Path) -> str:
    """Return the line of a log that best explains why its process ended."""
    text = ""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - _TAIL_BYTES))
        text = file.read().decode(errors="replace").replace("\r", "\n")
    for pattern in _REASONS:
        matches = list(re.finditer(pattern, text, re.MULTILINE))
        if matches:
            reason = matches[-1][1].strip()
            if reason.endswith(":"):
                reason = f"{reason} {_check.first_words(text[matches[-1].end() :])}".strip()
            return _reason(reason)
    return "it printed nothing"


def _reason(text: str) -> str:
    return _check.one_line(text.strip(), _LONGEST_REASON)


def terminal_variables() -> dict[str, str]:
    """Return the environment variable for rank 0 if its output is shown on a terminal; else an empty dict."""
    if not sys.stdout.isatty():
        return {}
    return {COLUMNS: str(shutil.get_terminal_size().columns - len(_PREFIX) - 1)}


class LastErrors:
    """The last error that each of several sources has shown: ranks often fail with the same one, shown once."""

    def __init__(self) -> None:
        self._by_source: dict[str, str] = {}
        self._lock = threading.Lock()

    def is_new(self, source: str, error: str) -> bool:
        """Return whether no other source has shown this error, and note that this one shows it."""
        with self._lock:
            if any(other != source and shown == error for other, shown in self._by_source.items()):
                return False
            self._by_source[source] = error
            return True


class Relay:
    """Copies the output of a process from its pipes to a log and, line by line, to this process's streams.

    Args:
        process (Popen): the process, whose streams are pipes.
        log (Path): the file for all output.
    """

    def __init__(self, process: subprocess.Popen, log: Path):
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._errors = LastErrors()
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._streams = [_Stream(source, file, stream.fileno(), self._errors) for source, stream in pairs if source]
        for stream in self._streams:
            stream.thread.start()

    def is_new(self, error: str) -> bool:
        """Return whether the process has not shown this error; if it does so later, that line is only in its log."""
        return self._errors.is_new("launcher", error)

    def drain(self, seconds: float) -> None:
        """Wait until all output is shown, for at most `seconds`: another process may keep the pipes open."""
        for stream in self._streams:
            stream.thread.join(seconds)


class _Stream:
    def __init__(self, source: IO[bytes], log: int, terminal: int, errors: LastErrors):
        self._source = source
        self._log = log
        self._terminal = terminal
        self._errors = errors
        self._shows_bars = os.isatty(terminal)
        self._pending = bytearray()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while data := os.read(self._source.fileno(), _CHUNK):
            self._receive(data)
        self._flush()

    def _receive(self, data: bytes) -> None:
        """Show complete lines and keep the rest, so that the other stream does not split a line."""
        searched = max(len(self._pending) - 1, 0)  # a carriage return at the end may be half of a line's end
        self._pending += data
        done = 0
        for start, stop in [end.span() for end in _LINE_END.finditer(self._pending, searched)]:
            self._show(bytes(self._pending[done:start]), bytes(self._pending[start:stop]))
            done = stop
        self._write_log(bytes(self._pending[:done]))
        del self._pending[:done]
        if len(self._pending) > _CHUNK:
            self._flush()

    def _flush(self) -> None:
        rest = bytes(self._pending)
        self._pending.clear()
        self._write_log(rest)
        if rest.strip(b"\r"):
            self._show(rest.strip(b"\r"), b"\n")

    def _write_log(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the run
            _write(self._log, text)

    def _show(self, line: bytes, end: bytes) -> None:
        """Show a line; a line that a progress bar overwrites is shown only on a terminal."""
        overwritten = end == b"\r"
        if _MINDSPORE_LOG.match(line) or (overwritten and not (line and self._shows_bars)):
            return
        error = _ERROR_LINE.match(line)
        if error and not self._errors.is_new("rank 0", _reason(error[1].decode(errors="replace"))):
            return
        with contextlib.suppress(OSError):  # a closed terminal must not end the run
            _write(self._terminal, _PREFIX + line + (b"\r" if overwritten else b"\n"))


def _write(descriptor: int, data: bytes) -> None:
    """Write all bytes."""
    while data:
        data = data[os.write(descriptor, data) :]


def print_line(line: str) -> None:
    """Print a line of the launcher between the lines of the process."""
    _print(sys.stdout, line)


def print_error(message: str) -> None:
    """Print a one-line error, in the form that all programs of this package use."""
    _print(sys.stderr, f"error: {message}")


def _print(stream: TextIO, line: str) -> None:
    with contextlib.suppress(OSError):
        _write(stream.fileno(), f"{_check.one_line(line, _check.LINE)}\n".encode())
