"""What graphs contain as constants may change between two calls, as it may where nothing is compiled."""

import copy
import dataclasses
import functools
import sys
import types
import warnings
from collections import UserDict, deque

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

from conftest import running_in
from ms_accum import evaluate, freeze_batch_norm, replace_dropout
from ms_accum.loss.known_losses import WithLoss
from ms_accum.network import constants as constants_module
from ms_accum.network.compiled import compiled
from ms_accum.network.constants import Constants
from ms_accum.network.restoring import training_mode
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


def times_two(gradient):
    return gradient * 2


def add_hook_of_parameter(network, optimizer):
    network.last.weight.register_hook(times_two)


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
        add_hook_of_parameter,
        set_rate,
        set_decay,
    )
}


def restore_globals():
    globals()["shift"] = TABLE["scale"] = MODULE.scale = Network.gain = Plain.scale = 1.0
    remembered.cache_clear()


@pytest.fixture(autouse=True)
def restored():
    yield
    restore_globals()
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


class Plain:
    scale = 1.0


class Indexed(Plain):
    def __getitem__(self, index):
        return self.scale


class Computed:
    """Has the attributes that are in a dict, as settings from a file often do."""

    def __init__(self):
        self.content = {"scale": 1.0}

    def __getattr__(self, name):
        if name not in vars(self).get("content", ()):
            raise AttributeError(name)
        return self.content[name]


class Reads(nn.Cell):
    """Multiplies by what `read` takes from what it is given."""

    def __init__(self, given, read, **attributes):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(3), ms.float32), name="w")
        self.given, self.read = given, read
        for name, value in attributes.items():
            setattr(self, name, value)

    def construct(self, x):
        return ops.mean((x * self.w) ** 2) * self.read(self, self.given)

    @functools.cached_property
    def cached(self):
        return 2.0 * self.given


def given_number(network, given):
    return given * 1.0


def first(network, given):
    return given[0] * 1.0


def scale_of(network, given):
    return given.scale * 1.0


def scale_in(network, given):
    return given["scale"] * 1.0


def scale_of_class(network, given):
    return Plain.scale * 1.0


def named(network, given):
    return getattr(network, given) * getattr(network, f"{given}_{1}")


def current(network, given):
    return network.current["scale"] + given["x"]["scale"] + given["y"]["scale"]


def rows(network, given):
    return Tensor(given).shape[0] * 1.0


def inverse_sign(network, given):
    return ops.sum(ops.sign(1.0 / (ops.stop_gradient(network.w) * 0 + given)))


def cached(network, given):
    return network.cached


def total(network, given):
    return ops.sum(network.buffer)


def late(network, given):
    return given(network.w)[0] * 1.0


@functools.cache
def remembered():
    return TABLE["scale"]


def of_remembered(network, given):
    return remembered() * 1.0


class Late(nn.Cell):
    """Uses a Parameter that it may be given later."""

    def construct(self, x):
        return x * self.factor if hasattr(self, "factor") else x


class Times(nn.Cell):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def construct(self, x):
        return x * self.factor


def with_buffer():
    network = Reads(None, total)
    network.register_buffer("buffer", Tensor([1.0, 0.0], ms.float32))
    return network


def tables():
    both = {"x": {"scale": 1.0}, "y": {"scale": 2.0}}
    return Reads(both, current, current=both["x"])


def reset_cached(network):
    network.given = 3.0
    del network.__dict__["cached"]


def set_remembered(network):
    TABLE["scale"] = 3.0
    remembered.cache_clear()


def add_parameter(network):
    network.given.factor = Parameter(Tensor(3.0, ms.float32), name="factor", requires_grad=False)


def layers(network, given):
    output = network.w
    for layer in given:
        output = layer(output)
    return output[0] * 1.0


