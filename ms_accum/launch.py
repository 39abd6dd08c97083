"""How do several processes of one program start and end together?

    python -m ms_accum.launch --nproc 2 train.py --epochs 3

MindSpore's dynamic cluster is a scheduler and workers that find it by their environment. This starts them as `msrun`
does, but with this interpreter, a free port, and exit codes that say what happened: when a rank ends badly, the
others are ended and the exit code is that rank's. A signal is handed on to the ranks, each once: they have sessions
of their own, so that Ctrl-C in a terminal reaches nobody but the launcher. One machine; for several there is `msrun`.
A rank computes on the device of its number, as with `msrun` (Ascend and GPU not run here).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ._member import SCHEDULER, Member, cluster, free_port, scheduler_of, start, worker_of
from ._relay import Relay, complain, say
from .signals import CODES, WORDS

USAGE, DISK = 2, 5  # as in `program`, which would import MindSpore
LOOK, LAST = 0.1, 1.0
"""float, seconds: how often ranks are looked at, and what they have after a second signal."""


class Job:
    """The ranks of a program, and the scheduler by which they find each other.

    Args:
        command (Sequence[str]): what each rank runs, after the interpreter.
        nproc (int): how many ranks.
        logs (Path): the folder of their logs.
    """

    def __init__(self, command: Sequence[str], nproc: int, logs: Path):
        self.workers: list[Member] = []
        self._members: list[Member] = []
        self._relay: Relay | None = None
        self._port = free_port()
        try:
            self._start(command, cluster(nproc, self._port.getsockname()[1]), nproc, logs)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End whatever is left: the scheduler, ranks, and processes that ranks have started."""
        for member in self._members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(member.process.pid, signal.SIGKILL)
            member.process.wait()
        self.drain()
        self._port.close()

    def drain(self) -> None:
        """Wait until what rank 0 has said is shown."""
        if self._relay:
            self._relay.drain(LAST)

    def running(self) -> list[Member]:
        """Return the ranks that have not ended."""
        return [worker for worker in self.workers if worker.running()]

    def failed(self) -> Member | None:
        """Return who ended badly, a rank if there is one: the scheduler goes after a rank has gone."""
        return next((member for member in (*self.workers, *self._members) if member.failed()), None)

    def send(self, number: int) -> None:
        """Send a signal to the ranks, not to what they started: that is theirs to end."""
        for worker in self.running():
            worker.process.send_signal(number)

    def _start(self, command: Sequence[str], environment: dict[str, str], nproc: int, logs: Path) -> None:
        log = logs / "scheduler.log"
        self._members.append(start("the scheduler", SCHEDULER, scheduler_of(environment), log))
        for rank in range(nproc):
            log = logs / f"worker_{rank}.log"
            self.workers.append(start(f"rank {rank}", command, worker_of(environment, rank), log, piped=rank == 0))
            self._members.append(self.workers[-1])
        # Its threads begin after the last fork.
        self._relay = Relay(self.workers[0].process, logs / "worker_0.log")


def watch(job: Job, received: Sequence[int], grace: float) -> int:
    """Hand signals on, end the ranks when one has failed, and return the exit code."""
    code = asked = handed = 0
    deadline = math.inf
    while running := job.running():
        failed = job.failed()
        if failed and deadline == math.inf:
            deadline = time.monotonic() + grace
            # Those that were sent a signal know; a second one would keep ours from saving their state.
            if not asked:
                code, asked = give_up(job, failed), 1
        for number in received[handed:]:
            handed, asked = handed + 1, asked + 1
            code = code or CODES[signal.Signals(number)]
            job.send(number)
            deadline = deadline if asked == 1 else time.monotonic() + LAST
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK)
    for worker in running:
        complain(f"{worker.name} did not end within {grace if asked == 1 else LAST:g} s and was killed")
    failed = job.failed()
    # Whatever becomes of the scheduler when all ranks are done.
    return give_up(job, failed) if failed and failed in job.workers and not asked else code


def give_up(job: Job, failed: Member) -> int:
    """Say who failed, ask the others to end, and return the exit code."""
    if failed is job.workers[0]:
        job.drain()
    complain(failed.end())
    job.send(signal.SIGTERM)
    return failed.code()


def say_stopped(job: Job, number: int) -> None:
    """Say that a signal ended the job, after a word on each rank that ended as signals do not explain.

    MindSpore makes a SIGINT that it gets while it compiles a SIGTERM.
    """
    job.drain()
    for worker in job.workers:
        if worker.failed() and worker.code() not in WORDS:
            complain(worker.end())
    complain(WORDS[CODES[signal.Signals(number)]])


def launch(command: Sequence[str], nproc: int, logs: Path, grace: float) -> int:
    """Run the ranks of a program, and return the exit code of the job."""
    received: list[int] = []
    for number in CODES:
        signal.signal(number, lambda number, frame: received.append(number))
    with Job(command, nproc, logs) as job:
        code = watch(job, received, grace)
        if received and code in WORDS:
            say_stopped(job, received[0])
    return code


class Parser(argparse.ArgumentParser):
    """Flags that are read in one way only, whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse flags in one line."""
        complain(message)
        sys.exit(USAGE)


def whole(text: str) -> int:
    """Convert a flag's text to a number of ranks."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be an int >= 1, but got '{text}'")
    return int(text)


def seconds(text: str) -> float:
    """Convert a flag's text to seconds."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number >= 0, but got '{text}'")


def flags() -> Parser:
    """Return the launcher's flags; whatever stands behind the program's name is the program's."""
    usage = (
        "python -m ms_accum.launch [--nproc N] [--log_dir DIR] [--grace SECONDS] (script.py | -m module) [its flags]"
    )
    parser = Parser(usage=usage, description="Run several processes of one program.", allow_abbrev=False)
    add, shown = parser.add_argument, "default: %(default)s"
    add("--nproc", type=whole, metavar="N", default=1, help=f"how many processes, {shown}")
    add("--log_dir", metavar="DIR", help="folder of the ranks' logs, default: a new one in 'logs'")
    what = "what the others have to end in when one has ended badly"
    add("--grace", type=seconds, metavar="SECONDS", default=20.0, help=f"{what}, default: 20")
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("command", nargs=argparse.PARSER, metavar="script.py [its flags]", help="the program")
    return parser


def log_folder(path: str | None, nproc: int) -> Path:
    """Make the folder of the logs, without logs of ranks that an earlier job had and this one has not."""
    if path is None:
        os.makedirs("logs", exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir="logs"))
    os.makedirs(path, exist_ok=True)
    for log in Path(path).glob("worker_*.log"):
        if log.stem[7:].isdigit() and int(log.stem[7:]) >= nproc:
            log.unlink()
    return Path(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, run the program and return the exit code."""
    parser = flags()
    args = parser.parse_args(argv)
    if not args.module and not os.path.isfile(args.command[0]):
        parser.error(f"argument script.py: '{args.command[0]}' is no file")
    try:
        logs = log_folder(args.log_dir, args.nproc)
        say(f"{'ranks':16} {args.nproc}, logs in {logs}")
        return launch([*(["-m"] if args.module else []), *args.command], args.nproc, logs, args.grace)
    except OSError as error:
        complain(f"the job can't be started: {error}")
        return DISK


if __name__ == "__main__":
    sys.exit(main())
