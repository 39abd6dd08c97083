"""The Accumulator: reduction, clipping, skipped windows, counters and arguments."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer
from mindspore.experimental import optim

from helpers import Slope, batches, cross_entropy, forward_of, joined, mutate, values
from ms_accum import Accumulator, split_batch
from ms_accum.engine import window as windows
from ms_accum.network import tree
from reference import clip, digest, global_norm, miss, window_gradient

DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16}


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

    weight = (
        (1.0,) if getattr(getattr(accumulator, "window", None), "weighted", False) else ()
    )  # an optimizer has no weight

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


def accumulators_of(accumulator):
    return values(accumulator.window.sums.grad_sum)


# The sum


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.5), ("sum", 10.0)])
def test_gradients_of_four_micro_batches_are_reduced(reduction, expected):
    fed = Fed(4, reduction=reduction)
    assert fed.feed(1, 2, 3, 4) == [False, False, False, True]
    assert fed.applied == [expected]
    assert expected == window_gradient([[1], [2], [3], [4]], reduction=reduction)[0]


def test_large_opposite_gradients_cancel_exactly():
    fed = Fed(4, reduction="mean")
    fed.feed(1e8, -1e8, 3, 1)
    assert fed.applied == [1.0]


@pytest.mark.parametrize(
    "mutation", ["one late", *(pytest.param(name, marks=pytest.mark.slow) for name in ("no division", "no clear"))]
)
def test_reduction_test_detects_mutations(mutation, monkeypatch):
    expected = [np.array([5.0])]
    intact = Fed(4, reduction="mean")
    intact.feed(1, 2, 3, 4, 1, 2, 3, 4)
    assert miss(intact.applied, expected, 1e-7) == 0
    mutate(monkeypatch, mutation)
    broken = Fed(4, reduction="mean")
    broken.feed(1, 2, 3, 4, 1, 2, 3, 4)
    assert miss(broken.applied, expected, 1e-5) >= 100


# The mean, exact for uneven micro-batches


def test_mean_is_weighted():
    fed = Fed(3, reduction="mean")
    fed.feed_weighted((1, 8), (2, 4), (7, 4))
    assert fed.applied == [np.float32((1 * 8 + 2 * 4 + 7 * 4) / 16)]
    fed.feed_weighted((1, 8), (2, 8), (7, 4))  # by 1/20, which is rounded
    assert miss(fed.applied[1:], window_gradient([[[1]], [[2]], [[7]]], [8, 8, 4]), 1e-7) <= 1
    unweighted = Fed(3, reduction="mean")
    unweighted.feed(1, 2, 7)
    assert miss(unweighted.applied, fed.applied, 1e-5) >= 100


def test_weight_can_be_python_number():
    fed = Fed(2, reduction="mean")
    accumulator = fed.accumulator

    @ms.jit
    def step(rows, *grads):
        return accumulator(grads, rows.shape[0])

    step(Tensor(np.zeros(3), ms.float32), *as_gradients(1.0))
    step(Tensor(np.zeros(1), ms.float32), *as_gradients(5.0))
    assert fed.applied == [2.0]


def test_flush_divides_by_accumulated_weight():
    fed = Fed(4, reduction="mean")
    fed.feed(1, 2)
    assert fed.accumulator.flush() is True
    assert fed.applied == [1.5]
    assert fed.accumulator.flush() is False
    assert (fed.accumulator.updates, fed.accumulator.micro_batches) == (1, 0)


def test_flush_with_sum_reduction():
    fed = Fed(4)
    fed.feed(1, 2)
    fed.accumulator.flush()
    assert fed.applied == [3.0]


def test_flush_returns_false_for_skipped_window():
    fed = Fed(4)
    fed.feed(np.nan)
    assert fed.accumulator.flush() is False
    assert (fed.accumulator.skipped, fed.accumulator.micro_batches) == (1, 0)


EXPERIMENTAL = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def train_with_short_window(kind, sizes, in_step):
    """Feed windows of 3 and 2 micro-batches to an optimizer, and flush."""
    parameters = make_parameters((2,))
    accumulator = Accumulator(getattr(optim, kind)(parameters, lr=0.1), sizes, reduction="mean")
    step = compiled(accumulator) if in_step else lambda grads: accumulator((grads,), 1.0)
    for gradient in (1.0, 2.0, 6.0, 4.0, -1.0):
        step(Tensor([gradient, gradient / 2], ms.float32))
    flushed = accumulator.flush()
    return flushed, accumulator.updates, accumulator.micro_batches, values(parameters)[0].tolist()


@pytest.mark.host
@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("kind", EXPERIMENTAL)
def test_flushed_window_equals_full_window_of_same_micro_batches(kind, in_step):
    """In PyNative mode the first window leaves a compiled part of such an optimizer behind."""
    flushed = train_with_short_window(kind, 3, in_step)
    full = train_with_short_window(kind, {0: 3, 1: 2}, in_step)
    assert flushed[:3] == (True, 2, 0) and full[:3] == (False, 2, 0)
    assert flushed[3] == full[3]


@pytest.mark.host
def test_flush_without_division_is_detected(monkeypatch):
    """The mutant."""
    full = train_with_short_window("SGD", {0: 3, 1: 2}, in_step=True)
    mutate(monkeypatch, "no division")
    assert train_with_short_window("SGD", 3, in_step=True)[3] != full[3]


@pytest.mark.host
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


def test_clear_discards_open_window():
    fed = Fed(2, reduction="mean")
    fed.feed(7)
    fed.accumulator.clear()
    fed.accumulator.clear()  # twice is once
    assert fed.accumulator.micro_batches == 0
    assert fed.feed(1, 2) == [False, True]
    assert fed.applied == [1.5]


def test_counters():
    fed = Fed(2)
    seen = []
    for gradient in (1.0, 1.0, np.inf, 1.0, 1.0):
        fed.feed(gradient)
        state = fed.accumulator
        seen.append((state.updated, state.micro_batches, state.updates, state.skipped))
    assert seen == [(False, 1, 0, 0), (True, 0, 1, 0), (False, 1, 1, 0), (False, 0, 1, 1), (False, 1, 1, 1)]


# Before and after the boundary


@pytest.mark.parametrize("make", [nn.Momentum, nn.Adam])
def test_optimizer_state_is_unchanged_inside_window(make):
    parameters = make_parameters((3,), (2, 2))
    optimizer = make(parameters, 0.1, 0.9)
    accumulator = Accumulator(optimizer, 3, reduction="mean")
    step = compiled(accumulator)
    gradients = as_gradients(np.ones(3), np.ones((2, 2)))
    state = list(optimizer.get_parameters())
    before = digest(values(state))
    for _ in range(2):
        step(*gradients)
        assert digest(values(state)) == before
        assert int(optimizer.global_step.asnumpy()[0]) == 0
        assert all(np.all(array) for array in accumulators_of(accumulator))
    step(*gradients)
    assert digest(values(state)) != before
    assert int(optimizer.global_step.asnumpy()[0]) == 1
    assert not any(np.any(array) for array in accumulators_of(accumulator))


def test_missing_clear_is_detected(monkeypatch):
    mutate(monkeypatch, "no clear")
    fed = Fed(2)
    fed.feed(1, 1)
    assert any(np.any(array) for array in accumulators_of(fed.accumulator))


# Clipping


def test_clipping_is_applied_after_accumulation():
    fed = Fed(2, 1.0)
    fed.feed(10, -10)
    assert fed.accumulator.grad_norm == 0.0
    assert fed.applied == [0.0]
    fed.feed(10, -9.5)
    assert fed.applied == [0.5]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bound", [0.5, 2.0, 1e6])
def test_clip_norm_bounds_window_gradient(bound, reduction, rng):
    shapes = ((40, 30), (7,), (1,))
    fed = Fed(2, bound, shapes=shapes, reduction=reduction)
    micro_gradients = [[rng.randn(*shape).astype(np.float32) for shape in shapes] for _ in range(2)]
    for gradients in micro_gradients:
        fed.step(*as_gradients(*gradients))
    expected = window_gradient(micro_gradients, reduction=reduction)
    assert fed.accumulator.grad_norm == pytest.approx(global_norm(expected), rel=1e-5)
    assert global_norm(fed.applied) <= bound * (1 + 1e-6) or bound > 1e3
    assert miss(fed.applied, clip(expected, bound), 1e-5, 1e-7) <= 1
    early = window_gradient([clip(gradients, bound) for gradients in micro_gradients], reduction=reduction)
    assert miss(early, clip(expected, bound), 1e-5, 1e-7) >= 100 or bound > 1e3


def test_clip_norm_defaults_to_none():
    assert Fed(2).accumulator.clip_norm is None
    assert Fed(2, 3).accumulator.clip_norm == 3.0


def test_grad_norm_is_computed_after_unscaling():
    parameters = make_parameters((1,))
    accumulator = Accumulator(nn.SGD(parameters, 1.0, loss_scale=8.0), 2, 1.0)
    step = compiled(accumulator)
    for gradient in (16.0, 24.0):
        step(*as_gradients(gradient))
    assert accumulator.grad_norm == 5.0
    assert miss(values(parameters), [[-1.0]], 1e-6) <= 1


# Gradients of half precision


def in_half_precision(total, gradient):
    return ops.assign(total, ops.cast(ops.cast(total + gradient, ms.float16), ms.float32))


def add_in_half_precision(total, gradients):
    return tree._map(in_half_precision, total, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [512, 4096])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_summed_in_float32(dtype, micro_batches):
    fed = Fed(micro_batches)
    gradients = as_gradients(1e-4, dtype=DTYPES[dtype])
    rounded = float(gradients[0].astype(ms.float32).asnumpy()[0])
    for _ in range(micro_batches):
        fed.step(*gradients)
    assert fed.applied[0][0] == pytest.approx(micro_batches * rounded, abs=1e-6)
    assert rounded == pytest.approx(1e-4, rel=1e-3 if dtype == "float16" else 1e-2)
    if (dtype, micro_batches) == ("float16", 4096):
        assert fed.applied[0][0] == pytest.approx(0.4096, abs=1e-4)


@pytest.mark.slow
def test_float16_accumulation_is_detected(monkeypatch):
    monkeypatch.setenv("MS_ACCUM_NATIVE", "0")
    monkeypatch.setattr(tree, "add", add_in_half_precision)
    fed = Fed(4096)
    gradients = as_gradients(1e-4, dtype=ms.float16)
    for _ in range(4096):
        fed.step(*gradients)
    assert abs(fed.applied[0][0] - 0.4096) >= 100 * 1e-4


def test_float16_parameters_get_float16_gradients():
    parameters = make_parameters((1,), dtype=ms.float16)
    accumulator = Accumulator(nn.Momentum(parameters, 1.0, 0.9), 2, reduction="mean")
    step = compiled(accumulator)
    for gradient in (1.0, 2.0):
        step(*as_gradients(gradient, dtype=ms.float16))
    assert values(parameters)[0].dtype == np.float16
    assert values(parameters)[0] == -1.5


# State that changes between two windows


class Step(nn.Cell):
    """A train step as a Cell. (A `ms.jit` function does not see `set_data` once it ran, with branches or without.)"""

    def __init__(self, accumulator):
        super().__init__(auto_prefix=False)
        self.accumulator = accumulator

    def construct(self, gradient):
        return self.accumulator((gradient,))


def parameter_after_second_window(*, touched):
    """Return the parameter after a second window, before which the moments were set to 10 by name."""
    parameters = make_parameters((1,))
    optimizer = nn.Momentum(parameters, 1.0, 1.0)
    accumulator = Accumulator(optimizer, 2)
    if not touched:
        accumulator.window.sums.boundary.touched = ()
    step, gradient = Step(accumulator), Tensor([1.0], ms.float32)
    step(gradient), step(gradient)
    optimizer.moments[0].set_data(Tensor([10.0], ms.float32))
    step(gradient), step(gradient)
    return values(parameters)[0].item()


def test_optimizer_state_set_between_windows_is_used_in_a_loop():
    assert parameter_after_second_window(touched=True) == -2 - (10 + 2)


@pytest.mark.graph
def test_optimizer_state_set_between_windows_is_used():
    assert parameter_after_second_window(touched=True) == -2 - (10 + 2)


@pytest.mark.graph
def test_untouched_optimizer_state_set_between_windows_is_ignored():
    assert parameter_after_second_window(touched=False) != -2 - (10 + 2)


# Changing the window size


def test_window_size_change_does_not_recompile(compiles):
    accumulator = Fed(2).accumulator

    @ms.jit
    def step(gradient):  # a tuple of gradients would be a constant, and compiled anew at each call
        return accumulator((gradient,))

    def feed(window):
        return [bool(step(*as_gradients(1)).asnumpy()) for _ in range(window)]

    feed(2)
    compiled_so_far = len(compiles)
    for window in (3, 5, 2):
        accumulator.accumulate_step = window
        assert accumulator.accumulate_step == window
        assert feed(window) == [False] * (window - 1) + [True]
    assert len(compiles) == compiled_so_far == 1


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


# Skipped windows


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("accumulate_step", [1, 2])
def test_nonfinite_window_is_skipped(accumulate_step, poison):
    parameters = make_parameters((2,), (3,))
    optimizer = nn.Adam(parameters, 0.1)
    accumulator = Accumulator(optimizer, accumulate_step, 1.0, reduction="mean")
    step = compiled(accumulator)
    good = as_gradients(np.ones(2), np.ones(3))
    bad = as_gradients(np.ones(2), [1.0, poison, 1.0])
    state = list(optimizer.get_parameters())
    for _ in range(accumulate_step):
        step(*good)
    before = digest(values(state))
    for gradients in [bad] + [good] * (accumulate_step - 1):
        step(*gradients)
    assert digest(values(state)) == before
    assert (accumulator.updates, accumulator.skipped, accumulator.updated) == (1, 1, False)
    assert not np.isfinite(accumulator.grad_norm)
    for _ in range(accumulate_step):
        step(*good)
    assert (accumulator.updates, accumulator.skipped, accumulator.updated) == (2, 1, True)
    assert accumulator.grad_norm == pytest.approx(np.sqrt(5))
    assert all(np.isfinite(array).all() for array in values(state))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_window_after_skipped_window_is_clean(poison):
    fed = Fed(2, reduction="mean")
    fed.feed(poison, 1, 2, 4)
    assert fed.applied == [3.0]


def cleared_by_multiplication(total, finite=False):
    return tree._map(times_zero, total)


def times_zero(total):
    return ops.assign(total, total * 0.0)


def test_clear_by_multiplication_is_detected(monkeypatch):
    monkeypatch.setenv("MS_ACCUM_NATIVE", "0")
    monkeypatch.setattr(tree, "clear", cleared_by_multiplication)
    fed = Fed(2, reduction="mean")
    fed.feed(np.nan, 1, 2, 4)
    assert fed.accumulator.skipped == 2


# A window of 1


def test_window_of_1_allocates_no_accumulators(monkeypatch):
    made = []
    monkeypatch.setattr(windows, "zeros_like", lambda *arguments: made.append(arguments))
    Accumulator(nn.SGD(make_parameters((2,)), 1.0), 1, reduction="mean")
    assert not made


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("make", [nn.SGD, nn.Adam])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_window_of_1_equals_plain_optimizer(reduction, make, native, rng, monkeypatch):
    """Byte for byte, but for Adam's own kernel, which rounds less often on CPUs with fused multiply-add."""
    monkeypatch.setenv("MS_ACCUM_NATIVE", native)
    arrays = [rng.randn(4, 3).astype(np.float32), rng.randn(3).astype(np.float32)]
    results = []
    for accumulate in (False, True):
        parameters = make_parameters((4, 3), (3,))
        optimizer = make(parameters, 0.1)
        step = compiled(Accumulator(optimizer, 1, reduction=reduction)) if accumulate else compiled(optimizer)
        for _ in range(3):
            step(*as_gradients(*arrays))
        results.append(values(optimizer.get_parameters()))
    if make is nn.Adam and native == "1":
        assert miss(results[1], results[0], 1e-6, 1e-6) <= 1
    else:
        assert digest(results[0]) == digest(results[1])


