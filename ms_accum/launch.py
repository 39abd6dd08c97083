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

from ._heartbeat import read
from ._member import SCHEDULER, Member, cluster, free_port, heartbeat_of, scheduler_of, start, worker_of
from ._relay import Relay, complain, say
from ._streams import open_streams
from .signals import CODES, WORDS, Asked, heard

USAGE, DISK = 2, 5  # as in `program`, which would import MindSpore
_WITHOUT = "without the scheduler no rank goes on: they are asked to save their state, and to end"
LOOK, LAST, PATIENCE = 0.1, 1.0, 20.0
"""float, seconds: how often ranks are looked at, what they have after a second signal, and when one is late.

MindSpore's CPU lets a rank wait for half a minute.
"""


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

    def failed(self, asked: bool) -> Member | None:
        """Return who ended badly, a rank if there is one; who ended as it was asked to did not.

        The scheduler's end means something while all ranks run, or where they can't end without it: it goes when one
        has gone.
        """
        alone = len(self.running()) == len(self.workers) or (self.running() and self.stranded())
        left = [*self.workers, *(self._members if alone else ())]
        return next((each for each in left if each.failed() and not (asked and each.code() in WORDS)), None)

    def late(self, failed: Member) -> str | None:
        """Say which rank the failed one may have waited for in vain: the one that is farthest behind it."""
        own = read(heartbeat_of(failed.log))
        others = [worker for worker in self.workers if worker is not failed]
        beats = [(beat, worker.name, worker.running()) for worker in others if (beat := read(heartbeat_of(worker.log)))]
        if own is None or not beats or min(beats)[0].done >= own.done:
            return None
        (done, age, _), name, runs = min(beats)
        if not runs:
            return f"{name} had ended before, after {done:,} micro-batches, and {failed.name} had done {own.done:,}"
        if age < PATIENCE:  # the failed one had another reason
            return None
        so_far = f"it had done {done:,} micro-batches, the last {age:.0f} s before"
        return f"{name} was late: {so_far}, and {failed.name} {own.done:,}"

    def stranded(self) -> bool:
        """Return whether all that is left are programs that have ended, in processes that can't without a scheduler."""
        if self._members[0].running():
            return False
        beats = [read(heartbeat_of(worker.log)) for worker in self.running()]
        return all(beat is not None and beat.over for beat in beats)

    def send(self, number: int) -> None:
        """Send a signal to the ranks, not to what they started: that is theirs to end."""
        for worker in self.running():
            worker.process.send_signal(number)

    def _start(self, command: Sequence[str], environment: dict[str, str], nproc: int, logs: Path) -> None:
        log = logs / "scheduler.log"
        self._members.append(start("the scheduler", SCHEDULER, scheduler_of(environment), log))
        for rank in range(nproc):
            log = logs / f"worker_{rank}.log"
            own = worker_of(environment, rank, log)
            heartbeat_of(log).unlink(missing_ok=True)
            self.workers.append(start(f"rank {rank}", command, own, log, piped=rank == 0))
            self._members.append(self.workers[-1])
        # Its threads begin after the last fork.
        self._relay = Relay(self.workers[0].process, logs / "worker_0.log")


class Ending:
    """How a job ends: by itself, by signals, or because one of its ranks failed. Each is written here once.

    Args:
        job (Job): what ends.
        grace (float): seconds that the others have when a rank has failed.
    """

    def __init__(self, job: Job, grace: float):
        self._job, self._grace = job, grace
        self._failed: Member | None = None
        self._signal: Asked | None = None
        self._deadline = math.inf

    @property
    def _asked(self) -> bool:
        return self._failed is not None or self._signal is not None

    @property
    def overdue(self) -> bool:
        """bool, whether the ranks that are left have had their time. Who saves after a signal has no end of it."""
        return time.monotonic() > self._deadline or (self._failed is not None and self._job.stranded())

    def look(self) -> None:
        """See whether a rank has failed. The first to fail says why the job did; the others are asked to end."""
        failed = None if self._failed else self._job.failed(self._asked)
        if failed is None:
            return
        if not self._asked and failed.process.returncode in WORDS:
            # It heard a signal that we did not: so have the others, or they stop with it, and may still be saving.
            self._signal = Asked(next(number for number, code in CODES.items() if code == failed.code()))
            return
        # Read before anybody is asked to end: a rank that ends writes so, and then looks as if it had been in time.
        more = self._job.late(failed) if failed in self._job.workers else _WITHOUT
        if not self._asked:  # those that were sent a signal know; a second one would keep ours from saving their state
            self._job.send(signal.SIGTERM)
        self._failed = failed
        self._deadline = min(self._deadline, time.monotonic() + self._grace)
        if failed is self._job.workers[0]:
            self._job.drain()
        complain(failed.end())
        if more:
            complain(more)

    def hand_on(self, number: int) -> None:
        """Hand a signal on; who was asked to end before has to do so at once."""
        if self._signal is not None and not self._signal.at_once(number):
            return
        if self._asked:
            self._grace, self._deadline = LAST, time.monotonic() + LAST
        self._signal = self._signal or Asked(number)
        self._job.send(number)

    def code(self) -> int:
        """Say what is to be said at the end, and return the exit code: a failure's, else the signal's."""
        for worker in self._job.running() if not self._job.stranded() else ():
            complain(f"{worker.name} did not end within {self._grace:g} s and was killed")
        self.look()
        if self._failed is not None:
            return self._failed.code()
        if self._signal is None:
            return 0
        self._job.drain()
        complain(WORDS[self._signal.code])
        return self._signal.code


def watch(job: Job, received: Sequence[int], grace: float) -> int:
    """Hand signals on, end the ranks when one has failed, and return the exit code."""
    ending, handed = Ending(job, grace), 0
    while job.running() and not ending.overdue:
        ending.look()
        for number in received[handed:]:
            handed += 1
            ending.hand_on(number)
        time.sleep(LOOK)
    return ending.code()


def launch(command: Sequence[str], nproc: int, logs: Path, grace: float) -> int:
    """Run the ranks of a program, and return the exit code of the job."""
    received: list[int] = []
    for number in heard():
        signal.signal(number, lambda number, frame: received.append(number))
    with Job(command, nproc, logs) as job:
        return watch(job, received, grace)


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
    add(
        "--log_dir",
        type=os.path.expanduser,
        metavar="DIR",
        help="folder of the ranks' logs, default: a new one in 'logs'",
    )
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
    for left in (*Path(path).glob("worker_*.log"), *Path(path).glob("worker_*.beat")):
        number = left.stem[7:]
        if number.isascii() and number.isdecimal() and int(number) >= nproc:
            left.unlink()
    return Path(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, run the program and return the exit code."""
    open_streams()
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
