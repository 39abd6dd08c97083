"""MindSpore's Model with the train step and its callback trains as with one large batch."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    Model,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TimeMonitor,
)

from helpers import Losses, Slope, batches, cross_entropy, dataset, joined, micro_batch
from ms_accum import (
    AccumulatedTrainStep,
    Checkpointer,
    CheckpointError,
    Ema,
    FlushTail,
    GradientAccumulation,
    SaveStates,
    Stopped,
)
from reference import digest, miss

ROWS = [8, 8, 5, 8, 8, 8, 5]
N = 3


def make_micro_batches(rows=ROWS, seed=3):
    return batches(np.random.RandomState(seed), rows)


def network_of():
    ms.set_seed(1)
    return nn.SequentialCell(nn.Flatten(), nn.Dense(6, 5), nn.ReLU(), nn.Dense(5, 3))


class Trained:
    """A network, its optimizer, and the step for Model."""

    def __init__(self, lr=0.05, make=nn.Momentum, **options):
        self.network, loss_fn = network_of(), cross_entropy()
        arguments = (lr, 0.9) if make is nn.Momentum else (lr,)
        self.optimizer = make(self.network.trainable_params(), *arguments)
        options = {"gradient_accumulation_steps": N, "clip_norm": 0.5, **options}
        self.step = AccumulatedTrainStep((self.network, loss_fn), self.optimizer, **options)
        evaluated = nn.WithEvalCell(self.network, loss_fn)
        self.model = Model(self.step, eval_network=evaluated, eval_indexes=[0, 1, 2], metrics={"acc"})

    def train(self, *callbacks, micro_batches=None, epochs=2, **options):
        data = dataset(micro_batches or make_micro_batches())
        self.model.train(epochs, data, callbacks=[*callbacks, FlushTail()], **options)
        return self

    def fit(self, *callbacks, epochs=2, valid=None):
        valid = dataset(valid or make_micro_batches([8, 3], seed=5))
        self.model.fit(epochs, dataset(make_micro_batches()), valid, callbacks=list(callbacks))
        return self

    @property
    def weights(self):
        return [parameter.asnumpy().copy() for parameter in self.optimizer.parameters]


# The weight of a micro-batch


def positive(x, y):
    return (y > 0).sum()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("weight", [1e-20, 1e20])
def test_size_of_weights_does_not_matter(weight):
    """Each is divided by their sum before it multiplies anything."""
    network = Slope()
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 1.0), 2, weight=weight, check="off")
    for value in (1.0, 3.0):
        step(*micro_batch(value))
    assert (step.updates, step.skipped) == (1, 0)
    assert network.w.asnumpy()[0] == -2.0


NOTHING = Tensor(np.full(4, -100, np.int32))
SUMMED = {"mean losses": nn.CrossEntropyLoss(), "sums": nn.CrossEntropyLoss(reduction="sum")}


def trained_with_sums(way, window, data, loss_fn=SUMMED["sums"], **options):
    """Train with sums over the labels; without a gradient the weights still move."""
    network = network_of()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9, weight_decay=0.1)
    if way == "driver":
        system = GradientAccumulation(network, loss_fn, optimizer, reduction="sum", **options)
        system.train_process(1, data, window, report=(), ckpt_path=None)
    else:
        system = AccumulatedTrainStep((network, loss_fn), optimizer, window, reduction="sum", **options)
        Model(system).train(1, dataset(data), callbacks=[FlushTail()], dataset_sink_mode=False)
    return [parameter.asnumpy() for parameter in optimizer.get_parameters()], system


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", ["driver", "step"])
@pytest.mark.parametrize("loss", SUMMED)
@pytest.mark.parametrize(
    "options", [{}, {"nonfinite": "skip_micro"}, {"loss_scale": 8.0}, {"nonfinite": "raise"}], ids=str
)
def test_sum_over_no_labels_is_zero_and_updates(way, loss, options):
    """For windows of 1 and of 2 alike: the weights move, and decay."""
    (first, first_labels), (second, second_labels), (third, _), (fourth, _) = make_micro_batches([4] * 4)
    if loss == "mean losses":  # each of the four labels of a micro-batch, so that the sums of means are a quarter
        options = {**options, "loss_fn": SUMMED[loss]}
    for window in (1, 2):
        data = [(first, first_labels), (second, second_labels), (third, NOTHING), (fourth, NOTHING)]
        parameters, system = trained_with_sums(way, window, data, **options)
        assert (system.updates, system.skipped, system.left_out) == (4 // window, 0, 0)
        if loss == "sums":  # windows of complete batches, which decay the weights alike
            large = [joined(data[at : at + window]) for at in range(0, 4, window)]
            assert miss(parameters, trained_with_sums(way, 1, large)[0], 1e-5, 1e-7) <= 1


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("window", [1, 2])
def test_window_without_labels_does_not_hide_nan(window):
    """It was counted as one that is not finite, and then the next NaN was not."""
    good = make_micro_batches([4] * 4)
    bad = (Tensor(np.full((4, 6), np.nan, np.float32)), good[0][1])
    data = [(good[0][0], NOTHING), (good[1][0], NOTHING), good[2], bad]
    with pytest.raises(FloatingPointError, match="a gradient in epoch 1 is not finite, and nonfinite='raise'"):
        trained_with_sums("step", window, data, nonfinite="raise")


# What callbacks see


@pytest.mark.usefixtures("eager")
def test_tail_is_applied_before_evaluation_and_saving(tmp_path):
    trained, evaluated = Trained(), []

    class Sees(Callback):
        def on_eval_begin(self, run_context):
            evaluated.append((trained.step.updates, trained.weights[0]))

    config = CheckpointConfig(save_checkpoint_steps=7)
    trained.fit(Sees(), ModelCheckpoint("mine", str(tmp_path), config), TimeMonitor(), FlushTail())
    for epoch, (updates, weights) in enumerate(evaluated, 1):
        saved = ms.load_checkpoint(str(tmp_path / f"mine-{epoch}_7.ckpt"))
        np.testing.assert_array_equal(saved["1.weight"].asnumpy(), weights)
        assert updates == 3 * epoch
    assert sorted(saved) == sorted(parameter.name for parameter in trained.step.get_parameters())
    assert not any("accum" in name or "train_step" in name for name in saved)
    ms.load_param_into_net(network_of(), saved, strict_load=True)


def test_learning_rate_scheduler_and_lambda_callback():
    """The rate that is used is that of the window's last micro-batch; the gradient is 1."""
    network, seen = Slope(), []
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 1.0), 2)
    schedule = LearningRateScheduler(lambda lr, micro_batch: 1.0 / (micro_batch + 1))
    ends = LambdaCallback(on_train_epoch_end=lambda context: seen.append(context.original_args().cur_step_num))
    ones = [(Tensor(np.ones((4, 1), np.float32)),)] * 6
    Model(step).train(1, dataset(ones), callbacks=[schedule, ends, FlushTail()])
    assert -network.w.asnumpy() == pytest.approx(1 / 2 + 1 / 4 + 1 / 6)  # it acts after a micro-batch
    assert seen == [6]


