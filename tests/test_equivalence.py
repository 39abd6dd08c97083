"""N micro-batches equal one large batch.

Each optimizer is checked by three comparisons. At every update the gradient of the window is that of the
big batch at the same weights. The weights that come out are, for optimizers that are linear in the
gradient, those of a run on big batches by plain MindSpore. The others magnify the last bits of a
gradient (Adam divides by its size), so theirs are what the optimizer alone, without ms_accum, makes of the
measured gradients.

They are trained on networks without kinks. Where a value lies within a rounding of a kink, of ReLU or max pooling, its
gradient may go either way, and the big batch's is not unique either.
"""

from __future__ import annotations

import functools
import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim

from helpers import batches, compiled_step, cross_entropy, restore, run, values
from model_zoo import MLP, LeNet5
from ms_accum import Accumulator, GradientAccumulation, TrainClear, TrainForwardBackward, TrainOptim, evaluate, native
from ms_accum.network.parameters import untrained
from reference import gradient_miss, miss

ROWS, UPDATES = 24, 10
SEED = 0
WINDOWS = (1, 2, 3, 4, 8)


def smooth_lenet5():
    network = LeNet5()
    network.relu, network.max_pool2d = nn.GELU(), nn.AvgPool2d(kernel_size=2, stride=2)
    return network


def smooth_mlp():
    network = MLP()
    for number in (1, 3):
        network.dense_relu_sequential[number] = nn.GELU()
    return network


MODELS = {"lenet5": (smooth_lenet5, 32), "mlp": (smooth_mlp, 28)}
RATES = [0.02 * 0.9**number for number in range(UPDATES)]


def schedule(scale=1.0):
    return nn.ExponentialDecayLR(0.02 * scale, 0.9, 1)


def groups(parameters, lr):
    """Return groups of weights and of biases, so that the order is not the network's."""
    biases = [parameter for parameter in parameters if len(parameter.shape) == 1]
    weights = [parameter for parameter in parameters if len(parameter.shape) != 1]
    return [{"params": biases, "lr": lr * 0.5}, {"params": weights, "weight_decay": 0.01}]


# Linear in the gradient: (parameters, scale of the learning rate) -> optimizer.
LINEAR = {
    "SGD": lambda p, s: nn.SGD(p, 0.02 * s),
    "SGD momentum": lambda p, s: nn.SGD(p, 0.02 * s, momentum=0.9, dampening=0.1),
    "SGD nesterov": lambda p, s: nn.SGD(p, 0.02 * s, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD schedule": lambda p, s: nn.SGD(p, schedule(s)),
    "SGD groups": lambda p, s: nn.SGD(groups(p, 0.02 * s), 0.02 * s),
    "Momentum": lambda p, s: nn.Momentum(p, 0.02 * s, 0.9),
    # On CPU the kernel of Momentum ignores `use_nesterov`: not so that of SGD.
    "Momentum nesterov": lambda p, s: nn.Momentum(p, 0.02 * s, 0.9, use_nesterov=True),
    "Momentum list": lambda p, s: nn.Momentum(p, [rate * s for rate in RATES], 0.9, weight_decay=0.01),
    "Momentum groups": lambda p, s: nn.Momentum(groups(p, 0.02 * s), 0.02 * s, 0.9),
    "ASGD": lambda p, s: nn.ASGD(p, 0.02 * s),
    "experimental SGD": lambda p, s: optim.SGD(p, 0.02 * s, momentum=0.9, weight_decay=0.01),
    "mint SGD": lambda p, s: mint.optim.SGD(p, 0.02 * s, momentum=0.9),
}

# The rest: (parameters) -> optimizer.
ALONE = {
    "Adam": lambda p: nn.Adam(p, 0.001),
    "Adam decay list": lambda p: nn.Adam(p, [rate / 20 for rate in RATES], weight_decay=0.01),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.001, weight_decay=0.01),
    "RMSProp": lambda p: nn.RMSProp(p, 0.001, momentum=0.5, weight_decay=0.01),
    "Adagrad": lambda p: nn.Adagrad(p, learning_rate=0.01),
    "experimental Adam": lambda p: optim.Adam(p, 0.001),
    "mint Adam": lambda p: mint.optim.Adam(p, 0.001),
    "Adam groups": lambda p: nn.Adam(groups(p, 0.001), 0.001),
    "Adam schedule": lambda p: nn.Adam(p, schedule(0.05)),
    "AdamWeightDecay groups": lambda p: nn.AdamWeightDecay(groups(p, 0.001), 0.001),
    "LazyAdam": lambda p: nn.LazyAdam(p, 0.001, weight_decay=0.01),
    "AdamOffload": lambda p: nn.AdamOffload(p, 0.001),
    "RMSProp centered": lambda p: nn.RMSProp(p, 0.001, centered=True),
    "Rprop": lambda p: nn.Rprop(p, 0.001),
    "ProximalAdagrad": lambda p: nn.ProximalAdagrad(p, learning_rate=0.01),
    "AdaMax": lambda p: nn.AdaMax(p, 0.001),
    "Adadelta": lambda p: nn.Adadelta(p, 0.1),
    "AdaFactor": lambda p: nn.AdaFactor(p, learning_rate=0.001, relative_step=False, scale_parameter=False),
    # From the usual accumulators above 0 its first update forgets the weights, and with them all but the rounding of
    # later gradients.
    "FTRL": lambda p: nn.FTRL(p, initial_accum=0.0, learning_rate=0.001),
    "experimental AdamW": lambda p: optim.AdamW(p, 0.001),
    "experimental RAdam": lambda p: optim.RAdam(p, 0.001),
}
OPTIMIZERS = [*LINEAR, *ALONE]
COMMON = ("SGD", "Momentum", "Momentum nesterov", "Adam", "AdamWeightDecay", "RMSProp", "Adagrad")


