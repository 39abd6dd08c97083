"""Keras' gradient_accumulation_steps, an argument of its optimizers, in `Model.fit` with the backend of PyTorch.

- default: the optimizer as it is.
- weighted: with sample weights of the caller, computed from the complete window.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import ops  # noqa: E402
from serving import serve_cases  # noqa: E402

from benchmarks.conformance.case import IGNORED, CannotExpress, Case, Result, orthogonal  # noqa: E402
from benchmarks.conformance.oracle import BETAS, EPSILON, PENALTY  # noqa: E402

WEIGHTED = sys.argv[1] == "weighted"


class MicroBatches(keras.utils.PyDataset):
    """The micro-batches of an epoch, of a range; with class weights, or by the way, each sample has its weight."""

    def __init__(self, case: Case, begin: int = 0, end: int | None = None):
        super().__init__()
        self.pieces: list[Any] = case.micro_batches()
        if WEIGHTED or case.class_weights:
            counted = [counts(case, targets) for _, targets in self.pieces]
            if WEIGHTED:
                windows = [counted[n // case.window * case.window :][: case.window] for n in range(len(counted))]
                # The optimizer divides by N.
                totals = [sum(c.sum() for c in window) if case.reduction == "mean" else 1.0 for window in windows]
                counted = [len(window) * c / total for c, window, total in zip(counted, windows, totals)]
            self.pieces = [(x, np.where(y == IGNORED, 0, y), weight) for (x, y), weight in zip(self.pieces, counted)]
        self.pieces = self.pieces[begin:end]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> Any:
        return self.pieces[number]


def counts(case: Case, targets: np.ndarray) -> np.ndarray:
    """Return how much each sample counts."""
    if case.loss == "squares":
        return np.ones(len(targets), np.float32)
    return np.array([*(case.class_weights or [1.0] * len(case.start)), 0.0], np.float32)[
        np.where(targets == IGNORED, -1, targets)
    ]


@keras.saving.register_keras_serializable()
class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule."""

    def __init__(self, rates: list[float]):
        self.rates = rates

    def __call__(self, step: Any) -> Any:
        return self.rates[min(int(step), len(self.rates) - 1)]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"rates": self.rates}


@keras.saving.register_keras_serializable()
class Muon(keras.optimizers.Optimizer):
    """Momentum, made orthogonal."""

    def __init__(self, learning_rate: Any, momentum: float = 0.9, **more: Any):
        super().__init__(learning_rate, **more)
        self.momentum = momentum

    def build(self, variables: Any) -> None:
        """Make the moments."""
        super().build(variables)
        self.moments = self.add_optimizer_variables(variables, "moment")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Take a step."""
        moment = self.moments[self._get_variable_index(variable)]
        self.assign(moment, self.momentum * moment + gradient)
        self.assign_sub(variable, learning_rate * orthogonal(moment.value))


class Squares(keras.losses.Loss):
    """The sum of squares of a row."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return it for each row."""
        return ops.sum(ops.square(y_true - y_pred), -1)


def loss_of(case: Case) -> Any:
    """Return the loss."""
    if case.loss == "squares" and case.reduction == "sum":
        return Squares(reduction="sum")
    usual = "mean_with_sample_weight" if case.class_weights else "sum_over_batch_size"
    reduction = "sum" if WEIGHTED else usual
    if case.loss == "squares":
        return keras.losses.MeanSquaredError(reduction)
    entropy = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=IGNORED, reduction=reduction)
    if case.loss == "cross_entropy":
        return entropy
    if WEIGHTED:
        raise CannotExpress("a sample has one weight for both terms")

    def penalized(targets: Any, outputs: Any) -> Any:
        return entropy(targets, outputs) + PENALTY * ops.sum(ops.square(outputs)) / len(outputs)

    return penalized


def optimizer_of(case: Case) -> Any:
    """Return the optimizer."""
    rate = Rates(case.rates) if len(case.rates) > 1 else case.rate(0)
    more = {
        "gradient_accumulation_steps": case.window if case.window > 1 else None,
        "global_clipnorm": case.clip,
        "use_ema": bool(case.average),
    }
    more["ema_momentum"] = case.average or 0.99
    if case.optimizer == "adamw":
        beta, gamma = BETAS
        made: Any = keras.optimizers.AdamW(rate, case.weight_decay, beta, gamma, EPSILON, **more)
    elif case.optimizer == "muon":
        made = Muon(rate, case.momentum, **more)
    else:
        made = keras.optimizers.SGD(rate, **more)
    return made


def model_of(case: Case) -> keras.Model:
    """Return the network, compiled."""
    start = np.array(case.start, case.dtype)
    inputs = keras.Input(np.shape(case.inputs[0])[1:], dtype=case.dtype)
    outputs = (
        keras.layers.BatchNormalization(epsilon=1e-5, center=False, scale=False)(inputs) if case.batch_norm else inputs
    )
    outputs = keras.layers.Dense(len(start), use_bias=False, dtype=case.dtype, name="linear")(outputs)
    model = keras.Model(inputs, outputs)
    model.get_layer("linear").set_weights([start.T])
    model.compile(optimizer_of(case), loss_of(case))
    return model


def weights(model: keras.Model) -> np.ndarray:
    """Return a copy of the weights."""
    return np.array(model.get_layer("linear").get_weights()[0].T, np.float64)


class Look(keras.callbacks.Callback):
    """Counts how often the weights change, and notes them when an evaluation begins."""

    def __init__(self, model: keras.Model):
        super().__init__()
        self.before, self.updates, self.evaluated = weights(model), 0, None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Look at the weights."""
        now = weights(self.model)
        self.updates += not np.array_equal(now, self.before, equal_nan=True)
        self.before = now

    def on_test_begin(self, logs: Any = None) -> None:
        """Note the weights."""
        self.evaluated = weights(self.model) if self.evaluated is None else self.evaluated


def train(case: Case) -> Result:
    """Train by fit."""
    model, data = model_of(case), MicroBatches(case)
    look = Look(model)
    more = {"callbacks": [look], "shuffle": False, "verbose": 0}
    if case.stop_after:
        model.fit(MicroBatches(case, end=case.stop_after), **more)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.keras")
            model.save(file)
            model = keras.models.load_model(file)
        data = MicroBatches(case, begin=case.stop_after)
    model.fit(data, epochs=case.epochs, validation_data=data if case.evaluates else None, **more)
    # With an average the weights are those before fit overwrites them by it.
    return Result(look.before, look.updates, average=weights(model) if case.average else None, evaluated=look.evaluated)


if __name__ == "__main__":
    serve_cases(
        train,
        ["keras", "torch"],
        can=["clip", "schedule", "ema", "nan", "own optimizer", "class weights", "float16", "two terms", "BatchNorm"]
        + ["resume", "evaluation"],
        cannot={
            "N that changes": "gradient_accumulation_steps is given when the optimizer is made",
            "two ranks": "not tried: with this backend the ranks are those of PyTorch, by a loop of one's own",
        },
    )