def test_window_of_1_updates_counters():
    fed = Fed(1, reduction="mean")
    fed.feed_weighted((3, 5))
    assert fed.applied == [3.0]
    assert (fed.accumulator.updates, fed.accumulator.updated, fed.accumulator.micro_batches) == (1, True, 0)
    assert fed.accumulator.flush() is False


# The functional pattern


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_tutorial_step_equals_large_batch(reduction, rng):
    window = batches(rng, [8, 8, 8])
    network, loss_fn = nn.Dense(6, 3), cross_entropy()
    forward = forward_of(network, loss_fn)
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    start = values(optimizer.parameters)
    expected = ms.value_and_grad(forward, None, optimizer.parameters)(*joined(window))[1]
    accumulator = Accumulator(optimizer, 3, reduction=reduction)
    divisor, weight = (3, ()) if reduction == "sum" else (1, (8,))

    def divided(x, y):
        return loss_fn(network(x), y) / divisor

    grad_fn = ms.value_and_grad(divided, None, optimizer.parameters)

    @ms.jit
    def train_step(x, y):
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, accumulator(grads, *weight))

    for columns in window:
        train_step(*columns)
    seen = [before - after for before, after in zip(start, values(optimizer.parameters))]
    assert miss(seen, values(expected), 1e-5, 1e-6) <= 1
    assert miss(seen, [3 * array for array in values(expected)], 1e-5, 1e-6) >= 100


