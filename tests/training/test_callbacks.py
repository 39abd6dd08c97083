"""Do MindSpore's callbacks, and evaluation, work in the driver as they do in Model?"""

from __future__ import annotations

import os
import time

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    LossMonitor,
    Metric,
    ModelCheckpoint,
    ReduceLROnPlateau,
)

from helpers import Recorder, batches, cross_entropy, micro_batch, slope_driver
from ms_accum import Checkpointer, GradientAccumulation, Stopped
from ms_accum.saving import training_state

ROWS = [8, 8, 5, 8, 3]


def driver(lr=0.1, **options):
    ms.set_seed(1)
    network = nn.SequentialCell(nn.Flatten(), nn.Dense(6, 3))
    optimizer = nn.SGD(network.trainable_params(), lr)
    return GradientAccumulation(network, cross_entropy(), optimizer, **options), optimizer


def data(rows=ROWS, seed=3):
    return batches(np.random.RandomState(seed), rows)


def train(model, epochs=2, mini_steps=2, **options):
    recorder = Recorder()
    model.train_process(epochs, data(), mini_steps, report=recorder, ckpt_path=None, **options)
    return recorder.records


class RecordedCalls(Callback):
    """Records which methods are called, and the entries of `original_args` with these names."""

    def __init__(self, *names):
        self.names, self.moments = names, []

    def __enter__(self):
        self.moments.append("enter")
        return self

    def __exit__(self, *error):
        self.moments.append("exit")

    def keep(self, moment, run_context):
        args = run_context.original_args()
        self.moments.append((moment, *(args.get(name) for name in self.names)) if self.names else moment)


for moment in [f"on_{mode}_{part}" for mode in ("train", "eval") for part in
               ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")]:  # fmt: skip
    setattr(RecordedCalls, moment, lambda self, run_context, moment=moment: self.keep(moment, run_context))


# The moments


@pytest.mark.usefixtures("eager")
def test_window_is_a_step():
    recorded = RecordedCalls("cur_epoch_num", "cur_step_num", "batch_num", "record", "net_outputs")
    records = train(driver()[0], callbacks=[recorded])
    steps = [moment[1:] for moment in recorded.moments if moment[0] == "on_train_step_end"]
    assert [step[:3] for step in steps] == [(1, 1, 3), (1, 2, 3), (1, 3, 3), (2, 4, 3), (2, 5, 3), (2, 6, 3)]
    assert [(record.epoch, record.step) for record in records] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    for *_, record, outputs in steps:
        assert record in records and outputs.shape == () and float(outputs) == np.float32(record.loss)


@pytest.mark.usefixtures("eager")
def test_callback_methods_called_in_order_of_model():
    recorded = RecordedCalls()
    train(driver()[0], epochs=1, mini_steps=3, callbacks=recorded, valid_dataset=data([4]))
    step, evaluation = ["on_train_step_begin", "on_train_step_end"], ["begin", "epoch_begin", "step_begin", "step_end"]
    assert recorded.moments == [
        *("enter", "on_train_begin", "on_train_epoch_begin", *step, *step),
        *(f"on_eval_{part}" for part in (*evaluation, "epoch_end", "end")),
        *("on_train_epoch_end", "on_train_end", "exit"),
    ]


@pytest.mark.usefixtures("eager")
def test_callbacks_exited_after_error():
    class Fails(Callback):
        def on_train_step_end(self, run_context):
            raise KeyError("mine")

    recorded = RecordedCalls()
    with pytest.raises(KeyError, match="mine"):
        train(driver()[0], callbacks=[recorded, Fails()])
    assert recorded.moments[-1] == "exit"


@pytest.mark.usefixtures("eager")
def test_original_args_have_entries_of_model():
    model, optimizer = driver()
    names = ("train_network", "network", "optimizer", "loss_fn", "epoch_num", "mode", "list_callback", "train_dataset")
    recorded, dataset = RecordedCalls(*names), data()
    model.train_process(2, dataset, 2, report=(), ckpt_path=None, callbacks=recorded)
    args = dict(zip(names, recorded.moments[1][1:]))
    assert args["optimizer"] is optimizer and args["epoch_num"] == 2 and args["mode"] == "train"
    assert args["train_dataset"] is dataset and args["list_callback"] == [recorded]
    trained = {parameter.name for parameter in optimizer.parameters}
    assert {parameter.name for parameter in args["train_network"].trainable_params()} == trained
    assert isinstance(args["network"], nn.Cell) and isinstance(args["loss_fn"], nn.Cell)


# To stop


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("moment", "windows"), [("on_train_step_end", 2), ("on_train_epoch_end", 3)])
def test_request_stop_ends_run_without_error(moment, windows):
    def stop(run_context):
        if run_context.original_args().cur_step_num >= 2:
            run_context.request_stop()

    recorded = RecordedCalls()
    records = train(driver()[0], epochs=3, callbacks=[recorded, LambdaCallback(**{moment: stop})])
    assert len(records) == windows and recorded.moments[-2:] == ["on_train_end", "exit"]


