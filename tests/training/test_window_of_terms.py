"""Is each term of a loss divided by what it averages over in the window?"""

from __future__ import annotations

import json
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Callback, LambdaCallback

import several_terms as terms
from helpers import run
from ms_accum import Checkpointer, GradientAccumulation, Stopped, replace_dropout
from ms_accum.layers import COUNTER
from ms_accum.training.progress import Lines
from programs.metrics import MetricsFile
from reference import digest
from runs import stop_after

pytestmark = pytest.mark.usefixtures("eager")

ROWS = (4, 2, 5, 3, 1, 6, 2)
DATA = terms.data_of(ROWS, masked=[2])


def driver(network, loss_fn=None, weight=terms.WEIGHT, coefficients=terms.COEFFICIENTS, lr=1.0, **options):
    options = {"check": "off", **options}
    optimizer = nn.SGD(network.trainable_params(), lr)
    terms_or_one = {"weight": weight, "coefficients": coefficients}
    return GradientAccumulation(network, loss_fn or terms.Loss(), optimizer, **terms_or_one, **options)


def updates_of(model, network, data, size, epochs=1, **options):
    """Return how far each update moved the parameters, with the record of its window and what the oracle expects.

    The oracle gets the weights before each window, as they are.
    """

    class Watch(Callback):
        def __init__(self):
            self.before, self.moves = self.now(), []
            self.network = terms.Net()

        def now(self):
            return [parameter.asnumpy().copy() for parameter in network.trainable_params()]

        def on_train_step_end(self, run_context):
            after = self.now()
            self.moves.append(
                (self.before, terms.flat(self.before) - terms.flat(after), run_context.original_args().record)
            )
            self.before = after

    watch = Watch()
    run(model, data, size, epochs, callbacks=watch, **options)
    return watch.moves


def expected_of(before, window, coefficients=terms.COEFFICIENTS):
    network = terms.Net()
    for parameter, array in zip(network.trainable_params(), before):
        parameter.set_data(Tensor(array))
    return terms.oracle(network, window, coefficients)


def check(moves, windows, coefficients=terms.COEFFICIENTS, limit=1e-6):
    assert len(moves) == len(windows)
    for (before, move, record), window in zip(moves, windows):
        gradient, means = expected_of(before, window, coefficients)
        norm = np.linalg.norm(gradient)
        assert terms.error(move, gradient) <= limit
        assert record.grad_norm == pytest.approx(norm, rel=1e-5)
        assert record.loss == pytest.approx(terms.loss_of(means, coefficients), rel=1e-5)
        assert dict(record.terms) == pytest.approx(means, rel=1e-5)


WINDOWS = [DATA[:3], DATA[3:6], DATA[6:]]


def test_coefficients_may_be_functions_of_the_update():
    network = terms.Net()
    model = driver(network, coefficients={"entropy": lambda updates: 0.5 * updates, "size": 0.1})
    moves = updates_of(model, network, DATA, 3)
    for updates, (move, window) in enumerate(zip(moves, WINDOWS)):
        check([move], [window], {"entropy": 0.5 * updates, "size": 0.1})


def test_lines_and_metrics_show_each_term(tmp_path, capsys):
    model = driver(terms.Net())
    metrics = MetricsFile(str(tmp_path / "metrics"))
    model.train_process(1, DATA[:2], 2, report=Lines(), callbacks=metrics, ckpt_path=None)
    line = json.loads((tmp_path / "metrics").read_text())
    shown = {f"loss_{name}": mean for name, mean in terms.oracle(terms.Net(), DATA[:2])[1].items()}
    assert {name: line[name] for name in shown} == pytest.approx(shown, rel=1e-5) and "terms" not in line
    assert re.search(r"loss is -?\d\S*, ce \S+, entropy -\S+, size \S+, lr 1", capsys.readouterr().out)


