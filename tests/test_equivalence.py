"""N micro-batches equal one large batch: with every optimizer, with LeNet5, in both modes of MindSpore."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim

from helpers import batches, compiled_step, cross_entropy, forward_of, joined, run, values
from model_zoo import LeNet5
from ms_accum import Accumulator, GradientAccumulation, evaluate, native
from reference import digest, miss

# Every optimizer


class Columns(nn.Cell):
    """The mean over rows of x times the weights: the gradient of each Parameter is the mean of its columns of x."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((1, 3)), ms.float32), name="weight")
        self.bias = Parameter(Tensor(np.ones(2), ms.float32), name="bias")

    def construct(self, x):
        return ops.mean(ops.sum(x[:, :3] * self.weight, 1) + ops.sum(x[:, 3:] * self.bias, 1))


ROWS = [(4, 2, 2), (8,), (1, 1, 2, 4), (8, 4, 4)]  # all shares are exact in float32, and so are the sums of x
SIZES = {update: len(rows) for update, rows in enumerate(ROWS)}
RATES = [0.1, 0.05, 0.2, 0.1]


def groups(parameters, lr=0.1):
    """Return groups in another order than the network's."""
    return [{"params": parameters[1:], "lr": lr * 0.5}, {"params": parameters[:1], "weight_decay": 0.01}]


OPTIMIZERS = {
    "SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov": lambda p: nn.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD schedule": lambda p: nn.SGD(p, nn.ExponentialDecayLR(0.1, 0.9, 1)),
    "SGD groups": lambda p: nn.SGD(groups(p), 0.1),
    "Momentum list": lambda p: nn.Momentum(p, RATES, 0.9, weight_decay=0.01),
    "Momentum groups": lambda p: nn.Momentum(groups(p), 0.1, 0.9),
    "ASGD": lambda p: nn.ASGD(p, 0.1),
    "Adam": lambda p: nn.Adam(p, RATES, weight_decay=0.01),
    "Adam groups": lambda p: nn.Adam(groups(p), 0.1),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.1, weight_decay=0.01),
    "LazyAdam": lambda p: nn.LazyAdam(p, 0.1),
    "AdamOffload": lambda p: nn.AdamOffload(p, 0.1),
    "AdaMax": lambda p: nn.AdaMax(p, 0.1),
    "Adadelta": lambda p: nn.Adadelta(p, 0.1),
    "AdaFactor": lambda p: nn.AdaFactor(p, learning_rate=0.1, relative_step=False, scale_parameter=False),
    "Adagrad": lambda p: nn.Adagrad(p, learning_rate=0.1),
    "ProximalAdagrad": lambda p: nn.ProximalAdagrad(p, learning_rate=0.1),
    "FTRL": lambda p: nn.FTRL(p, learning_rate=0.1),
    "RMSProp": lambda p: nn.RMSProp(p, 0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: nn.Rprop(p, 0.1),
    "experimental SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "experimental Adam": lambda p: optim.Adam(p, 0.1),
    "experimental AdamW": lambda p: optim.AdamW(p, 0.1),
    "experimental RAdam": lambda p: optim.RAdam(p, 0.1),
    "mint SGD": lambda p: mint.optim.SGD(p, 0.1, momentum=0.9),
    "mint Adam": lambda p: mint.optim.Adam(p, 0.1),
}
OF_MINT = [name for name in OPTIMIZERS if name.startswith("mint")]  # MindSpore's CPU runs them in graph mode only


def check(name):
    """Compare the bytes of the weights and of the optimizer's state with those of plain MindSpore."""
    random = np.random.RandomState(1)
    windows = [[(Tensor(random.randint(-8, 9, (n, 5)) / 4, ms.float32),) for n in rows] for rows in ROWS]
    networks = Columns(), Columns()
    ours, plain = (OPTIMIZERS[name](network.trainable_params()) for network in networks)
    model = GradientAccumulation(networks[0], None, ours, check="off")
    run(model, [micro_batch for window in windows for micro_batch in window], SIZES)
    grad_fn = ms.grad(networks[1], None, plain.parameters)
    for window in windows:
        plain(grad_fn(*joined(window)))
    assert model.updates == len(ROWS) and (networks[0].weight.asnumpy() != 1).all()
    assert digest(values(ours.get_parameters())) == digest(values(plain.get_parameters()))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in OF_MINT])
