"""What graphs contain as constants may change between two calls, as it may where nothing is compiled."""

import copy
import functools
import sys
import types
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

from conftest import running_in
from ms_accum import evaluate, freeze_batch_norm, replace_dropout
from ms_accum.loss.known_losses import WithLoss
from ms_accum.network import constants as constants_module
from ms_accum.network.constants import Constants
from ms_accum.network.restoring import training_mode
from ms_accum.training.evaluation import evaluate_seen
from ways import Trained

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm layers")

shift = 1.0
TABLE = {"scale": 1.0}
MODULE = sys.modules["settings_of_the_user"] = types.ModuleType("settings_of_the_user")
MODULE.scale = 1.0


class Settings:
    def __init__(self):
        self.scale = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Network(nn.Cell):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.settings = Settings()
        self.first = nn.Dense(3, 4, weight_init="ones", bias_init="zeros")
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.Identity()
        self.last = nn.Dense(4, 1, weight_init="ones", bias_init="zeros")
        self.factor = 1.0
        self.factors = [1.0]
        self.table = {"scale": 1.0}
        self.slotted = Slotted()
        self.tensor = Tensor(np.ones(1), ms.float32)
        self.array = np.ones(1, np.float32)

    def construct(self, x):
        hidden = self.act(self.norm(self.first(x)))
        hidden = hidden * 3 if hasattr(self, "triples") else hidden
        hidden = hidden * self.tensor * Tensor(self.array)
        scale = scaled(self.gain * self.settings.scale * self.table["scale"] * self.slotted.scale * MODULE.scale)
        return self.last(hidden) * self.factor * self.factors[0] * scale


def scaled(value):
    return value * TABLE["scale"]


def mean_error(factor, output, target):
    return ops.mean((output - target) ** 2) * factor * shift


def error_of(output, target):
    return mean_error(1.0, output, target)


def times_three(cell, inputs, output):
    return output * 3


def set_factor(network, optimizer):
    network.factor = 3.0


def set_list(network, optimizer):
    network.factors[0] = 3.0


def set_dict(network, optimizer):
    network.table["scale"] = 3.0


def set_in_object(network, optimizer):
    network.settings.scale = 3.0


def set_in_slot(network, optimizer):
    network.slotted.scale = 3.0


def set_in_module(network, optimizer):
    MODULE.scale = 3.0


def set_in_tensor(network, optimizer):
    network.tensor[0] = 3.0


def set_in_array(network, optimizer):
    network.array[0] = 3.0


def set_in_class(network, optimizer):
    Network.gain = 3.0


def set_global(network, optimizer):
    globals()["shift"] = 3.0


def set_global_of_helper(network, optimizer):
    TABLE["scale"] = 3.0


def set_one_layer(network, optimizer):
    network.norm.set_train(False)


def add_attribute(network, optimizer):
    network.triples = True


def freeze(network, optimizer):
    network.last.weight.requires_grad = False


def freeze_statistics(network, optimizer):
    freeze_batch_norm(network)


def replace(network, optimizer):
    network.act = nn.Tanh()


def add_hook(network, optimizer):
    network.act.register_forward_hook(times_three)


def set_rate(network, optimizer):
    optimizer.param_groups[0]["lr"] = 0.3


