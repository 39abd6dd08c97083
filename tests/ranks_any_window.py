"""Random programs on several ranks: tests/ranks_any_window.py NUMBER, by msrun or ms_accum.launch.

Each rank has its own micro-batches; the simulator has those of all. Nothing is compiled but what communicates.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mindspore as ms

from ms_accum import own_group
from random_programs import Program, Seed
from systems import check_program

WAYS = ("driver", "step", "accumulator", "cells")

if __name__ == "__main__":
    ms.set_context(mode=ms.PYNATIVE_MODE)
    group, seed = own_group(), int(os.environ["MS_ACCUM_SEED"])
    for number in range(int(sys.argv[1])):
        draws = Seed(seed % 2**31 + number)
        program = Program(draws, WAYS[number % len(WAYS)], ranks=group.size)
        try:
            check_program(program, Path(tempfile.mkdtemp()), group, sync=bool(draws.integer(0, 2)))
        except BaseException:
            print(f"rank {group.rank}, program {number}: {program!r}", file=sys.stderr)
            raise
    if group.rank == 0:
        Path("ran.json").write_text(json.dumps(number + 1), encoding="utf-8")