@pytest.mark.usefixtures("eager")
def test_resumed_run_counts_the_windows_before_it(tmp_path):
    stop = LambdaCallback(on_train_step_end=lambda context: context.request_stop())
    train(driver()[0], callbacks=stop, checkpointer=Checkpointer(tmp_path))
    seen = RecordedCalls("cur_step_num", "planned")
    train(driver()[0], callbacks=seen, checkpointer=Checkpointer(tmp_path, resume="auto"))
    assert ("on_train_begin", 1, 5) in seen.moments  # a bar shows 1/6


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("moment", "windows"), [("begin", 0), ("epoch_begin", 0), ("step_begin", 1)])
def test_stop_before_window_loses_no_micro_batch(moment, windows):
    model, _ = driver()
    stop = LambdaCallback(**{f"on_train_{moment}": lambda context: context.request_stop()})
    assert len(train(model, callbacks=stop)) == windows and model.micro_batches == 0


@pytest.mark.usefixtures("eager")
def test_resumed_run_evaluates_epoch_whose_evaluation_failed(tmp_path):
    class Fails(Mistakes):
        def eval(self):
            raise KeyError("mine")

    recorded, valid = RecordedCalls("cur_epoch_num"), data([4])
    with pytest.raises(KeyError, match="mine"):
        train(
            driver()[0],
            valid_dataset=valid,
            metrics={"mistakes": Fails()},
            checkpointer=Checkpointer(tmp_path, every=1),
        )
    train(driver()[0], valid_dataset=valid, callbacks=recorded, checkpointer=Checkpointer(tmp_path, resume="auto"))
    assert [moment[1] for moment in recorded.moments if moment[0] == "on_train_epoch_end"] == [1, 2]


@pytest.mark.usefixtures("eager")
def test_window_of_weight_0_does_not_end_run(capsys):
    model, _ = driver(weight=lambda x, y: 0.0 if len(y) == 5 else float(len(y)))
    model.train_process(1, data([8, 5, 8]), 1, ckpt_path=None, callbacks=LossMonitor())
    assert model.updates == 2 and "(skipped: nothing in it counts)" in capsys.readouterr().out


# MindSpore's own


@pytest.mark.usefixtures("eager")
def test_loss_monitor_prints_losses_of_windows(capsys):
    records = train(driver()[0], callbacks=LossMonitor())
    lines = [f"epoch: {r.epoch} step: {r.step}, loss is {np.float32(r.loss)}" for r in records]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.usefixtures("eager")
