"""Starts several processes of one program, and ends them together.

    python -m ms_accum.launch --nproc 2 train.py --epochs 3

MindSpore's dynamic cluster consists of a scheduler and workers, which find it through environment variables. The
launcher starts them like `msrun`, but with this interpreter, a free port, and meaningful exit codes: if a rank fails,
the launcher ends the others and returns that rank's exit code. It forwards each signal to the ranks once: they run in
their own sessions, so Ctrl-C in a terminal reaches only the launcher. A rank computes on the device with its number on
its machine, as with `msrun` (Ascend and GPU not run here).

On several machines, start one launcher on each, with `--nnodes`, `--node_rank` and `--master_addr`. They do not
communicate: each one ends the ranks of its machine, and those of the others end because an exchange fails.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .._check import quantity
from ..ranks.heartbeat import read
from ..saving.files import check_inside
from .flags import Parser, number, path, whole
from .process import CODES, DISK, SIGNAL_MESSAGES, USAGE, Failure, StopRequest, handled_signals, open_streams
from .processes import (
    SCHEDULER,
    Machine,
    Member,
    Relay,
    cluster,
    failure_reason,
    heartbeat_of,
    print_error,
    print_line,
    reserve_port,
    scheduler_of,
    start,
    terminal_variables,
    worker_of,
)

_PORT, _LAST_PORT = 8118, 65535  # the first is msrun's
_ANY_ADDRESS = "0.0.0.0"
_ELSEWHERE = "the reason may be on another machine: see the launcher's output there"
_NO_SCHEDULER = "no rank can continue without the scheduler: all ranks receive SIGTERM, to save their state and end"
CHECK_SECONDS, KILL_SECONDS, LATE_SECONDS, LOST_SECONDS = 0.1, 1.0, 20.0, 3.0
"""float, seconds: between two checks of the ranks, allowed after a second signal, after which a rank is late, and after
which an exchange is lost that a failed rank takes no part in.