# Resumed


def train_resumable(folder, stop=None, epochs=2):
    """Train, or resume; return the losses and the final state, which is None if the run was stopped."""
    trained, losses = Trained(), Losses()
    data = dataset(make_micro_batches())
    asked = None if stop is None else lambda: len(losses.seen) == stop
    states = SaveStates(Checkpointer(folder, resume="auto", stop=asked), trained.step, data)
    callbacks = [states, FlushTail()]
    try:
        trained.model.train(epochs, data, callbacks=[losses, *callbacks], initial_epoch=states.initial_epoch)
    except Stopped:
        return losses.seen, None
    state = digest(parameter.asnumpy() for parameter in trained.optimizer.get_parameters())
    return losses.seen, (state, trained.step.updates)


@pytest.mark.usefixtures("eager")
def test_resuming_before_epoch_end_warns(tmp_path):
    train_resumable(tmp_path, 7)
    with pytest.warns(
        RuntimeWarning, match="stopped before the end of epoch 1, whose evaluation and callbacks are not"
    ):
        SaveStates(Checkpointer(tmp_path, resume="auto"), Trained().step, dataset(make_micro_batches()))


@pytest.mark.usefixtures("eager")
def test_data_set_of_a_resumed_run_begins_anew_after_it(tmp_path):
    train_resumable(tmp_path, 5)
    trained, data = Trained(), dataset(make_micro_batches())
    states = SaveStates(Checkpointer(tmp_path, resume="auto"), trained.step, data)
    trained.model.train(2, data, callbacks=[FlushTail(), states], initial_epoch=states.initial_epoch)
    assert len(list(data.create_tuple_iterator(num_epochs=1))) == data.get_dataset_size()


