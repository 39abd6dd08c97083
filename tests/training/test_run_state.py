"""Does a training state contain everything that a run changes, under the right owners?"""

from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler as schedules

from helpers import Recorder, batches, slope_driver, values
from ms_accum import Checkpointer, CheckpointError, GradientAccumulation, Stopped
from ms_accum.training.loop import trained_parameters

pytestmark = pytest.mark.usefixtures("eager")


class Following(nn.Cell):
    """A network with a slow copy of itself, as MoCo and BYOL have one, that training moves but no gradient does."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, 3)
        self.momentum_encoder = nn.Dense(6, 3)
        self.momentum = Parameter(Tensor(4.0), name="momentum", requires_grad=False)
        self.momentum_encoder.weight.requires_grad = self.momentum_encoder.bias.requires_grad = False

    def construct(self, x):
        ops.assign_add(self.momentum_encoder.weight, 0.25 * self.dense.weight)
        return self.dense(x)


def run(make, folder=None, rates=0.1, stop=None, **options):
    """Train, from other numbers than a state has, and return all that is left."""
    ms.set_seed(1 if folder is None or stop else 2)
    network = Following()
    optimizer = make(network.trainable_params(), rates)
    model = GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer)
    asked = itertools.count(1)  # five times in a window
    options_of_stop = {"stop": lambda: next(asked) == stop} if stop else {}
    states = None if folder is None else Checkpointer(folder, resume="auto", **options_of_stop, **options)
    data = batches(np.random.RandomState(1), [4] * 12)
    try:
        model.train_process(1, data, 2, report=(), ckpt_path=None, checkpointer=states)
    except Stopped:
        assert stop
    return [array.tolist() for array in values(trained_parameters(network, optimizer).values())]


MAKE = {
    "SGD": lambda p, lr: nn.SGD(p, lr, momentum=0.9),
    "Momentum": lambda p, lr: nn.Momentum(p, lr, 0.9),
    "Momentum in groups": lambda p, lr: nn.Momentum([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr, 0.9),
    "Adam": nn.Adam,
    "NAdam": optim.NAdam,
    "ASGD": lambda p, lr: optim.ASGD(p, lr, t0=2.0),
    "experimental SGD": lambda p, lr: optim.SGD(p, lr, momentum=0.9),
    "RAdam": optim.RAdam,
    "Rprop": optim.Rprop,
}


@pytest.mark.parametrize("name", MAKE)
def test_resumed_run_equals_uninterrupted_run(name, tmp_path):
    """Also where another setting was allowed that changes nothing: then the optimizer's settings alone are new."""
    expected = run(MAKE[name])
    first = run(MAKE[name], tmp_path, stop=12, config={"note": 1})
    resumed = run(MAKE[name], tmp_path, config={"note": 2}, allow_config_change=True)
    assert resumed == expected != first


@pytest.mark.parametrize("reverse", [False, True])
def test_other_kind_of_learning_rate_with_allow_config_change(reverse, tmp_path):
    """Where it is allowed; the optimizer then has Parameters that the state has not, or has not those it has."""

    def make(parameters, rate):
        return nn.Momentum(parameters, rate, 0.9)

    first, second = [0.2, nn.CosineDecayLR(0.0, 0.1, 9)][:: -1 if reverse else 1]
    run(make, tmp_path, rates=first, stop=12, config={"note": 1})
    run(make, tmp_path, rates=second, config={"note": 2}, allow_config_change=True)


def test_duplicate_names_are_rejected_before_training(tmp_path):
    model = slope_driver()
    model._step.optimizer.twins = {number: Parameter(Tensor(0.0), name="twin") for number in range(2)}
    with pytest.raises(CheckpointError, match="Two Parameters of the optimizer are named 'twin'"):
        model.train_process(1, [(Tensor([[1.0]]),)], 1, report=(), ckpt_path=None, checkpointer=Checkpointer(tmp_path))
    assert model.updates == 0


