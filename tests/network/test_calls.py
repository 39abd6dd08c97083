"""Networks, optimizers and graphs are freed with the objects that trained them."""

from __future__ import annotations

import gc
import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Model

from helpers import batches, cross_entropy
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    FlushTail,
    GradientAccumulation,
    TrainForwardBackward,
    TrainOptim,
    evaluate,
)
from ms_accum.network.compiled import Compiled, call


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, 3)

    def construct(self, x):
        return self.dense(x)


def data():
    return batches(np.random.RandomState(0), (4, 4))


def driver(network, mini_steps=2, loss=None, **options):
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    model = GradientAccumulation(network, loss or cross_entropy(), optimizer, check="off", **options)
    model.train_process(1, data(), mini_steps, report=(), ckpt_path=None)


def cells(network):
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
    forward = TrainForwardBackward(nn.WithLossCell(network, cross_entropy()), optimizer, grad_sum)
    for micro_batch in data():
        forward(*micro_batch)
    TrainOptim(optimizer, grad_sum)()


def loop(network):
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    accumulator = Accumulator(optimizer, 2)
    differentiate = ms.value_and_grad(nn.WithLossCell(network, cross_entropy()), None, optimizer.parameters)
    for micro_batch in data():
        accumulator(differentiate(*micro_batch)[1])


def model(network):
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    step = AccumulatedTrainStep((network, cross_entropy()), optimizer, 2)
    columns = tuple(np.concatenate([part.asnumpy() for part in column]) for column in zip(*data()))
    dataset = ms.dataset.NumpySlicesDataset(columns, shuffle=False).batch(4)
    metrics = {"eval_network": step.eval_network, "eval_indexes": [0, 1, 2], "metrics": {"acc"}}
    model = Model(step, **metrics)
    model.train(1, dataset, callbacks=[FlushTail()])
    model.eval(dataset)


WAYS = {
    "driver": driver,
    "cells": cells,
    "loop": loop,
    "model": model,
    "evaluate": lambda network: evaluate(network, data()),
}


def is_freed_after(use):
    """Return whether nothing keeps a network once what used it is gone."""
    network = Net()
    use(network)
    reference = weakref.ref(network)
    del network
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("way", WAYS)
def test_network_is_freed(way):
    assert is_freed_after(WAYS[way])


class Around(Compiled):
    def __init__(self, network):
        super().__init__("a test", True, network)
        self.network = network


class WithStar(Around):
    def construct(self, *inputs):
        return self.network(*inputs)


class WithCall(Around):
    def construct(self, *inputs):
        return call(self.network, inputs)


@pytest.mark.parametrize(("kind", "frees"), [(WithCall, True), (WithStar, False)])
def test_star_in_a_cell_keeps_its_network(kind, frees):
    """If MindSpore frees both one day, `call` is not needed any more."""
    assert is_freed_after(lambda network: kind(network)(data()[0][0])) is frees
