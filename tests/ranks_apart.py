"""Scenarios of what must be equal on all ranks without being trained, and of what must differ.

Run by tests/ranks_job.py.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ranks
from helpers import cross_entropy
from ms_accum import (
    Accumulator,
    GradientAccumulation,
    TrainForwardBackward,
)
from reference import digest


class Frozen(nn.Cell):
    """A head on a backbone that is not trained."""

    def __init__(self, seed):
        super().__init__()
        ms.set_seed(seed)
        self.backbone = nn.SequentialCell(nn.Dense(6, 4), nn.BatchNorm1d(4))
        self.head = nn.Dense(4, 10)
        for parameter in self.backbone.get_parameters():
            parameter.requires_grad = False

    def construct(self, x):
        return self.head(self.backbone(x))


def optimizer_of(network):
    return nn.SGD(network.head.trainable_params(), 0.1)


def backbones(group):
    """What ranks that have made a backbone each have of it, with each way to train."""
    results = {}
    for name, begin in (
        (
            "cells",
            lambda network, optimizer: TrainForwardBackward(
                nn.WithLossCell(network, cross_entropy()), optimizer, optimizer.parameters.clone("sum", "zeros")
            ),
        ),
        ("accumulator", lambda network, optimizer: Accumulator(optimizer, 2, network=network)),
        (
            "driver",
            lambda network, optimizer: ranks.train(
                GradientAccumulation(network, cross_entropy(), optimizer), ranks.even_data(group)[:2], 1, 1
            ),
        ),
    ):
        network = Frozen(seed=1 + group.rank)
        try:
            begin(network, optimizer_of(network))
            results[name] = digest(network.backbone[0].get_parameters())
        except RuntimeError as error:
            results[name] = str(error)
    return results


def masks(group, seed=1):
    """What random layers draw on this rank, and what generators will, once and again."""
    drawn = []
    for _ in range(2):
        ms.set_seed(seed)
        ms.manual_seed(seed)
        network = nn.SequentialCell(nn.Dense(6, 10), nn.Dropout(p=0.5)).set_train()
        ranks.driver_of(network)
        dropped = network[1](Tensor(np.ones((4, 16)), ms.float32)).asnumpy() > 0
        drawn.append([dropped.astype(int).tolist(), ms.get_rng_state().asnumpy().tolist()])
    return drawn


def run_scenarios(group):
    on_host = ranks.on_host
    return {
        "backbones": on_host(backbones, group),
        "masks": on_host(masks, group),
    }