def test_split_batches_in_functional_pattern(rng):
    (batch,) = batches(rng, [10])
    network, loss_fn = nn.Dense(6, 3), cross_entropy()
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    start = values(optimizer.parameters)
    grad_fn = ms.value_and_grad(forward_of(network, loss_fn), None, optimizer.parameters)
    expected = grad_fn(*batch)[1]
    accumulator = Accumulator(optimizer, 3, reduction="mean")

    @ms.jit
    def train_step(x, y):
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, accumulator(grads, x.shape[0]))

    for columns in split_batch(batch, 4):
        train_step(*columns)
    assert accumulator.flush() is False
    assert accumulator.updates == 1
    seen = [before - after for before, after in zip(start, values(optimizer.parameters))]
    assert miss(seen, values(expected), 1e-5, 1e-6) <= 1


def test_pynative_mode():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    parameters = make_parameters((1,))
    accumulator = Accumulator(nn.SGD(parameters, 1.0), 2, reduction="mean")
    for gradient in (1.0, 2.0, 3.0):
        accumulator(as_gradients(gradient), 1)
    assert values(parameters) == [-1.5]
    assert accumulator.flush()
    assert values(parameters) == [-4.5]


# Names


def state_of(accumulator):
    window = accumulator.window
    parameters = [value for value in vars(window).values() if isinstance(value, Parameter)]
    return [*parameters, *window.sums.grad_sum, *window.sums.weight_sum]