def test_run_ended_by_nonfinite_raise_resumes_after_that_window(tmp_path):
    def train():
        model, recorder = slope_driver(nonfinite="raise"), Recorder()
        data = [(Tensor([[value]], ms.float32),) for value in (1.0, np.nan, 2.0, 4.0)]
        states = Checkpointer(tmp_path, resume="auto")
        try:
            model.train_process(1, data, 1, report=recorder, ckpt_path=None, checkpointer=states)
        finally:
            steps.append([record.step for record in recorder.records])
        return model

    steps = []
    with pytest.raises(FloatingPointError, match="window 2 in epoch 1"):
        train()
    assert values([train()._network.w])[0] == -7.0 and steps == [[1, 2], [3, 4]]


# Schedulers


def scheduled(make, folder=None, stop=None, **options):
    """Train with a scheduler; return the rates used, and what is left."""
    ms.set_seed(1)
    network = nn.Dense(6, 3)
    optimizer = optim.SGD(network.trainable_params(), 0.5)
    scheduler = make(optimizer)
    model = GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, scheduler=scheduler)
    states = None
    if folder is not None:
        asked = itertools.count(1)
        states = Checkpointer(folder, resume="auto", stop=stop and (lambda: next(asked) >= stop), **options)
    recorder = Recorder()
    try:
        data = batches(np.random.RandomState(1), [4] * 12)
        model.train_process(1, data, 2, report=(recorder,), ckpt_path=None, checkpointer=states)
    except Stopped:
        pass
    return [record.lr for record in recorder.records], [array.tolist() for array in values(network.trainable_params())]


SCHEDULERS = {
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2, 0.5),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 4),
    "SequentialLR": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.StepLR(optimizer, 1, 0.5), schedules.StepLR(optimizer, 1, 0.25)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_steps_per_update_and_resumes(name, tmp_path):
    rates, weights = scheduled(SCHEDULERS[name])
    assert len(rates) == 6 and rates[0] == 0.5 and len(set(rates)) > 2
    first, _ = scheduled(SCHEDULERS[name], tmp_path, stop=12)
    second, resumed_weights = scheduled(SCHEDULERS[name], tmp_path)
    assert len(first) == 2 and first + second == rates and resumed_weights == weights


def test_skipped_window_does_not_step_scheduler():
    network = nn.Dense(6, 3)
    optimizer = optim.SGD(network.trainable_params(), 0.5)
    scheduler = schedules.StepLR(optimizer, 1, 0.5)
    model = GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, scheduler=scheduler)
    good, bad = batches(np.random.RandomState(1), [4, 4])
    bad = (Tensor(np.full((4, 6), np.nan), ms.float32), bad[1])
    model.train_process(1, [good, bad, good], 1, report=(), ckpt_path=None)
    assert (model.updates, model.skipped) == (2, 1) and float(optimizer.lrs[0].asnumpy()) == 0.125


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: schedules.ReduceLROnPlateau(optimizer),
        lambda optimizer: schedules.StepLR(optim.SGD(nn.Dense(2, 2).trainable_params(), 0.1), 1),
        lambda optimizer: 0.5,
    ],
    ids=["of a metric", "of another optimizer", "a rate"],
)
def test_invalid_scheduler_is_rejected(make):
    network = nn.Dense(6, 3)
    optimizer = optim.SGD(network.trainable_params(), 0.5)
    with pytest.raises(TypeError, match="'scheduler' must be one of mindspore.experimental.optim.lr_scheduler for "):
        GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, scheduler=make(optimizer))


@pytest.mark.usefixtures("graph_mode")
def test_optimizer_that_ignores_schedulers_is_rejected():
    network = nn.Dense(6, 3)
    optimizer = mint.optim.SGD(network.trainable_params(), 0.5)
    with pytest.raises(TypeError, match="mint.optim.SGD, which ignores it. Use mindspore.exp"):
        GradientAccumulation(network, nn.MSELoss(), optimizer, scheduler=schedules.StepLR(optimizer, 1))