On CPU a rank waits for the others for half a minute, then MindSpore raises an error.
"""


class Job:
    """The ranks of a program on this machine, and on machine 0 the scheduler through which all ranks find each other.

    Args:
        command (Sequence[str]): the command of each rank, after the interpreter.
        machine (Machine): the ranks, and the scheduler's address.
        logs (Path): the folder of their logs.
    """

    def __init__(self, command: Sequence[str], machine: Machine, logs: Path):
        self.workers: list[Member] = []
        self.machine = machine
        self._scheduler: Member | None = None
        self._members: list[Member] = []
        self._relay: Relay | None = None
        self._port = reserve_port(machine.address, machine.port) if machine.has_scheduler else None
        try:
            if self._port:
                machine = machine._replace(port=self._port.getsockname()[1])
            self._start(command, cluster(machine), logs)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all remaining processes: the scheduler, ranks, and processes started by ranks."""
        for member in self._members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(member.process.pid, signal.SIGKILL)
            member.process.wait()
        self.drain()
        if self._port:
            self._port.close()

    def drain(self) -> None:
        """Wait until all output of rank 0 is shown."""
        if self._relay:
            self._relay.drain(KILL_SECONDS)

    def new_reason(self, failed: Member) -> str:
        """Return why a process has failed; an empty text if rank 0, whose output is shown, has printed that."""
        if failed.name == "rank 0":
            return ""
        reason = failure_reason(failed.log)
        return reason if self._relay is None or self._relay.is_new(reason) else ""

    def running(self) -> list[Member]:
        """Return the ranks that have not ended."""
        return [worker for worker in self.workers if worker.running()]

    def failed(self, stopping: bool, ended: Sequence[Member] = ()) -> Member | None:
        """Return the process that failed, preferably a rank; not one that ended by a requested signal, or in `ended`.

        A failure of the scheduler counts only while all ranks run, or if they hang without it: the scheduler also ends
        after a rank has ended.
        """
        scheduler_counts = len(self.running()) == len(self.workers) or (self.running() and self.stranded())
        for member in [*self.workers, *(self._members if scheduler_counts else [])]:
            if member.failed() and member not in ended and not (stopping and member.code() in SIGNAL_MESSAGES):
                return member
        return None

    def late(self, failed: Member) -> str | None:
        """Return a text about the slowest rank, for which the failed one may have waited; None if there is none."""
        heartbeats = {worker: beat for worker in self.workers if (beat := read(heartbeat_of(worker.log)))}
        if failed not in heartbeats:
            return None
        slowest = min(heartbeats, key=lambda worker: heartbeats[worker].done)
        slowest_beat, failed_done = heartbeats[slowest], heartbeats[failed].done
        if slowest_beat.done >= failed_done:
            return None
        done, of_failed = quantity(slowest_beat.done, "micro-batch"), f"{failed.name} had finished {failed_done:,}"
        if not slowest.running():
            return f"{slowest.name} had ended before, after {done}; {of_failed}"
        if slowest_beat.age < LATE_SECONDS:  # the failed rank had another reason
            return None
        so_far = f"it had finished {done}, the last {slowest_beat.age:.0f} s ago"
        return f"{slowest.name} was late: {so_far}; {of_failed}"

    def stranded(self) -> bool:
        """Return whether all remaining programs have ended, but their processes hang without the scheduler."""
        if self._scheduler is None or self._scheduler.running():
            return False
        heartbeats = [read(heartbeat_of(worker.log)) for worker in self.running()]
        return all(beat is not None and beat.over for beat in heartbeats)

    def lost(self) -> list[Member]:
        """Return the ranks that are in an exchange for a while, of which each rank is needed."""
        heartbeats = [(worker, read(heartbeat_of(worker.log))) for worker in self.running()]
        return [
            worker
            for worker, beat in heartbeats
            if beat and beat.exchanges and not beat.over and beat.age >= LOST_SECONDS
        ]

    def send(self, number: int) -> None:
        """Send a signal to the ranks, which must themselves end the processes that they started."""
        for worker in self.running():
            worker.process.send_signal(number)

    def _start(self, command: Sequence[str], environment: dict[str, str], logs: Path) -> None:
        if self.machine.has_scheduler:
            log = logs / "scheduler.log"
            self._scheduler = start("the scheduler", SCHEDULER, scheduler_of(environment), log)
            self._members.append(self._scheduler)
        for device, rank in enumerate(self.machine.ranks):
            log = logs / f"worker_{rank}.log"
            variables = {**worker_of(environment, rank, device, log), **(terminal_variables() if rank == 0 else {})}
            heartbeat_of(log).unlink(missing_ok=True)
            self.workers.append(start(f"rank {rank}", command, variables, log, piped=rank == 0))
            self._members.append(self.workers[-1])
        # Created last, because its threads must start after the last fork.
        if self.machine.has_scheduler:
            self._relay = Relay(self.workers[0].process, logs / "worker_0.log")


