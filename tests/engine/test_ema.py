"""Does the average of the weights follow its definition, once per update?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, Model

from helpers import Slope, dataset, micro_batch, run, slope_driver
from ms_accum import AccumulatedTrainStep, Checkpointer, Ema, FlushTail, GradientAccumulation, SaveStates
from ways import Half, Root, Trained

DATA = [micro_batch(float(a), float(b)) for a, b in np.random.RandomState(3).randint(-4, 5, (14, 2))]


@pytest.mark.usefixtures("each_mode")
def test_applied_sets_and_restores_weights():
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


class WeightsInEvaluation(Callback):
    """Records the weights in evaluations."""

    def __init__(self, network):
        self.network, self.seen = network, []

    def on_eval_step_end(self, run_context):
        self.seen.append(self.network.w.asnumpy().tolist())


class Thrice(nn.Cell):
    """The loss as loss, output and label: `Model` requires three outputs for an evaluation."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x):
        loss = self.network(x)
        return loss, loss, loss


@pytest.mark.usefixtures("each_mode")
def test_driver_evaluates_with_average():
    ema, network = Ema(0.75), Slope(2)
    model, recorder = (
        GradientAccumulation(network, None, nn.SGD([network.w], 0.25), ema=ema),
        WeightsInEvaluation(network),
    )
    model.train_process(2, DATA, 2, callbacks=recorder, valid_dataset=DATA[:1], report=(), ckpt_path=None)
    assert (
        len(recorder.seen) == 2
        and recorder.seen[1] == ema.state["of.w"].asnumpy().tolist() != network.w.asnumpy().tolist()
    )


@pytest.mark.usefixtures("each_mode")
def test_model_fit_evaluates_with_average():
    ema, network = Ema(0.75), Slope(2)
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 0.25), 2, ema=ema, check="off")
    model = Model(step, eval_network=Thrice(network), eval_indexes=[0, 1, 2], metrics={"loss"})
    recorder = WeightsInEvaluation(network)
    model.fit(2, dataset(DATA), dataset(DATA[:1]), callbacks=[FlushTail(), recorder], dataset_sink_mode=False)
    assert (
        len(recorder.seen) == 2
        and recorder.seen[1] == ema.state["of.w"].asnumpy().tolist() != network.w.asnumpy().tolist()
    )


class Monitor(Callback):
    """Evaluates by itself after each epoch, or each second step, and saves the best weights, as MindCV's does."""

    def __init__(self, rows, every_step=False):
        self.rows, self.every_step, self.model = rows, every_step, None
        self.losses, self.saved, self.names = [], [], []

    def evaluate(self, args):
        self.losses.append(self.model.eval(self.rows)["loss"])
        ms.save_checkpoint(args.train_network, "best.ckpt")
        saved = ms.load_checkpoint("best.ckpt")
        self.names.append(sorted(saved))
        self.saved.append(saved["w"].asnumpy().tolist())

    def on_train_step_end(self, run_context):
        args = run_context.original_args()
        if self.every_step and args.cur_step_num in range(2, 99, 2):
            self.evaluate(args)

    def on_train_epoch_end(self, run_context):
        if not self.every_step:
            self.evaluate(run_context.original_args())


def monitored(*, tail_first=True, own=True, epochs=2, data=DATA, **how):
    """Train with a callback that evaluates; return it, the Ema, the step, and the weights of a run without it."""
    plain, runs = Slope(2), []
    for network, callback in ((plain, None), (Slope(2), Monitor(dataset(DATA[:1]), **how))):
        ema = Ema(0.75)
        step = AccumulatedTrainStep(network, nn.SGD([network.w], 0.25), 2, ema=ema, check="off")
        evaluates = step.eval_network if own else Thrice(network)
        model = Model(step, eval_network=evaluates, eval_indexes=[0, 1, 2], metrics={"loss"})
        callbacks = [FlushTail()]
        if callback is not None:
            callback.model = model
            callbacks.insert(1 if tail_first else 0, callback)
        model.train(epochs, dataset(data), callbacks=callbacks, dataset_sink_mode=False)
        runs.append(step)
    return callback, step, plain.w.asnumpy()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("tail_first", [True, False])
def test_evaluation_in_callback_uses_average(tail_first):
    callback, step, plain = monitored(tail_first=tail_first)
    average = step.ema.state["of.w"].asnumpy()
    assert callback.saved[1] == average.tolist() != plain.tolist()
    assert callback.losses[1] == pytest.approx(float(np.sum(DATA[0][0].asnumpy() * average)), rel=1e-5)
    assert step.network.w.asnumpy().tolist() == plain.tolist() and not step.ema.is_applied
    assert all("w" in names and not any("eval" in name for name in names) for names in callback.names)


@pytest.mark.usefixtures("eager")
def test_training_continues_with_weights_after_evaluation():
    callback, step, plain = monitored(every_step=True)
    assert len(callback.saved) == 14 and step.network.w.asnumpy().tolist() == plain.tolist()


@pytest.mark.usefixtures("eager")
def test_evaluation_without_average_warns_once():
    with pytest.warns(RuntimeWarning, match="evaluated weights that are not averaged.*step.eval_network") as caught:
        callback, _, plain = monitored(own=False, epochs=3)
    assert len(caught) == 1 and callback.saved[2] == plain.tolist()


