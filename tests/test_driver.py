"""Runs of the driver."""

from __future__ import annotations

import builtins
import os
import signal
import threading
from contextlib import suppress

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from helpers import (
    Slope,
    batches,
    cross_entropy,
    micro_batch,
    run,
    seen_gradient,
    slope_driver,
    values,
)
from ms_accum import AccumulatedTrainStep, Checkpointer, GradientAccumulation, evaluate
from ms_accum.training.interrupts import _end_unless_repeated
from ms_accum.training.runners import ByCalls, ByLoops
from reference import digest

pytestmark = pytest.mark.usefixtures("eager")


def linear_driver(loss=None, make=nn.SGD, lr=1.0, **options):
    """Return a network of one dense layer, its optimizer and its driver."""
    network = nn.Dense(6, 3)
    loss = cross_entropy() if loss is None else loss
    optimizer = make(network.trainable_params(), lr)
    return network, optimizer, GradientAccumulation(network, loss, optimizer, **options)


# Interrupts


def mine(number, frame):
    """A program's handler."""


@pytest.mark.parametrize("handler", [signal.SIG_DFL, mine], ids=["default", "mine"])
@pytest.mark.parametrize("place", ["notebook", "thread", "program"])
def test_sigterm_interrupts_only_in_notebooks(place, handler, monkeypatch):
    """There MindSpore turns "Stop" into SIGTERM; tests/pages/test_notebook.py tries it in a kernel."""
    model, seen = slope_driver(), []

    def rows():
        yield micro_batch(1)
        seen.append(signal.getsignal(signal.SIGTERM))
        if seen[0] not in (signal.SIG_DFL, mine):
            signal.raise_signal(signal.SIGTERM)
        yield micro_batch(2)

    def train():
        with suppress(KeyboardInterrupt):
            run(model, rows(), 2)

    if place != "program":
        monkeypatch.setattr(builtins, "get_ipython", object, raising=False)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        thread = threading.Thread(target=train)
        if place == "thread":
            thread.start()
            thread.join()
        else:
            train()
        after = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    interrupts = place == "notebook" and handler == signal.SIG_DFL
    assert (seen != [handler]) == interrupts and after == (_end_unless_repeated if interrupts else handler)
    assert model.updates == (not interrupts)
    run(model, [micro_batch(1)] * 2, 2)
    assert model.updates == 1 + (not interrupts)


def test_interrupt_that_is_lost_ends_the_run(monkeypatch):
    """As by MindSpore's compiler, which drops what Python raises in it; clicks that follow are one with the first."""
    monkeypatch.setattr(builtins, "get_ipython", object, raising=False)
    model, sent = slope_driver(), []

    def rows():
        for number in range(8):
            if number in (1, 2):
                with suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGTERM)
                sent.append(number)
            yield micro_batch(1)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        for _ in range(2):  # also in the next run
            with pytest.raises(KeyboardInterrupt):
                run(model, rows(), 1)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert model.updates == 2 and sent == [1, 1]


# Tails


WAITING = "1 micro-batch of an earlier call that tail='carry' left over. Call 'flush\\(\\)' or 'clear\\(\\)' first"


@pytest.mark.parametrize("size", [{"mini_steps": 3}, {"micro_batch_size": 1}], ids=str)
def test_window_size_change_inside_carried_window_is_rejected(size):
    model = slope_driver(tail="carry")
    run(model, [micro_batch(1)] * 3, 2)
    with pytest.raises(RuntimeError, match=f"size of windows can't change while one holds {WAITING}"):
        run(model, [micro_batch(1)] * 3, **size)
    assert model.micro_batches == 1
    model.clear()
    run(model, [micro_batch(1)] * 3, **size)
    assert model.micro_batches == 0


# Weights


@pytest.mark.parametrize("answer", [-1.0, float("nan"), float("inf")])
def test_negative_or_nonfinite_weight_is_rejected(answer):
    model = slope_driver(weight=lambda x: answer)
    with pytest.raises(ValueError, match="'weight' must be a function that returns a finite number >= 0, but got"):
        run(model, [micro_batch(1)] * 2, 2)


# Losses