def test_model_checkpoint_saves_on_the_update_clock(tmp_path):
    model, optimizer = driver()
    config = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=5)
    train(model, callbacks=ModelCheckpoint("mine", str(tmp_path), config))
    names = {"mine-1_2.ckpt", "mine-2_1.ckpt", "mine-2_3.ckpt"}
    assert {name for name in os.listdir(tmp_path) if name.endswith(".ckpt")} == names
    last = ms.load_checkpoint(str(tmp_path / "mine-2_3.ckpt"))
    for parameter in optimizer.parameters:
        np.testing.assert_array_equal(last[parameter.name].asnumpy(), parameter.asnumpy())


def test_learning_rate_scheduler_counts_windows():
    model = slope_driver(lr=1.0)
    recorder = Recorder()
    schedule = LearningRateScheduler(lambda lr, step: 1.0 / (step + 1))
    ones = [micro_batch(1.0)] * 6
    model.train_process(1, ones, 2, report=recorder, ckpt_path=None, callbacks=schedule)
    assert [record.lr for record in recorder.records] == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert -model._network.w.asnumpy() == pytest.approx(1 + 1 / 2 + 1 / 3)  # so they were used, too


# Evaluation


class Mistakes(Metric):
    """A metric of the user's."""

    def clear(self):
        self.count = 0

    def update(self, *inputs):
        output, label = (tensor.asnumpy() for tensor in inputs)
        self.count += int((output.argmax(1) != label).sum())

    def eval(self):
        return self.count


@pytest.mark.usefixtures("eager")
def test_evaluation_covers_complete_data_set():
    model, _ = driver()
    recorded, valid_batches = RecordedCalls("eval_results", "metrics"), data([8, 3], seed=5)
    train(model, epochs=1, callbacks=recorded, valid_dataset=valid_batches, metrics={"mistakes": Mistakes()})
    results, metrics = next(call[1:] for call in recorded.moments if call[0] == "on_train_epoch_end")
    x, y = (np.concatenate([column.asnumpy() for column in columns]) for columns in zip(*valid_batches))
    weight, bias = (parameter.asnumpy() for parameter in model._network.trainable_params())
    scores = x @ weight.T + bias
    of_rows = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]
    assert results["eval_loss"] == pytest.approx(of_rows.mean(), rel=1e-5)  # not the mean of two means
    assert metrics == {"mistakes": int((scores.argmax(1) != y).sum())}


class LastEvaluation(Callback):
    def on_eval_end(self, run_context):
        self.loss = run_context.original_args().metrics["eval_loss"]


def test_evaluation_weighs_as_training():
    """And a batch that counts nothing, whose loss may be 0/0, is left out."""
    model, last = slope_driver(weight=lambda x: x[0, 0], check="off"), LastEvaluation()
    poison = (Tensor([[0.0], [np.nan]], ms.float32),)
    valid = [micro_batch(1.0), poison, micro_batch(3.0)]
    model.train_process(1, [micro_batch(1.0)], 1, valid_dataset=valid, callbacks=last, report=(), ckpt_path=None)
    assert last.loss == pytest.approx(-(1 * 1.0 + 3 * 3.0) / (1 + 3))


class Evaluated(Callback):
    """Records the updates that were evaluated, and the weights, and acts on a number of evaluations."""

    def __init__(self, optimizer=None, after=0, act=lambda run_context: None):
        self.optimizer, self.after, self.act = optimizer, after, act
        self.updates, self.weights = [], []

    def on_eval_end(self, run_context):
        self.updates.append(run_context.original_args().updates)
        if self.optimizer is not None:
            self.weights.append(self.optimizer.parameters[0].asnumpy().copy())
        if len(self.updates) == self.after:
            self.act(run_context)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({}, [3, 6]),
        ({"eval_every": 2}, [2, 4, 6]),  # the last one once, not twice
        ({"eval_every": 99}, [6]),
        ({"eval_every": 2, "max_updates": 5}, [2, 4, 5]),
    ],
)
def test_evaluations_come_after_updates(options, updates):
    evaluated, valid = Evaluated(), data([4])
    train(driver()[0], callbacks=evaluated, valid_dataset=valid, **options)
    assert evaluated.updates == updates


