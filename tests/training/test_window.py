"""How are the micro-batches of a window run?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train import Callback, LambdaCallback

from helpers import Slope, batches, cross_entropy, micro_batch, run, seen_gradient, slope_driver
from ms_accum import GradientAccumulation
from ms_accum.training import window as windows
from ms_accum.training.window import OpenWindow
from reference import digest


@pytest.fixture
def calls(monkeypatch):
    """Count how many micro-batches each call runs."""
    counts = []
    together = windows.TrainTogether.__call__

    def count_and_run(cell, count, *columns):
        counts.append(int(count.asnumpy()))
        return together(cell, count, *columns)

    monkeypatch.setattr(windows.TrainTogether, "__call__", count_and_run)
    return counts


def trained(rng_seed, rows, window, reduction="mean", **options):
    """Return the bytes of what a run leaves, and its losses."""
    ms.set_seed(1)
    network = nn.Dense(6, 3)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    loss = cross_entropy(reduction)
    model = GradientAccumulation(network, loss, optimizer, reduction=reduction, **options)
    recorder = run(model, batches(np.random.RandomState(rng_seed), rows), window, epochs=2)
    return digest(optimizer.get_parameters()), [record.loss for record in recorder.records]


def never_wait(monkeypatch):
    monkeypatch.setattr(windows, "_LIMIT", 0)


IN_ONE_CALL = [
    ([8] * 5, 2, [2, 2, 1] * 2),
    ([8] * 21, 20, [8, 8, 4, 1] * 2),
    ([8, 8, 4, 4, 8], 5, [2, 2, 1] * 2),
]
CASES = [(*case, reduction) for case in IN_ONE_CALL for reduction in ("mean", "sum")]


@pytest.mark.parametrize(
    ("rows", "window", "expected", "reduction"),
    [case if case is CASES[4] else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_micro_batches_in_one_call_equal_one_by_one(rows, window, expected, reduction, calls, monkeypatch):
    together = trained(3, rows, window, reduction)
    assert calls == expected
    never_wait(monkeypatch)
    one_by_one = trained(3, rows, window, reduction)
    assert calls == expected
    assert together[0] == one_by_one[0]
    assert together[1] == pytest.approx(one_by_one[1], rel=1e-7)


def test_mutant_that_repeats_last_micro_batch_is_detected(monkeypatch):
    expected = trained(3, [8] * 5, 2)
    stacked = windows._Waiting.stacked

    def repeated(waiting):
        for stack in waiting._stacks:
            stack[0] = stack[waiting.count - 1]
        return stacked(waiting)

    monkeypatch.setattr(windows._Waiting, "stacked", repeated)
    assert trained(3, [8] * 5, 2)[0] != expected[0]


def one_buffer(*values):
    """Yield micro-batches that all are the same array, each time with other numbers in it."""
    buffer = np.zeros((1, 1), np.float32)
    micro_batch = Tensor.from_numpy(buffer)
    for value in values:
        buffer[:] = value
        yield (micro_batch,)


class ByReference(windows._Waiting):
    """Reads the micro-batches only when they are run."""

    def __init__(self, columns):
        super().__init__(columns)
        self._columns = []

    def take(self, columns):
        self._columns.append(columns)
        return super().take(columns)

    def stacked(self):
        for stack, columns in zip(self._stacks, zip(*self._columns)):
            stack[: self.count] = [column.asnumpy() for column in columns]
        return super().stacked()


@pytest.mark.parametrize(("waiting", "seen"), [(windows._Waiting, 2.5), (ByReference, 4.0)], ids=["copy", "mutant"])
def test_loader_may_reuse_its_buffer(waiting, seen, monkeypatch):
    monkeypatch.setattr(windows, "_Waiting", waiting)
    model = slope_driver()
    run(model, one_buffer(1.0, 2.0, 3.0, 4.0), 4)
    assert seen_gradient(model) == seen


def test_column_of_bfloat16():
    class Wide(Slope):
        def construct(self, x):
            return super().construct(ops.cast(x, ms.float32))

    network = Wide()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0))
    run(model, [(Tensor([[value]], ms.bfloat16),) for value in (1.0, 2.0)], 2)
    assert seen_gradient(model) == 1.5


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
def test_infinite_loss_is_reported(mode):
    ms.set_context(mode=mode)
    model = slope_driver()
    model._network.w.set_data(Tensor([2.0], ms.float32))
    losses = [record.loss for record in run(model, [(Tensor([[x]], ms.float32),) for x in (1.0, 3e38)], 2).records]
    assert losses == [float("inf")]


def test_large_micro_batches_run_one_by_one(calls, monkeypatch):
    never_wait(monkeypatch)
    trained(3, [8] * 4, 2)
    assert not calls


def test_micro_batches_run_one_by_one_where_nothing_is_compiled(calls):
    graph = trained(3, [8] * 5, 4)
    assert calls
    calls.clear()
    assert trained(3, [8] * 5, 4, compile=False)[1] == pytest.approx(graph[1], rel=1e-5)
    assert not calls


def test_loss_is_available_after_end_of_window():
    window = slope_driver()._window
    window.open(2)
    runner = window._runner
    loss = runner.add((Tensor([[1.0]], ms.float32),), Tensor(1.0, ms.float32))
    with pytest.raises(RuntimeError, match="not been run yet"):
        loss.asnumpy()
    runner.finish()
    assert float(loss.asnumpy()) == 0.0


class Masks(nn.Cell):
    """Its loss tells the masks of its dropout apart."""

    def __init__(self):
        super().__init__()
        ms.set_seed(1)
        self.w = Parameter(Tensor([1.0], ms.float32), name="w")
        self.dropout = nn.Dropout(p=0.5)
        self.factors = Tensor(np.sqrt(np.arange(2, 66)), ms.float32)

    def construct(self, x):
        return ops.reduce_sum(self.dropout(x) * self.factors) * self.w[0]


def losses_of_masks(runs):
    """Return the losses of windows of 1 row of ones, in several runs of the driver; 3 micro-batches, so with tails."""
    network = Masks()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1e-9))
    records = []
    for prepare in runs:
        prepare()
        records += run(model, [(Tensor(np.ones((64,)), ms.float32),)] * 3, 2).records
    return [record.loss for record in records]


def test_each_micro_batch_has_its_own_dropout_mask(monkeypatch):
    losses = losses_of_masks([lambda: None] * 4)
    assert len(set(losses)) == len(losses) == 8


@pytest.mark.slow
def test_second_forward_graph_repeats_dropout_masks(monkeypatch):
    losses = losses_of_masks([lambda: None, lambda: never_wait(monkeypatch)])
    assert len({round(loss, 3) for loss in losses}) < len(losses)


class Scaled(Slope):
    """Has a Parameter that is not trained, and that a loader may set."""

    def __init__(self):
        super().__init__()
        self.factor = Parameter(Tensor(1.0, ms.float32), name="factor", requires_grad=False)

    def construct(self, x):
        return super().construct(x) * self.factor


@pytest.mark.parametrize(("wait", "seen"), [(False, (1 + 2 * 3) / 2), (True, (2 + 2 * 3) / 2)], ids=["off", "on"])
def test_loader_that_sets_parameters_needs_wait_false(wait, seen):
    """With it both micro-batches are run with what was set last: the reason for the switch."""
    network = Scaled()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), wait=wait)

    def loader():
        for value in (1.0, 3.0):
            ops.assign(network.factor, Tensor(1.0 if value == 1 else 2.0))
            yield (Tensor([[value]], ms.float32),)

    run(model, loader(), 2)
    assert seen_gradient(model) == seen


def between_calls(model, network):
    run(model, [micro_batch(1.0)], 2)
    ops.assign(network.factor, Tensor(2.0))
    run(model, [micro_batch(3.0)], 2)


def at_an_epochs_end(model, network):
    changes = LambdaCallback(on_train_epoch_end=lambda context: ops.assign(network.factor, Tensor(2.0)))
    data = iter([1.0, 3.0])
    run(model, OneMicroBatchPerEpoch(data), 2, epochs=2, callbacks=changes)


class SetsParameterInEvaluations(Callback):
    """Changes the network as an evaluation begins."""

    def on_eval_begin(self, run_context):
        ops.assign(run_context.original_args().network.factor, Tensor(2.0))


def in_an_evaluation(model, network):
    data = iter([1.0, 3.0])
    options = {"callbacks": SetsParameterInEvaluations(), "valid_dataset": [micro_batch(1.0)]}
    run(model, OneMicroBatchPerEpoch(data), 2, epochs=2, **options)


def after_an_error(model, network):
    def loader():
        yield micro_batch(1.0)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run(model, loader(), 2)
    ops.assign(network.factor, Tensor(2.0))
    run(model, [micro_batch(3.0)], 2)


class OneMicroBatchPerEpoch:
    """A data set with one micro-batch in each epoch, of the next value."""

    def __init__(self, values):
        self._values = values

    def __iter__(self):
        yield micro_batch(next(self._values))


@pytest.mark.parametrize(
    "train",
    [
        between_calls,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (at_an_epochs_end, in_an_evaluation, after_an_error)),
    ],
)
def test_carried_window_runs_before_weights_are_changed_elsewhere(train):
    network = Scaled()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), tail="carry")
    train(model, network)
    assert model.updates == 1 and seen_gradient(model) == (1 * 1 + 2 * 3) / 2


def test_mutant_that_runs_carried_window_later_is_detected(monkeypatch):
    monkeypatch.setattr(OpenWindow, "run_waiting", lambda window: None)
    network = Scaled()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), tail="carry")
    between_calls(model, network)
    assert seen_gradient(model) == (2 * 1 + 2 * 3) / 2


@pytest.mark.slow
def test_two_drivers_of_one_network_carry_their_windows():
    """The first one's micro-batch is run at the weights at which it came."""
    network = Squared()
    first, second = (GradientAccumulation(network, None, nn.SGD([network.w], 0.25), tail="carry") for _ in range(2))
    run(first, [micro_batch(1.0)], 2)
    run(second, [micro_batch(4.0)], 1)
    moved = 0.25 * 4.0
    run(first, [micro_batch(2.0)], 2)
    assert float(network.w.asnumpy()[0]) == moved - 0.25 * ((0 - 1.0) + (moved - 2.0)) / 2


class Squared(Slope):
    """Half the mean squared distance of w from x, as its own loss: the gradient is w minus the mean of x."""

    def construct(self, x):
        return ops.mean(ops.sum(ops.square(self.w - x), 1)) / 2


def test_wait_must_be_bool():
    with pytest.raises(TypeError, match="'wait' must be a bool"):
        slope_driver(wait=8)
