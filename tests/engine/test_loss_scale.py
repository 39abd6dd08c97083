"""Does the loss scale leave training unchanged, and is it lowered after an overflow?"""

from __future__ import annotations

import gc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn

from helpers import Recorder, micro_batch, run
from ms_accum import (
    Accumulator,
    Checkpointer,
    Ema,
    GradientAccumulation,
    Stopped,
)
from ways import WAYS, Half, Root, Trained

ROWS = [(1.0, 2.0, 2), (3.0, -1.0, 4), (0.5, 0.25, 1), (-2.0, 1.0, 2), (4.0, 4.0, 4)]


def inputs(rows=ROWS):
    return [micro_batch(a, b, rows=count) for a, b, count in rows]


@pytest.mark.usefixtures("eager")
def test_overflows_do_not_end_run_and_are_counted_separately():
    trained = Trained("driver", Half(), window=1, loss_scale=amp.DynamicLossScaler(2.0**30, 2, 500))
    trained.train([micro_batch(1.0, 1.0)] * 20)
    records, model = trained.recorder.records, trained.system
    assert (model.updates, model.skipped, model.overflows) == (5, 15, 15)
    assert [record.overflow for record in records] == [True] * 15 + [False] * 5
    with pytest.raises(RuntimeError, match="the gradients of 10 windows in a row were not finite"):
        trained.train([micro_batch(np.nan, 1.0)] * 20)
    assert model.overflows == 15


@pytest.mark.usefixtures("eager")
def test_window_of_weight_0_does_not_lower_dynamic_scale():
    """Its mean, 0/0, is not finite, but no overflow."""
    scaler, network = amp.DynamicLossScaler(64.0, 2, 500), Half()
    system = Accumulator(nn.SGD([network.w], 1.0), 2, reduction="mean", loss_scale=scaler)
    for _ in range(2):
        system((Tensor([1.0, 1.0], ms.float32),), 0.0)
    assert (int(system.updates), int(system.skipped)) == (0, 1) and float(scaler.scale_value.asnumpy()) == 64.0


GOOD, NO_GRADIENT = micro_batch(1.0, 4.0), micro_batch(0.0, 1.0)  # of Root; the second one's loss is finite


def scales_of(micro_batches, initial, window):
    """Train with windows of 1; return the driver, and the scale after each."""
    trained = Trained("driver", Root(), 1, lr=0.01, loss_scale=amp.DynamicLossScaler(initial, 2, window))
    recorder = run(trained.system, micro_batches, 1, watch=lambda: trained.system.loss_scale)
    return recorder, trained.system


@pytest.mark.usefixtures("eager")
def test_scale_of_1_is_not_lowered():
    """A gradient that is not finite then has another cause."""
    recorder, model = scales_of([GOOD] + [NO_GRADIENT] * 3, 2.0, 500)
    assert recorder.seen == [2.0, 1.0, 1.0, 1.0] and (model.updates, model.skipped, model.overflows) == (1, 3, 1)
    assert [record.overflow for record in recorder.records] == [False, True, False, False]


@pytest.mark.usefixtures("eager")
def test_scale_grows_after_updates_without_an_overflow_between():
    recorder, _ = scales_of([GOOD, NO_GRADIENT, GOOD, GOOD, GOOD, GOOD], 64.0, 2)
    assert recorder.seen == [64.0, 32.0, 32.0, 64.0, 64.0, 128.0]


class Run:
    """A run that overflows at its beginning, and whose scale grows later."""

    def __init__(self):
        scaler = amp.DynamicLossScaler(2.0**18, 2, 3)
        self.network, self.recorder = Half(), Recorder()
        self.optimizer = nn.Momentum([self.network.w], 0.1, 0.9)
        self.model = GradientAccumulation(self.network, None, self.optimizer, loss_scale=scaler, check="off")
        self.scaler = scaler

    def stop_after(self, windows, folder):
        """Train until a stop is requested in the next window."""
        stop = Checkpointer(folder, stop=lambda: len(self.recorder.records) == windows)
        with pytest.raises(Stopped):
            self.train(stop)

    def train(self, states=None):
        data = [micro_batch(1.0, number / 8) for number in range(9)]
        self.model.train_process(2, data, 2, report=self.recorder, ckpt_path=None, checkpointer=states)
        return self

    @property
    def left(self):
        parameters = (self.network.w, *self.optimizer.moments, self.scaler.scale_value)
        counts = (self.model.updates, self.model.skipped, self.model.overflows)
        return [parameter.asnumpy().tolist() for parameter in parameters], counts


@pytest.mark.usefixtures("eager")
def test_resuming_with_other_scale_is_rejected(tmp_path):
    Run().stop_after(1, tmp_path)
    plain = Run()
    plain.model = GradientAccumulation(plain.network, None, plain.optimizer, check="off")
    with pytest.raises(ValueError, match="loss_scale"):
        plain.train(Checkpointer(tmp_path, resume="auto"))


@pytest.mark.usefixtures("eager")
def test_overflows_before_a_stop_are_not_those_of_the_resumed_run(tmp_path):
    Run().stop_after(3, tmp_path)
    resumed, whole = Run().train(Checkpointer(tmp_path, resume="auto")), Run().train()
    overflows = [record.overflow for record in whole.recorder.records]
    assert overflows[:4] == [True, True, True, False] and resumed.left == whole.left
    assert [record.overflow for record in resumed.recorder.records] == overflows[3:]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0, ValueError, "'loss_scale' must be a finite number > 0, but got 0"),
        (
            "dynamic",
            TypeError,
            "'loss_scale' must be a number, or a loss scaler or a loss scale manager of mindspore.amp",
        ),
    ],
)
def test_invalid_scale_is_rejected(scale, error, message):
    with pytest.raises(error, match=message):
        Trained("driver", Half(), loss_scale=scale)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
def test_optimizer_with_own_loss_scale_is_rejected(way):
    def make(parameters):
        return nn.SGD(parameters, 1.0, loss_scale=64.0)

    with pytest.raises(ValueError, match="'loss_scale' must be None for an optimizer with loss_scale=64, but got 64"):
        Trained(way, Half(), make=make, loss_scale=64)


@pytest.mark.usefixtures("eager")
def test_scale_shared_by_two_optimizers_is_rejected():
    """The first to end a window would change it inside the other's window."""
    scaler = amp.DynamicLossScaler(64.0, 2, 50)
    first = Trained("driver", Half(), loss_scale=scaler)
    message = "'loss_scale' must be a separate one for each optimizer, but got one that another optimizer uses"
    with pytest.raises(ValueError, match=message):
        Trained("accumulator", Half(), loss_scale=scaler)
    del first
    gc.collect()
    assert Trained("accumulator", Half(), loss_scale=scaler).train(inputs()).updates == 3


@pytest.mark.usefixtures("eager")
def test_resume_with_allowed_change_starts_new_scale(tmp_path):
    def stopped(folder, run):
        run.stop_after(2, folder)
        return Checkpointer(folder, resume="auto", allow_config_change=True)

    def plain(**options):
        run = Run()
        run.model = GradientAccumulation(run.network, None, run.optimizer, check="off", **options)
        return run

    without = plain().train(stopped(tmp_path / "dynamic", Run()))
    assert without.model.updates == 10 - 2 and without.model.loss_scale == 1  # two overflows before the stop
    run = Run()
    run.train(stopped(tmp_path / "plain", plain(ema=Ema(0.5))))
    assert 0 < run.model.overflows == 10 - run.model.updates  # its scale begins anew; the average is left out
