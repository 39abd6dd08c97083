"""How are the micro-batches of a window run?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train import Callback, LambdaCallback

from helpers import Slope, batches, cross_entropy, micro_batch, run, seen_gradient, slope_driver
from ms_accum import GradientAccumulation
from ms_accum.training import runners
from ms_accum.training.open_window import OpenWindow
from reference import digest


@pytest.fixture
def ends(monkeypatch):
    """Record whether the graph of a micro-batch ends the window."""
    recorded = []
    add = runners._AddAndEnd.__call__

    def record(cell, last, *inputs):
        recorded.append(bool(last.asnumpy()))
        return add(cell, last, *inputs)

    monkeypatch.setattr(runners._AddAndEnd, "__call__", record)
    return recorded


def trained(rng_seed, rows, window, reduction="mean", **options):
    """Return the bytes of what a run leaves, and its losses."""
    ms.set_seed(1)
    network = nn.Dense(6, 3)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    loss = cross_entropy(reduction)
    model = GradientAccumulation(network, loss, optimizer, reduction=reduction, **options)
    recorder = run(model, batches(np.random.RandomState(rng_seed), rows), window, epochs=2)
    return digest(optimizer.get_parameters()), [record.loss for record in recorder.records]


def end_in_another_graph(monkeypatch):
    """Let the driver end its windows in a graph of their own."""
    add = OpenWindow.add
    monkeypatch.setattr(OpenWindow, "add", lambda window, micro_batch, ends: add(window, micro_batch))


@pytest.mark.parametrize(
    ("reduction", "options"),
    [
        ("mean", {"clip_norm": 0.1}),
        pytest.param("mean", {"nonfinite": "skip_micro"}, marks=pytest.mark.slow),
    ],
    ids=["clipped", "skip_micro"],
)
def test_last_micro_batch_and_end_in_one_graph(reduction, options, ends, monkeypatch):
    rows = [8, 8, 4, 8, 8]
    in_one_graph = trained(3, rows, 2, reduction, **options)
    assert ends == [False, True, False, True, False] * 2  # a tail ends in a graph of its own
    ends.clear()
    end_in_another_graph(monkeypatch)
    assert trained(3, rows, 2, reduction, **options) == in_one_graph
    assert not any(ends)


def one_buffer(*values):
    """Yield micro-batches that all are the same array, each time with other numbers in it."""
    buffer = np.zeros((1, 1), np.float32)
    micro_batch = Tensor.from_numpy(buffer)
    for value in values:
        buffer[:] = value
        yield (micro_batch,)


def test_loader_may_reuse_its_buffer():
    model = slope_driver()
    run(model, one_buffer(1.0, 2.0, 3.0, 4.0), 4)
    assert seen_gradient(model) == 2.5


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


def test_each_micro_batch_has_its_own_dropout_mask():
    losses = losses_of_masks([lambda: None] * 4)
    assert len(set(losses)) == len(losses) == 8


class Scaled(Slope):
    """Has a Parameter that is not trained, and that a loader may set."""

    def __init__(self):
        super().__init__()
        self.factor = Parameter(Tensor(1.0, ms.float32), name="factor", requires_grad=False)

    def construct(self, x):
        return super().construct(x) * self.factor


def test_loader_may_set_parameters_between_micro_batches():
    network = Scaled()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0))

    def loader():
        for value in (1.0, 3.0):
            ops.assign(network.factor, Tensor(1.0 if value == 1 else 2.0))
            yield (Tensor([[value]], ms.float32),)

    run(model, loader(), 2)
    assert seen_gradient(model) == (1 * 1 + 2 * 3) / 2


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