def set_decay(network, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.3


CHANGES = {
    change.__name__: change
    for change in (
        set_factor,
        set_list,
        set_dict,
        set_in_object,
        set_in_slot,
        set_in_module,
        set_in_tensor,
        set_in_array,
        set_in_class,
        set_global,
        set_global_of_helper,
        set_one_layer,
        add_attribute,
        freeze,
        freeze_statistics,
        replace,
        add_hook,
        set_rate,
        set_decay,
    )
}


@pytest.fixture(autouse=True)
def restored():
    yield
    globals()["shift"] = TABLE["scale"] = MODULE.scale = Network.gain = 1.0
    Scaled.construct.__defaults__[0][1:] = []


def parts():
    network = Network()
    optimizer = optim.SGD(network.trainable_params(), 0.1)
    loss_fn = functools.partial(mean_error, 1.0)
    network.set_train()
    return Constants("test", (WithLoss(network, loss_fn), optimizer)), network, optimizer


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_needs_another_graph(change):
    constants, network, optimizer = parts()
    assert [constants.graph(), constants.graph()] == [0, 0]
    change(network, optimizer)
    assert [constants.graph(), constants.graph()] == [1, 1]


def test_graph_is_used_again_after_a_change_back():
    constants, network, _ = parts()
    numbers = []
    for factor in (1.0, 2.0, 1.0, 3.0, 2.0):
        network.factor = factor
        numbers.append(constants.graph())
    assert numbers == [0, 1, 0, 2, 1]


def of_two(x):
    return x * TABLE["scale"]


MODULE.of_two = of_two


class Anything:
    """Has every attribute, like a mock."""

    def __getattr__(self, name):
        return self


class Mixin:
    def shifted(self, x):
        return MODULE.of_two(x + sum([shift for _ in range(2)]))


class Scaled(nn.Cell, Mixin):
    mock = Anything()

    def __init__(self):
        super().__init__()
        self.scale, self.epoch, self.known, self.nan = 1.0, 0, {1}, float("nan")

    def construct(self, x, powers=[1.0]):  # noqa: B006
        return self.shifted(x) * self.scale * powers[0] * len(self.known) * self.nan

    def on_epoch(self):
        self.epoch += 1


class Listed(nn.Cell):
    """Has a Cell in a plain list, and an attribute that only the loss function reads."""

    def __init__(self):
        super().__init__()
        self.layers, self.temperature = [Scaled()], 1.0

    def construct(self, x):
        return self.layers[0](x)


def listed():
    network = Listed()
    inner = Scaled()

    def loss_fn(output, target):
        return inner(output - target) / network.temperature

    return Constants("test", (WithLoss(network, loss_fn),)), network, inner


HIDDEN = {
    "in a list": lambda network, inner: setattr(network.layers[0], "scale", 2.0),
    "in a closure": lambda network, inner: setattr(inner, "scale", 2.0),
    "named by the loss only": lambda network, inner: setattr(network, "temperature", 2.0),
    "a global in a comprehension of a mixin": lambda network, inner: globals().update(shift=2.0),
    "a global of a function in a module": lambda network, inner: TABLE.update(scale=2.0),
    "a default": lambda network, inner: Scaled.construct.__defaults__[0].append(2.0),
    "a set": lambda network, inner: inner.known.add(2),
}


@pytest.mark.parametrize("change", HIDDEN.values(), ids=HIDDEN)
def test_hidden_change_needs_another_graph(change):
    constants, network, inner = listed()
    assert constants.graph() == 0
    change(network, inner)
    assert [constants.graph(), constants.graph()] == [1, 1]


def test_other_name_of_an_equal_value_needs_another_graph():
    constants, network, _ = parts()
    constants.graph()
    network.table["other"] = network.table.pop("scale")
    assert constants.graph() == 1


def test_attribute_of_methods_that_graphs_do_not_call_needs_no_other_graph():
    constants, _, inner = listed()
    constants.graph()
    inner.on_epoch()
    inner.nan = float("nan")
    assert constants.graph() == 0


def test_network_can_be_copied_after_an_evaluation():
    network, scores = Network(), []
    data = [(Tensor(np.ones((4, 3)), ms.float32), Tensor(np.zeros(4), ms.int32))]
    evaluate(network, data)
    copied = copy.deepcopy(network)
    set_factor(copied, None)
    for evaluated in (network, copied):
        evaluate_seen(evaluated, data, lambda image, score, label: scores.append(score[0, 0]))
    np.testing.assert_allclose(scores[1], scores[0] * 3, rtol=1e-6)


def notes_of_calls(network, optimizer):
    network(Tensor(np.zeros((2, 3)), ms.float32))


def evaluation(network, optimizer):
    network.set_train()
    with training_mode(network, False):
        network.compile_and_run(Tensor(np.zeros((2, 3)), ms.float32))


def notes_of_the_user(network, optimizer):
    network.history = [1]
    network.epoch = 1


def equal_number(network, optimizer):
    network.factor = float("1.0")
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]


def new_weights(network, optimizer):
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(np.ones(parameter.shape), parameter.dtype))


def local_names(network, optimizer):
    globals()["output"] = globals()["mean"] = object()  # a local name, and an attribute


NO_CHANGES = [notes_of_calls, notes_of_the_user, evaluation, equal_number, new_weights, local_names]


@pytest.mark.parametrize("no_change", NO_CHANGES)
def test_graph_stays_without_a_change(no_change):
    constants, network, optimizer = parts()
    network.set_train()
    assert constants.graph() == 0
    no_change(network, optimizer)
    assert constants.graph() == 0


@pytest.mark.parametrize("change", [set_in_tensor, set_in_array])
def test_contents_of_large_tensors_are_not_compared(change, monkeypatch):
    """As docs/limits.md states it: reading them would take longer than a small network."""
    monkeypatch.setattr(constants_module, "_LARGEST_COMPARED", 3)
    constants, network, optimizer = parts()
    assert constants.graph() == 0
    change(network, optimizer)
    assert constants.graph() == 0


def test_equal_tuple_needs_no_other_graph():
    """A run of `Model` replaces the optimizer's tuple of parameters, of which the optimizer has two names."""
    network = nn.Dense(3, 2)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    constants = Constants("test", [optimizer])
    assert constants.graph() == 0 and optimizer._parameters is optimizer.parameters
    object.__setattr__(optimizer, "parameters", ms.ParameterTuple(tuple(optimizer.parameters)))
    assert constants.graph() == 0


def test_scheduler_needs_no_other_graph():
    constants, network, optimizer = parts()
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    assert constants.graph() == 0
    scheduler.step()
    assert constants.graph() == 0


def test_deleted_attribute_and_new_child_need_another_graph():
    constants, network, _ = parts()
    constants.graph()
    del network.factor
    assert constants.graph() == 1
    network.other = nn.Dense(2, 2)
    assert constants.graph() == 2