@pytest.mark.parametrize(
    ("loss", "reduction", "match"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "mean", "'reduction' must be 'sum' for a loss that sums"),
        (nn.MSELoss(reduction="none"), "sum", "'loss_fn' must be a loss with reduction='mean' or 'sum'"),
    ],
)
def test_loss_with_mismatched_reduction_is_rejected(loss, reduction, match):
    with pytest.raises(ValueError, match=f"For 'GradientAccumulation', {match}"):
        linear_driver(loss, reduction=reduction)


# Records


def test_default_report_prints_lines_without_terminal(capsys):
    slope_driver().train_process(1, [micro_batch(1)] * 2, 1, ckpt_path=None)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "epoch: 1 step: 1 loss is 0, lr 1"
    assert second.startswith("epoch: 1 step: 2 loss is -1, lr 1, ") and second.endswith(" rows/s")


# Datasets


def test_exhausted_generator_is_rejected():
    model = slope_driver()
    with pytest.raises(ValueError, match="in every epoch, but got none in epoch 2. A generator can be read once only"):
        run(model, (micro_batch(value) for value in (1, 2, 3)), 2, epochs=2)
    assert model.updates == 2


def test_empty_dataset_is_rejected():
    with pytest.raises(ValueError, match="'train_dataset' must have batches, but got an empty one"):
        run(slope_driver(), [], 2)


def test_window_longer_than_epoch_is_rejected_with_tail_drop():
    with pytest.raises(ValueError, match="'mini_steps' must be at most 3 with tail='drop', but got 7"):
        run(slope_driver(tail="drop"), [micro_batch(1)] * 3, 7, epochs=5)


def test_window_longer_than_generator_raises_error_with_tail_drop():
    with pytest.raises(RuntimeError, match="no window was filled in the whole run"):
        run(slope_driver(tail="drop"), iter([micro_batch(1)] * 3), 7)


class InHalf(nn.Cell):
    """The sum of w times the mean row, in float16: so is its gradient, the mean row times what multiplies the loss.

    In float16 a 256th of `small` is not exact, and 1,024 times `large` is infinite.
    """

    small, large = 3 * 2.0**-22, 100.0

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(2), ms.float32), name="w")

    def construct(self, x):
        products = ops.cast(ops.mean(x, 0), ms.float16) * ops.cast(self.w, ms.float16)
        return ops.cast(ops.sum(products), ms.float32)


def loss_scale_of_2(network):
    """Casts in `construct` are not marked: a loss scale says that the network computes in float16."""
    return {"loss_scale": 2.0, "optimizer": nn.SGD([network.w], 1.0)}


def marked_as_float16(network):
    network.add_flags(fp16=True)  # as `to_float` and `amp.auto_mixed_precision` do
    return {"optimizer": nn.SGD([network.w], 1.0)}


@pytest.mark.parametrize("float16", [loss_scale_of_2, marked_as_float16])
@pytest.mark.parametrize("rows", [[1024, 1], [1, 4096], [1, 1024, 256]], ids=str)
def test_weights_do_not_enter_a_float16_backward(rows, float16):
    network = InHalf()
    model = GradientAccumulation(network, None, **float16(network), check="off")
    run(model, [micro_batch(network.small, network.large, rows=count) for count in rows], len(rows))
    assert (model.updates, network.w.asnumpy().tolist()) == (1, [-network.small, -network.large])


def test_weights_do_not_overflow_in_a_network_that_casts_by_itself():
    """Not marked, and without a loss scale: the shares of a window, which multiply its losses, are at most 1."""
    network = InHalf()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), check="off")
    run(model, [micro_batch(network.small, network.large, rows=1024)] * 2, 2)
    assert (model.updates, network.w.asnumpy().tolist()) == (1, [-network.small, -network.large])


def test_overflow_in_parameter_dtype_skips_window():
    network = Slope(dtype=ms.float16)
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), reduction="sum")
    run(model, [(Tensor(np.full((1, 1), 40_000.0), ms.float16),)] * 4, 4)
    assert (model.skipped, model.updates) == (1, 0)
    assert values([network.w])[0] == [0.0]


def test_frozen_parameter_is_rejected():
    network = nn.Dense(2, 2)
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    network.bias.requires_grad = False
    with pytest.raises(ValueError, match="'bias', which is frozen. Freeze before"):
        GradientAccumulation(network, nn.MSELoss(), optimizer)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("window", [1, 2])