class Ending:
    """How a job ends: by itself, by a signal, or because a rank failed.

    Args:
        job (Job): the job.
        grace (float): seconds in which the other ranks must end after a rank has failed.
    """

    def __init__(self, job: Job, grace: float):
        self._job = job
        self._grace = grace
        self._failed: Member | None = None
        self._signal: StopRequest | None = None
        self._ended: list[Member] = []  # by the launcher
        self._deadline = math.inf
        self._gone_since = math.inf

    @property
    def _stopping(self) -> bool:
        return self._failed is not None or self._signal is not None

    @property
    def overdue(self) -> bool:
        """bool, whether the time limit of the remaining ranks is over. After a first signal there is no limit."""
        return time.monotonic() > self._deadline or (self._failed is not None and self._job.stranded())

    def check_ranks(self) -> None:
        """Check whether a rank has failed. The first failure is the job's; the other ranks are sent SIGTERM."""
        self._end_lost()
        if self._failed is not None:
            return
        failed = self._job.failed(self._stopping, self._ended)
        if failed is None:
            return
        if not self._stopping and failed.process.returncode in SIGNAL_MESSAGES:
            # It received a signal that the launcher did not receive. The others may be saving their states.
            self._signal = StopRequest(next(number for number, code in CODES.items() if code == failed.code()))
            self._gone_since = time.monotonic()
            return
        # Both are read before ranks get a signal: an ending rank writes to its file, and would then no longer be late,
        # and rank 0 may print the same error.
        if failed in self._job.workers:
            elsewhere = _ELSEWHERE if self._job.machine.nnodes > 1 and failed.process.returncode > 0 else None
            hint = self._job.late(failed) or elsewhere
        else:
            hint = _NO_SCHEDULER
        reason = self._job.new_reason(failed)
        if not self._stopping:  # a second signal would end our programs before they have saved their state
            self._job.send(signal.SIGTERM)
        self._failed = failed
        self._gone_since = time.monotonic()
        self._deadline = min(self._deadline, self._gone_since + self._grace)
        if failed.name == "rank 0":
            self._job.drain()
        print_error(failed.end(reason))
        if hint:
            print_error(hint)

    def _end_lost(self) -> None:
        """Kill ranks that wait for one that is gone: they can't save, and MindSpore ends them late.

        A rank that has failed, or has ended with a signal that only this rank received, maybe before all had joined.
        """
        by_rank = self._failed is None or self._failed in self._job.workers
        if by_rank and time.monotonic() - self._gone_since >= LOST_SECONDS:
            for worker in self._job.lost():
                worker.process.kill()
                worker.process.wait()
                self._ended.append(worker)
                print_error(f"{worker.name} was waiting for all ranks and was ended")

    def forward(self, number: int) -> None:
        """Forward a signal; ranks that already received one must now end at once."""
        if self._signal is not None and not self._signal.at_once(number):
            return
        if self._stopping:
            self._grace = KILL_SECONDS
            self._deadline = time.monotonic() + KILL_SECONDS
        self._signal = self._signal or StopRequest(number)
        self._job.send(number)

    def code(self) -> int:
        """Print the final messages, and return the exit code: that of the failed rank, else that of the signal."""
        for worker in self._job.running() if not self._job.stranded() else ():
            print_error(f"{worker.name} did not end within {self._grace:g} s and was killed")
        self.check_ranks()
        if self._failed is not None:
            return self._failed.code()
        if self._signal is None:
            return 0
        self._job.drain()
        print_error(SIGNAL_MESSAGES[self._signal.code])
        return self._signal.code


def launch(command: Sequence[str], machine: Machine, logs: Path, grace: float) -> int:
    """Run this machine's ranks of a program, forward signals to them, and return the exit code of the job."""
    received: list[int] = []
    for signal_number in handled_signals():
        signal.signal(signal_number, lambda signal_number, frame: received.append(signal_number))
    with Job(command, machine, logs) as job:
        ending = Ending(job, grace)
        while job.running() and not ending.overdue:
            ending.check_ranks()
            while received:
                ending.forward(received.pop(0))
            time.sleep(CHECK_SECONDS)
        return ending.code()


def flags() -> Parser:
    """Return the launcher's flags; everything after the program's name belongs to the program."""
    usage = (
        "python -m ms_accum.launch [--nproc N] [--log_dir DIR] [--grace SECONDS]\n"
        "           [--nnodes M --node_rank K --master_addr HOST [--master_port PORT]]\n"
        "           (script.py | -m module) [its flags]"
    )
    parser = Parser("Run several processes (ranks) of one program.", usage=usage)
    add = parser.add_argument_group("processes").add_argument
    text = "number of processes on this machine (default: %(default)s)"
    add("--nproc", type=whole(1), metavar="N", default=1, help=text)
    text = "folder for the logs of the ranks (default: a new folder in logs/)"
    add("--log_dir", type=path, metavar="DIR", help=text)
    text = "seconds in which the other ranks must end after a rank has failed (default: 20)"
    add("--grace", type=number(0), metavar="SECONDS", default=20.0, help=text)
    add("-m", dest="module", action="store_true", help="run the program as a module")
    add = parser.add_argument_group("several machines, each with a launcher").add_argument
    text = "number of machines, all with the same --nproc (default: %(default)s)"
    add("--nnodes", type=whole(1), metavar="M", default=1, help=text)
    add("--node_rank", type=whole(0), metavar="K", help="number of this machine, from 0")
    add("--master_addr", metavar="HOST", help="name or IPv4 address of machine 0, which the others must reach")
    text = f"port on machine 0 for the scheduler (default: {_PORT}; on a single machine a free one)"
    add("--master_port", type=whole(1), metavar="PORT", help=text)
    parser.add_argument("command", nargs=argparse.PARSER, metavar="script.py [its flags]", help="the program")
    return parser