def test_window_in_which_nothing_counts_is_skipped():
    network = terms.Net()
    tokens = lambda x, y: (y >= 0).sum()  # noqa: E731
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    loss_fn = lambda logits, labels: {"ce": ops.mean(logits), "more": ops.sum(logits)}  # noqa: E731
    weight = {"ce": tokens, "more": tokens}
    model = GradientAccumulation(network, loss_fn, optimizer, weight=weight, check="off", compile=False)
    run(model, DATA[:2], 2)
    before = digest([*network.get_parameters(), *optimizer.moments])
    records = run(model, terms.data_of((3, 2), masked=[0, 1]), 2).records
    assert digest([*network.get_parameters(), *optimizer.moments]) == before
    assert records[0].skipped and not records[0].terms and model.skipped == 1


# Gradients that are not finite


def spoiled(data, number):
    x, y = data[number]
    return [*data[:number], (np.full_like(x, np.inf), y), *data[number + 1 :]]


@pytest.mark.parametrize("bad", [0, 1])
def test_dropout_counts_each_micro_batch_once(bad):
    """If one is left out, the others run again, with the masks of the first time."""
    network = nn.SequentialCell(terms.Net(), replace_dropout(nn.SequentialCell(nn.Dropout(p=0.5)), seed=1))
    data = spoiled(DATA[:4], 1) if bad else DATA[:4]
    model = driver(network, nonfinite="skip_micro")
    run(model, data, 4)
    (counter,) = [each for each in network.get_parameters() if each.name.endswith(COUNTER)]
    assert model.left_out == bad and int(counter.asnumpy()) == 4 - bad


def test_dropout_counts_once_also_after_a_window_of_which_all_is_left_out():
    network = nn.SequentialCell(terms.Net(), replace_dropout(nn.SequentialCell(nn.Dropout(p=0.5)), seed=1))
    model = driver(network, nonfinite="skip_micro")
    run(model, spoiled(spoiled(spoiled(DATA[:4], 0), 1), 2), 2)
    (counter,) = [each for each in network.get_parameters() if each.name.endswith(COUNTER)]
    assert model.left_out == 3 and int(counter.asnumpy()) == 1


class LastIsNan(terms.Loss):
    """NaN in the last term only."""

    def construct(self, logits, labels):
        of_terms = super().construct(logits, labels)
        return {"entropy": of_terms["entropy"], "ce": of_terms["ce"], "size": of_terms["size"] * np.nan}


@pytest.mark.parametrize("size", [1, 3])
def test_term_that_is_nan_is_no_overflow(size):
    network, scaler = terms.Net(), amp.DynamicLossScaler(2.0**10, 2, 100)
    model = driver(network, LastIsNan(), loss_scale=scaler)
    run(model, DATA[3:], size)
    assert (model.overflows, model.loss_scale, model.updates) == (0, 2.0**10, 0)


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro"])
def test_window_of_which_all_overflows_lowers_the_scale(policy):
    network, scaler = terms.Net(), amp.DynamicLossScaler(2.0**30, 2**20, 100)
    model = driver(Halved(network), loss_scale=scaler, nonfinite=policy)
    moves = updates_of(model, network, DATA[:4], 2)
    assert moves[0][2].skipped and not moves[0][1].any() and moves[0][2].bad == (1, 2) * (policy == "skip_micro")
    assert scaler.scale_value.asnumpy() == 2.0**10 and model.overflows == 1
    gradient = expected_of(moves[1][0], DATA[2:4])[0]
    assert terms.error(moves[1][1], gradient) <= 1e-2  # float16