OBJECTS = {
    "namespace": (lambda: Reads(types.SimpleNamespace(scale=1.0), scale_of), lambda n: vars(n.given).update(scale=3.0)),
    "object with __getitem__": (lambda: Reads(Indexed(), first), lambda n: setattr(n.given, "scale", 3.0)),
    "object with __getattr__": (lambda: Reads(Computed(), scale_of), lambda n: n.given.content.update(scale=3.0)),
    "class": (lambda: Reads(Plain, scale_of), lambda n: setattr(Plain, "scale", 3.0)),
    "class as a global": (lambda: Reads(None, scale_of_class), lambda n: setattr(Plain, "scale", 3.0)),
    "deque": (lambda: Reads(deque([1.0]), first), lambda n: n.given.__setitem__(0, 3.0)),
    "view of a dict": (lambda: Reads(types.MappingProxyType(TABLE), scale_in), lambda n: TABLE.update(scale=3.0)),
    "UserDict": (lambda: Reads(UserDict(scale=1.0), scale_in), lambda n: n.given.update(scale=3.0)),
    "computed name": (lambda: Reads("k", named, k=1.0, k_1=1.0), lambda n: setattr(n, "k_1", 3.0)),
    "other one of two dicts": (tables, lambda n: setattr(n, "current", n.given["y"])),
    "shape of an array": (lambda: Reads(np.ones((2, 3)), rows), lambda n: setattr(n.given, "shape", (3, 2))),
    "sign of 0": (lambda: Reads(0.0, inverse_sign), lambda n: setattr(n, "given", -0.0)),
    "cached_property": (lambda: Reads(1.0, cached), reset_cached),
    "buffer": (with_buffer, lambda n: n.register_buffer("buffer", Tensor([3.0, 0.0], ms.float32))),
    "content of a buffer": (with_buffer, lambda n: n.buffer.__setitem__(0, 3.0)),
    "lru_cache": (lambda: Reads(None, of_remembered), set_remembered),
    "first Parameter of a Cell": (lambda: Reads(Late(), late), add_parameter),
    "layer taken from a CellList": (
        lambda: Reads(nn.CellList([Times(1.0), Times(3.0)]), layers),
        lambda n: n.given.__delitem__(1),
    ),
}


@pytest.mark.parametrize(("make", "change"), OBJECTS.values(), ids=OBJECTS)
def test_change_in_an_object_needs_another_graph(make, change):
    network = make()
    constants = Constants("test", [network])
    assert constants.graph() == 0
    if network.read is cached:
        assert network.cached == 2.0  # as while it is compiled
    constants.ran()
    assert constants.graph() == 0
    change(network)
    assert [constants.graph(), constants.graph()] == [1, 1]