def test_state_has_unique_names_and_is_not_trainable():
    parameters = make_parameters((2,), (3,))
    optimizer = nn.SGD(parameters, 1.0)
    state = [p for _ in range(2) for p in state_of(Accumulator(optimizer, 2, reduction="mean"))]
    names = [parameter.name for parameter in [*state, *optimizer.get_parameters()]]
    assert len(set(names)) == len(names)
    assert not any(parameter.requires_grad for parameter in state)
    assert all(parameter.dtype == ms.float32 for parameter in state if "grad_sum" in parameter.name)


def test_two_accumulators_in_one_graph():
    parameters = make_parameters((1,))
    # Two optimizers of `nn` don't go into one graph: MindSpore calls the counter of each `global_step`.
    optimizer = nn.SGD(parameters, 1.0)
    first, second = Accumulator(optimizer, 2), Accumulator(optimizer, 3, reduction="mean")

    @ms.jit
    def step(*grads):
        first(grads)
        return second(grads, 1.0)

    for gradient in (1, 2, 3, 4, 5, 6):
        step(*as_gradients(gradient))
    assert (first.updates, second.updates) == (3, 2)
    assert values(parameters) == [-(21.0 + 2.0 + 5.0)]


def test_two_accumulators_in_one_process():
    first, second = Fed(2), Fed(2)
    first.feed(1)
    second.feed(5, 5)
    first.feed(1)
    assert (first.applied, second.applied) == ([2.0], [10.0])


