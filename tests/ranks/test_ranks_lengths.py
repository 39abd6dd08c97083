"""Is a window of ranks with other numbers of micro-batches that of one padded batch of all their samples?"""

from __future__ import annotations

import numpy as np
import pytest

import ranks_lengths as program
from helpers import run
from sentences import DISTRIBUTIONS, driver_of, miss_of, one_batch, table_of


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gradient_of_two_ranks_is_that_of_one_padded_batch(distribution, job):
    large = driver_of()
    before = table_of(large)
    run(large, [one_batch([row for rank in (0, 1) for row in program.samples_on(rank, distribution)])], 1)
    expected = table_of(large) - before
    for rank in job[0]:
        (updates, exact), (_, by_rows) = rank["lengths"][distribution]
        assert updates == 1 and miss_of(np.array(exact) - before, expected) < 1e-6
        assert miss_of(np.array(by_rows) - before, expected) > 1e-3
