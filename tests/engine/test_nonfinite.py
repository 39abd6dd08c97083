"""Is a micro-batch whose gradient is not finite left out of its window, and is it listed?"""

from __future__ import annotations

import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Model

from helpers import Recorder, Slope, batches, cross_entropy, micro_batch, slope_driver, values
from ms_accum import AccumulatedTrainStep, Accumulator, Checkpointer, FlushTail, GradientAccumulation, Stopped
from ms_accum.engine import nonfinite
from ms_accum.network import tree
from ms_accum.programs.callbacks import MetricsFile
from reference import miss
from runs import stop_after
from test_model_step import dataset
from ways import WAYS, Half, Root, Trained

GOOD = [micro_batch(1.0, 4.0, rows=2), micro_batch(3.0, 2.0, rows=5), micro_batch(5.0, 1.0, rows=1)]
BAD = micro_batch(np.nan, 1.0, rows=3)
NO_GRADIENT = micro_batch(0.0, 1.0, rows=3)  # of Root: its loss is finite


class Endless(nn.Cell):
    """The mean over rows of w * x; for x = 99 the loss is infinite, and the gradient is not."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(2), ms.float32), name="w")

    def construct(self, x):
        return ops.mean(ops.sum(x * self.w, 1)) + ops.max(ops.where(x == 99, Tensor(np.inf), Tensor(0.0)))[0]


class Looked(nn.Cell):
    """Rows of a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingLookup(4, 2)

    def construct(self, x):
        return ops.mean(self.table(ops.cast(x, ms.int32)))


def weights(way, network, micro_batches, window, **options):
    return Trained(way, network, window, **options).train(micro_batches).weights


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bad", [BAD, NO_GRADIENT], ids=["loss", "gradient"])
def test_window_equals_that_of_its_finite_micro_batches(way, reduction, bad):
    expected = weights(way, Root(), GOOD, 3, lr=0.1, reduction=reduction)
    mixed = [GOOD[0], bad, *GOOD[1:]]
    found = weights(way, Root(), mixed, 4, lr=0.1, reduction=reduction, nonfinite="skip_micro")
    assert miss([found], [expected], 1e-6) <= 1 and np.isfinite(found).all()
    assert miss([weights(way, Root(), mixed, 4, lr=0.1, reduction=reduction)], [expected], 1e-6) >= 100


@pytest.mark.host
@pytest.mark.filterwarnings("ignore:.*all gradients of the window are 0")  # the mutant adds nothing
@pytest.mark.parametrize("way", ["driver", "step", "cells"])
def test_weight_of_left_out_micro_batch_is_detected(way, monkeypatch):
    expected = weights(way, Root(), GOOD, 3, lr=0.1)
    skip = nonfinite.SkipMicro.__call__

    def with_its_weight(self, *args):
        return Tensor(1.0), skip(self, *args)[1]

    monkeypatch.setattr(nonfinite.SkipMicro, "__call__", with_its_weight)
    monkeypatch.setattr(tree, "add_no_nan", lambda total, gradients, weight: total)
    found = weights(way, Root(), [GOOD[0], NO_GRADIENT, *GOOD[1:]], 4, lr=0.1, nonfinite="skip_micro")
    assert miss([found], [expected], 1e-6) >= 100


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("window", [1, 2])
def test_window_without_finite_micro_batch_is_skipped(way, reduction, window):
    def make(parameters):
        return nn.Momentum(parameters, 0.1, 0.9)  # a gradient of 0 would still move the weights

    trained = Trained(way, Root(), window, reduction=reduction, make=make, nonfinite="skip_micro")
    trained.train(GOOD[:window])
    before = [array.tolist() for array in values(trained.optimizer.get_parameters())]
    trained.train([BAD] * window)
    assert [array.tolist() for array in values(trained.optimizer.get_parameters())] == before
    assert trained.updates == 1


@pytest.mark.host
def test_accumulators_never_contain_nan():
    trained = Trained("cells", Root(), 3, nonfinite="skip_micro")
    for number, columns in enumerate([GOOD[0], BAD, NO_GRADIENT]):
        loss = trained.add(*columns)
        window = trained.add.window
        sums = np.concatenate(values([*window.grad_sum, window.weight_sum[0].reshape(1)]))
        assert np.isfinite(sums).all() and np.isfinite(loss.asnumpy()) == (number == 0)
    assert sums.tolist()[-1] == 2


