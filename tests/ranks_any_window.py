"""Random programs on several ranks: tests/ranks_any_window.py SEED NUMBER, by msrun or ms_accum.launch.

Each rank has its own micro-batches; the simulator has those of all. Nothing is compiled but what communicates.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mindspore as ms

from ms_accum import own_group
from random_programs import Program
from systems import check_program

WAYS = ("driver", "step", "accumulator", "cells")

if __name__ == "__main__":
    ms.set_context(mode=ms.PYNATIVE_MODE)
    group, first, count = own_group(), *map(int, sys.argv[1:])
    for seed in range(first, first + count):
        program = Program(WAYS[seed % len(WAYS)], seed, ranks=group.size)
        try:
            check_program(program, Path(tempfile.mkdtemp()), group)
        except BaseException:
            print(f"rank {group.rank}, seed {seed}: {program!r}", file=sys.stderr)
            raise
    if group.rank == 0:
        Path("ran.json").write_text(json.dumps(count), encoding="utf-8")
