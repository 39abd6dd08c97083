"""MindSpore's accumulation for parallel training, `mindspore.parallel.nn.GradAccumulation`, on one process.

As its tutorial does: it wraps the network with its loss, splits the batch itself, and `Model.train` builds the step.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation
from mindspore_parts import Look, Network, loss_of, optimizer_of, result
from serving import serve_cases

from benchmarks.conformance.case import CannotExpress, Case, Result


def train(case: Case) -> Result:
    """Train with windows as batches."""
    if case.optimizer == "adamw":
        raise CannotExpress("Model takes no experimental.optim.AdamW, and nn.AdamWeightDecay has no bias correction")
    ms.reset_auto_parallel_context()  # a case that ended with an error leaves its settings
    network = Network(case)
    look = Look(network)
    optimizer = optimizer_of(case, network)
    net = AutoParallel(GradAccumulation(nn.WithLossCell(network, loss_of(case)), case.window))
    net.hsdp()
    batches = case.large_batches()[0]
    data = ms.dataset.GeneratorDataset(lambda: iter(batches), ["inputs", "targets"], shuffle=False)
    ms.Model(net, optimizer=optimizer).train(case.epochs, data, look, dataset_sink_mode=False)
    return result(network, look.updates, evaluated=look.evaluated)


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    serve_cases(
        train,
        ["mindspore"],
        can=["schedule", "nan", "own optimizer", "class weights", "two terms", "BatchNorm", "evaluation"],
        cannot={
            "float16": "not tried: its graph has a copy of the network for each of the 4,096 micro-batches",
            "clip": "Model.train builds the step, and has no bound for a norm",
            "ema": "MindSpore has no average of weights",
            "N that changes": "micro_size is given when the Cell is made",
            "resume": "a window is one call, within which nothing can be saved",
            "two ranks": "not tried: it needs several Ascend devices",
        },
    )
