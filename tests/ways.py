"""The ways to accumulate, made alike: driver, Cells, step for Model, Accumulator in a compiled step and in a loop."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from helpers import Recorder
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    GradientAccumulation,
    TrainClear,
    TrainForwardBackward,
    TrainOptim,
)
from ms_accum.network.parameters import unique_name, untrained, zeros_like

WAYS = ("driver", "step", "accumulator", "loop")
"""tuple[str], the ways with all options; Trained has the three Cells, too."""


class Half(nn.Cell):
    """The mean over rows of w * x, computed in float16: the gradient is the mean of x, and overflows above 65504."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(2), ms.float32), name="w")

    def construct(self, x):
        products = ops.cast(x, ms.float16) * ops.cast(self.w, ms.float16)
        return ops.mean(ops.sum(ops.cast(products, ms.float32), 1))


class Root(nn.Cell):
    """The mean over rows of w * x + sqrt(x) - sqrt(x): for x = 0 only the gradient is not finite."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(2), ms.float32), name="w")

    def construct(self, x):
        return ops.mean(ops.sum(ops.sqrt(x * self.w), 1))


class Trained:
    """A network that returns its loss, trained in one of the ways."""

    def __init__(self, way, network, window=2, lr=1.0, reduction="mean", make=None, **options):
        self.way, self.network, self.window = way, network, window
        self.optimizer = make(network.trainable_params()) if make else nn.SGD(network.trainable_params(), lr)
        self.recorder, self.cells_updates = Recorder(), 0
        getattr(self, f"make_{way}")(reduction, options)

    def make_driver(self, reduction, options):
        self.system = GradientAccumulation(
            self.network, None, self.optimizer, reduction=reduction, check="off", **options
        )

    def make_step(self, reduction, options):
        self.system = AccumulatedTrainStep(
            self.network, self.optimizer, self.window, reduction=reduction, check="off", **options
        )

    def make_accumulator(self, reduction, options):
        self.system = Accumulator(self.optimizer, self.window, reduction=reduction, network=self.network, **options)
        self.weighs = reduction == "mean"
        network, system = self.network, self.system

        def forward(x):
            loss = network(x)
            return system.scale(loss), loss

        self.grad_fn = ms.value_and_grad(forward, None, self.optimizer.parameters, has_aux=True)

    make_loop = make_accumulator

    def make_cells(self, reduction, options):
        name = unique_name("by_hand")
        grad_sum = zeros_like(f"{name}.grad_sum", self.optimizer.parameters)
        weight_sum = untrained(f"{name}.weight_sum", 0.0, ms.float32) if reduction == "mean" else None
        shared = {"weight_sum": weight_sum, **({"compile": options["compile"]} if "compile" in options else {})}
        self.add = TrainForwardBackward(self.network, self.optimizer, grad_sum, **shared)
        self.optim = TrainOptim(self.optimizer, grad_sum, **{**options, **shared})
        self.clear = TrainClear(grad_sum, **shared)
        self.system = self.optim.window.config

    def train(self, micro_batches):
        """Train one epoch; the tail is flushed."""
        getattr(self, f"train_{self.way}")([columns[0] for columns in micro_batches])
        return self

    def train_driver(self, inputs):
        self.system.train_process(1, [(x,) for x in inputs], self.window, report=self.recorder, ckpt_path=None)

    def train_step(self, inputs):
        for x in inputs:
            self.system(x)
        self.system.flush()

    def train_accumulator(self, inputs, wrap=ms.jit):
        """Train with an `Accumulator` in a compiled step; with MS_JIT=0 nothing is compiled."""
        grad_fn, system, weighs = self.grad_fn, self.system, self.weighs

        def step(x):
            _, grads = grad_fn(x)
            return system(grads, x.shape[0]) if weighs else system(grads)

        step = wrap(step)
        for x in inputs:
            step(x)
        system.flush()

    def train_loop(self, inputs):
        """Train with an `Accumulator` in a plain loop."""
        self.train_accumulator(inputs, wrap=lambda step: step)

    def train_cells(self, inputs):
        for first in range(0, len(inputs), self.window):
            for x in inputs[first : first + self.window]:
                self.add(x)
            self.cells_updates += bool(self.optim()[0].asnumpy())
            self.clear()

    @property
    def weights(self):
        return self.network.w.asnumpy().copy()

    @property
    def updates(self):
        return self.cells_updates if self.way == "cells" else int(self.system.updates)
