"""Scenarios of ranks that read sentences of different lengths, in other numbers of micro-batches.

Run by tests/ranks_job.py.
"""

from __future__ import annotations

import ranks
from sentences import DISTRIBUTIONS, counted, driver_of, lengths_of, packed, samples_of, table_of

MICRO_BATCHES = (3, 7)  # of each rank


def samples_on(rank, distribution):
    """Return samples that fill exactly so many micro-batches as this rank has."""
    samples = samples_of(lengths_of(distribution, 60 + rank))
    parts = (samples[:number] for number in range(len(samples), 0, -1))
    return next(part for part in parts if len(packed(part)) == MICRO_BATCHES[rank])


def rows(words, labels):
    return words.shape[0]


def trained(group, distribution, weight):
    """Return the weights after one window of all micro-batches."""
    model = driver_of(weight)
    ranks.train(model, packed(samples_on(group.rank, distribution), seed=1), max(MICRO_BATCHES), epochs=1)
    return [model.updates, table_of(model).tolist()]


def run_scenarios(group):
    return {
        distribution: [ranks.on_host(trained, group, distribution, weight) for weight in (counted, rows)]
        for distribution in DISTRIBUTIONS
    }