def make_optimizer(name, parameters, reduction):
    if name in LINEAR:
        return LINEAR[name](parameters, 1.0 if reduction == "mean" else 1 / ROWS)
    return ALONE[name](parameters)


class Accumulating:
    """The forward graph of one order of parameters, shared by all optimizers that have this order."""

    def __init__(self, forward, parameters, mean):
        stand_in = nn.SGD(list(parameters), 0.0)
        self.grad_sum = stand_in.parameters.clone(prefix="grad_sum", init="zeros")
        self.weight_sum = untrained("weight_sum", 0.0, ms.float32) if mean else None
        self.forward_backward = TrainForwardBackward(forward, stand_in, self.grad_sum, weight_sum=self.weight_sum)
        self.clear = TrainClear(self.grad_sum, weight_sum=self.weight_sum)

    def gradient(self):
        divisor = np.float32(1.0) if self.weight_sum is None else self.weight_sum.asnumpy()
        return [array / divisor for array in values(self.grad_sum)]


class Bench:
    """One network, one loss, and what is compiled of them once for all optimizers."""

    def __init__(self, model, reduction):
        ms.set_seed(1)
        make, side = MODELS[model]
        self.reduction, self.network = reduction, make()
        self.forward = nn.WithLossCell(self.network, nn.CrossEntropyLoss(reduction=reduction)).set_train()
        self.parameters = self.network.trainable_params()
        self.start = values(self.parameters)
        self.shape = (ROWS, 1, side, side)
        self.data = functools.cache(self._data)
        self.big_gradient = ms.jit(ms.value_and_grad(self.forward, None, ms.ParameterTuple(self.parameters)))
        self.accumulating = functools.lru_cache(self._accumulating)

    def _accumulating(self, names, mean):
        order = {parameter.name: parameter for parameter in self.parameters}
        return Accumulating(self.forward, [order[name] for name in names], mean)

    def big(self, batch):
        """Return the gradient of one big batch, in the network's order."""
        return self.big_gradient(*map(Tensor, batch))[1]

    def in_order_of(self, optimizer, gradients):
        order = dict(zip([parameter.name for parameter in self.parameters], gradients))
        return [order[parameter.name] for parameter in optimizer.parameters]

    def _data(self, seed):
        rng = np.random.RandomState(seed)
        return [
            (rng.randn(*self.shape).astype(np.float32), rng.randint(0, 10, ROWS).astype(np.int32))
            for _ in range(UPDATES)
        ]


@functools.cache
def bench(model, reduction):
    return Bench(model, reduction)


class Plain:
    """An optimizer alone, with the weights and the state that it starts from; in PyNative mode, which compiles nothing.

    MindSpore's CPU runs those of `mint` in graph mode only.
    """

    def __init__(self, setup, name):
        self.bench = setup
        restore(setup.parameters, setup.start)
        self.optimizer = make_optimizer(name, setup.parameters, setup.reduction)
        self.state = list(self.optimizer.get_parameters())
        self.fresh = values(self.state)
        self.mode = ms.GRAPH_MODE if name.startswith("mint") else ms.PYNATIVE_MODE
        self.on_big_batches = functools.cache(self._on_big_batches)

    def _on_big_batches(self, seed):
        """Return the weights after plain training."""
        restore(self.state, self.fresh)
        for batch in self.bench.data(seed):
            self.update(self.bench.in_order_of(self.optimizer, self.bench.big(batch)))
        return values(self.optimizer.parameters)

    def fed_with(self, gradients):
        """Return the weights after an update for each of `gradients`."""
        restore(self.state, self.fresh)
        for gradient in gradients:
            self.update(map(Tensor, gradient))
        return values(self.optimizer.parameters)

    def update(self, gradients):
        mode = ms.get_context("mode")
        ms.set_context(mode=self.mode)
        self.optimizer(tuple(gradients))
        ms.set_context(mode=mode)


