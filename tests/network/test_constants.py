"""Attributes of the user's Cells may change between two calls, as they may where nothing is compiled."""

import copy
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

from ms_accum import evaluate, freeze_batch_norm
from ms_accum.loss.known_losses import WithLoss
from ms_accum.network.compiled import Constants, compiled
from ms_accum.network.training_mode import training_mode
from ways import Trained

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm layers")


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = nn.Dense(3, 4, weight_init="ones", bias_init="zeros")
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.Identity()
        self.last = nn.Dense(4, 1, weight_init="ones", bias_init="zeros")
        self.factor, self.squares, self.kind, self.factors = 1.0, False, "as it is", [1.0]

    def construct(self, x):
        hidden = self.act(self.norm(self.first(x)))
        hidden = hidden * 3 if hasattr(self, "triples") else hidden
        hidden = hidden * hidden if self.squares else hidden
        hidden = -hidden if self.kind == "negative" else hidden
        return self.last(hidden) * self.factor * self.factors[0]


class Loss(nn.Cell):
    """Returns the loss of a network from its inputs alone."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x):
        return ops.mean((self.network(x) - ops.sum(x, 1, True)) ** 2)


def times_three(cell, inputs, output):
    return output * 3


def times_two(gradient):
    return gradient * 2


CHANGES = {
    "a number": lambda network, optimizer: setattr(network, "factor", 3.0),
    "a flag": lambda network, optimizer: setattr(network, "squares", True),
    "a string": lambda network, optimizer: setattr(network, "kind", "negative"),
    "a new attribute": lambda network, optimizer: setattr(network, "triples", True),
    "set_train of a layer": lambda network, optimizer: network.norm.set_train(False),
    "frozen statistics": lambda network, optimizer: freeze_batch_norm(network),
    "requires_grad": lambda network, optimizer: setattr(network.last.weight, "requires_grad", False),
    "a hook of a Cell": lambda network, optimizer: network.act.register_forward_hook(times_three),
    "a hook of a Parameter": lambda network, optimizer: network.last.weight.register_hook(times_two),
    "a layer": lambda network, optimizer: setattr(network, "act", nn.Tanh()),
    "a Parameter": lambda network, optimizer: setattr(network.last, "bias", Parameter(Tensor([2.0]), name="new")),
    "the rate of a group": lambda network, optimizer: optimizer.param_groups[0].update(lr=0.3),
    "the decay of a group": lambda network, optimizer: optimizer.param_groups[0].update(weight_decay=0.3),
}


def parts():
    network = Network()
    network.set_train()
    optimizer = optim.SGD(network.trainable_params(), 0.1)
    return Constants("test", (WithLoss(network, nn.MSELoss()), optimizer, times_two)), network, optimizer


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_needs_another_graph(change):
    constants, network, optimizer = parts()
    assert [constants.graph(), constants.graph()] == [0, 0]
    change(network, optimizer)
    assert [constants.graph(), constants.graph()] == [1, 1]


@pytest.mark.usefixtures("eager")
def test_graph_is_used_again_after_a_change_back():
    constants, network, _ = parts()
    numbers = []
    for factor in (1.0, 2.0, 1.0, 3.0, 2.0):
        network.factor = factor
        numbers.append(constants.graph())
    assert numbers == [0, 1, 0, 2, 1]


def evaluation(network, optimizer):
    with training_mode(network, False):
        network.compile_and_run(Tensor(np.zeros((2, 3)), ms.float32))


def equal_number(network, optimizer):
    network.factor = float("1.0")


def new_weights(network, optimizer):
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(np.ones(parameter.shape), parameter.dtype))


def scheduler(network, optimizer):
    optim.lr_scheduler.StepLR(optimizer, 1).step()


def in_a_list(network, optimizer):
    """A constant, as docs/limits.md states it."""
    network.factors[0] = 3.0


@pytest.mark.parametrize("no_change", [evaluation, equal_number, new_weights, scheduler, in_a_list])
def test_other_changes_need_no_other_graph(no_change):
    constants, network, optimizer = parts()
    assert constants.graph() == 0
    no_change(network, optimizer)
    assert constants.graph() == 0


@pytest.mark.usefixtures("eager")
def test_many_graphs_are_a_warning_that_names_what_changes():
    constants, network, _ = parts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in range(8):
            network.factor = float(factor)
            constants.graph()
    network.factor = 100.0
    with pytest.warns(RuntimeWarning, match="compiled for the 9th time, because 'factor' has changed.*ops.assign"):
        constants.graph()
    network.factor = 101.0
    constants.graph()  # once


def trained(way, changes, **options):
    """Return the parameters after a window, a change, another window, and so on."""
    network = Network()
    system = Trained(way, Loss(network), make=lambda all: optim.SGD(all, 0.01), **options)
    system.network.set_train()
    micro_batch = (Tensor(np.random.RandomState(0).rand(4, 3), ms.float32),)
    system.train([micro_batch] * 2)
    for change in changes:
        CHANGES[change](network, system.optimizer)
        system.train([micro_batch] * 2)
    return [parameter.asnumpy() for parameter in system.optimizer.parameters]


def check_equal(way, changes):
    for mine, its in zip(trained(way, changes), trained(way, changes, compile=False)):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "changes"),
    [
        ("driver", ["a number", "a hook of a Cell", "requires_grad", "a Parameter"]),
        ("driver", ["frozen statistics", "the rate of a group", "a layer"]),
        ("step", ["set_train of a layer", "a hook of a Parameter", "a string"]),
        ("cells", ["a flag", "the decay of a group", "a new attribute"]),
    ],
)
def test_changes_between_windows_are_followed(way, changes):
    check_equal(way, changes)


def test_evaluate_follows_a_change_of_a_network_and_of_its_copy():
    network, scores = Network(), []
    data = [(Tensor(np.ones((4, 3)), ms.float32), Tensor(np.zeros(4), ms.int32))]
    evaluate(network, data)
    copied = copy.deepcopy(network)
    copied.factor = 3.0
    for evaluated in (network, copied, network):
        scores.append(compiled("evaluate", evaluated, True)(data[0][0]).asnumpy()[0, 0])
        network.register_forward_hook(times_three)
    np.testing.assert_allclose(scores, [scores[0], scores[0] * 3, scores[0] * 9], rtol=1e-6)


class Multiplied(nn.Cell):
    """The gradient of `w` is the mean of x, times `factor`."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([0.0]), name="w")
        self.factor = parameter_of(1.0, "factor")

    def construct(self, x):
        return ops.mean(ops.sum(x * self.w * self.factor, 1))


def parameter_of(value, name):
    return Parameter(Tensor(value, ms.float32), name=name, requires_grad=False)


@pytest.mark.parametrize("what", ["buffer", "rate"])
@pytest.mark.parametrize("options", [{}, {"loss_scale": 1}, {"clip_norm": 99.0}], ids=str)
@pytest.mark.parametrize("way", ["driver", "step", "loop"])
def test_parameter_that_is_replaced_gets_values_later(way, options, what):
    """A loop or a branch keeps the storage of Parameters that do not occur outside."""
    network, moved, before = Multiplied(), [], 0.0
    trained = Trained(way, network, **options)
    owner, name = (network, "factor") if what == "buffer" else (trained.optimizer, "learning_rate")
    for change in (
        lambda: None,
        lambda: setattr(owner, name, parameter_of(2.0, "new")),
        lambda: getattr(owner, name).set_data(Tensor(5.0, ms.float32)),
        lambda: ops.assign(getattr(owner, name), Tensor(7.0, ms.float32)),
    ):
        change()
        trained.train([(Tensor(np.ones((2, 1)), ms.float32),)] * 2)
        now = float(network.w.asnumpy()[0])
        moved.append(before - now)
        before = now
    assert moved == pytest.approx([1, 2, 5, 7])
