"""Are sparse gradients refused in one line, before anything is trained?"""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from ms_accum import AccumulatedTrainStep, Accumulator, GradientAccumulation, TrainForwardBackward

REMEDY = r"Use nn\.Embedding: the gradients of nn\.EmbeddingLookup are sparse\."


class Words(nn.Cell):
    def __init__(self, make=nn.EmbeddingLookup):
        super().__init__()
        self.words, self.head = make(6, 3), nn.Dense(3, 1)

    def construct(self, x):
        return ops.mean(ops.square(self.head(self.words(x))))


def optimizer_of(network):
    return nn.SGD(network.trainable_params(), 0.1)


MAKE = {
    "driver": lambda network: GradientAccumulation(network, None, optimizer_of(network)),
    "step": lambda network: AccumulatedTrainStep(network, optimizer_of(network)),
    "accumulator": lambda network: Accumulator(optimizer_of(network), 2, network=network),
    "cells": lambda network: TrainForwardBackward(
        network, optimizer_of(network), optimizer_of(network).parameters.clone("grad_sum", "zeros")
    ),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", MAKE)
def test_network_with_sparse_gradients_is_refused(way):
    message = f"'network' must be one with dense gradients, but got the sparse ones of 'words'. {REMEDY}"
    with pytest.raises(ValueError, match=message):
        MAKE[way](Words())
    MAKE[way](Words(nn.Embedding))


@pytest.mark.usefixtures("eager")
def test_table_that_is_not_trained_is_accepted():
    network = Words()
    network.words.embedding_table.requires_grad = False
    GradientAccumulation(network, None, optimizer_of(network))


@pytest.mark.parametrize("jit", [True, False])
def test_sparse_gradients_without_the_network_are_refused(jit, tmp_path, monkeypatch):
    """MindSpore tells what they are while it compiles."""
    monkeypatch.chdir(tmp_path)
    network = Words()
    optimizer = optimizer_of(network)
    accumulator = Accumulator(optimizer, 2)
    grad_fn = ms.value_and_grad(network, None, optimizer.parameters)
    grad_fn = grad_fn if jit else ms.jit(grad_fn)

    def step(x):
        loss, grads = grad_fn(x)
        return ops.depend(loss, accumulator(grads))

    with pytest.raises(ValueError, match=f"'grads' must be dense Tensors, but got sparse ones. {REMEDY}"):
        (ms.jit(step) if jit else step)(Tensor([0, 2, 2], ms.int32))
    assert int(accumulator.micro_batches) == 0
    assert jit or not Path("rank_0").exists()
