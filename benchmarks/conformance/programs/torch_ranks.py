"""Several ranks of PyTorch's libraries: torchrun starts them, and their sums are counted."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable

import torch
from several_ranks import case_of_rank, launched, write
from torch import distributed

from benchmarks.conformance.case import Case, Result


def rank() -> int:
    """Return the number of this process among the ranks."""
    return int(os.environ.get("RANK", "0"))


def total(value: Any) -> Any:
    """Return the sum over the ranks of a number or a tensor."""
    if "RANK" not in os.environ:
        return value
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    summed = torch.as_tensor(value, dtype=torch.float64).clone()
    distributed.all_reduce(summed)
    return summed


def across_ranks(train: Callable[[Case], Result], program: str) -> Callable[[Case], Result]:
    """Return `train`, which for a case of several ranks starts the program again on each of them.

    On a rank this function trains, writes the result of rank 0, and ends the process.
    """
    case = case_of_rank()
    if case is not None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            made = train(case)
        sums = sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")
        made.reductions = sums / made.updates if made.updates else None
        if rank() == 0:
            write(made)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # some libraries end their process group themselves, some do not

    def start(case: Case) -> Result:
        if case.ranks == 1:
            return train(case)
        launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}")
        return launched(case, launcher, program)

    return start
