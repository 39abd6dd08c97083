"""ms_accum's driver, as README has it."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from typing import Any

from mindspore_parts import Network, optimizer_of, weights
from ours_parts import CAN, PACKAGES, Data, Stopped, Watch, across_ranks, loss_and_weight, sizes
from serving import serve_cases

from benchmarks.conformance.case import Case, Result
from ms_accum import Checkpointer, Ema, GradientAccumulation, own_group


def train(case: Case) -> Result:
    """Train by `train_process`; a stopped run is resumed by a new driver from the states that it has saved."""
    loss_fn, weight = loss_and_weight(case)
    options: dict[str, Any] = {"reduction": case.reduction, "weight": weight, "clip_norm": case.clip}
    run: dict[str, Any] = {"mini_steps": sizes(case), "report": (), "ckpt_path": None}

    def driver() -> tuple[Any, GradientAccumulation]:
        network = Network(case)
        average = Ema(case.average) if case.average else None
        optimizer = optimizer_of(case, network)
        return network, GradientAccumulation(network, loss_fn, optimizer, ema=average, **options)

    network, model = driver()
    watch = Watch(network)
    if case.evaluates:
        run.update(valid_dataset=Data(case), metrics={"watch": watch})
    with tempfile.TemporaryDirectory() as folder:
        if case.stop_after:
            stopped = Data(case, stop_after=case.stop_after)
            with suppress(Stopped):
                model.train_process(case.epochs, stopped, checkpointer=Checkpointer(folder, every=1), **run)
            network, model = driver()
            run["checkpointer"] = Checkpointer(folder, resume="auto")
        model.train_process(case.epochs, Data(case, own_group().rank), **run)
    result = Result(weights(network), model.updates, evaluated=watch.noted)
    if model.ema is not None:
        with model.ema.applied():
            result.average = weights(network)
    if case.ranks > 1:
        result.reductions = reductions(model, case)
    return result


def reductions(model: GradientAccumulation, case: Case) -> float:
    """Return the sums over ranks for each update, from the graphs."""
    from benchmarks.programs.collectives import collectives_of

    runner = model._step._runner([])
    each = len(collectives_of(runner._forward_backward))
    return case.window * each + len(collectives_of(runner.optim))


if __name__ == "__main__":
    serve_cases(across_ranks(train, __file__), PACKAGES, CAN)
