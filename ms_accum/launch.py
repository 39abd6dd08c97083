"""Starts several processes (ranks) of one program by MindSpore's `msrun`, and ends them together.

    python -m ms_accum.launch --nproc 2 train.py --epochs 3

By itself `msrun` runs the `python` on PATH, exits with 0 after Ctrl-C, leaves its ranks running after SIGTERM, and
kills all ranks as soon as one has ended with an error, while others still save. So here `msrun` only starts the
processes. This program waits for them, passes signals on, shows the output of rank 0, and returns the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import BinaryIO, NoReturn, TextIO

from . import _check

# Options of msrun that are passed on.
_OF_MSRUN = {
    "worker_num": (int, "number of ranks on all machines"),
    "node_rank": (int, "number of this machine, from 0"),
    "master_addr": (str, "address of machine 0, which the others must reach"),
    "master_port": (int, "port of machine 0"),
    "cluster_time_out": (int, "seconds in which all ranks must have started"),
    **dict.fromkeys(("bind_core", "bind_numa", "rank_table_file"), (str, "see msrun --help")),
}
_CHECK_SECONDS = 0.1
# After a rank has failed the others get SIGTERM, and have this long to end.
_GRACE_SECONDS = 10.0
# A repeated signal counts as one: `timeout` sends it to its command and to the command's group.
_REPEAT_SECONDS = 1.0
_TERMINATED = 128 + signal.SIGTERM  # the exit code of our programs after SIGTERM, and of those that it ended
# What msrun starts in each process: this becomes the program, run by the launcher's interpreter. It ends with the
# launcher, and has a session of its own, so that Ctrl-C in a terminal reaches only the launcher. The scheduler does not
# run the program, which would write its files a second time.
_BECOME = """
import ctypes, os, sys
launcher, interpreter, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(launcher):
    sys.exit("the launcher has ended")
if os.getpgrp() != os.getpid():
    os.setsid()
if os.environ.get("MS_ROLE") == "MS_SCHED":
    command = ["-c", "from mindspore.communication import init; init()"]
os.execv(interpreter, [interpreter, *command])
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {_check.one_line(message, _check.LINE)}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the launcher's flags; everything after the program's name belongs to the program."""
    parser = _Parser(
        prog="python -m ms_accum.launch",
        usage="%(prog)s [--nproc N] [--log_dir DIR] [options of msrun]\n           (script.py | -m module) [its flags]",
        description="Run a program in several processes (ranks) by MindSpore's msrun.",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks on this machine (default: 1)")
    parser.add_argument("--log_dir", metavar="DIR", help="folder for the logs (default: a new one in logs/)")
    parser.add_argument("-m", dest="module", action="store_true", help="run the program as a module")
    group = parser.add_argument_group("options of msrun, mostly for several machines")
    for option, (kind, text) in _OF_MSRUN.items():
        group.add_argument(f"--{option}", type=kind, metavar="X", help=text)
    parser.add_argument("command", nargs=argparse.PARSER, metavar="script.py [its flags]", help="the program")
    args = parser.parse_args(argv)
    if args.nproc < 1:
        parser.error(f"argument --nproc: must be an int >= 1, but got {args.nproc}")
    if args.worker_num not in (None, args.nproc):
        for name in ("node_rank", "master_addr"):
            if getattr(args, name) is None:
                parser.error(f"argument --{name}: must be given on several machines")
    if not (args.module or os.path.isfile(args.command[0])):
        parser.error(f"argument script.py: '{args.command[0]}' is not a file")
    return args


class Job:
    """The processes of this machine: its ranks and, on the machine with `--master_addr`, the scheduler.

    Args:
        args (Namespace): the launcher's flags.
    """

    def __init__(self, args: argparse.Namespace):
        from mindspore.parallel.cluster.process_entity import _ProcessManager
        from mindspore.parallel.cluster.run import get_args

        options = {"worker_num": args.nproc, "local_worker_num": args.nproc}
        if args.master_addr is None:
            options["master_port"] = _free_port()
        options.update({name: value for name in _OF_MSRUN if (value := getattr(args, name)) is not None})
        sys.argv = ["msrun", *(f"--{name}={value}" for name, value in options.items()), "python3"]
        msrun = get_args()
        msrun.log_dir = self.logs = args.log_dir or _new_folder()
        program = ["-m", *args.command] if args.module else args.command
        msrun.task_script_args = ["-c", _BECOME, str(os.getpid()), sys.executable, *program]
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        os.environ.setdefault("PYTHONUNBUFFERED", "1")  # otherwise a killed rank loses what it printed
        self.on_several_machines = msrun.worker_num > args.nproc
        first = max(msrun.node_rank, 0) * args.nproc if self.on_several_machines else 0
        manager = _ProcessManager(msrun)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # msrun prints the commands
                manager.run()
        finally:  # also if only some could be started
            started = enumerate(manager.cgn_processes, first)
            self.ranks: dict[str, subprocess.Popen] = {f"rank {number}": rank for number, rank in started}
            scheduler = {"the scheduler": manager.msn_process} if manager.msn_process else {}
            self.processes: dict[str, subprocess.Popen] = {**self.ranks, **scheduler}
            if len(self.ranks) < args.nproc:
                self.end()

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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _new_folder() -> str:
    os.makedirs("logs", exist_ok=True)
    return tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir="logs")


def _wait(job: Job, received: list[int]) -> int:
    """Wait until all ranks have ended, and return the exit code of the job: that of the first rank that failed."""
    awaited = job.processes if job.on_several_machines else job.ranks  # ranks elsewhere may still need the scheduler
    stop, stopped_at, deadline, failed, runs = 0, 0.0, math.inf, None, True
    with open(job.log("rank 0") if "rank 0" in job.ranks else os.devnull, "rb") as output:
        while runs and time.monotonic() < deadline:
            time.sleep(_CHECK_SECONDS)
            runs = any(job.code(name) is None for name in awaited)
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
                _write(sys.stderr, os.fsencode(f"error: {_end_of(failed, job)}\n"))
                if not stop:  # a second signal would end our programs before they have saved their state
                    job.terminate()
        _show(output, to_end=True)
    if failed is not None:
        return job.code(failed) or 1
    return 128 + stop if any(job.code(name) != 0 for name in job.ranks) else 0


def _lines(output: BinaryIO) -> list[bytes]:
    """Return the rest of a log, without the lines of MindSpore's own."""
    return [line for line in output.readlines() if not line.startswith((b"[INFO]", b"[WARNING]"))]


def _show(output: BinaryIO, *, to_end: bool = False) -> None:
    """Show the lines of rank 0 that are complete, or all."""
    lines = _lines(output)
    if lines and not lines[-1].endswith(b"\n") and not to_end:
        output.seek(-len(lines.pop()), os.SEEK_CUR)
    _write(sys.stdout, b"".join(lines))


def _end_of(name: str, job: Job) -> str:
    """Return how a process ended, with the last error in its log, or the last line, if its output is not shown."""
    with open(job.log(name), "rb") as output:
        lines = [line.decode(errors="replace").strip() for line in _lines(output)] if name != "rank 0" else []
    errors = [line for line in lines if "rror: " in line] or [line for line in lines if line]
    reason = f": {_check.one_line(errors[-1])}" if errors else ""
    return f"{name} ended with exit code {job.code(name)}{reason}; its log is {job.log(name)}"


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
