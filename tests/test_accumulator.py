"""The Accumulator: reduction, clipping, skipped windows, counters and arguments."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer
from mindspore.experimental import optim

from helpers import Slope, values
from ms_accum import Accumulator, _check
from ms_accum.engine import window as windows


def make_parameters(*shapes, dtype=ms.float32):
    return [
        Parameter(initializer("zeros", shape, dtype).init_data(), name=f"w{number}")
        for number, shape in enumerate(shapes)
    ]


def as_gradients(*arrays, dtype=ms.float32):
    return tuple(Tensor(np.atleast_1d(array), dtype) for array in arrays)


def compiled(accumulator):
    """Return the step that feeds an accumulator micro-batches of equal weights.

    A tuple handed to a compiled function is a constant, and each new one is compiled anew: it takes tensors.
    """

    weighted = isinstance(accumulator, Accumulator) and accumulator.settings["reduction"] == "mean"
    weight = (1.0,) if weighted else ()

    @ms.jit
    def step(*grads):
        return accumulator(grads, *weight)

    return step


def compiled_weighted(accumulator):
    @ms.jit
    def step(weight, *grads):
        return accumulator(grads, weight)

    return step


class Fed:
    """An Accumulator in front of SGD(1.0) from 0: minus the parameters are the gradients that it saw."""

    def __init__(self, accumulate_step, *arguments, shapes=((1,),), **options):
        self.parameters = make_parameters(*shapes)
        self.accumulator = Accumulator(nn.SGD(self.parameters, 1.0), accumulate_step, *arguments, **options)
        self.step = compiled(self.accumulator)
        self.weighted = compiled_weighted(self.accumulator)

    def feed(self, *micro_gradients):
        """Feed numbers, each the gradient of a micro-batch, and return whether each one updated."""
        return [bool(self.step(*as_gradients(gradient)).asnumpy()) for gradient in micro_gradients]

    def feed_weighted(self, *pairs):
        for gradient, weight in pairs:
            self.weighted(Tensor(weight, ms.float32), *as_gradients(gradient))

    @property
    def applied(self):
        return [-value for value in values(self.parameters)]


# The mean, exact for uneven micro-batches


@pytest.mark.parametrize("window", [1, 2])
def test_window_of_weight_0_is_skipped(window):
    fed = Fed(window, reduction="mean")
    fed.feed_weighted(*[(5.0, 0.0)] * window, *[(3.0, 2.0)] * window)
    assert [int(fed.accumulator.updates), int(fed.accumulator.skipped), fed.applied] == [1, 1, [[3.0]]]


@pytest.mark.usefixtures("eager")
def test_flush_is_compiled_if_step_is_compiled():
    """Outside graphs, an experimental optimizer could not be compiled again for another shape."""
    parameters = make_parameters((2,))
    accumulator = Accumulator(optim.SGD(parameters, lr=1.0), 3, reduction="mean")

    @ms.jit
    def step(x):
        return accumulator((ops.sum(x, 0),), x.shape[0])

    for rows in (2, 2, 4):
        step(Tensor(np.ones((rows, 2)), ms.float32))
        assert accumulator.flush()
    assert values(parameters)[0].tolist() == [-8.0, -8.0]


# Gradients of half precision


def test_float16_parameters_get_float16_gradients():
    parameters = make_parameters((1,), dtype=ms.float16)
    accumulator = Accumulator(nn.Momentum(parameters, 1.0, 0.9), 2, reduction="mean")
    step = compiled(accumulator)
    for gradient in (1.0, 2.0):
        step(*as_gradients(gradient, dtype=ms.float16))
    assert values(parameters)[0].dtype == np.float16
    assert values(parameters)[0] == -1.5


# Changing the window size


def test_window_size_change_inside_window_is_rejected():
    fed = Fed(3)
    fed.feed(1)
    with pytest.raises(RuntimeError, match="can't change inside a window, which holds 1 micro-batch. Call 'flush"):
        fed.accumulator.accumulate_step = 2
    assert fed.accumulator.accumulate_step == 3
    fed.accumulator.clear()
    fed.accumulator.accumulate_step = 2


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_window_size_change_from_or_to_1_is_rejected(before, after):
    with pytest.raises(ValueError, match="can't change from or to 1"):
        Fed(before).accumulator.accumulate_step = after


# A window of 1


def test_window_of_1_allocates_no_accumulators(monkeypatch):
    made = []
    monkeypatch.setattr(windows, "zeros_like", lambda *arguments: made.append(arguments))
    Accumulator(nn.SGD(make_parameters((2,)), 1.0), 1, reduction="mean")
    assert not made


# Names


def state_of(accumulator):
    parameters = [value for value in vars(accumulator).values() if isinstance(value, Parameter)]
    return [*parameters, *accumulator._window.grad_sum, *accumulator._window.weight_sum]


def test_state_has_unique_names_and_is_not_trainable():
    parameters = make_parameters((2,), (3,))
    optimizer = nn.SGD(parameters, 1.0)
    state = [p for _ in range(2) for p in state_of(Accumulator(optimizer, 2, reduction="mean"))]
    names = [parameter.name for parameter in [*state, *optimizer.get_parameters()]]
    assert len(set(names)) == len(names)
    assert not any(parameter.requires_grad for parameter in state)
    assert all(parameter.dtype == ms.float32 for parameter in state if "grad_sum" in parameter.name)


# Invalid arguments


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0,), {}, ValueError, "'accumulate_step' must be an int >= 1, but got 0."),
        ((2, 0.0), {}, ValueError, "'clip_norm' must be a finite number > 0, but got 0.0."),
        ((2, "1"), {}, TypeError, "'clip_norm' must be a number > 0, but got '1'"),
    ],
)
def test_invalid_arguments(arguments, options, error, match):
    with pytest.raises(error) as caught:
        Accumulator(nn.SGD(make_parameters((1,)), 1.0), *arguments, **options)
    assert str(caught.value).startswith(f"For 'Accumulator', {match}")


def test_accumulate_step_setter_is_validated():
    with pytest.raises(ValueError, match="For 'Accumulator', 'accumulate_step' must be an int >= 1, but got 0"):
        Fed(2).accumulator.accumulate_step = 0


def test_network_as_optimizer_is_rejected():
    with pytest.raises(TypeError, match="For 'Accumulator', 'optimizer' must be a MindSpore optimizer, but got Slope"):
        Accumulator(Slope(), 2)


NO_WEIGHTS = {
    "a NumPy number of no dimension": (np.array(8.0), TypeError, "not a NumPy array, but got"),
    "an array": (np.array([8.0, 2.0]), TypeError, "not a NumPy array, but got"),
    "a text": ("8", TypeError, "must be a number or a Tensor with one element"),
    "two numbers": (Tensor([8.0, 2.0]), ValueError, "must be one number, but got a Tensor of shape (2"),
}


@pytest.mark.parametrize(("weight", "error", "reason"), NO_WEIGHTS.values(), ids=NO_WEIGHTS)
@pytest.mark.parametrize("compiles", [False, True])
def test_invalid_weight_types_are_rejected_with_clear_message(weight, error, reason, compiles):
    accumulator = Accumulator(nn.SGD(make_parameters((1,)), 1.0), 2, reduction="mean")

    def step(gradient):
        return accumulator((gradient,), weight)

    with pytest.raises(error) as caught:
        (ms.jit(step) if compiles else step)(Tensor([1.0]))
    first = str(caught.value).split("\n")[0]
    assert "For 'Accumulator', 'weight' must be" in first and reason in first


@pytest.mark.parametrize("weight", [np.float32(8), np.int64(8), Tensor(8.0), Tensor([8.0]), 8])
def test_numpy_scalars_and_one_element_tensors_are_valid_weights(weight):
    accumulator = Accumulator(nn.SGD(make_parameters((1,)), 1.0), 2, reduction="mean")
    accumulator(as_gradients(1.0), weight)
    accumulator(as_gradients(4.0), 4)
    assert accumulator.updates == 1 and values(accumulator.optimizer.parameters)[0] == [-2.0]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("nonfinite", ["skip_window", "skip_micro"])
def test_weights_of_one_element_count_as_numbers_do(window, nonfinite):
    accumulator = Accumulator(nn.SGD(make_parameters((1,)), 1.0), window, reduction="mean", nonfinite=nonfinite)
    step = compiled_weighted(accumulator)
    for gradient in (1.0, np.nan, 4.0, 1.0)[: 2 * window]:
        step(Tensor([2.0], ms.float32), *as_gradients(gradient))
    applied = {(1, "skip_window"): -1.0, (1, "skip_micro"): -1.0, (2, "skip_window"): -2.5, (2, "skip_micro"): -3.5}
    assert values(accumulator.optimizer.parameters)[0] == [applied[window, nonfinite]]


def test_sum_that_was_not_chosen_is_logged_once(monkeypatch, caplog):
    """In the constructor: a compiled step can't."""
    monkeypatch.setattr(_check, "_logged", set())
    optimizer = nn.SGD(make_parameters((1,)), 1.0)
    for options in ({"reduction": "sum"}, {"reduction": "mean"}):
        Accumulator(optimizer, 2, **options)
    Accumulator(optimizer, 1)  # a sum of one
    assert not caplog.messages
    assert [Accumulator(optimizer, size).settings["reduction"] for size in (2, {0: 1, 9: 2})] == ["sum"] * 2
    (message,) = caplog.messages
    assert "'reduction' is not given, so gradients are summed" in message and "give reduction='mean'" in message


