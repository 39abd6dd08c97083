"""Is a micro-batch whose gradient is not finite left out of its window, and is it listed?"""

from __future__ import annotations

import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Model

from helpers import Slope, batches, cross_entropy, dataset, micro_batch, run, slope_driver
from ms_accum import AccumulatedTrainStep, Accumulator, Checkpointer, FlushTail, GradientAccumulation
from programs.metrics import MetricsFile
from ways import Root, Trained

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


@pytest.mark.usefixtures("eager")
def test_metrics_contain_bad_micro_batches_only_if_any(tmp_path):
    trained = Trained("driver", Root(), 2, lr=0.1, nonfinite="skip_micro")
    file = MetricsFile(str(tmp_path / "metrics.jsonl"))
    data = [GOOD[0], BAD, GOOD[1], GOOD[2]]
    trained.system.train_process(1, data, 2, report=file, ckpt_path=None)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["bad"] == [2] and not {"bad", "overflow"} & set(lines[1])


@pytest.mark.usefixtures("eager")
def test_raise_names_micro_batch():
    trained = Trained("driver", Root(), 2, lr=0.1, nonfinite="raise")
    message = r"the gradient of window 2 in epoch 1 \(micro-batch 4\) is not finite. nonfinite='skip_micro' leaves"
    with pytest.raises(FloatingPointError, match=message):
        trained.train([*GOOD, BAD, *GOOD])
    assert trained.updates == 1


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", ["driver", "step"])
def test_nonfinite_loss_with_finite_gradient_is_left_out(way):
    trained = Trained(way, Endless(), 2, lr=0.1, nonfinite="skip_micro").train([GOOD[0], micro_batch(99.0, 1.0)])
    alone = Trained(way, Endless(), 2, lr=0.1).train([GOOD[0]])
    assert trained.weights.tolist() == alone.weights.tolist() and trained.updates == 1


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("way", ["driver", "step", "accumulator"])
def test_window_of_which_all_is_left_out_is_skipped(way, reduction):
    trained = Trained(way, Root(), 2, lr=0.1, reduction=reduction, nonfinite="skip_micro")
    trained.train([BAD, NO_GRADIENT])
    assert trained.weights.tolist() == [1.0, 1.0]
    trained.train([GOOD[0], BAD])
    assert [int(getattr(trained.system, name)) for name in ("updates", "skipped", "left_out")] == [1, 1, 3]


@pytest.mark.usefixtures("eager")
def test_flush_raises_for_nonfinite_window():
    trained = Trained("driver", Root(), 2, lr=0.1, nonfinite="raise", tail="carry")
    trained.train([*GOOD[:2], BAD])
    with pytest.raises(FloatingPointError, match="the gradient of the open window is not finite"):
        trained.system.flush()


@pytest.mark.usefixtures("eager")
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


ZERO = [micro_batch(0.0, 1.0, rows=2), micro_batch(0.0, np.nan, rows=2)]  # weights of 0: one gradient, and one loss


def _first_value(x):
    return float(first_value(x).asnumpy())


@pytest.mark.usefixtures("eager")
def test_flush_tail_raises_for_nonfinite_gradient():
    step, model, data = model_of("raise")
    with pytest.raises(FloatingPointError, match="a gradient in epoch 1 is not finite, and nonfinite='raise'"):
        model.train(1, data, callbacks=FlushTail(), dataset_sink_mode=False)
    assert step.updates == 0


@pytest.mark.usefixtures("eager")
def test_raise_in_compiled_step_is_rejected():
    network = Slope()
    with pytest.raises(ValueError, match="'nonfinite' must be 'skip_window' or 'skip_micro', but got 'raise'"):
        Accumulator(nn.SGD([network.w], 1.0), 2, nonfinite="raise")
    with pytest.raises(ValueError, match="'nonfinite' must be one of 'skip_window', 'skip_micro', 'raise'"):
        slope_driver(nonfinite="ignore")


def fed(*micro_batches, **options):
    """Return an Accumulator that got pairs of a gradient and a weight in windows of two."""
    network = Root()
    accumulator = Accumulator(nn.SGD([network.w], 0.1), 2, reduction="mean", nonfinite="skip_micro", **options)
    for gradient, weight in micro_batches:
        accumulator((Tensor([gradient, gradient], ms.float32),), weight)
    return accumulator, network


@pytest.mark.usefixtures("eager")
def test_micro_batch_of_weight_0_is_not_left_out():
    """It does not count, so its gradient of 0/0 has a good reason. (The driver does not run it at all.)"""
    accumulator, network = fed((np.nan, 0.0), (1.0, 2.0), (np.nan, 0.0), (np.nan, 0.0))
    assert (int(accumulator.updates), int(accumulator.skipped), accumulator.left_out) == (1, 1, 0)
    assert network.w.asnumpy() == pytest.approx([0.9, 0.9])


@pytest.mark.usefixtures("eager")
def test_micro_batch_of_weight_0_lowers_no_scale():
    """That of one which counts would be an overflow."""
    for weight, overflows in ((0.0, 0), (1.0, 1)):
        scaler = amp.DynamicLossScaler(64.0, 2, 500)
        accumulator, _ = fed((64.0, 1.0), (np.nan, weight), loss_scale=scaler)
        assert (int(accumulator.updates), accumulator.overflows) == (1, overflows)
        assert accumulator.loss_scale == 64.0 / 2**overflows


# Too many in a row


def skips_above_9(gradients, norm):
    return gradients, norm < 9


def train_on(values):
    """Train with windows of one micro-batch of each value."""
    run(slope_driver(columns=2, stages=[skips_above_9]), [micro_batch(value, 1.0) for value in values], 1)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("other", [99.0, None])
def test_ten_windows_in_a_row_end_the_run(other):
    """What a stage has skipped, or nothing, is between them."""
    between = [] if other is None else [other] * 2
    train_on([np.nan] * 9 + [1.0, *between] + [np.nan] * 9)
    with pytest.raises(RuntimeError, match="the gradients of 10 windows in a row were not finite"):
        train_on([1.0] + [np.nan] * 5 + between + [np.nan] * 5)


@pytest.mark.usefixtures("eager")
def test_windows_before_a_resume_count_among_ten_in_a_row(tmp_path):
    bad = [micro_batch(np.nan, 1.0)] * 5
    run(slope_driver(columns=2), bad, 1, checkpointer=Checkpointer(tmp_path))
    model = slope_driver(columns=2)
    with pytest.raises(RuntimeError, match="the gradients of 10 windows in a row were not finite"):
        run(model, bad, 1, epochs=2, checkpointer=Checkpointer(tmp_path, resume="auto"))
    assert model.skipped == 10
