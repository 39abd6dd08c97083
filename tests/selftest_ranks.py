"""The self-test on several ranks, with a planted fault; run by tests/app/test_selftest.py.

python -m ms_accum.launch --nproc 2 tests/selftest_ranks.py FAULT
"""

from __future__ import annotations

import os
import sys

from mindspore import ops

from helpers import in_both
from ms_accum import selftest
from ms_accum.app import checks, self_test
from ms_accum.app.process import run
from ms_accum.network import tree
from ms_accum.ranks import reduction


def not_summed(all_reduce, tensors):
    return tree.unflattened(tree.flattened(tensors) + 0.0 * all_reduce(tree.flattened(tensors)), tensors)


def own_rows_only(sums, gradients, parts):
    rows = ops.cat([reduction.parts_of(grad, part) for grad, part in zip(gradients, parts)], 1)[sums.rank]
    own = ()
    start = 0
    for part in parts:
        own = (*own, tree.columns(rows, start, start + part.size))
        start += part.size
    return own


def twice_the_norm(gradients, after=None):
    return 2.0 * ops.sqrt(tree.sum_of_squares(gradients))


def main(fault):
    checks.CHECKS = tuple(check for check in checks.CHECKS if check.name == "clip_norm")
    checks.MORE_CHECKS = ()
    if fault == "gradients not summed":
        reduction._sum = not_summed
    elif fault == "parts not summed":
        reduction.PartSums._own_parts = own_rows_only
    elif fault == "on rank 1" and os.environ["RANK_ID"] == "1":
        for place, name, replacement in in_both("norm", twice_the_norm, "global_norm"):
            setattr(place, name, replacement)
    return run(self_test.main, selftest.flags(), ["--full", "--json=result.json"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