@pytest.mark.usefixtures("eager")
def test_restored_weights_are_saved(tmp_path):
    """The state of the last window is saved already when EarlyStopping loads the best epoch's weights."""
    trained, data = Trained(lr=8.0, make=nn.SGD, clip_norm=None), dataset(make_micro_batches())
    states = SaveStates(Checkpointer(tmp_path, every=1), trained.step, data)
    stop = EarlyStopping("eval_loss", patience=1, restore_best_weights=True)
    trained.model.fit(9, data, dataset(make_micro_batches([8, 3], seed=5)), callbacks=[FlushTail(), states, stop])
    other, data = Trained(lr=8.0, make=nn.SGD, clip_norm=None), dataset(make_micro_batches())
    SaveStates(Checkpointer(tmp_path, resume="auto"), other.step, data)
    np.testing.assert_array_equal(other.weights[0], trained.weights[0])


@pytest.mark.usefixtures("eager")
def test_stop_request_saves_open_window(tmp_path):
    trained, data = Trained(), dataset(make_micro_batches())
    states = SaveStates(Checkpointer(tmp_path / "stopped"), trained.step, data)
    stop = LambdaCallback(on_train_step_end=lambda c: c.original_args().cur_step_num == 5 and c.request_stop())
    trained.model.train(2, data, callbacks=[stop, states, FlushTail()])
    assert trained.step.micro_batches == 2
    assert train_resumable(tmp_path / "stopped")[1] == train_resumable(tmp_path / "whole")[1]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": [8] * 7}, "'dataset' must be the one that Model trains on, but got another one"),
        (
            {"initial_epoch": 0},
            "'initial_epoch' must be 1, the number of epochs that the resumed run has finished, but got 0. Pass",
        ),
    ],
)
def test_mismatched_resumed_run_is_rejected(tmp_path, options, message):
    train_resumable(tmp_path, 9)
    trained, data = Trained(), dataset(make_micro_batches())
    states = SaveStates(Checkpointer(tmp_path, resume="auto"), trained.step, data)
    trained_on = dataset(make_micro_batches(options["data"])) if "data" in options else data
    initial = options.get("initial_epoch", states.initial_epoch)
    with pytest.raises(ValueError, match=message):
        trained.model.train(2, trained_on, callbacks=[states, FlushTail()], initial_epoch=initial)


@pytest.mark.usefixtures("eager")
def test_epochs_of_another_length_are_rejected(tmp_path):
    train_resumable(tmp_path, 4)
    with pytest.raises(CheckpointError, match="has epochs of 7 batches, but this data set has 3"):
        SaveStates(Checkpointer(tmp_path, resume="auto"), Trained().step, dataset(make_micro_batches([8] * 3)))