class Halved(nn.Cell):
    """Its gradients pass through float16."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x):
        return ops.cast(ops.cast(self.network(x), ms.float16), ms.float32)


# States


def test_stopping_inside_a_window_changes_no_byte(tmp_path):
    def train(stop=None, folder=None):
        ms.set_seed(1), np.random.seed(1)
        network = terms.Net()
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        options = {"weight": terms.WEIGHT, "coefficients": terms.COEFFICIENTS, "check": "off", "tail": "carry"}
        model = GradientAccumulation(network, terms.Loss(), optimizer, **options)
        states = None
        if folder is not None:
            states = Checkpointer(folder, resume="auto", stop=None if stop is None else stop_after(stop))
        draws = LambdaCallback(on_train_step_end=lambda run_context: np.random.rand())
        recorder = run(model, Noisy(), 3, 2, checkpointer=states, callbacks=draws)
        return digest([*network.get_parameters(), *optimizer.get_parameters()]), recorder.records[-1].terms

    class Noisy:
        """Draws from NumPy's generator, whose state must be that of the beginning, too."""

        def __iter__(self):
            for x, y in DATA:
                yield x + np.random.randn(*x.shape).astype(np.float32), y

    expected = train()
    for stop in (1, 5, 9, 13, 16, 20):
        with pytest.raises(Stopped):
            train(stop, tmp_path / str(stop))
        left, means = train(None, tmp_path / str(stop))
        assert left == expected[0] and means == pytest.approx(expected[1], rel=1e-6), stop


# Data


class Column(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([0.0], ms.float32), name="w")

    def construct(self, x):
        return {"a": ops.mean(x * self.w), "b": ops.sum(x * 0)}


def test_loader_may_reuse_its_buffer():
    network, buffer = Column(), np.zeros((1, 1), np.float32)
    shared = Tensor.from_numpy(buffer)

    def loader():
        for value in (1.0, 2.0, 6.0):
            buffer[:] = value
            yield (shared,)

    optimizer = nn.SGD([network.w], 1.0)
    model = GradientAccumulation(network, None, optimizer, weight={"a": "rows", "b": 1}, check="off")
    run(model, loader(), 3)
    assert -network.w.asnumpy()[0] == pytest.approx(3.0)


def test_evaluation_has_the_mean_of_each_term_and_the_coefficients_of_its_update():
    results = []

    class Read(Callback):
        def on_eval_end(self, run_context):
            results.append(dict(run_context.original_args().metrics))

    network, coefficients = terms.Net(), {"entropy": lambda updates: 0.5 + updates, "size": lambda updates: updates}
    model = driver(network, coefficients=coefficients, lr=0.0)
    run(model, DATA[:3], 1, callbacks=Read(), valid_dataset=DATA, eval_every=1)
    _, means = terms.oracle(network, DATA)
    for updates, found in enumerate(results, 1):
        loss = terms.loss_of(means, {"entropy": 0.5 + updates, "size": updates})
        expected = {**{f"eval_{name}": mean for name, mean in means.items()}, "eval_loss": loss}
        assert found == pytest.approx(expected, rel=1e-5)
    assert len(results) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "sum"}, "'reduction' must be 'mean' with several terms"),
        ({"weight": {}}, "'weight' must be a dict from the names of terms"),
        ({"weight": None}, "'coefficients' must be None unless 'weight' is a dict of terms"),
    ],
)
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        driver(terms.Net(), **{"weight": terms.WEIGHT, "coefficients": {"size": 0.3}, **options})


def other_names(logits, labels):
    return {"ce": ops.mean(logits)}


def one_value(logits, labels):
    return ops.mean(logits)


def no_scalar(logits, labels):
    return ops.mean(logits), ops.mean(logits, 0), ops.mean(logits)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (other_names, "must return the terms of 'weight' .*but got .'ce'"),
        (one_value, "must return a dict or a tuple of terms"),
        (no_scalar, "must be scalars"),
    ],
)
def test_other_losses_are_rejected_before_training(loss_fn, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        run(driver(terms.Net(), loss_fn, check="first"), DATA, 3)
    assert "\n" not in str(caught.value)


def test_terms_without_a_dict_of_weights_are_rejected():
    with pytest.raises((TypeError, ValueError), match="give GradientAccumulation a dict as 'weight'"):
        run(driver(terms.Net(), weight=None, coefficients=None, check="first"), DATA, 3)
