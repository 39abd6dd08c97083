"""Is the average of the weights the one that its definition says, on the update clock?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.train import Callback, Model

from helpers import Slope, micro_batch, values
from ms_accum import AccumulatedTrainStep, Checkpointer, Ema, FlushTail, GradientAccumulation, Stopped
from ms_accum.numerics.collaborators import Numerics
from reference import miss
from runs import stop_after
from test_train_step import dataset
from ways import WAYS, Half, Root, Trained

DATA = [micro_batch(float(a), float(b)) for a, b in np.random.RandomState(3).randint(-4, 5, (14, 2))]


def expected(weights, decay, warm_up=0):
    """The average of the weights after each update, by its definition."""
    average = None
    for number, each in enumerate(np.asarray(weights, np.float64), 1):
        factor = min(decay, (number - 1) / number) if number <= max(warm_up, 1) else decay
        average = each if average is None else factor * average + (1 - factor) * each
    return average


def trained(way, ema, window=2, data=DATA, network=None, **options):
    """Train window by window; return the weights after each update, and the average."""
    run = Trained(way, network or Slope(2), window, lr=0.25, ema=ema, **options)
    seen = []
    for first in range(0, len(data), window):
        before = run.updates
        run.train(data[first : first + window])
        seen += [run.weights] * (run.updates - before)
    return seen, ema.state["of.w"].asnumpy()


@pytest.mark.modes
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("decay", "warm_up"), [(0.75, 0), (0.9, 4), (0.5, 100), (0.0, 0)])
def test_the_average_is_that_of_the_updates(way, decay, warm_up):
    seen, average = trained(way, Ema(decay, warm_up))
    assert len(seen) == 7
    assert miss([average], [expected(seen, decay, warm_up)], 1e-6, 1e-7) <= 1


@pytest.mark.parametrize("way", WAYS)
def test_the_average_in_graph_mode(way):
    test_the_average_is_that_of_the_updates(way, 0.9, 4)


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_an_average_on_the_micro_batch_clock_is_noticed(way, monkeypatch):
    step = Ema.after_window
    monkeypatch.setattr(Ema, "after_window", lambda self, updated: (step(self, updated), step(self, updated))[0])
    seen, average = trained(way, Ema(0.9))
    assert miss([average], [expected(seen, 0.9)], 1e-6, 1e-7) >= 100


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_windows_of_one_are_averaged(way):
    seen, average = trained(way, Ema(0.75), window=1)
    assert miss([average], [expected(seen, 0.75)], 1e-6, 1e-7) <= 1


@pytest.mark.modes
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_window_changes_nothing(way):
    bad = [micro_batch(np.nan, 1.0)] * 2
    ema = Ema(0.75)
    seen, average = trained(way, ema, data=[*bad, *DATA[:6], *bad])
    assert len(seen) == 3 == ema.updates
    assert miss([average], [expected(seen, 0.75)], 1e-6, 1e-7) <= 1


@pytest.mark.both
def test_it_is_applied_and_taken_back():
    ema = Ema(0.75)
    run = Trained("driver", Slope(2), lr=0.25, ema=ema).train(DATA)
    before, average = run.weights, ema.state["of.w"].asnumpy()
    with ema.applied():
        assert run.weights.tolist() == average.tolist() != before.tolist() and ema.is_applied
        with pytest.raises(RuntimeError, match="the averages are already applied"), ema.applied():
            pass
    assert run.weights.tolist() == before.tolist() and not ema.is_applied
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert run.weights.tolist() == before.tolist()
    again = Trained("driver", Slope(2), lr=0.25, ema=Ema(0.75)).train(DATA)
    again.train(DATA)
    assert run.train(DATA).weights.tolist() == again.weights.tolist()  # training continues from the weights


@pytest.mark.host
def test_weights_that_are_loaded_before_the_first_update_are_averaged():
    ema = Ema(0.5)
    run = Trained("accumulator", Slope(2), lr=0.25, ema=ema)
    ops.assign(run.network.w, run.network.w + 100)
    run.train(DATA[:2])
    assert ema.state["of.w"].asnumpy().tolist() == run.weights.tolist()


class Looks(Callback):
    """Keeps the weights that an evaluation sees."""

    def __init__(self, network):
        self.network, self.seen = network, []

    def on_eval_step_end(self, run_context):
        self.seen.append(self.network.w.asnumpy().tolist())


class Thrice(nn.Cell):
    """The loss as loss, output and label: what `Model` wants of a network for an evaluation."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x):
        loss = self.network(x)
        return loss, loss, loss