@pytest.mark.usefixtures("eager")
def test_save_states_cannot_be_reused(tmp_path):
    trained, data = Trained(), dataset(make_micro_batches())
    states = SaveStates(Checkpointer(tmp_path), trained.step, data)
    trained.model.train(1, data, callbacks=[states, FlushTail()])
    with pytest.raises(RuntimeError, match="a run of Model has used it already"):
        trained.model.train(1, data, callbacks=[states, FlushTail()])


@pytest.mark.usefixtures("eager")
def test_restarted_counting_callbacks_warn(tmp_path):
    train_resumable(tmp_path, 9)
    trained, data = Trained(), dataset(make_micro_batches())
    states = SaveStates(Checkpointer(tmp_path, resume="auto"), trained.step, data)
    callbacks = [FlushTail(), states, ReduceLROnPlateau("loss"), EarlyStopping("loss")]
    with pytest.warns(RuntimeWarning, match="EarlyStopping and ReduceLROnPlateau restart in a resumed run"):
        trained.model.train(2, data, callbacks=callbacks, initial_epoch=states.initial_epoch)


# Invalid arguments


@pytest.mark.usefixtures("eager")
def test_invalid_number_of_steps_is_rejected():
    with pytest.raises(ValueError, match="'gradient_accumulation_steps' must be an int >= 1, but got 0"):
        Trained(gradient_accumulation_steps=0)


@pytest.mark.usefixtures("eager")
def test_loss_function_as_network_is_rejected():
    with pytest.raises(TypeError, match="'network' must be a Cell, or a Cell and its loss function, but got function"):
        AccumulatedTrainStep(positive, nn.SGD(network_of().trainable_params(), 0.1))


@pytest.mark.usefixtures("eager")
def test_flush_tail_requires_accumulated_train_step():
    network = network_of()
    model = Model(network, cross_entropy(), nn.SGD(network.trainable_params(), 0.1))
    with pytest.raises(TypeError, match="'network' must be an AccumulatedTrainStep alone, but got .* Use Model"):
        model.train(1, dataset(make_micro_batches()), callbacks=[FlushTail()])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("weight", [1e-39, 1e-31, 3e38])
def test_loss_and_gradient_do_not_depend_on_the_size_of_weights(weight):
    network = Slope()
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 1.0), 2, weight=lambda x: weight)
    loss = [step(*micro_batch(value)) for value in (1.0, 3.0)][-1]
    assert network.w.asnumpy() == pytest.approx(-2.0) and step.grad_norm == pytest.approx(2.0)
    assert float(loss.asnumpy()) == 0.0  # the weights were 0
    step(*micro_batch(1.0))
    assert float(step(*micro_batch(3.0)).asnumpy()) == pytest.approx(-4.0)


@pytest.mark.usefixtures("eager")
def test_run_without_flush_tail_is_warned_of_once():
    """In a loop of the user's nothing is missing: it calls `flush`."""
    network, ones = Slope(), dataset([micro_batch(1)] * 3)
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 1.0), 2, check="off")
    step(*micro_batch(1))
    step.clear()
    with pytest.warns(RuntimeWarning, match="without the callback FlushTail.* lost after the last") as caught:
        Model(step).train(2, ones, dataset_sink_mode=False)
    assert len(caught) == 1 and step.updates == 3


@pytest.mark.usefixtures("eager")
def test_model_with_loss_and_step_is_rejected():
    trained = Trained()
    model = Model(trained.step, loss_fn=cross_entropy())
    with pytest.raises(TypeError, match="AccumulatedTrainStep alone, but got AccumulatedTrainStep with loss_fn or opt"):
        model.train(1, dataset(make_micro_batches()), callbacks=[FlushTail()])


# The edges of an epoch


@pytest.mark.usefixtures("eager")
def test_step_called_by_hand_after_an_interrupted_run_has_complete_windows():
    """Not one that ends where the interrupted epoch would have ended."""

    def fail(context):
        raise KeyError("mine")

    trained = Trained(gradient_accumulation_steps=3)
    with pytest.raises(KeyError):
        trained.model.train(
            1, dataset(make_micro_batches()[:2]), callbacks=[FlushTail(), LambdaCallback(on_train_step_end=fail)]
        )
    check_complete_windows(trained.step)