@pytest.mark.host
def test_left_out_micro_batches_are_counted_and_listed():
    trained = Trained("driver", Root(), 2, lr=0.1, nonfinite="skip_micro")
    trained.train([GOOD[0], BAD, GOOD[1], GOOD[2], NO_GRADIENT, BAD, GOOD[0]])
    assert [record.bad for record in trained.recorder.records] == [(2,), (), (5, 6), ()]
    assert [record.skipped for record in trained.recorder.records] == [False, False, True, False]
    assert trained.system.left_out == 3 and trained.system.skipped == 1
    losses = [record.loss for record in trained.recorder.records]
    assert np.isfinite(losses[:2]).all() and np.isnan(losses[2])


@pytest.mark.host
def test_record_of_skipped_window_lists_nonfinite_micro_batches():
    recorder = Trained("driver", Root(), 2, lr=0.1).train([GOOD[0], BAD, GOOD[1], GOOD[2]]).recorder
    assert [(record.skipped, record.bad) for record in recorder.records] == [(True, (2,)), (False, ())]


@pytest.mark.host
def test_numbers_of_bad_micro_batches_in_split_batches():
    model = slope_driver(nonfinite="skip_micro")
    columns = np.concatenate([np.ones((4, 1)), [[np.nan]], np.ones((1, 1))]).astype(np.float32)
    recorder = Recorder()
    model.train_process(
        1, [(Tensor(columns[:4]),), (Tensor(columns),)], micro_batch_size=2, report=recorder, ckpt_path=None
    )
    assert [record.bad for record in recorder.records] == [(), (3,)]


@pytest.mark.host
def test_metrics_contain_bad_micro_batches_only_if_any(tmp_path):
    trained = Trained("driver", Root(), 2, lr=0.1, nonfinite="skip_micro")
    file = MetricsFile(str(tmp_path / "metrics.jsonl"))
    data = [GOOD[0], BAD, GOOD[1], GOOD[2]]
    trained.system.train_process(1, data, 2, report=file, ckpt_path=None)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["bad"] == [2] and not {"bad", "overflow"} & set(lines[1])


@pytest.mark.host
def test_raise_names_micro_batch():
    trained = Trained("driver", Root(), 2, lr=0.1, nonfinite="raise")
    message = r"the gradient of window 2 in epoch 1 \(micro-batch 4\) is not finite. nonfinite='skip_micro' leaves"
    with pytest.raises(FloatingPointError, match=message):
        trained.train([*GOOD, BAD, *GOOD])
    assert trained.updates == 1


@pytest.mark.host
def test_raise_allows_overflows_of_dynamic_scale():
    scaler = amp.DynamicLossScaler(2.0**18, 2, 500)
    trained = Trained("driver", Half(), 2, nonfinite="raise", loss_scale=scaler)
    assert trained.train([micro_batch(1.0, 1.0)] * 10).updates == 2


@pytest.mark.host
def test_left_out_micro_batches_lower_dynamic_scale():
    scaler = amp.DynamicLossScaler(2.0**15, 2, 500)
    large = micro_batch(4.0, 4.0)
    trained = Trained("driver", Half(), 2, nonfinite="skip_micro", loss_scale=scaler)
    trained.train([micro_batch(1.0, 1.0), large, micro_batch(1.0, 1.0), large])
    assert (trained.updates, trained.system.left_out, trained.system.overflows) == (2, 2, 2)
    assert float(scaler.scale_value.asnumpy()) == 2.0**13


@pytest.mark.host
@pytest.mark.parametrize("way", ["driver", "cells", "step"])
def test_nonfinite_loss_with_finite_gradient_is_left_out(way):
    trained = Trained(way, Endless(), 2, lr=0.1, nonfinite="skip_micro").train([GOOD[0], micro_batch(99.0, 1.0)])
    alone = Trained(way, Endless(), 2, lr=0.1).train([GOOD[0]])
    assert trained.weights.tolist() == alone.weights.tolist() and trained.updates == 1


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_are_rejected(way):
    message = "'nonfinite' must be another one with sparse gradients, but got 'skip_micro'. Use nn.Embedding"
    with pytest.raises(ValueError, match=message):
        Trained(way, Looked(), make=lambda parameters: nn.Adam(parameters, 0.1), nonfinite="skip_micro")