class Trial(Plain):
    """An optimizer behind the three Cells: trains with any window, from the same start each time."""

    def __init__(self, setup, name):
        super().__init__(setup, name)
        names = tuple(parameter.name for parameter in self.optimizer.parameters)
        self.cells = setup.accumulating(names, setup.reduction == "mean")
        self.optim = TrainOptim(self.optimizer, self.cells.grad_sum, weight_sum=self.cells.weight_sum)

    def train(self, windows, seed=SEED):
        """Return the weights, the gradients of all windows, and by how much each misses the big batch's.

        The windows are of these sizes, in turn.
        """
        restore(self.state, self.fresh)
        self.cells.clear()
        gradients, missed = [], []
        for batch, window in zip(self.bench.data(seed), itertools.cycle(windows)):
            rows = ROWS // window
            expected = self.bench.in_order_of(self.optimizer, values(self.bench.big(batch)))
            for start in range(0, ROWS, rows):
                self.cells.forward_backward(*(Tensor(column[start : start + rows]) for column in batch))
            gradients.append(self.cells.gradient())
            missed.append(gradient_miss(gradients[-1], expected))
            self.optim()
            self.cells.clear()
        return values(self.optimizer.parameters), gradients, missed


def expected_weights(plain, name, gradients):
    return plain.on_big_batches(SEED) if name in LINEAR else plain.fed_with(gradients)


def check(name, model, reduction, courses):
    """Compare gradients and weights after each of the courses: a few window sizes that take turns."""
    setup = bench(model, reduction)
    trial, plain = Trial(setup, name), Plain(setup, name)
    start = setup.in_order_of(trial.optimizer, setup.start)
    for windows in courses:
        weights, gradients, missed = trial.train(windows)
        assert miss(weights, start, 1e-5, 1e-6) >= 100  # it did train
        errors = max(missed), miss(weights, expected_weights(plain, name, gradients), 1e-5, 1e-6)
        assert max(errors) <= 1, (windows, errors)


# Every optimizer, with windows of every size


@pytest.mark.parametrize(
    ("name", "model", "reduction", "window"),
    [
        pytest.param("SGD nesterov", "mlp", "sum", 3, marks=pytest.mark.slow),
        ("Adam", "lenet5", "mean", 8),
    ],
)
def test_micro_batches_equal_large_batch(name, model, reduction, window):
    check(name, model, reduction, [(window,)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "reduction"),
    [*((name, "mlp", "mean") for name in OPTIMIZERS), *((name, "lenet5", "sum") for name in COMMON)],
)
def test_every_optimizer_with_every_window_size(name, model, reduction):
    """The size changes with every update."""
    check(name, model, reduction, [WINDOWS])


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


class Head(nn.Cell):
    """A network with something to switch off: training it is not evaluating it."""

    def __init__(self):
        super().__init__()
        self.dropout, self.dense = nn.Dropout(p=0.5), nn.Dense(6, 3)

    def construct(self, x):
        return self.dense(self.dropout(x))


@pytest.mark.parametrize("setting", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_one_training_graph_per_shape(setting, compiles, rng, monkeypatch):
    monkeypatch.setenv(native.SWITCH, setting)
    network = Head()
    model = GradientAccumulation(network, cross_entropy(), nn.Momentum(network.trainable_params(), 0.1, 0.9))
    run(model, batches(rng, [8] * 5), 2, epochs=2)
    assert compiles == ["Loop"]  # a tail as well
    run(model, batches(rng, [8, 8, 4]), 3)
    assert compiles[1:] == ["Loop"]


@pytest.mark.slow
def test_evaluation_between_runs_does_not_recompile_training(compiles, rng):
    network = Head()
    model = GradientAccumulation(network, cross_entropy(), nn.Momentum(network.trainable_params(), 0.1, 0.9))
    data = batches(rng, [8] * 4)
    for _ in range(3):
        run(model, data, 2)
        evaluate(network, data)
    assert sorted(compiles) == ["Head", "Loop"]


def test_accumulator_step_compiles_one_graph_per_shape(compiles, rng):
    network, loss_fn = nn.Dense(6, 3), cross_entropy()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    accumulator = Accumulator(optimizer, 2, reduction="mean")
    train_step = compiled_step(network, loss_fn, accumulator, optimizer)
    for columns in batches(rng, [8] * 5):
        train_step(*columns)
    assert len(compiles) == 1
    for columns in batches(rng, [8, 4, 8, 4]):
        train_step(*columns)
    assert len(compiles) == 2