def check_complete_windows(step):
    step.set_train()
    ends = []
    for columns in make_micro_batches([8] * 3):
        step(*columns)
        ends.append(step.updated)
    assert ends == [False, False, True]


class Normalized(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Dense(6, 3, weight_init=0.1)

    def construct(self, x):
        return self.head(self.norm(ops.flatten(x)))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_window_that_a_stop_ends_is_trained_also_after_an_evaluation(evaluates):
    """A callback that evaluates leaves the layers in evaluation mode."""
    network = Normalized()
    step = AccumulatedTrainStep((network, cross_entropy()), nn.SGD(network.trainable_params(), 0.1), 3, check="off")
    model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"loss"})

    def stop(context):
        if context.original_args().cur_step_num == 2:
            if evaluates:
                model.eval(dataset(make_micro_batches([8])), dataset_sink_mode=False)
            context.request_stop()

    data = dataset(make_micro_batches())
    model.train(1, data, callbacks=[LambdaCallback(on_train_step_end=stop), FlushTail()], dataset_sink_mode=False)
    assert step.updates == 1 and network.norm.moving_mean.asnumpy().all()


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:.*without the callback FlushTail")
@pytest.mark.parametrize("stop", [*range(1, 15), None])
def test_windows_that_cross_epochs_are_resumed(stop, tmp_path):
    """Without `FlushTail`: the state may be that of a window that began in the epoch before."""

    def train(epochs, folder=None, stop=None):
        network = Slope()
        step, data = AccumulatedTrainStep(network, nn.SGD([network.w], 1.0), 4, check="off"), dataset(ones)
        counter = Losses()
        asked = None if stop is None else lambda: len(counter.seen) == stop
        callbacks, done = [counter], 0
        if folder is not None:
            callbacks.append(SaveStates(Checkpointer(folder, resume="auto", stop=asked), step, data))
            done = callbacks[1].initial_epoch
        Model(step).train(epochs, data, callbacks=callbacks, initial_epoch=done, dataset_sink_mode=False)
        return step.updates, step.micro_batches, network.w.asnumpy().tolist()

    ones = [(Tensor(np.full((2, 1), float(value), np.float32)),) for value in range(1, 6)]
    if stop is None:
        train(1, tmp_path)
    else:
        with pytest.raises(Stopped):
            train(3, tmp_path, stop)
    assert train(3, tmp_path) == train(3)


@pytest.mark.usefixtures("eager")
def test_predicting_returns_the_output_and_does_not_train():
    """By hand a step trains after `set_train`."""
    trained = Trained(gradient_accumulation_steps=1)
    before, (x, y) = trained.weights, make_micro_batches([8])[0]
    output = trained.model.predict(x)
    assert np.array_equal(output.asnumpy(), trained.network(x).asnumpy())
    assert np.array_equal(trained.model.predict(x, y).asnumpy(), output.asnumpy())
    for now, then in zip(trained.weights, before):
        np.testing.assert_array_equal(now, then)
    trained.step(x, y)
    assert trained.step.updates == 0
    trained.step.set_train()
    trained.step(x, y)
    assert trained.step.updates == 1


def test_predicting_after_an_evaluation_does_not_train():
    trained, data = Trained(gradient_accumulation_steps=1), make_micro_batches([8, 8])
    options = {"eval_network": trained.step.eval_network, "eval_indexes": [0, 1, 2], "metrics": {"acc"}}
    model, (x, y) = Model(trained.step, **options), data[0]
    for updates in (0, 2):
        model.eval(dataset(data), dataset_sink_mode=False)
        for columns in ((x,), (x, y)):
            assert np.array_equal(model.predict(*columns).asnumpy(), trained.network(x).asnumpy())
        assert trained.step.updates == updates
        model.train(1, dataset(data), callbacks=FlushTail(), dataset_sink_mode=False)
    assert trained.step.updates == 4