def test_failed_micro_batch_discards_window(window):
    model = slope_driver(tail="carry", check="off")
    with pytest.raises(ValueError, match=r"^For 'train_process', MindSpore rejects Float32 \[1\] of 'train_dataset' "):
        run(model, [micro_batch(1), (Tensor([1.0]),)], window)
    assert model.micro_batches == 0 and model.updates == window % 2
    run(model, [micro_batch(3)] * window, window)
    assert seen_gradient(model) == [3 if window > 1 else 1 + 3]


@pytest.mark.usefixtures("each_mode")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_interrupted_micro_batch_leaves_no_state(error, monkeypatch):
    """Whatever runs it, it is not the last of its window: that one has updated."""

    def interrupted_after(add):
        def interrupted(runner, inputs, *, ends, stops):
            add(runner, inputs[:1], ends=False, stops=stops)
            raise error

        return interrupted

    model = slope_driver()
    with monkeypatch.context() as patch, pytest.raises(error):
        for kind in (ByCalls, ByLoops):
            patch.setattr(kind, "add", interrupted_after(kind.add))
        run(model, [micro_batch(200.0)] * 2, 2)
    assert model.micro_batches == 0
    run(model, [micro_batch(1.0)] * 2, 2)
    assert seen_gradient(model) == 1.0