def test_weight_with_sum_reduction_is_rejected():
    fed = Fed(2)
    with pytest.raises(ValueError, match="'weight' must come with reduction='mean', but got 'sum'"):
        fed.feed_weighted((1, 8))


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
@pytest.mark.parametrize("window", [1, 2])
def test_mean_reduction_without_weight_is_rejected(mode, window):
    """With weights of 1 it would be the wrong mean of uneven micro-batches."""
    ms.set_context(mode=mode)
    accumulator = Accumulator(nn.SGD(make_parameters((1,)), 1.0), window, reduction="mean")

    def step(*grads):
        return accumulator(grads)

    with pytest.raises(ValueError, match=r"'weight' must be given .*, but got None. Call accumulator\(grads, rows\)"):
        (ms.jit(step) if mode == ms.GRAPH_MODE else step)(*as_gradients(1.0))
    assert accumulator.micro_batches == accumulator.updates == 0


@pytest.mark.parametrize(
    ("gradients", "match"),
    [
        ((np.ones(2),), "'grads' must have one tensor for each of the optimizer's 2 parameters, but got 1"),
        ((np.ones(3), np.ones(2)), r"'grads' must have the shapes .* but got .*3.* for .*2"),
    ],
)
def test_gradients_of_another_network_are_rejected(gradients, match):
    step = compiled(Accumulator(nn.SGD(make_parameters((2,), (3,)), 1.0), 2))
    with pytest.raises(ValueError, match=match):
        step(*as_gradients(*gradients))