# Invalid arguments


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0,), {}, ValueError, "'accumulate_step' must be an int >= 1, but got 0."),
        ((-1,), {}, ValueError, "'accumulate_step' must be an int >= 1, but got -1."),
        ((1.5,), {}, TypeError, "'accumulate_step' must be an int >= 1, but got 1.5"),
        ((True,), {}, TypeError, "'accumulate_step' must be an int >= 1, but got True"),
        (("4",), {}, TypeError, "'accumulate_step' must be an int >= 1, but got '4'"),
        ((2, 0.0), {}, ValueError, "'clip_norm' must be a finite number > 0, but got 0.0."),
        ((2, float("nan")), {}, ValueError, "'clip_norm' must be a finite number > 0, but got nan."),
        ((2, "1"), {}, TypeError, "'clip_norm' must be a number > 0, but got '1'"),
        ((2,), {"reduction": "none"}, ValueError, "'reduction' must be one of 'mean', 'sum', but got 'none'."),
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
    "a bool": (True, TypeError, "must be a number or a Tensor with one element"),
    "a text": ("8", TypeError, "must be a number or a Tensor with one element"),
    "a list": ([8], TypeError, "must be a number or a Tensor with one element"),
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


@pytest.mark.host
@pytest.mark.parametrize("accumulate_step", [1, 2])
def test_window_of_zero_weights_makes_no_update(accumulate_step):
    """Otherwise weight decay would change the parameters; a weight other than 0 cancels out exactly."""
    parameters = [Parameter(Tensor(np.ones(3), ms.float32), name="w")]
    accumulator = Accumulator(nn.SGD(parameters, 0.5, weight_decay=0.5), accumulate_step, reduction="mean")
    step = compiled_weighted(accumulator)
    for weight, expected in ((0.0, 1.0), (3.0, 0.25), (0.0, 0.25)):
        for _ in range(accumulate_step):
            step(Tensor(weight, ms.float32), Tensor(np.ones(3), ms.float32))
        assert values(parameters)[0].tolist() == [expected] * 3
    assert (accumulator.updates, accumulator.skipped) == (1, 2)
