"""Networks with several inputs, and networks that return a loss and their output."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import EarlyStopping, Model

from helpers import run
from ms_accum import (
    AccumulatedTrainStep,
    Checkpointer,
    FlushTail,
    GradientAccumulation,
    Stopped,
    evaluate,
    verify,
    window_factors,
)
from runs import stop_after

pytestmark = pytest.mark.usefixtures("eager")

WORDS, CLASSES, IGNORED = 9, 3, -100
TAGS = nn.CrossEntropyLoss(ignore_index=IGNORED)


class Classifier(nn.Cell):
    """A score for each class, from words and a mask of those that count."""

    def __init__(self):
        super().__init__()
        ms.set_seed(1)
        self.table, self.head = nn.Embedding(WORDS, 4), nn.Dense(4, CLASSES)

    def construct(self, words, mask):
        mean = ops.sum(self.table(words) * ops.expand_dims(mask, -1), 1) / ops.sum(mask, 1, keepdim=True)
        return self.head(mean)


class WithItsLoss(nn.Cell):
    """The same as transformers have it: the loss, the scores, and something else."""

    def __init__(self):
        super().__init__()
        self.classifier, self.loss_fn = Classifier(), nn.CrossEntropyLoss(ignore_index=IGNORED)

    def construct(self, words, mask, labels):
        scores = self.classifier(words, mask)
        return self.loss_fn(scores, labels), scores, mask


def data_of(rows=(8, 4, 8, 2), ignored=0.0):
    rng, data = np.random.RandomState(1), []
    for number in rows:
        words, lengths = rng.randint(0, WORDS, (number, 5)).astype(np.int32), rng.randint(1, 6, (number, 1))
        labels = np.where(rng.rand(number) < ignored, IGNORED, words[:, 0] % CLASSES).astype(np.int32)
        data.append(tuple(map(Tensor, (words, (np.arange(5) < lengths).astype(np.float32), labels))))
    return data


def driver_of(network=Classifier, loss_fn=TAGS, lr=0.5, **options):
    network = network()
    optimizer = nn.SGD(network.trainable_params(), lr)
    options = options if loss_fn is None else {"inputs": 2, **options}
    return GradientAccumulation(network, loss_fn, optimizer, **options)


def weights_of(model):
    return np.concatenate([each.asnumpy().ravel() for each in model._network.trainable_params()])


def whole_batch(network=Classifier, **options):
    """The weights after two updates with all rows, by MindSpore's own gradient."""
    network = network()
    columns = [Tensor(np.concatenate([each.asnumpy() for each in column])) for column in zip(*data_of(**options))]

    def forward(words, mask, labels):
        return TAGS(network(words, mask), labels)

    optimizer = nn.SGD(network.trainable_params(), 0.5)
    for _ in range(2):
        optimizer(ms.grad(forward, None, optimizer.parameters)(*columns))
    return np.concatenate([each.asnumpy().ravel() for each in network.trainable_params()])


@pytest.mark.parametrize(("network", "loss_fn"), [(Classifier, TAGS), (WithItsLoss, None)])
def test_trains_like_the_whole_batch(network, loss_fn):
    """With labels that are ignored, so that the default weight must look at the third column."""
    model = driver_of(network, loss_fn, weight=None if loss_fn else lambda *columns: (columns[2] != IGNORED).sum())
    run(model, data_of(ignored=0.4), 4, epochs=2)
    np.testing.assert_allclose(weights_of(model), whole_batch(ignored=0.4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("network", "loss_fn"), [(Classifier, TAGS), (WithItsLoss, None)])
def test_metrics_and_early_stopping(network, loss_fn):
    model, stopping = driver_of(network, loss_fn, check="off"), EarlyStopping("acc", patience=2, mode="max")
    seen = []

    class Keep(ms.train.Callback):
        def on_eval_end(self, run_context):
            seen.append(run_context.original_args().eval_results["acc"])

    run(model, data_of(), 2, epochs=60, valid_dataset=data_of(), metrics={"acc"}, callbacks=[Keep(), stopping])
    right, rows = evaluate(getattr(model._network, "classifier", model._network), data_of(), inputs=2)
    assert seen[-1] == right / rows and max(seen) > seen[0] and len(seen) < 60


def test_resumed_run_is_the_same(tmp_path):
    with pytest.raises(Stopped):
        run(driver_of(), data_of(), 2, epochs=2, checkpointer=Checkpointer(tmp_path, stop=stop_after(6)))
    resumed, whole = driver_of(), driver_of()
    run(resumed, data_of(), 2, epochs=2, checkpointer=Checkpointer(tmp_path, resume="auto"))
    run(whole, data_of(), 2, epochs=2)
    assert (weights_of(resumed) == weights_of(whole)).all()


def test_verify_and_factors_count_the_labels():
    batch = [np.concatenate([each.asnumpy() for each in column]) for column in zip(*data_of(ignored=0.4))]
    assert verify(Classifier(), TAGS, batch, 4, inputs=2).ok
    window = data_of(ignored=0.4)
    counts = np.array([(labels.asnumpy() != IGNORED).sum() for *_, labels in window])
    assert window_factors(window, TAGS, inputs=2) == pytest.approx(counts / counts.sum())


@pytest.mark.parametrize(("network", "loss_fn"), [(Classifier, TAGS), (WithItsLoss, None)])
def test_model(network, loss_fn):
    network = network()
    optimizer = nn.SGD(network.trainable_params(), 0.5)
    options = {} if loss_fn is None else {"inputs": 2}
    step = AccumulatedTrainStep((network, loss_fn) if loss_fn else network, optimizer, 4, check="off", **options)
    model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"acc"})
    columns = [np.concatenate([each.asnumpy() for each in column]) for column in zip(*data_of())]
    dataset = NumpySlicesDataset(tuple(columns), shuffle=False).batch(6)
    model.train(2, dataset, callbacks=FlushTail(), dataset_sink_mode=False)
    found = np.concatenate([each.asnumpy().ravel() for each in network.trainable_params()])
    np.testing.assert_allclose(found, whole_batch(), rtol=1e-5, atol=1e-6)
    right, rows = evaluate(getattr(network, "classifier", network), dataset, inputs=2)
    assert model.eval(dataset, dataset_sink_mode=False)["acc"] == pytest.approx(right / rows)


class Alone(WithItsLoss):
    """The loss only."""

    def construct(self, words, mask, labels):
        return self.loss_fn(self.classifier(words, mask), labels)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: driver_of(inputs=0), "'inputs' must be an int >= 1, but got 0"),
        (lambda: driver_of(WithItsLoss, None, inputs=2), "'inputs' must be None without a loss function, but got 2"),
        (
            lambda: run(driver_of(inputs=1), data_of(), 2),
            "must be one that yields 2 columns: .*, but got 3: .* If the network gets 2 of them, give 'inputs'.",
        ),
        (
            lambda: run(driver_of(), [columns[:2] for columns in data_of()], 2),
            "must be one that yields 3 columns: 2 for the network, and what 'loss_fn' takes in addition",
        ),
        (
            lambda: run(driver_of(Alone, None), data_of(), 2, valid_dataset=data_of(), metrics={"acc"}),
            "'metrics' must be None for a network that returns only its loss, but got some. Return .loss, output.",
        ),
        (
            lambda: evaluate(Classifier(), data_of()),
            "one that yields 2 columns, of which the network gets 1, but got 3",
        ),
    ],
)
def test_wrong_use_is_rejected(use, message):
    with pytest.raises(ValueError, match=message):
        use()
