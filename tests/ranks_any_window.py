"""Random programs on several ranks: tests/ranks_any_window.py SEED NUMBER [GROUPS], by msrun or ms_accum.launch.

Each rank has its own micro-batches; the simulator has those of all in its group. Nothing is compiled but what
communicates. With several groups each runs other programs at the same time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mindspore as ms
from mindspore import communication

from ms_accum import own_group, total
from random_programs import Program
from systems import check_program

WAYS = ("driver", "step", "accumulator", "cells")


def group_of(groups):
    """Return the number of this process's group, and the group: of two, the second has all odd ranks."""
    everyone = own_group()
    if groups == 1:
        return 0, everyone
    number = everyone.rank % groups
    name = f"of programs {number}"
    communication.create_group(name, list(range(number, everyone.size, groups)))
    return number, own_group(name)


if __name__ == "__main__":
    ms.set_context(mode=ms.PYNATIVE_MODE)
    first, count, groups = map(int, [*sys.argv[1:], "1"][:3])
    number, group = group_of(groups)
    first += number * count
    os.environ["MS_JIT"] = "1"
    assert total([7], group) == [7 * group.size]  # its bytes are no float32 that a compiled sum keeps
    os.environ["MS_JIT"] = "0"
    for seed in range(first, first + count):
        program = Program(WAYS[seed % len(WAYS)], seed, ranks=group.size)
        try:
            check_program(program, Path(tempfile.mkdtemp()), group)
        except BaseException:
            print(f"rank {group.rank}, seed {seed}: {program!r}", file=sys.stderr)
            raise
    if group.rank == 0:
        Path(f"ran{number}.json").write_text(json.dumps(count), encoding="utf-8")