@pytest.mark.host
def test_flush_raises_for_nonfinite_window():
    trained = Trained("driver", Root(), 2, lr=0.1, nonfinite="raise", tail="carry")
    trained.train([*GOOD[:2], BAD])
    with pytest.raises(FloatingPointError, match="the gradient of the open window is not finite"):
        trained.system.flush()


@pytest.mark.host
def test_flush_of_weight_0_does_not_raise():
    network = Root()
    options = {"weight": _first_value, "nonfinite": "raise", "tail": "carry", "check": "off"}
    model = GradientAccumulation(network, None, nn.SGD([network.w], 0.1), **options)
    model.train_process(1, ZERO, 3, report=(), ckpt_path=None)
    assert not model.flush() and (model.updates, model.skipped) == (0, 1)


def model_of(policy):
    network = nn.SequentialCell(nn.Flatten(), nn.Dense(6, 3))
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = AccumulatedTrainStep((network, cross_entropy()), optimizer, 2, nonfinite=policy)
    rows = batches(np.random.RandomState(1), [4] * 4)
    rows[1] = (Tensor(np.full((4, 6), np.nan, np.float32)), rows[1][1])
    return step, Model(step), dataset(rows)


def first_value(x):
    return x[0, 0]


@pytest.mark.host
def test_flush_tail_does_not_raise_for_window_of_weight_0():
    network, options = Root(), {"nonfinite": "raise", "weight": first_value, "check": "off"}
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 0.1), 2, **options)
    data = dataset([GOOD[0], GOOD[1], micro_batch(0.0, 1.0), micro_batch(0.0, 1.0)])
    Model(step).train(1, data, callbacks=FlushTail(), dataset_sink_mode=False)
    assert (step.updates, step.skipped) == (1, 1)


ZERO = [micro_batch(0.0, 1.0, rows=2), micro_batch(0.0, np.nan, rows=2)]  # weights of 0: one gradient, and one loss


def weighed(way, data, window, **options):
    """Train with `first_value` as weight, and return the weights and what trained them."""
    network = Root()
    optimizer = nn.SGD([network.w], 0.1)
    if way == "driver":
        system = GradientAccumulation(network, None, optimizer, weight=_first_value, check="off", **options)
        system.train_process(1, data, window, report=(), ckpt_path=None)
    elif way == "step":
        system = AccumulatedTrainStep(network, optimizer, window, weight=first_value, check="off", **options)
        Model(system).train(1, dataset(data), callbacks=FlushTail(), dataset_sink_mode=False)
    else:
        system = Accumulator(optimizer, window, reduction="mean", **options)
        grad_fn = ms.value_and_grad(network, None, optimizer.parameters)

        def train_step(x):
            return system(grad_fn(x)[1], first_value(x))

        train_step = ms.jit(train_step)
        for (x,) in data:
            train_step(x)
        system.flush()
    return network.w.asnumpy().tolist(), system


def _first_value(x):
    return float(first_value(x).asnumpy())


@pytest.mark.host
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", ["driver", "step", "accumulator"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_micro_batch_of_weight_0_is_not_left_out(way, window):
    """Not left out, not counted, and nothing warns of a gradient that is not finite."""
    data = [columns for good in GOOD for columns in (good, ZERO[0], ZERO[1])]
    found, system = weighed(way, data, window, nonfinite="skip_micro")
    expected = weighed("driver", GOOD, 1)[0]
    assert found == pytest.approx(expected, rel=1e-6)
    assert (system.updates, system.left_out, system.skipped) == (3, 0, {1: 6, 2: 2, 3: 0}[window])