ARRAYS = [
    Tensor(np.ones(3), ms.bfloat16),
    Tensor(np.ones(3), ms.bool_),
    Tensor(1.0, ms.float32),
    np.ones((4, 4))[:, ::2],
    np.ones(3, np.float16),
    np.array([1, "one"], object),
    np.array(["2026-11-26"], "datetime64[D]"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{type(array).__name__}, {array.dtype}")
def test_contents_of_any_type_are_compared(array):
    network = Reads(array, first)
    constants = Constants("test", [network])
    assert [constants.graph(), constants.graph()] == [0, 0]
    if isinstance(array, Tensor):
        array.assign_value(Tensor(np.zeros(array.shape), array.dtype))
    else:
        array[0] = 0
    assert [constants.graph(), constants.graph()] == [1, 1]


class Counts(nn.Cell):
    """Writes into a tensor that is no Parameter."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(3), ms.float32), name="w")
        self.seen = Tensor(np.zeros(2), ms.float32)

    def construct(self, x):
        seen = ops.assign_add(self.seen, ops.ones_like(self.seen))
        return ops.mean((x * self.w) ** 2) * ops.sum(seen)


def test_tensor_that_a_graph_writes_into_is_a_warning_and_needs_no_other_graph(monkeypatch):
    weights, numbers = [], []
    graph = Constants.graph
    monkeypatch.setattr(Constants, "graph", lambda self: numbers.append(graph(self)) or numbers[-1])
    for compile in (False, True):
        trained = Trained("driver", Counts(), window=1, lr=0.01, compile=compile)
        with warnings.catch_warnings() if not compile else pytest.warns(RuntimeWarning, match="writes into .*'seen'"):
            trained.train([(Tensor(np.ones((2, 3)), ms.float32),)] * 4)
        weights.append(trained.weights)
    np.testing.assert_allclose(*weights, rtol=1e-6)
    assert set(numbers[-4:]) == {0}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "change"), OBJECTS.values(), ids=OBJECTS)
def test_change_in_an_object_is_followed(make, change, monkeypatch):
    """And nothing is compiled without a change, also if compiling changes the network, as a `cached_property` does."""

    def trained(changes, **options):
        restore_globals()
        network = make()
        system = Trained("driver", network, window=1, **options)
        system.train([(Tensor(np.ones((2, 3)), ms.float32),)] * 2)
        ops.assign(network.w, ops.ones(3))
        if changes:
            change(network)
        return system.train([(Tensor(np.ones((2, 3)), ms.float32),)] * 2).weights

    expected = trained(True, compile=False)
    assert not np.array_equal(expected, trained(False, compile=False), equal_nan=True)
    numbers = []
    graph = Constants.graph
    monkeypatch.setattr(Constants, "graph", lambda self: numbers.append(graph(self)) or numbers[-1])
    np.testing.assert_allclose(trained(True), expected, rtol=1e-5)
    assert numbers == [0, 0, 1, 1]


def test_attribute_that_only_generated_code_names_needs_no_other_graph():
    """A dataclass compares all its fields, in code without a source."""

    @dataclasses.dataclass
    class State:
        scale: float = 1.0
        seen: int = 0

    network = Reads(State(), scale_of)
    constants = Constants("test", [network])
    constants.graph()
    network.given.seen += 1
    assert constants.graph() == 0
    network.given.scale = 2.0
    assert constants.graph() == 1


def three_times(function):
    @functools.wraps(function)
    def wrapper(*inputs):
        return function(*inputs) * 3

    return wrapper


@three_times
def decorated(network, given):
    return given * 1.0


@ms.jit
def compiled_by_user(network, given):
    return given * 1.0


def test_decorator_that_mindspore_leaves_out_is_a_warning():
    constants = Constants("test", [Reads(1.0, decorated)])
    with pytest.warns(RuntimeWarning, match="'test', MindSpore compiles 'decorated' without its decorator.*compile=F"):
        constants.graph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        constants.graph()
        Constants("test", [Reads(1.0, compiled_by_user), Reads(1.0, of_remembered)]).graph()


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


def score_of(network):
    """Return the first score of the network, run as `evaluate` runs it."""
    return compiled("evaluate", network, True)(Tensor(np.ones((4, 3)), ms.float32)).asnumpy()[0, 0]


def test_network_can_be_copied_after_an_evaluation():
    network = Network()
    evaluate(network, [(Tensor(np.ones((4, 3)), ms.float32), Tensor(np.zeros(4), ms.int32))])
    copied = copy.deepcopy(network)
    set_factor(copied, None)
    scores = [score_of(evaluated) for evaluated in (network, copied)]
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
    restore_globals()
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


WINDOW = [2]


def window_size(updates):
    return WINDOW[0]


@pytest.mark.parametrize("way", ["loop", "step"])
def test_function_of_window_sizes_may_read_what_changes(way):
    updates = []
    for compile in (False, True):
        WINDOW[0] = 2
        trained = Trained(way, Reads(1.0, given_number), window_size, compile=compile)
        trained.train([(Tensor(np.ones((2, 3)), ms.float32),)] * 5)  # the last window is flushed
        WINDOW[0] = 1
        trained.train([(Tensor(np.ones((2, 3)), ms.float32),)] * 5)
        updates.append(trained.updates)
    assert updates == [3 + 4, 3 + 4]


def test_evaluate_follows_a_change_and_hooks_of_the_network():
    network, scores = Network(), []
    for change in (lambda: None, lambda: set_factor(network, None), lambda: network.register_forward_hook(times_three)):
        change()
        scores.append(score_of(network))
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


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.filterwarnings("ignore:For 'GradientAccumulation', MindSpore compiles 'decorated' without its decorator")
def test_graph_leaves_out_a_decorator(compile):
    """Also in plain MindSpore."""
    trained = Trained("driver", Reads(1.0, decorated), window=1, compile=compile)
    weights = trained.train([(Tensor(np.ones((2, 3)), ms.float32),)]).weights
    np.testing.assert_allclose(weights, 1 - (2 / 3 if compile else 2), rtol=1e-6)