class Frozen(nn.Cell):
    """A head on a backbone that is not to change."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.SequentialCell(nn.Dense(6, 4), nn.BatchNorm1d(4)), nn.Dense(4, 3)

    def construct(self, x):
        return self.head(self.backbone(x))


@pytest.mark.usefixtures("eager")
def test_subnetwork_in_evaluation_mode_stays_in_it(rng):
    network = Frozen()
    network.set_train()
    network.backbone.set_train(False)
    model = GradientAccumulation(network, nn.CrossEntropyLoss(), nn.SGD(network.head.trainable_params(), 0.1))
    data = batches(rng, [8] * 4)
    for _ in range(2):
        run(model, data, 2)
        evaluate(network, data)
    assert not network.backbone[1].moving_mean.asnumpy().any()
    assert [network.training, network.backbone.training] == [True, False]


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:BatchNorm layers")
@pytest.mark.parametrize("make", ["driver", "step"])
def test_flush_after_an_evaluation_trains(make, rng):
    """It equals the one without: BatchNorm normalizes by the rows of the tail, and its statistics change."""

    def flushed(evaluates):
        ms.set_seed(1)
        network = nn.SequentialCell(nn.Dense(6, 4), nn.BatchNorm1d(4))
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        if make == "driver":
            model = GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, tail="carry")
            run(model, data, 2)
        else:
            model = AccumulatedTrainStep((network, nn.CrossEntropyLoss()), optimizer, 2)
            model.set_train()
            for columns in data:
                model(*map(ms.Tensor, columns))
        if evaluates:
            network.set_train(False)
        assert model.flush() and network.training != evaluates
        return values(network.get_parameters())

    data = [(x, y % 4) for x, y in batches(rng, [8] * 3)]
    assert all((one == other).all() for one, other in zip(flushed(True), flushed(False)))


@pytest.mark.parametrize(("tail", "planned"), [("flush", 6), ("carry", 5), ("drop", 3)])
def test_planned_updates(tail, planned):
    model = slope_driver(tail=tail)
    data = [micro_batch(1)] * 5
    assert model.planned_updates(3, data, 3) == planned
    recorder = run(model, data, 3, epochs=3)
    assert len(recorder.records) == recorder.planned == planned
    assert model.planned_updates(3, iter(data), 3) is None


def test_run_with_states_is_rejected_while_micro_batches_of_an_earlier_call_wait(tmp_path):
    model = slope_driver(tail="carry")
    run(model, [micro_batch(1)] * 4, 3)
    with pytest.raises(RuntimeError, match=f"a training state can't contain {WAITING}"):
        run(model, [micro_batch(1)] * 3, 3, checkpointer=Checkpointer(tmp_path))
    assert model.micro_batches == 1 and not list(tmp_path.iterdir())
    model.clear()
    run(model, [micro_batch(1)] * 3, 3, checkpointer=Checkpointer(tmp_path))
    assert (model.updates, model.micro_batches) == (2, 0)


# Runs that fail


def test_interrupted_run_leaves_no_open_window():
    model = slope_driver()

    def interrupted():
        yield from [micro_batch(1), micro_batch(1), micro_batch(100)]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, interrupted(), 2)
    recorder = run(model, [micro_batch(1)] * 2, 2)
    assert [record.samples for record in recorder.records] == [2]
    assert seen_gradient(model) == [2.0]


def test_run_with_only_skipped_windows_is_logged(caplog):
    model = slope_driver()
    run(model, [micro_batch(1)] * 2 + [micro_batch(np.nan)] * 2, 2)
    assert not caplog.messages
    run(model, [micro_batch(np.nan)] * 4, 2)
    assert caplog.messages == ["For 'train_process', all 2 windows were skipped, so nothing was learned."]


# Checkpoints


def test_model_is_saved_at_tutorial_path():
    network, _, model = linear_driver()
    model.train_process(1, batches(np.random.RandomState(0), [4, 4]), 2, report=())
    assert os.listdir() == ["gradient_accumulation.ckpt"]
    saved = ms.load_checkpoint("gradient_accumulation.ckpt")
    assert sorted(saved) == sorted(parameter.name for parameter in network.get_parameters())  # no accumulators
    assert digest(values([saved[p.name] for p in network.get_parameters()])) == digest(values(network.get_parameters()))


@pytest.mark.parametrize(
    ("path", "match"),
    [("model.txt", "'ckpt_path' must end with '.ckpt'"), ("no/folder/model.ckpt", "the folder of 'ckpt_path' must ex")],
)
def test_unwritable_ckpt_path_is_rejected_before_training(path, match):
    model = slope_driver()
    with pytest.raises(ValueError, match=match):
        model.train_process(1, [micro_batch(1)], 1, report=(), ckpt_path=path)
    assert model.updates == 0


# Changes between two runs


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("window", [1, 2])
def test_weights_loaded_between_runs_are_trained(window):
    model = slope_driver()
    network = model._network
    run(model, [micro_batch(1)] * 2, window)
    ms.load_param_into_net(network, {"w": Parameter(Tensor([100.0], ms.float32), name="w")})
    recorder = run(model, [micro_batch(1)] * window, window)
    assert [record.loss for record in recorder.records] == [100.0]
    assert values([network.w]) == [99.0]


# Invalid arguments


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"reduction": "none"}, ValueError, "'reduction' must be one of 'mean', 'sum', but got 'none'."),
        ({"tail": "keep"}, ValueError, "'tail' must be one of 'flush', 'carry', 'drop', but got 'keep'."),
        ({"weight": 0}, ValueError, "'weight' must be a finite number > 0, but got 0.0."),
        ({"weight": "rows"}, TypeError, "'weight' must be a number > 0, but got 'rows'"),
        ({"weight": 2, "reduction": "sum"}, ValueError, "'weight' must come with reduction='mean', but got 'sum'."),
    ],
)
def test_invalid_arguments(options, error, match):
    with pytest.raises(error) as caught:
        slope_driver(**options)
    assert str(caught.value).startswith(f"For 'GradientAccumulation', {match}")


def test_invalid_network_or_optimizer_is_rejected():
    network = Slope()
    with pytest.raises(TypeError, match="'network' must be a Cell, but got int"):
        GradientAccumulation(4, None, nn.SGD([network.w], 1.0))
    with pytest.raises(TypeError, match="'optimizer' must be a MindSpore optimizer, but got Slope"):
        GradientAccumulation(network, None, network)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0,), {"mini_steps": 2}, ValueError, "'epoch' must be an int >= 1, but got 0"),
        ((1,), {"mini_steps": 0}, ValueError, "'mini_steps' must be an int >= 1, but got 0"),
    ],
)
def test_invalid_train_process_arguments(arguments, options, error, match):
    with pytest.raises(error, match=f"For 'train_process', {match}"):
        slope_driver().train_process(*arguments, [micro_batch(1)] * 4, report=(), ckpt_path=None, **options)
