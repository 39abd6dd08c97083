"""A job of several ranks, asked as if it were one program.

The launcher gives ranks no stdin and shows what rank 0 says only. So they connect to a socket, each is sent every
request, and an answer is the list of theirs, by rank.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

from benchmarks.programs.protocol import flags_of, serve

_PROGRAM = Path(__file__).with_name("ranks_ours.py")
_LOOK = 1.0  # seconds: how often to see whether the job has ended
_END = 60.0


class Job:
    """The ranks, as one.

    Args:
        ranks (int): how many.
        folder (str): for the socket and the logs.
        flags (list[str]): of the ranks' program.
    """

    def __init__(self, ranks: int, folder: str, flags: list[str]):
        address = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(ranks)
            server.settimeout(_LOOK)
            launcher = [sys.executable, "-m", "ms_accum.launch", "--nproc", str(ranks), "--log_dir", folder]
            command = [*launcher, str(_PROGRAM), "--address", address, *flags]
            self._launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            streams = [self._accepted(server).makefile("rw", encoding="utf-8") for _ in range(ranks)]
        abouts = {stream: self._answer(stream) for stream in streams}
        self._streams = sorted(streams, key=lambda stream: abouts[stream]["rank"])
        self.about = {**abouts[self._streams[0]], "ranks": ranks}

    def __call__(self, **request: Any) -> dict[str, Any]:
        for stream in self._streams:
            print(json.dumps(request), file=stream, flush=True)
        return {"ranks": [self._answer(stream) for stream in self._streams]}

    def _accepted(self, server: socket.socket) -> socket.socket:
        while self._launcher.poll() is None:
            try:
                connection, _ = server.accept()
            except socket.timeout:
                continue
            connection.settimeout(None)
            return connection
        return self._ended()

    def _answer(self, stream: Any) -> dict[str, Any]:
        return json.loads(stream.readline() or self._ended())

    def _ended(self) -> Any:
        """End with the exit code of the launcher, which has printed the reason."""
        sys.exit(self._launcher.wait(_END) or 1)


def build(ranks: int, folder: str, network: str, ways: list) -> tuple[dict, Callable[..., dict]]:
    """Start the job."""
    job = Job(ranks, folder, ["--network", network, "--ways", *ways])
    return job.about, job


serve(build, **flags_of(build))