def test_container_that_contains_itself_is_read_once():
    constants, network, _ = parts()
    network.factors.append(network.factors)
    assert [constants.graph(), constants.graph()] == [0, 0]
    network.factors[0] = 2.0
    assert constants.graph() == 1


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


class Loss(nn.Cell):
    """Returns the loss of a network from its inputs alone."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x):
        return error_of(self.network(x), ops.sum(x, 1, True))


def trained(way, change, mode, **options):
    """Return the parameters after a window, a change of what a graph contains as a constant, and another window."""
    globals()["shift"] = TABLE["scale"] = MODULE.scale = Network.gain = 1.0
    with running_in(mode):
        network = Network()
        window = 1 if way == "driver, windows of 1" else 2
        system = Trained(way.partition(",")[0], Loss(network), window, make=lambda all: optim.SGD(all, 0.1), **options)
        system.network.set_train()
        micro_batch = (Tensor(np.random.RandomState(0).rand(4, 3), ms.float32),)
        system.train([micro_batch] * window)
        change(network, system.optimizer)
        system.train([micro_batch] * window)
        return [parameter.asnumpy() for parameter in system.optimizer.parameters]


def check_equal(way, change, mode):
    with_change = trained(way, change, ms.PYNATIVE_MODE, compile=False)
    without = trained(way, lambda network, optimizer: None, ms.PYNATIVE_MODE, compile=False)
    assert any(not np.allclose(mine, its, atol=1e-4) for mine, its in zip(with_change, without))
    for mine, its in zip(trained(way, change, mode), with_change):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)


# A step of the user's own with `ms.jit`, the way "accumulator", is not compared.
CHANGED_IN = dict.fromkeys(("driver", "driver, windows of 1", "step", "cells"), CHANGES)
CHANGED_IN["loop"] = {name: CHANGES[name] for name in ("set_rate", "set_decay")}  # the forward is the user's own
FAST = [("driver", "set_factor"), ("driver", "freeze"), ("driver, windows of 1", "set_rate"), ("step", "set_global")]
FAST += [("cells", "set_one_layer"), ("loop", "set_decay")]
CASES = [
    pytest.param(way, change, id=f"{way}, {name}", marks=[] if (way, name) in FAST else pytest.mark.slow)
    for way, changes in CHANGED_IN.items()
    for name, change in changes.items()
]


@pytest.mark.parametrize(("way", "change"), CASES)
def test_change_between_two_calls_is_followed(way, change):
    check_equal(way, change, ms.PYNATIVE_MODE)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_between_two_calls_is_followed_in_graph_mode(change):
    check_equal("driver", change, ms.GRAPH_MODE)


def test_change_would_be_ignored_without_constants(monkeypatch):
    monkeypatch.setattr(Constants, "graph", lambda self: 0)
    with pytest.raises(AssertionError):
        check_equal("driver", set_factor, ms.PYNATIVE_MODE)


def test_evaluate_follows_a_change_and_hooks_of_the_network():
    network = Network()
    data = [(Tensor(np.ones((4, 3)), ms.float32), Tensor(np.zeros(4), ms.int32))]
    scores = []
    for change in (lambda: None, lambda: set_factor(network, None), lambda: network.register_forward_hook(times_three)):
        change()
        evaluate_seen(network, data, lambda image, score, label: scores.append(score[0, 0]))
    np.testing.assert_allclose(scores, [scores[0], scores[0] * 3, scores[0] * 9], rtol=1e-6)


# Limits, as docs/limits.md states them


class Dropped(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(32), ms.float32), name="w")
        self.drop = nn.Dropout(p=0.5)
        self.factor = 1.0

    def construct(self, x):
        return ops.sum(self.drop(x) * self.w) * self.factor


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
def test_new_graph_repeats_masks_of_dropout_unless_it_is_replaced(replaces):
    network = Dropped()
    if replaces:
        replace_dropout(network)
    trained, masks = Trained("driver", network, window=1, reduction="sum"), []
    for factor in (1.0, 2.0):
        before, network.factor = network.w.asnumpy().copy(), factor
        trained.train([(Tensor(np.ones(32), ms.float32),)])
        masks.append((network.w.asnumpy() != before).tolist())
    assert (masks[0] == masks[1]) is not replaces


@pytest.mark.parametrize("compile", [True, False])
def test_momentum_moves_a_frozen_parameter(compile):
    network = Network()
    options = {"make": lambda all: nn.Momentum(all, 0.1, 0.9), "compile": compile}
    trained, micro_batch = Trained("driver", Loss(network), window=1, **options), (Tensor(np.eye(3), ms.float32),)
    trained.train([micro_batch])
    network.last.bias.requires_grad = False
    before, moment = network.last.bias.asnumpy().copy(), trained.optimizer.moments[-1].asnumpy().copy()
    trained.train([micro_batch])
    np.testing.assert_allclose(network.last.bias.asnumpy(), before - 0.09 * moment, rtol=1e-5)
    assert moment.any()