@pytest.mark.usefixtures("eager")
def test_error_after_evaluation_restores_weights():
    class Fails(Callback):
        def on_train_epoch_end(self, run_context):
            self.model.eval(dataset(DATA[:1]))
            assert ema.is_applied
            raise KeyError("a mistake of the user")

    ema, network, callback = Ema(0.75), Slope(2), Fails()
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 0.25), 2, ema=ema, check="off")
    callback.model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"loss"})
    with pytest.raises(KeyError):
        callback.model.train(1, dataset(DATA), callbacks=[FlushTail(), callback], dataset_sink_mode=False)
    assert not ema.is_applied
    before = network.w.asnumpy().tolist()
    loss = callback.model.eval(dataset(DATA[:1]))["loss"]  # after a run the average is applied for the evaluation alone
    assert loss == pytest.approx(float(np.sum(DATA[0][0].asnumpy() * ema.state["of.w"].asnumpy())), rel=1e-5)
    assert not ema.is_applied and network.w.asnumpy().tolist() == before != ema.state["of.w"].asnumpy().tolist()


@pytest.mark.usefixtures("eager")
def test_training_state_contains_weights_not_averages(tmp_path):
    network, ema = Slope(2), Ema(0.75)
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 0.25), 2, ema=ema, check="off")
    rows, callback = dataset(DATA), Monitor(dataset(DATA[:1]))
    callback.model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"loss"})
    states = SaveStates(Checkpointer(str(tmp_path / "states")), step, rows)
    callback.model.train(1, rows, callbacks=[FlushTail(), callback, states], dataset_sink_mode=False)
    trained_to = network.w.asnumpy().tolist()
    again = Slope(2)
    other = AccumulatedTrainStep(again, nn.SGD([again.w], 0.25), 2, ema=Ema(0.75), check="off")
    SaveStates(Checkpointer(str(tmp_path / "states"), resume="auto"), other, dataset(DATA)).__exit__(KeyError)
    assert again.w.asnumpy().tolist() == trained_to != callback.saved[0]


@pytest.mark.usefixtures("eager")
def test_training_with_applied_average_is_rejected():
    """What is trained while the averages are applied would be lost at the end of the block."""
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


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", ["driver", "step", "accumulator"])
def test_flush_with_applied_average_is_rejected(way):
    ema = Ema(0.75)
    run = Trained(way, Slope(2), 3, lr=0.25, ema=ema, **({"tail": "carry"} if way == "driver" else {}))
    original_flush = run.system.flush
    if way != "driver":  # its epochs would end with a flush
        run.system.flush = lambda: False
    run.train(DATA[:4])
    run.system.flush = original_flush
    before = run.weights
    with ema.applied():
        with pytest.raises(RuntimeError, match="For '.*', the averages of 'ema' are applied. Leave that block"):
            run.system.flush()
        assert (run.updates, run.system.micro_batches) == (1, 1)
    assert run.weights.tolist() == before.tolist()
    assert run.system.flush() and (run.updates, ema.updates) == (2, 2)
    with ema.applied():
        assert not run.system.flush()  # no window is open


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", ["cells", "accumulator"])
def test_updates_inside_applied_block_raise(way):
    """A compiled step can't see that the averages are applied."""
    ema = Ema(0.75)
    run = Trained(way, Slope(2), 2, lr=0.25, ema=ema).train(DATA[:4])
    before = run.weights
    message = "'applied' must be left before training, but got 2 updates inside the block, which are lost"
    with pytest.raises(RuntimeError, match=message), ema.applied():
        run.train(DATA[:4])
    assert run.weights.tolist() == before.tolist() and not ema.is_applied
    with ema.applied():
        pass
    with pytest.raises(KeyError, match="another error"), ema.applied():
        run.train(DATA[:4])
        raise KeyError("another error")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("arguments", [(0.75, 4), (0.5, 3)])
def test_other_averages_do_not_resume(arguments, tmp_path):
    run(slope_driver(columns=2, ema=Ema(0.75, 3)), DATA[:2], 2, checkpointer=Checkpointer(tmp_path))
    model, states = slope_driver(columns=2, ema=Ema(*arguments)), Checkpointer(tmp_path, resume="auto")
    with pytest.raises(ValueError, match="belongs to a run with other settings: ema was .*0.75.*3.* and is"):
        run(model, DATA[:2], 2, epochs=2, checkpointer=states)


@pytest.mark.usefixtures("eager")
def test_float16_parameters_are_averaged_in_float32():
    ema = Ema(0.999)
    run = Trained("driver", Slope(2, ms.float16), lr=0.25, ema=ema).train(DATA)
    assert ema.state["of.w"].dtype == ms.float32 and run.updates == 7
    with ema.applied():
        assert run.network.w.dtype == ms.float16


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0,), ValueError, "For 'Ema', 'decay' must be a number >= 0 and < 1, but got 1.0"),
        (("0.9",), TypeError, "'decay' must be a number >= 0 and < 1, but got '0.9'"),
        ((0.9, -1), ValueError, "'warm_up' must be an int >= 0, but got -1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, error, message):
    with pytest.raises(error, match=message):
        Ema(*arguments)


@pytest.mark.usefixtures("eager")
def test_ema_belongs_to_one_optimizer():
    ema = Ema(0.9)
    with pytest.raises(RuntimeError, match="'applied' needs averages"), ema.applied():
        pass
    Trained("driver", Root(), ema=ema)
    with pytest.raises(RuntimeError, match="no average before the first update"), ema.applied():
        pass
    with pytest.raises(ValueError, match="'ema' must be a new one for each optimizer, but got one that is in use"):
        Trained("driver", Half(), ema=ema)
