"""Starts several processes (ranks) of one program on this machine, and ends them together.

    python -m ms_accum.launch --nproc 2 train.py --epochs 3

It starts them as MindSpore's `msrun` does, by the environment variables of its dynamic cluster. But `msrun` runs the
`python` on PATH, exits with 0 after Ctrl-C, leaves its ranks running after SIGTERM, and kills all ranks as soon as one
has ended with an error, while others still save. This program waits for them, passes signals on, shows the output of
rank 0, and returns the exit code. For several machines there is `msrun`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, BinaryIO, NoReturn, TextIO

from . import _check
from .saving.files import check_own

_CHECK_SECONDS = 0.1
# After a rank has failed the others get SIGTERM, and have this long to end.
_GRACE_SECONDS = 10.0
# A repeated signal counts as one: `timeout` sends it to its command and to the command's group.
_REPEAT_SECONDS = 1.0
_TERMINATED = 128 + signal.SIGTERM  # the exit code of our programs after SIGTERM, and of those that it ended
# The scheduler, which lets the ranks find each other, does not run the program: it would write its files a second time.
_SCHEDULER = ["-c", "from mindspore.communication import init; init()"]
_PR_SET_PDEATHSIG = 1
_PORT_IS_TAKEN = "Failed to create the TCP server"  # in the words of MindSpore's scheduler
# What MindSpore logs, such as "[WARNING] ME(19267:140285518519168,MainProcess):2026-11-29-15:58:30".
_OF_MINDSPORE = re.compile(rb"\[(INFO|WARNING)\] [A-Z_]+\(\d+")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {_check.one_line(message, _check.LINE)}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the launcher's flags; everything after the program's name belongs to the program."""
    parser = _Parser(
        prog="python -m ms_accum.launch",
        usage="%(prog)s [--nproc N] [--log_dir DIR] (script.py | -m module) [its flags]",
        description="Run a program in several processes (ranks) on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="number of ranks (default: 1)")
    parser.add_argument("--log_dir", metavar="DIR", help="folder for the logs (default: a new one in logs/)")
    parser.add_argument("-m", dest="module", action="store_true", help="run the program as a module")
    parser.add_argument("command", nargs=argparse.PARSER, metavar="script.py [its flags]", help="the program")
    args = parser.parse_args(argv)
    if args.nproc < 1:
        parser.error(f"argument --nproc: must be an int >= 1, but got {args.nproc}")
    if not (args.module or os.path.isfile(args.command[0])):
        parser.error(f"argument script.py: '{args.command[0]}' is not a file")
    return args


class Job:
    """The ranks, and the scheduler by which they find each other.

    Args:
        args (Namespace): the launcher's flags.
    """

    def __init__(self, args: argparse.Namespace):
        self.logs = args.log_dir or _new_folder()
        os.makedirs(self.logs, exist_ok=True)
        self.processes: dict[str, subprocess.Popen] = {}
        self._shared = {"MS_WORKER_NUM": args.nproc, "RANK_SIZE": args.nproc}
        self.port = _free_port()
        self._shared |= {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": self.port}
        program = ["-m", *args.command] if args.module else args.command
        try:
            self._start("the scheduler", _SCHEDULER, MS_ROLE="MS_SCHED", RANK_ID=0)
            for rank in range(args.nproc):
                own = {"MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": rank}
                self._start(f"rank {rank}", program, MS_ROLE="MS_WORKER", **own)
        except BaseException:
            self.end()  # only some could be started
            raise
        self.ranks = {name: process for name, process in self.processes.items() if name != "the scheduler"}

    def _start(self, name: str, command: Sequence[str], **own: Any) -> None:
        """Start a process, with this interpreter. Without buffers: a killed rank would lose what it printed."""
        variables = {name: str(value) for name, value in {**self._shared, **own}.items()}
        check_own(self.log(name), in_place=True)
        with open(self.log(name), "wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command],
                env={"PYTHONUNBUFFERED": "1", **os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches only the launcher
                preexec_fn=partial(_end_with, os.getpid()),
            )

    def log(self, name: str) -> str:
        """Return the path of a process's log."""
        return os.path.join(self.logs, f"{name.replace('rank ', 'worker_').replace('the ', '')}.log")

    def code(self, name: str) -> int | None:
        """Return the exit code of a process as a shell does; None while it runs.

        It is not reaped here: until `end` its number, and that of its group, can't become another process's.
        """
        ended = os.waitid(os.P_PID, self.processes[name].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status

    def failed(self, *, stopping: bool) -> str | None:
        """Return a process that failed. When the job is stopping, to end by SIGTERM is no failure."""
        expected = (None, 0, _TERMINATED) if stopping else (None, 0)
        names = self.ranks if stopping else self.processes
        return next((name for name in names if self.code(name) not in expected), None)

    def terminate(self) -> None:
        """Send SIGTERM to the ranks, which end the processes that they started.

        SIGINT is not forwarded: MindSpore catches it and closes its connections, and the program does not see it.
        """
        for rank in self.ranks.values():
            os.kill(rank.pid, signal.SIGTERM)

    def end(self) -> None:
        """Kill what is left: ranks, processes that they started, and the scheduler."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):  # it has no group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()


def _end_with(launcher: int) -> None:
    """Let the kernel kill this process when the launcher has ended, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _new_folder() -> str:
    os.makedirs("logs", exist_ok=True)
    return tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir="logs")


def _wait(job: Job, received: list[int]) -> int:
    """Wait until all ranks have ended, and return the exit code of the job: that of the first rank that failed."""
    stop, stopped_at, deadline, failed, runs = 0, 0.0, math.inf, None, True
    with open(job.log("rank 0"), "rb") as output:
        while runs and time.monotonic() < deadline:
            time.sleep(_CHECK_SECONDS)
            runs = any(job.code(name) is None for name in job.ranks)
            _show(output)
            if received:
                number, now = received.pop(0), time.monotonic()
                if not stop:
                    stop, stopped_at = number, now
                    job.terminate()
                elif now - stopped_at > _REPEAT_SECONDS:
                    break
            if failed is None and (failed := job.failed(stopping=bool(stop))):
                deadline = time.monotonic() + _GRACE_SECONDS
                _show(output)
                for line in _report(failed, job):
                    _write(sys.stderr, os.fsencode(f"error: {line}\n"))
                if not stop:  # a second signal would end our programs before they have saved their state
                    job.terminate()
        _show(output, to_end=True)
    if failed is not None:
        return job.code(failed) or 1
    return 128 + stop if any(job.code(name) != 0 for name in job.ranks) else 0


def _lines(output: BinaryIO) -> list[bytes]:
    """Return the rest of a log, without the lines of MindSpore's own."""
    return [line for line in output.readlines() if not _OF_MINDSPORE.match(line)]


def _show(output: BinaryIO, *, to_end: bool = False) -> None:
    """Show the lines of rank 0 that are complete, or all."""
    lines = _lines(output)
    if lines and not lines[-1].endswith(b"\n") and not to_end:
        output.seek(-len(lines.pop()), os.SEEK_CUR)
    _write(sys.stdout, b"".join(lines))


def _report(failed: str, job: Job) -> list[str]:
    """Return how a process ended that failed, and other ranks that may be the cause.

    These have ended before, also with 0, or have an error in their log and hang: who waits for them fails first.
    """
    codes = {name: job.code(name) for name in (failed, *(name for name in job.ranks if name != failed))}
    errors = {name: _error_of(name, code, job) for name, code in codes.items()}
    ends = {name: "still runs" if code is None else f"had ended with exit code {code}" for name, code in codes.items()}
    ends[failed] = f"ended with exit code {codes[failed]}"
    return [
        f"{name} {ends[name]}{errors[name]}; its log is {job.log(name)}"
        for name, code in codes.items()
        if code is not None or errors[name]
    ]


def _error_of(name: str, code: int | None, job: Job) -> str:
    """Return the last error in a process's log, or the last line if it failed, unless its output is shown."""
    with open(job.log(name), "rb") as output:
        lines = [line.decode(errors="replace").strip() for line in _lines(output)] if name != "rank 0" else []
    if name == "the scheduler" and any(_PORT_IS_TAKEN in line for line in lines):
        return f": another program has taken port {job.port}; start the job again, which chooses another port"
    errors = [line for line in lines if "rror: " in line]
    if not errors and 0 < (code or 0) < 128:  # what a killed rank has printed last is not the cause
        errors = [line for line in lines if line]
    return f": {_check.one_line(errors[-1])}" if errors else ""


def _write(stream: TextIO, text: bytes) -> None:
    try:
        stream.buffer.write(text)
        stream.flush()
    except OSError:  # a closed terminal or pipe must not end the job
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, run the program and return the exit code."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
    args = _parse(argv)
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        job = Job(args)
    except (OSError, ValueError, RuntimeError) as error:
        _write(sys.stderr, os.fsencode(f"error: the job can't be started: {_check.one_line(error)}\n"))
        return 1
    try:
        _write(sys.stdout, os.fsencode(f"{args.nproc} ranks, logs in {job.logs}\n"))
        return _wait(job, received)
    finally:
        job.end()


if __name__ == "__main__":
    sys.exit(main())