def test_optimizer_does_the_same_as_with_large_batches(name):
    check(name)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("name", OF_MINT)
def test_optimizer_of_mint_does_the_same_as_with_large_batches(name):
    check(name)


# A real network


def test_lenet5_trains_as_with_large_batches():
    """Smooth: where a value lies within a rounding of a kink, its gradient may go either way."""
    random, weights = np.random.RandomState(0), []
    images = [(random.randn(rows, 1, 32, 32), random.randint(0, 10, rows)) for rows in (8, 4, 6, 6)]
    data = [(Tensor(x, ms.float32), Tensor(y, ms.int32)) for x, y in images]
    for window in (2, 1):
        ms.set_seed(1)
        network = LeNet5()
        network.relu, network.max_pool2d = nn.GELU(), nn.AvgPool2d(kernel_size=2, stride=2)
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        if window == 2:
            run(GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer), data, window)
        else:
            grad_fn = ms.grad(forward_of(network, nn.CrossEntropyLoss()), None, optimizer.parameters)
            for at in (0, 2):
                optimizer(grad_fn(*joined(data[at : at + 2])))
        weights.append(values(optimizer.get_parameters()))
    assert miss(*weights, 1e-5, 1e-6) <= 1


# The modes of MindSpore


def trained(mode, make, **options):
    ms.set_context(mode=mode)
    ms.set_seed(1)
    network = nn.SequentialCell(nn.Dense(6, 8), nn.ReLU(), nn.Dense(8, 3))
    optimizer = make(network.trainable_params())
    model = GradientAccumulation(network, cross_entropy(), optimizer, clip_norm=0.5, **options)
    recorder = run(model, batches(np.random.RandomState(0), [8, 8, 4] * 4), 2)
    return values(optimizer.parameters), [record.loss for record in recorder.records]


@pytest.mark.parametrize(
    "make",
    [lambda p: nn.Momentum(p, 0.1, 0.9), pytest.param(lambda p: nn.AdamWeightDecay(p, 0.01), marks=pytest.mark.slow)],
)
def test_default_mode_equals_graph_mode_and_operators_one_by_one(make):
    graph, graph_losses = trained(ms.GRAPH_MODE, make)
    default, default_losses = trained(ms.PYNATIVE_MODE, make)
    eager, eager_losses = trained(ms.PYNATIVE_MODE, make, compile=False)
    assert all(map(np.array_equal, graph, default)) and graph_losses == default_losses
    assert miss(graph, eager, 1e-5, 1e-6) <= 1
    assert graph_losses == pytest.approx(eager_losses, rel=1e-5)


# What is compiled


class Head(nn.Cell):
    """A network with something to switch off: training it is not evaluating it."""

    def __init__(self):
        super().__init__()
        self.dropout, self.dense = nn.Dropout(p=0.5), nn.Dense(6, 3)

    def construct(self, x):
        return self.dense(self.dropout(x))


@pytest.mark.parametrize("setting", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_one_training_graph_per_shape(setting, compiles, rng, monkeypatch):
    """With tails, other sizes of windows, and evaluations between the runs."""
    monkeypatch.setenv(native.SWITCH, setting)
    network, data = Head(), batches(rng, [8] * 5)
    model = GradientAccumulation(network, cross_entropy(), nn.Momentum(network.trainable_params(), 0.1, 0.9))
    for sizes in (2, {0: 1, 4: 3}):
        run(model, data, sizes, epochs=2)
        evaluate(network, data)
    assert sorted(compiles) == ["Head", "Loop"]
    run(model, batches(rng, [8, 8, 4]), 3)
    assert compiles[2:] == ["Loop"]


def test_accumulator_step_compiles_one_graph_per_shape(compiles, rng):
    network, loss_fn = nn.Dense(6, 3), cross_entropy()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    accumulator = Accumulator(optimizer, 2, reduction="mean")
    train_step = compiled_step(network, loss_fn, accumulator, optimizer)
    for size in (2, 3, 5):
        accumulator.accumulate_step = size
        for columns in batches(rng, [8] * size):
            train_step(*columns)
    assert len(compiles) == 1 and accumulator.updates == 3
    for columns in batches(rng, [8, 4, 8, 4]):
        train_step(*columns)
    assert len(compiles) == 2