@pytest.mark.usefixtures("eager")
def test_evaluation_inside_an_epoch_changes_nothing_else():
    plain, evaluating = driver(), driver()
    records = train(plain[0])
    again = train(evaluating[0], valid_dataset=data([4, 3]), eval_every=1)
    assert [record._replace(seconds=0) for record in again] == [record._replace(seconds=0) for record in records]
    for one, other in zip(plain[1].parameters, evaluating[1].parameters):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.usefixtures("eager")
def test_early_stopping_inside_an_epoch(tmp_path):
    """The best weights are restored, and are those of the last state."""
    model, optimizer = driver(lr=50.0)
    stop = EarlyStopping("eval_loss", patience=1, restore_best_weights=True)
    evaluated, states = Evaluated(optimizer), Checkpointer(tmp_path, every=1)
    options = {"valid_dataset": data([4], seed=5), "eval_every": 1, "checkpointer": states}
    records = train(model, 9, 1, callbacks=[evaluated, stop], **options)
    assert 1 < len(records) == len(evaluated.updates) < len(ROWS)
    saved = training_state.read(str(max(tmp_path.glob("state-*.safetensors")))).arrays["network.1.weight"]
    for restored in (optimizer.parameters[0].asnumpy(), saved):
        np.testing.assert_array_equal(restored, evaluated.weights[-2])


@pytest.mark.usefixtures("eager")
def test_reduced_rate_inside_an_epoch_is_that_of_the_next_update():
    model, _ = driver(lr=1e-3)
    reduce = ReduceLROnPlateau("eval_loss", factor=0.5, patience=1, min_delta=9.0)
    records = train(model, epochs=1, mini_steps=1, callbacks=reduce, valid_dataset=data([4], seed=5), eval_every=2)
    assert [record.lr for record in records] == pytest.approx([1e-3, 1e-3, 1e-3, 1e-3, 5e-4])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("evaluation", [1, 2, 3])  # inside an epoch, in the next one, at the end
def test_resumed_run_repeats_the_evaluation_in_which_it_ended(tmp_path, evaluation):
    def fail(run_context):
        raise KeyError("mine")

    evaluated, options = Evaluated(after=evaluation, act=fail), {"valid_dataset": data([4]), "eval_every": 2}
    with pytest.raises(KeyError, match="mine"):
        train(driver()[0], callbacks=evaluated, checkpointer=Checkpointer(tmp_path), **options)
    resumed = Evaluated()
    train(driver()[0], callbacks=resumed, checkpointer=Checkpointer(tmp_path, resume="auto"), **options)
    assert evaluated.updates[:-1] + resumed.updates == [2, 4, 6]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("every", [2, None])
def test_request_to_stop_ends_an_evaluation(tmp_path, every):
    """With the second of three batches; the resumed run evaluates."""
    asked, options = [], {"valid_dataset": data([4, 4, 4]), "eval_every": every}
    begun, evaluated = RecordedCalls(), Evaluated()

    def stop():
        return begun.moments.count("on_eval_step_end") == 1 and not asked.append(1)

    with pytest.raises(Stopped):
        train(driver()[0], callbacks=[begun, evaluated], checkpointer=Checkpointer(tmp_path, stop=stop), **options)
    assert len(asked) == 1 and begun.moments.count("on_eval_step_end") == 1 and not evaluated.updates
    train(driver()[0], callbacks=evaluated, checkpointer=Checkpointer(tmp_path, resume="auto"), **options)
    assert evaluated.updates == ([3, 6] if every is None else [2, 4, 6])


class Modes(Callback):
    """Gives the Cells modes of their own before an evaluation, and reads them after it."""

    def __init__(self, network):
        self.cells, self.before, self.after = [cell for _, cell in network.cells_and_names()], [], []

    def now(self):
        return [(cell.training, cell.phase) for cell in self.cells]

    def on_eval_begin(self, run_context):
        self.cells[-1].set_train(not self.cells[-1].training)
        self.before.append(self.now())

    def on_eval_end(self, run_context):
        self.after.append(self.now())