def grouped(parameters):
    return [{"params": [parameter], "lr": 0.1} for parameter in parameters]


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda parameters: nn.Lamb(parameters, 0.1), "nn.AdamWeightDecay"),
        (lambda parameters: nn.LARS(nn.Momentum(parameters, 0.1, 0.9)), "nn.Momentum"),
        (lambda parameters: mint.optim.AdamW(parameters, 0.1), "mindspore.experimental.optim.AdamW"),
        (lambda parameters: nn.AdaFactor(grouped(parameters), learning_rate=0.1, relative_step=False), "nn.Adam"),
    ],
    ids=["Lamb", "LARS", "mint AdamW", "AdaFactor groups"],
)
def test_optimizers_unsupported_on_cpu_are_rejected(make, instead):
    optimizer = make(make_parameters((2,), (3,)))
    with pytest.raises(ValueError, match=f"'optimizer' must be one that .*{instead}"):
        Accumulator(optimizer, 2)


@pytest.mark.usefixtures("eager")
def test_optimizers_of_mint_outside_graphs_are_rejected():
    """They would count updates and leave the weights as they are."""
    message = "one that trains, but got mint.optim.SGD in PyNative mode. Use compile=True, or mindspore.experimental"
    with pytest.raises(ValueError, match=message):
        Accumulator(mint.optim.SGD(make_parameters((2,)), 0.1), 2)