@pytest.mark.both
def test_evaluations_use_the_average():
    ema, network = Ema(0.75), Slope(2)
    model, looks = GradientAccumulation(network, None, nn.SGD([network.w], 0.25), ema=ema), Looks(network)
    model.train_process(2, DATA, 2, callbacks=looks, valid_dataset=DATA[:1], report=(), ckpt_path=None)
    assert (
        len(looks.seen) == 2 and looks.seen[1] == ema.state["of.w"].asnumpy().tolist() != network.w.asnumpy().tolist()
    )


@pytest.mark.both
def test_so_do_those_of_model():
    ema, network = Ema(0.75), Slope(2)
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 0.25), 2, ema=ema, check="off")
    model, looks = Model(step, eval_network=Thrice(network), eval_indexes=[0, 1, 2], metrics={"loss"}), Looks(network)
    model.fit(2, dataset(DATA), dataset(DATA[:1]), callbacks=[FlushTail(), looks], dataset_sink_mode=False)
    assert (
        len(looks.seen) == 2 and looks.seen[1] == ema.state["of.w"].asnumpy().tolist() != network.w.asnumpy().tolist()
    )


@pytest.mark.host
def test_what_is_trained_are_the_weights_themselves():
    """What is learned with the averages in their place would be lost at the end of the block."""
    ema, network = Ema(0.75), Slope(2)
    model = GradientAccumulation(network, None, nn.SGD([network.w], 0.25), ema=ema)
    model.train_process(1, DATA, 2, report=(), ckpt_path=None)
    message = "the averages of 'ema' are applied. Leave that block before training"
    with ema.applied(), pytest.raises(RuntimeError, match=message):
        model.train_process(1, DATA, 2, report=(), ckpt_path=None)
    other = Ema(0.5)
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 0.25), 2, ema=other, check="off")
    Model(step).train(1, dataset(DATA), callbacks=[FlushTail()], dataset_sink_mode=False)
    with other.applied(), pytest.raises(RuntimeError, match=message):
        Model(step).train(1, dataset(DATA), callbacks=[FlushTail()], dataset_sink_mode=False)


def resumed(folder, stop):
    def make():
        network = Slope(2)
        ema = Ema(0.75, warm_up=3)
        return GradientAccumulation(network, None, nn.Momentum([network.w], 0.25, 0.9), ema=ema), ema

    def train(model, **options):
        model.train_process(1, DATA, 2, report=(), ckpt_path=None, **options)

    whole, expected = make()
    train(whole)
    first, _ = make()
    with pytest.raises(Stopped):
        train(first, checkpointer=Checkpointer(folder, stop=stop_after(stop)))
    again, found = make()
    train(again, checkpointer=Checkpointer(folder, resume="auto"))
    return [values(ema.state.values()) for ema in (found, expected)]


@pytest.mark.both
@pytest.mark.parametrize("stop", [3, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 4, 9))])
def test_a_resumed_run_has_the_same(tmp_path, stop):
    found, expected = resumed(tmp_path, stop)
    assert all((one == other).all() for one, other in zip(found, expected))


def test_an_average_that_is_not_saved_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(Numerics, "state", property(lambda self: {}))
    found, expected = resumed(tmp_path, 9)
    assert not all((one == other).all() for one, other in zip(found, expected))


@pytest.mark.host
def test_parameters_of_float16_are_averaged_in_float32():
    ema = Ema(0.999)
    run = Trained("driver", Slope(2, ms.float16), lr=0.25, ema=ema).train(DATA)
    assert ema.state["of.w"].dtype == ms.float32 and run.updates == 7
    with ema.applied():
        assert run.network.w.dtype == ms.float16


@pytest.mark.host
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0,), ValueError, "For 'Ema', 'decay' must be a number >= 0 and < 1, but got 1.0"),
        ((-0.1,), ValueError, "'decay' must be a number >= 0 and < 1"),
        ((float("nan"),), ValueError, "'decay' must be a number >= 0 and < 1"),
        (("0.9",), TypeError, "'decay' must be a number >= 0 and < 1, but got '0.9'"),
        ((0.9, -1), ValueError, "'warm_up' must be an int >= 0, but got -1"),
        ((0.9, 1.5), ValueError, "'warm_up' must be an int >= 0, but got 1.5"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Ema(*arguments)


@pytest.mark.host
def test_it_serves_one_optimizer():
    ema = Ema(0.9)
    with pytest.raises(RuntimeError, match="'applied' needs averages"), ema.applied():
        pass
    Trained("driver", Root(), ema=ema)
    with pytest.raises(RuntimeError, match="no average before the first update"), ema.applied():
        pass
    with pytest.raises(ValueError, match="'ema' must be a new one for each optimizer, but got one that is in use"):
        Trained("driver", Half(), ema=ema)
    with pytest.raises(TypeError, match="'ema' must be an Ema, but got float"):
        Trained("driver", Half(), ema=0.9)