@pytest.mark.usefixtures("eager")
def test_each_cell_has_its_mode_again_after_an_evaluation():
    model, _ = driver()
    modes = Modes(model._network)
    train(model, callbacks=modes, valid_dataset=data([4]), eval_every=1)
    assert modes.after == modes.before and len({str(each) for each in modes.before}) == 2


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("every", [1, None])
def test_time_of_an_evaluation_is_not_that_of_the_next_window(every, monkeypatch):
    now = [0.0]

    class Clock(Callback):
        def on_train_step_begin(self, run_context):
            now[0] += 1

        def on_eval_begin(self, run_context):
            now[0] += 100

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    records = train(driver()[0], callbacks=Clock(), valid_dataset=data([4]), eval_every=every)
    assert [record.seconds for record in records] == [1.0] * 6


# Numbers of epochs


@pytest.mark.usefixtures("eager")
def test_initial_epoch_continues_epoch_count():
    model, _ = driver()
    recorded = RecordedCalls("cur_epoch_num")
    first = train(model, epochs=1)
    second = train(model, epochs=3, initial_epoch=1, callbacks=recorded)
    assert sorted({record.epoch for record in first + second}) == [1, 2, 3]
    assert [moment[1] for moment in recorded.moments if moment[0] == "on_train_epoch_begin"] == [2, 3]


# Errors


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [LossMonitor]}, "'callbacks' must be callbacks of mindspore.train, but got LossMonitor"),
        ({"metrics": {"acc"}}, "'valid_dataset' must be given with 'metrics', but got None"),
        ({"eval_every": 9}, "'valid_dataset' must be given with 'eval_every', but got None"),
        ({"valid_dataset": [], "eval_every": 0}, "'eval_every' must be an int >= 1, but got 0"),
        ({"initial_epoch": 2}, "'initial_epoch' must be an int >= 0 and < 2, the last epoch, but got 2"),
        ({"valid_dataset": [], "metrics": ["acc"]}, "'metrics' must be None, dict or set"),
        ({"valid_dataset": []}, "'valid_dataset' must be one that yields batches, but got none"),
        ({"valid_dataset": [data()[0][:1]]}, "'valid_dataset' must be one that yields 2 columns"),
        (
            {"valid_dataset": (batch for batch in data())},
            "one that can be read in each evaluation, but got a generator",
        ),
    ],
)
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        driver()[0].train_process(2, data(), 2, ckpt_path=None, **{"report": (), **options})


@pytest.mark.usefixtures("eager")
def test_exhausted_validation_data_is_rejected():
    """Of a map or the like it is not known before that it can be read once only."""
    model, message = slope_driver(), "batches in every evaluation, but got none. A generator can be read once only"
    with pytest.raises(ValueError, match=message):
        model.train_process(3, [micro_batch(1.0)], 1, valid_dataset=map(micro_batch, (1.0,)), report=(), ckpt_path=None)
    assert model.updates == 2


@pytest.mark.usefixtures("eager")
def test_metrics_rejected_without_output_of_network():
    with pytest.raises(
        ValueError, match="'metrics' must be None for a network that returns only its loss, but got some"
    ):
        slope_driver().train_process(
            1, [micro_batch(1.0)], 1, report=(), ckpt_path=None, valid_dataset=[micro_batch(1.0)], metrics={"acc"}
        )


@pytest.mark.usefixtures("eager")
def test_results_of_an_evaluation_are_not_those_of_the_next_epoch():
    seen = []

    class Looks(Callback):
        def on_train_step_end(self, run_context):
            seen.append("eval_results" in run_context.original_args())

    train(driver()[0], valid_dataset=data([8], seed=5), callbacks=Looks())
    assert seen == [False] * 6