def machine_of(args: argparse.Namespace) -> Machine:
    """Return what this machine runs.

    Raises:
        Failure: If a flag for several machines is missing, out of range, or given for a single one; or if the address
            of machine 0 is unknown, or is not this machine's where it must be.
    """
    given = {name: getattr(args, name) for name in ("node_rank", "master_addr", "master_port")}
    if args.nnodes == 1:
        for name in (name for name, value in given.items() if value is not None):
            raise Failure(f"argument --{name}: needs --nnodes=2 or more, the number of machines", USAGE)
        return Machine(args.nproc)
    for name in ("node_rank", "master_addr"):
        if given[name] is None:
            raise Failure(f"argument --{name}: must be given with --nnodes={args.nnodes}", USAGE)
    if args.node_rank >= args.nnodes:
        rule = f"must be < {args.nnodes}, the number of machines, but got {args.node_rank}"
        raise Failure(f"argument --node_rank: {rule}", USAGE)
    port = args.master_port or _PORT
    if port > _LAST_PORT:
        raise Failure(f"argument --master_port: must be <= {_LAST_PORT}, but got {port}", USAGE)
    try:
        address = socket.gethostbyname(args.master_addr)
    except (OSError, UnicodeError) as error:
        raise Failure(f"argument --master_addr: '{args.master_addr}' has no address: {error}", USAGE) from None
    if address == _ANY_ADDRESS:  # also that of an empty text: each machine would take itself for machine 0
        raise Failure(f"argument --master_addr: '{args.master_addr}' is not the address of a machine", USAGE)
    machine = Machine(args.nproc, args.nnodes, args.node_rank, address, port)
    if machine.has_scheduler:
        try:
            reserve_port(address, port).close()
        except OSError as error:
            rule = f"port {port} of {address} can't be used on this machine, number 0 of {args.nnodes}: {error}"
            raise Failure(f"argument --master_addr: {rule}", USAGE) from None
    return machine


def log_folder(folder: str | None, machine: Machine) -> Path:
    """Create the log folder, and remove logs of an earlier job with more ranks.

    Raises:
        OSError: If it can't be created, or a log would be a link out of it.
    """
    if folder is None:
        os.makedirs("logs", exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir="logs"))
    os.makedirs(folder, exist_ok=True)
    for old_log in (*Path(folder).glob("worker_*.log"), *Path(folder).glob("worker_*.beat")):
        rank = old_log.stem[len("worker_") :]
        if rank.isascii() and rank.isdecimal() and int(rank) >= machine.world_size:
            old_log.unlink()
    logs = [Path(folder, "scheduler.log"), *(Path(folder, f"worker_{rank}.log") for rank in machine.ranks)]
    check_inside(folder, *logs, *map(heartbeat_of, logs))
    return Path(folder)


def ranks_text(machine: Machine) -> str:
    """Return which ranks this machine runs, for people."""
    if machine.nnodes == 1:
        return str(machine.nproc)
    first, last = machine.ranks[0], machine.ranks[-1]
    own = str(first) if first == last else f"{first} to {last}"
    alone = " (only this machine can reach it)" if machine.address.startswith("127.") else ""
    return f"{own} of {machine.world_size}, scheduler at {machine.address}:{machine.port}{alone}"


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, run the program and return the exit code."""
    open_streams()
    parser = flags()
    try:
        args = parser.parse(sys.argv[1:] if argv is None else argv)
        name, *program_flags = args.command
        script = ["-m", name] if args.module else [name]
        if not (args.module or os.path.isfile(script[0])):
            parser.error(f"argument script.py: '{name}' is not a file")
        machine = machine_of(args)
        logs = log_folder(args.log_dir, machine)
        print_line(f"{'ranks':16} {ranks_text(machine)}, logs in {logs}")
        return launch([*script, *program_flags], machine, logs, args.grace)
    except Failure as failure:
        print_error(str(failure))
        return failure.code
    except OSError as error:
        print_error(f"the job can't be started: {error}")
        return DISK
