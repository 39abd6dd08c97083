"""Scenarios of ranks with loss scales, gradients that are not finite, and averages.

Run by tests/ranks_job.py.
"""

from __future__ import annotations

import numpy as np
from mindspore import amp, nn

import ranks
from helpers import Recorder, micro_batch
from ms_accum import Ema, GradientAccumulation, ZeroOptimizer
from ways import Half, Trained

WINDOW, BAD, LARGE = 2, 2, 4.0


def value(rank, number):
    return float(1 + rank + 2 * number)


def rows(rank, number):
    return 1 + rank + (number > 1)


def data_of(rank, *, bad=None, large=None):
    """Six micro-batches; on rank 0 number `bad` is not finite, and on the last one number `large` is larger."""
    values = [value(rank, number) for number in range(6)]
    if rank == 0 and bad is not None:
        values[bad] = np.nan
    if large is not None:
        values = [LARGE if rank and number == large else 1.0 for number in range(6)]
    return [micro_batch(entry, entry, rows=rows(rank, number)) for number, entry in enumerate(values)]


def run(group, data, make=None, **options):
    """Train one epoch; return what is left, and what the run has counted."""
    network, recorder = Half(), Recorder()
    optimizer = make(network) if make else nn.SGD([network.w], 1.0)
    ema = Ema(0.5)
    model = GradientAccumulation(network, None, optimizer, check="off", ema=ema, **options)
    try:
        model.train_process(1, data, WINDOW, report=recorder, ckpt_path=None)
        error = None
    except FloatingPointError as raised:
        error = str(raised)
    return {
        "weights": network.w.asnumpy().tolist(),
        "average": ema.state["of.w"].asnumpy().tolist(),
        "counts": [model.updates, model.skipped, model.overflows],
        "left out": model.left_out,
        "bad": [list(record.bad) for record in recorder.records],
        "loss": [record.loss for record in recorder.records],
        "error": error,
    }


def sharded(network):
    return ZeroOptimizer(lambda parameters: nn.SGD(parameters, 1.0), [network.w])


def scaled(group):
    """One rank overflows: from 2^17 twice for all, and at 2^15 for the large micro-batch of one rank."""
    scaler = amp.DynamicLossScaler(2.0**15, 2, 500)
    seen = run(group, data_of(group.rank, large=2), loss_scale=scaler)
    return {**seen, "scale": float(scaler.scale_value.asnumpy())}


def scaled_in_a_loop(group):
    """The same with an `Accumulator`, which does not get the losses."""
    scaler = amp.DynamicLossScaler(2.0**15, 2, 500)
    trained = Trained("accumulator", Half(), WINDOW, loss_scale=scaler).train(data_of(group.rank, large=2))
    counts = [trained.updates, int(trained.system.skipped), trained.system.overflows]
    return {"weights": trained.weights.tolist(), "counts": counts, "scale": float(scaler.scale_value.asnumpy())}


def run_scenarios(group):
    bad = data_of(group.rank, bad=BAD)
    micro = {"nonfinite": "skip_micro"}
    every = {"sync_every_micro_batch": True}
    return {
        "at the end": ranks.on_host(run, group, bad, **micro),
        "in step": ranks.on_host(run, group, bad, **micro, **every),
        "zero 1": ranks.on_host(run, group, bad, sharded, **micro),
        "zero 2": ranks.on_host(run, group, bad, sharded, **micro, **every),
        "sums": ranks.on_host(run, group, bad, reduction="sum", **micro),
        "skipped": ranks.on_host(run, group, bad),
        "raised": ranks.on_host(run, group, bad, nonfinite="raise"),
        "scaled": ranks.on_host(scaled, group),
        "scaled in a loop": ranks.on_host(scaled_in_a_loop, group),
    }
