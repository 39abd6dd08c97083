"""What the programs of MindSpore's libraries share: the network, the loss, the data, the optimizer, the schedule."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

from benchmarks.conformance.case import IGNORED, Case, Result, orthogonal
from benchmarks.conformance.oracle import BETAS, EPSILON, PENALTY


class Network(nn.Cell):
    """The network of a case."""

    def __init__(self, case: Case):
        super().__init__()
        start = Tensor(np.array(case.start, case.dtype))
        outputs, features = start.shape
        self.norm = nn.BatchNorm1d(features, affine=False) if case.batch_norm else nn.Identity()
        self.linear = nn.Dense(features, outputs, weight_init=start, has_bias=False, dtype=start.dtype)
        self.set_train()

    def construct(self, inputs: Any) -> Any:
        """Return the logits."""
        return self.linear(self.norm(inputs))


class Entropy(nn.Cell):
    """The cross entropy of rows or tokens, and with a case that says so the penalty on squared logits, once a row."""

    def __init__(self, case: Case):
        super().__init__()
        weights = None if case.class_weights is None else Tensor(np.array(case.class_weights, np.float32))
        self.entropy = nn.CrossEntropyLoss(weights, ignore_index=IGNORED, reduction=case.reduction)
        self.penalty = PENALTY if case.loss == "penalized" else 0.0

    def construct(self, outputs: Any, targets: Any) -> Any:
        """Return the loss."""
        loss = self.entropy(outputs.reshape((-1, outputs.shape[-1])), targets.reshape((-1,)))
        if self.penalty:
            loss = loss + self.penalty * ops.square(outputs).sum() / outputs.shape[0]
        return loss


def loss_of(case: Case) -> nn.Cell:
    """Return the function of outputs and targets that gives the loss of a micro-batch: what a user writes."""
    return nn.MSELoss(reduction=case.reduction) if case.loss == "squares" else Entropy(case)


def tensors(columns: Any) -> list[tuple[Tensor, Tensor]]:
    """Return columns as Tensors."""
    return [(Tensor(x), Tensor(y)) for x, y in columns]


def data_set(case: Case, rank: int = 0) -> Any:
    """Return a data set of the micro-batches of an epoch, those of a rank."""

    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from case.micro_batches(rank)

    return ms.dataset.GeneratorDataset(pieces, ["inputs", "targets"], shuffle=False)


def optimizer_of(case: Case, network: nn.Cell) -> Any:
    """Return the optimizer, with the schedule as `nn.Optimizer` takes it: it has the rate of each of its own calls."""
    parameters = network.trainable_params()
    if case.optimizer == "adamw":  # nn.AdamWeightDecay has no bias correction
        return optim.AdamW(parameters, case.rate(0), BETAS, EPSILON, case.weight_decay)
    if case.optimizer == "muon":
        return Muon(parameters, rates_of(case), case.momentum)
    return nn.SGD(parameters, rates_of(case), momentum=case.momentum, weight_decay=case.weight_decay)


def rates_of(case: Case) -> Any:
    """Return the learning rate, or one for each call of the optimizer, as many as there are micro-batches."""
    return [case.rate(n) for n in range(len(case.inputs) * case.epochs)] if len(case.rates) > 1 else case.rate(0)


class Muon(nn.Optimizer):
    """Momentum, made orthogonal."""

    def __init__(self, parameters: Any, learning_rate: Any, momentum: float):
        super().__init__(learning_rate, parameters)
        self.momentum = momentum
        self.moments = self.parameters.clone("moments", "zeros")

    def construct(self, gradients: Any) -> bool:
        """Take a step."""
        rate = self.get_lr()
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        for parameter, moment, gradient in zip(self.parameters, self.moments, gradients):
            total = self.momentum * moment + gradient
            ops.assign(moment, total)
            ops.assign(parameter, parameter - rate * orthogonal(total))
        return True


class Look(ms.Callback):
    """Looks at the weights after each step of `Model`, and notes them at the end of the first epoch."""

    def __init__(self, network: nn.Cell):
        self.updates, self.evaluated = Updates(network), None

    def on_train_step_end(self, run_context: Any) -> None:
        """Look whether the weights have changed."""
        self.updates.look()

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Note the weights, when a library evaluates."""
        self.evaluated = weights(self.updates.network) if self.evaluated is None else self.evaluated


class Updates:
    """How often the weights were seen to change, for libraries in whose graph the optimizer is called."""

    def __init__(self, network: nn.Cell):
        self.network, self.before = network, weights(network)
        self.count = 0

    def look(self) -> None:
        """Look at the weights after a micro-batch."""
        now = weights(self.network)
        self.count += not np.array_equal(now, self.before, equal_nan=True)
        self.before = now


def one_by_one(case: Case, make: Callable[[Case], Any], saved: Sequence[str]) -> Result:
    """Train by calls of `run.step`, where `run` is what `make` returns, and evaluate at the end of an epoch.

    A stopped run continues with another one, which loads the checkpoints of the attributes that are `saved`.
    """
    run = make(case)
    updates, done, evaluated = Updates(run.network), 0, None
    for _ in case.windows:
        for inputs, targets in tensors(case.micro_batches()):
            run.step(inputs, targets)
            updates.look()
            done += 1
            if done == case.stop_after:
                run = loaded(run, make(case), saved)
                updates.network = run.network
        evaluated = weights(run.network) if evaluated is None else evaluated
    return result(run.network, updates, evaluated=evaluated)


def loaded(run: Any, made: Any, saved: Sequence[str]) -> Any:
    """Return a new run with the checkpoints of a stopped one, one for each attribute that is `saved`."""
    with tempfile.TemporaryDirectory() as folder:
        for name in saved:
            file = str(Path(folder, f"{name}.ckpt"))
            ms.save_checkpoint(getattr(run, name), file)
            ms.load_param_into_net(getattr(made, name), ms.load_checkpoint(file))
    return made


def result(network: nn.Cell, updates: Updates, **more: Any) -> Result:
    """Return what training has come to."""
    return Result(weights(network), updates.count, **more)


def weights(network: nn.Cell) -> np.ndarray:
    """Return a copy of the weights."""
    (only,) = [value for name, value in network.parameters_and_names() if name.endswith("linear.weight")]
    return only.asnumpy().astype(np.float64)