@pytest.mark.host
@pytest.mark.parametrize("way", ["step", "accumulator"])
def test_ignored_weight_is_detected(way, monkeypatch):
    skip = nonfinite.SkipMicro.__call__
    monkeypatch.setattr(
        nonfinite.SkipMicro, "__call__", lambda self, kernels, grads, loss=None, weight=None: skip(self, kernels, grads)
    )
    assert weighed(way, [GOOD[0], ZERO[0], GOOD[1], ZERO[1]], 4, nonfinite="skip_micro")[1].left_out == 2


@pytest.mark.host
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("window", [2, 4])
def test_windows_of_weight_0_are_not_counted_as_nonfinite(window):
    """The tail, too, that `FlushTail` flushes."""
    system = weighed("step", [*GOOD, *ZERO, *ZERO, ZERO[0]][: window + 4], window, nonfinite="skip_micro")[1]
    assert system.left_out == 0 and system.counts[1] == 0 and system.skipped > 0


@pytest.mark.host
def test_left_out_micro_batches_next_to_weight_0_are_counted():
    with pytest.warns(RuntimeWarning, match="1 window skipped in epoch 1: gradients were not finite"):
        system = weighed("step", [GOOD[0], ZERO[0], ZERO[1], micro_batch(1.0, -1.0)], 2, nonfinite="skip_micro")[1]
    assert (system.updates, system.skipped, system.left_out) == (1, 1, 1)


@pytest.mark.host
def test_flush_tail_raises_for_nonfinite_gradient():
    step, model, data = model_of("raise")
    with pytest.raises(FloatingPointError, match="a gradient in epoch 1 is not finite, and nonfinite='raise'"):
        model.train(1, data, callbacks=FlushTail(), dataset_sink_mode=False)
    assert step.updates == 0


def test_model_leaves_out_nonfinite_micro_batches():
    step, model, data = model_of("skip_micro")
    model.train(1, data, callbacks=FlushTail(), dataset_sink_mode=False)
    assert (step.updates, step.left_out, step.skipped) == (2, 1, 0)


@pytest.mark.host
def test_raise_in_compiled_step_is_rejected():
    network = Slope()
    with pytest.raises(ValueError, match="'nonfinite' must be 'skip_window' or 'skip_micro', but got 'raise'"):
        Accumulator(nn.SGD([network.w], 1.0), 2, nonfinite="raise")
    with pytest.raises(ValueError, match="'nonfinite' must be one of 'skip_window', 'skip_micro', 'raise'"):
        slope_driver(nonfinite="ignore")


def resumed(folder, stop, data):
    def make():
        return Trained("driver", Root(), 3, lr=0.1, nonfinite="skip_micro")

    expected = make().train(data)
    first = make()
    with pytest.raises(Stopped):
        first.system.train_process(
            1, data, 3, report=(), ckpt_path=None, checkpointer=Checkpointer(folder, stop=stop_after(stop))
        )
    again = make()
    states = Checkpointer(folder, resume="auto")
    again.system.train_process(1, data, 3, report=again.recorder, ckpt_path=None, checkpointer=states)
    return again, expected


@pytest.mark.host
@pytest.mark.parametrize("stop", [1, 2, 4, 5])
def test_resumed_run_is_the_same(tmp_path, stop):
    again, expected = resumed(tmp_path, stop, [GOOD[0], BAD, GOOD[1], NO_GRADIENT, GOOD[2], GOOD[0]])
    assert again.weights.tolist() == expected.weights.tolist()
    assert again.system.left_out == expected.system.left_out == 2
    assert [record.bad for record in again.recorder.records] == [(2,), (4,)][-len(again.recorder.records) :]


def test_driver_leaves_out_micro_batches_in_graphs():
    ms.set_seed(1)
    network = nn.SequentialCell(nn.Flatten(), nn.Dense(6, 3))
    model = GradientAccumulation(
        network, cross_entropy(), nn.SGD(network.trainable_params(), 0.1), nonfinite="skip_micro"
    )
    rows = batches(np.random.RandomState(1), [4] * 8)
    rows[5] = (Tensor(np.full((4, 6), np.nan, np.float32)), rows[5][1])
    model.train_process(1, rows, 4, report=(), ckpt_path=None)
    assert (model.updates, model.left_out) == (2, 1)
