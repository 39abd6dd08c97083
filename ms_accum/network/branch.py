"""A branch that makes MindSpore's CPU runtime run a graph's kernels on a thread of its own."""

from __future__ import annotations

import os
from typing import Any

import mindspore as ms

from .compiled import in_graphs
from .state import state, unique_name

# From this number of cores on MindSpore has several such threads, and measures which way is faster.
_CORES = 12


@ms.jit_class
class Branch:
    """Returns a number as it is, in a graph through a branch.

    Kernels of a graph without branches are run by the calling thread, which spins while others do their share, and so
    takes a core from them: on two cores LeNet5 took 2.5 or 4.5 ms, at random. With a branch the calling thread sleeps.
    """

    def __init__(self) -> None:
        self.taken = state(f"{unique_name('branch')}.taken", True, ms.bool_)

    def __call__(self, number: Any) -> Any:
        if self.taken:
            number = number * 1
        return number


def branch(compiles: bool) -> Branch | None:
    """Return a `Branch` where graphs with one are faster, else None.

    Args:
        compiles (bool): whether what uses it is compiled in PyNative mode, too.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pays = ms.get_context("device_target") == "CPU" and cores < _CORES
    return Branch() if pays and in_graphs(compiles) else None