def test_predictions_are_those_of_the_average():
    """As evaluations with `eval_network`; a network that returns its loss returns it here, too."""
    network, ema = Slope(), Ema(0.5)
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 1.0), 1, ema=ema, check="off")
    model, ones = Model(step), [micro_batch(1)] * 2
    model.train(1, dataset(ones), callbacks=FlushTail(), dataset_sink_mode=False)
    predicted = float(model.predict(*micro_batch(1)).asnumpy())
    with ema.applied():
        assert predicted == pytest.approx(float(network(*micro_batch(1)).asnumpy()))
    assert predicted != pytest.approx(float(network(*micro_batch(1)).asnumpy()))


@pytest.mark.usefixtures("eager")
def test_skipped_windows_warn_and_too_many_end_run():
    bad = [(Tensor(np.full((8, 6), np.nan, np.float32)), y) for _, y in make_micro_batches([8] * 30)]
    with pytest.warns(RuntimeWarning, match="1 window skipped in epoch 1"):
        Trained().train(micro_batches=[*make_micro_batches([8] * 3), *bad[:3]], epochs=1)
    message = "the gradients of all 10 windows of an epoch were not finite"
    with pytest.raises(RuntimeError, match=message), pytest.warns(RuntimeWarning):
        Trained().train(micro_batches=bad, epochs=1)


class Epochs:
    """Yields these micro-batches in each epoch; the data set says that there are 5."""

    def __init__(self, *epochs):
        self.epochs = iter(epochs)

    def __iter__(self):
        for columns in next(self.epochs):
            yield tuple(column.asnumpy() for column in columns)

    def __len__(self):
        return 7

    @property
    def dataset(self):
        made = GeneratorDataset(self, ["x", "y"], shuffle=False)
        made.get_dataset_size = lambda: 5
        return made


GOOD = make_micro_batches([8] * 7)  # windows of 3 and 2, which the length ends, and of 2, which FlushTail ends
BAD = [*GOOD[:6], (Tensor(np.full((8, 6), np.nan, np.float32)), GOOD[6][1])]


@pytest.mark.usefixtures("eager")
def test_skipped_windows_warn_in_their_epoch_only():
    trained = Trained()
    with pytest.warns(RuntimeWarning, match="1 window skipped in epoch 2") as caught:
        trained.model.train(3, Epochs(GOOD, BAD, GOOD).dataset, callbacks=FlushTail())
    assert len(caught) == 1 and trained.step.counts == (8, 1)


@pytest.mark.usefixtures("eager")
def test_tail_that_is_not_finite_ends_the_run():
    trained = Trained(nonfinite="raise")
    with pytest.raises(FloatingPointError, match="a gradient in epoch 2 is not finite"):
        trained.model.train(3, Epochs(GOOD, BAD, GOOD).dataset, callbacks=FlushTail())
    assert trained.step.counts == (5, 1)


@pytest.mark.usefixtures("eager")
def test_tail_is_not_trained_while_averages_are_applied():
    """A callback has evaluated at the end of the epoch, before `FlushTail` ends the window."""
    trained, plain, valid = Trained(ema=Ema(0.75)), Trained(), dataset(GOOD[:1])
    model = Model(trained.step, eval_network=trained.step.eval_network, eval_indexes=[0, 1, 2], metrics={"loss"})
    evaluate = LambdaCallback(on_train_epoch_end=lambda run_context: model.eval(valid))
    model.train(2, Epochs(GOOD, GOOD).dataset, callbacks=[evaluate, FlushTail()])
    plain.model.train(2, Epochs(GOOD, GOOD).dataset, callbacks=FlushTail())
    assert trained.step.updates == plain.step.updates == 6 and not trained.step.ema.is_applied
    assert [each.tolist() for each in trained.weights] == [each.tolist() for each in plain.weights]
