"""Train with MindCV's optimizers and schedulers, and compare with one large batch: python tests/mindcv_runs.py

Prints a line of JSON for each comparison. A schedule is a list with exactly one rate for
each update, so a clock that runs ahead of the updates ends in an error. An optimizer is made once for each way to
train, and gets the schedules one after the other, because most of the time is MindSpore's compilation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mindspore as ms
import numpy as np
from mindcv.optim import create_optimizer
from mindcv.scheduler import create_scheduler
from mindspore import Tensor, nn, ops

from helpers import Recorder
from ms_accum import GradientAccumulation

EPOCHS, WINDOW = 2, 3
WINDOWS = ((5, 4, 3), (3, 5, 4), (7, 5))  # rows of micro-batches; the tail is shorter
UPDATES = EPOCHS * len(WINDOWS)
RATE = 0.01

DECAY = {"weight_decay": 0.05, "weight_decay_filter": "norm_and_bias"}  # groups, and `order_params`
OPTIMIZERS = {
    "sgd": DECAY,
    "momentum": DECAY,
    "nesterov": {"nesterov": True, **DECAY},
    "adam": DECAY,
    "adamw": DECAY,
    "lion": DECAY,
    "nadam": DECAY,
    "adan": {},
    "rmsprop": DECAY,
    "adagrad": DECAY,
}
LAYERS = {"layer_decay": 0.5, "weight_decay": 0.05}  # a group of its own, with its own list of rates, for each layer
SCHEDULES = {
    "constant": {"warmup_epochs": 0},
    "cosine_decay": {"warmup_epochs": 1, "warmup_factor": 0.1, "decay_epochs": 1},
    "one_cycle": {"warmup_epochs": 0},
    "cyclic": {"warmup_epochs": 0},
    "exponential_decay": {"warmup_epochs": 1, "lr_epoch_stair": True, "warmup_factor": 0.2},
    "polynomial_decay": {"warmup_epochs": 0, "decay_rate": 2.0},
    "step_decay": {"warmup_epochs": 0, "decay_epochs": 1, "decay_rate": 0.5},
    "multi_step_decay": {"warmup_epochs": 0, "milestones": [1], "decay_rate": 0.1},
}


def rates_of(schedule):
    """Return the rates of MindCV's schedule, counted in updates."""
    options = {"lr": RATE, "min_lr": RATE / 100, "num_epochs": EPOCHS, "steps_per_epoch": len(WINDOWS)}
    rates = [float(rate) for rate in create_scheduler(scheduler=schedule, **{**options, **SCHEDULES[schedule]})]
    if len(rates) != UPDATES:
        sys.exit(f"{schedule} has {len(rates)} rates for {UPDATES} updates")
    return rates


def windows():
    """Return the micro-batches of an epoch, by windows."""
    random = np.random.RandomState(3)

    def micro_batch(rows):
        return random.randn(rows, 6).astype(np.float32), random.randn(rows, 3).astype(np.float32)

    return [[micro_batch(rows) for rows in window] for window in WINDOWS]


class Trained:
    """A network and its optimizer, trained by the driver or with large batches, each time from the same state."""

    def __init__(self, way, optimizer, options):
        random = np.random.RandomState(4)
        self.network = nn.SequentialCell(nn.Dense(6, 8), nn.Tanh(), nn.Dense(8, 3))
        for parameter in self.network.get_parameters():
            parameter.set_data(Tensor(random.randn(*parameter.shape).astype(np.float32) / 2))
        # Not a softmax: where the gradients of a layer add up to 0, as they do behind one, Adan takes it for untrained
        # if their sum is exactly 0, which rounding decides.
        self.loss_fn = nn.MSELoss()
        self.optimizer = create_optimizer(self.network, optimizer, rates_of("cosine_decay"), **options)
        parameters = (*self.optimizer.get_parameters(), *self.network.get_parameters())
        self.start = [(parameter, parameter.asnumpy().copy()) for parameter in parameters]
        self.recorder = Recorder()
        self.micro_batches = [micro_batch for window in windows() for micro_batch in window]
        self.train = getattr(self, way)()

    def follow(self, schedule):
        """Train by a schedule; return the movement of all parameters and the clock of the rates."""
        for parameter, values in self.start:
            ops.assign(parameter, Tensor(values))
        if schedule:  # otherwise the one with which it was made
            ops.assign(self.optimizer.learning_rate.learning_rate, Tensor(rates_of(schedule), ms.float32))
        before = self.values()
        self.recorder.records.clear()
        self.train()
        return self.values() - before, int(self.optimizer.global_step.asnumpy()[0])

    def values(self):
        return np.concatenate([parameter.asnumpy().ravel() for parameter in self.network.trainable_params()])

    def large_batch(self):
        """Plain MindSpore: each window is one batch."""
        with_loss = nn.WithLossCell(self.network, self.loss_fn)
        grad_fn = ms.value_and_grad(with_loss, None, self.optimizer.parameters)
        batches = [tuple(map(np.concatenate, zip(*window))) for window in windows()]

        def train():
            for x, y in batches * EPOCHS:
                self.optimizer(grad_fn(Tensor(x), Tensor(y))[1])

        return train

    def driver(self):
        system = GradientAccumulation(self.network, self.loss_fn, self.optimizer)
        data = [tuple(map(Tensor, micro_batch)) for micro_batch in self.micro_batches]
        return lambda: system.train_process(EPOCHS, data, WINDOW, report=(self.recorder,), ckpt_path=None)


def compare(optimizer, options, schedules):
    """Print how far the driver is from one large batch."""
    large, trained = (Trained(way, optimizer, options) for way in ("large_batch", "driver"))
    for schedule in schedules:
        (expected, expected_clock), (moved, clock) = large.follow(schedule), trained.follow(schedule)
        facts = {"optimizer": optimizer, "schedule": schedule, "clocks": [clock, expected_clock]}
        facts |= {"miss": float(np.abs(moved - expected).max() / np.abs(expected).max())}
        facts |= {"shown": [record.lr for record in trained.recorder.records]}
        print(json.dumps({**facts, "rates": rates_of(schedule) if schedule else None}), flush=True)


def main():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for optimizer, options in OPTIMIZERS.items():
        compare(optimizer, options, list(SCHEDULES))
    compare("adamw", LAYERS, [None])
    try:
        Trained("driver", "lamb", {})
    except ValueError as error:
        print(json.dumps({"refused": str(error)}), flush=True)


if __name__ == "__main__":
    main()
