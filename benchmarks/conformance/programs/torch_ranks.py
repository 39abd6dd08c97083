"""A case of several ranks: the program is started again by torchrun, once for each rank, with the case in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import torch
from torch import distributed

from benchmarks.conformance.case import Case, Result

LIMIT = 100
_CASE, _RESULT = "CONFORMANCE_CASE", "CONFORMANCE_RESULT"


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
    if _CASE in os.environ:
        case = Case.of(json.loads(Path(os.environ[_CASE]).read_text(encoding="utf-8")))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            made = train(case)
        sums = sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")
        made.reductions = sums / made.updates if made.updates else None
        if rank() == 0:
            Path(os.environ[_RESULT]).write_text(json.dumps(made.as_json()), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # some libraries end their process group themselves, some do not

    def start(case: Case) -> Result:
        if case.ranks == 1:
            return train(case)
        with tempfile.TemporaryDirectory() as folder:
            given, written = Path(folder, "case.json"), Path(folder, "result.json")
            given.write_text(json.dumps(case.as_json()), encoding="utf-8")
            environment = {**os.environ, _CASE: str(given), _RESULT: str(written), "OMP_NUM_THREADS": "1"}
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
            done = subprocess.run(
                [*launcher, program, *sys.argv[1:]], env=environment, capture_output=True, text=True, timeout=LIMIT
            )
            if not written.exists():
                errors = [line for line in done.stderr.splitlines() if "Error" in line]
                raise RuntimeError(errors[0].strip() if errors else done.stderr[-300:])
            fields = json.loads(written.read_text(encoding="utf-8"))
            return Result(**{**fields, "words": fields["words"] + done.stderr})

    return start
