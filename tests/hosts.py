"""Hosts with their own network on this machine: network namespaces, joined by a cable (a pair of veth devices)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple


class Host(NamedTuple):
    """A network namespace with one address."""

    name: str
    address: str

    def start(self, *command: str, **options) -> subprocess.Popen:
        """Start a program on this host, in a session of its own. `kill` ends it, if it still runs then."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], start_new_session=True, **options)

    def pids(self) -> list[int]:
        """Return the processes on this host, all started by us: nobody else knows the namespace."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kill all processes on this host."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other, and nothing else.

    Raises:
        OSError: If `ip` is missing, or this process has no right to make namespaces.
    """
    hosts = [Host(f"ms_accum_{os.getpid()}_{number}", f"10.99.0.{number + 1}") for number in range(2)]
    with contextlib.ExitStack() as made:
        for host in hosts:
            _ip("netns", "add", host.name)
            made.callback(_ip, "netns", "delete", host.name)
            made.callback(host.kill)
        first, second = hosts
        _ip("-n", first.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield first, second


def why_no_hosts() -> str | None:
    """Return why hosts can't be made here, in one line; None if they can."""
    try:
        with two_hosts():
            return None
    except OSError as error:
        return str(error)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {' '.join(done.stderr.split())}")
    return done.stdout
