"""Samples of different lengths, packed by a budget of tokens, and windows by what they count."""

from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from helpers import micro_batch, run, seen_gradient, slope_driver
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    Checkpointer,
    CoupledLoss,
    FlushTail,
    GradientAccumulation,
    Group,
    SaveStates,
    Stopped,
    TokenBatches,
    evaluate,
    verify,
)
from ms_accum.training.token_batches import shapes_of
from runs import stop_after
from sentences import (
    DISTRIBUTIONS,
    IGNORED,
    TOKENS,
    WORDS,
    Tagger,
    counted,
    driver_of,
    lengths_of,
    loss_of,
    miss_of,
    one_batch,
    packed,
    samples_of,
    table_of,
)

pytestmark = pytest.mark.usefixtures("eager")


def rows_in(micro_batches):
    """Return the samples of micro-batches of words from 1, without padding and in one order."""
    return sorted(tuple(row[row > 0].tolist()) for words, *_ in micro_batches for row in words if row.any())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_each_sample_is_in_one_micro_batch_of_few_shapes(distribution):
    samples = samples_of(lengths_of(distribution))
    data = packed(samples, shapes=3, seed=1)
    first, second = list(data), list(data)
    assert rows_in(first) == rows_in(second) == sorted(tuple(words.tolist()) for words, _ in samples)
    assert first[0][0].tolist() != second[0][0].tolist()  # each epoch is shuffled otherwise
    shapes = {words.shape for words, _ in first}
    assert len(data) == len(first) and shapes <= set(data.shapes) and len(data.shapes) <= 3
    assert all(rows * positions <= TOKENS and positions % 8 == 0 for rows, positions in data.shapes)
    positions = sum(words.size for words, _ in first)
    assert data.padding == pytest.approx(1 - sum(len(words) for words, _ in samples) / positions)
    labels = np.concatenate([labels.ravel() for _, labels in first])
    assert (labels != IGNORED).sum() == sum((labels != IGNORED).sum() for _, labels in samples)
    again = packed(samples, shapes=3, seed=1)
    again.begin_with_epoch(1)
    assert all((one == other).all() for pair in zip(second, again) for one, other in zip(*pair))


def test_shapes_need_the_fewest_positions():
    rng = np.random.RandomState(0)
    for most in (1, 2, 3, 4) * 5:
        lengths = rng.randint(1, 70, rng.randint(1, 30))
        rounded = sorted({min(-(-length // 8) * 8, 70) for length in lengths})

        def cost(ends, lengths=lengths):
            return sum(min(end for end in ends if end >= length) for length in lengths)

        others = (each for size in range(most) for each in itertools.combinations(rounded[:-1], size))
        found = [shape.positions for shape in shapes_of(lengths, 70, most)]
        assert len(found) <= most and cost(found) == min(cost((*each, rounded[-1])) for each in others)


def test_columns():
    """Numbers, vectors at each position, and a dataset of MindSpore's, which is read again by one iterator."""
    rows = [(np.full((length, 2), 1.5), np.int64(length), np.arange(length)) for length in (3, 1, 2)]
    ((vectors, numbers, positions),) = TokenBatches(rows, 32, pad=(0, -1, 9))
    assert vectors.shape == (4, 8, 2) and vectors.dtype == np.float32 and vectors.sum() == 6 * 2 * 1.5
    assert numbers.tolist() == [3, 1, 2, -1] and numbers.dtype == np.int32
    assert positions[1].tolist() == [0, *[9] * 7] and (positions[3] == 9).all()
    data = TokenBatches(GeneratorDataset(rows, ["x", "n", "p"], shuffle=False), 32, pad=(0, -1, 9))
    for _ in range(2):
        ((_, numbers, _),) = data
        assert numbers.tolist() == [3, 1, 2, -1]
    assert not hasattr(data, "source") and len(data) == 1


def test_longer_samples_are_cut_if_asked():
    data = TokenBatches([np.arange(1, 41), np.arange(1, 4)], 32, longest=20)
    assert rows_in(data) == [(1, 2, 3), tuple(range(1, 21))]
    assert [shape.positions for shape in data.shapes] == [8, 20]  # not rounded to what a network can't take


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ([[1], []], {}, "'samples' must be samples with positions, but got none in number 1"),
        ([], {}, "'samples' must be samples, but got none"),
        ([[1] * 9], {"tokens": 8}, "'samples' must be samples of at most 8 positions, but got 9 in number 0. Raise"),
        ([([1, 2], [1])], {}, "'samples' must be samples whose sequences have one length, but got 1 and 2 in number 0"),
        ([[1], ([1], [2])], {}, "'samples' must be samples with the columns of the first, but got .* in number 1"),
        ([["a"]], {}, "'samples' must be samples of numbers, but got list in number 0"),
        ([[1]], {"tokens": 0}, "'tokens' must be an int >= 1, but got 0"),
        ([[1]], {"shapes": 0}, "'shapes' must be an int >= 1, but got 0"),
        ([[1]], {"longest": 9}, "'longest' must be at most 8, as 'tokens', but got 9"),
        ([np.ones(3, np.uint8)], {"pad": -100}, "'pad' must be a number that column 0 of uint8 can have, but got -100"),
        ([[1]], {"pad": 0.5}, "'pad' must be a number that column 0 of int32 can have, but got 0.5"),
        ([[2**40]], {}, "'samples' must be samples of numbers below 2..31, but got larger ones in number 0"),
        ([[1]], {"pad": (0, 1)}, "'pad' must be a number, or one for each of the 1 column of a sample, but got"),
        ([[1]], {"sequences": [1]}, "'sequences' must be columns with positions, of 1, but got .1."),
        ([[1], [2]], {"lengths": [1]}, "'lengths' must be 2 numbers, one a sample, but got 1"),
        ([[1], [2]], {"lengths": [1, 0]}, "'lengths' must be numbers >= 1, but got 0"),
        ([3], {}, "'sequences' must be columns with positions, of 1, but got .."),
        ((row for row in [[1]]), {}, "'samples' must be a list, a dataset, or an object whose '__iter__' starts anew"),
        ({(1,)}, {"seed": 1}, "'seed' must be None unless 'samples' is a list, but got 1"),
    ],
)
def test_wrong_use_is_rejected(samples, options, message):
    with pytest.raises((TypeError, ValueError), match=f"^For 'TokenBatches', {message}"):
        list(TokenBatches(samples, **{"tokens": 8, **options}))


def test_sample_longer_than_the_lengths_that_were_given_is_rejected():
    data = TokenBatches([[1] * 3, [1] * 9], 16, lengths=[3, 4])
    with pytest.raises(ValueError, match="must be samples of at most 8 positions, but got 9 in number 1"):
        list(data)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gradient_is_that_of_one_padded_batch(distribution):
    samples = samples_of(lengths_of(distribution, 30))
    data = packed(samples, seed=1)
    model, large, by_rows = driver_of(), driver_of(), driver_of(lambda words, labels: words.shape[0])
    before = table_of(model)
    run(model, data, len(data))
    run(large, [one_batch(samples)], 1)
    expected = table_of(large) - before
    assert miss_of(table_of(model) - before, expected) < 1e-6
    run(by_rows, data, len(data))
    assert miss_of(table_of(by_rows) - before, expected) > 1e-3


# In every way to train


def test_clipped_window_is_that_of_one_padded_batch():
    samples = samples_of(lengths_of("lognormal", 30))
    data = packed(samples, seed=1)
    model, large = driver_of(clip_norm=0.01), driver_of(clip_norm=0.01)
    run(model, data, len(data))
    run(large, [one_batch(samples)], 1)
    before = Tagger().table.embedding_table.asnumpy()
    assert np.linalg.norm(table_of(large) - before) == pytest.approx(0.01, rel=1e-4)
    assert miss_of(table_of(model) - before, table_of(large) - before) < 1e-4


def train_in_loop(data, network, optimizer):
    accumulator = Accumulator(optimizer, len(data), reduction="mean")
    grad_fn = ms.value_and_grad(lambda *columns: loss_of(network(columns[0]), columns[1]), None, optimizer.parameters)
    for columns in data:
        _, grads = grad_fn(*map(ms.Tensor, columns))
        accumulator(grads, float(counted(*columns)))
    assert int(accumulator.updates) == 1


def train_in_model(data, network, optimizer):
    step = AccumulatedTrainStep((network, loss_of), optimizer, 3 * len(data), weight=counted)
    dataset = GeneratorDataset(data, ["words", "labels"], shuffle=False)
    Model(step).train(1, dataset, callbacks=[FlushTail()], dataset_sink_mode=False)
    assert step.updates == 1


@pytest.mark.parametrize("train", [train_in_loop, train_in_model])
def test_other_ways_to_train_equal_one_padded_batch(train):
    samples = samples_of(lengths_of("two peaks", 30))
    network, large = Tagger(), driver_of()
    before = network.table.embedding_table.asnumpy().copy()
    train(packed(samples), network, nn.SGD(network.trainable_params(), 1.0))
    run(large, [one_batch(samples)], 1)
    assert miss_of(network.table.embedding_table.asnumpy() - before, table_of(large) - before) < 1e-6


def test_model_reads_the_epochs_of_a_list_one_after_the_other():
    data, again = (packed(samples_of(lengths_of("uniform")), seed=1) for _ in range(2))
    rows = GeneratorDataset(data, ["words", "labels"], shuffle=False).create_tuple_iterator(num_epochs=2)
    for _ in range(2):
        assert [words.asnumpy().tolist() for words, _ in rows] == [words.tolist() for words, _ in again]


def test_verify_takes_a_micro_batch():
    batch = max(packed(samples_of(lengths_of("uniform"))), key=lambda columns: columns[0].shape[0])
    assert verify(Tagger(), loss_of, batch, 2, weight=counted).ok
    wrong = verify(Tagger(), loss_of, batch, 2)
    assert not wrong.ok and "weight=" in wrong.diagnosis


def test_micro_batch_with_nan_is_left_out():
    """Of vectors: the rest of the window counts."""
    rng = np.random.RandomState(0)
    samples = [(rng.randn(length, 3).astype(np.float32), np.full(length, 1)) for length in (8, 8, 7, 5, 6, 4)]
    samples[2][0][0] = np.nan

    def mean(x, labels):
        return ops.sum(x * ops.expand_dims(labels, 2).astype(ms.float32)) / ops.sum(labels).astype(ms.float32)

    class Scaled(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = ms.Parameter(ms.Tensor(np.zeros(3), ms.float32), name="w")

        def construct(self, x):
            return x * self.w

    def trained(data, **options):
        network = Scaled()
        weight = {"weight": lambda x, labels: labels.sum(), "check": "off"}
        model = GradientAccumulation(network, mean, nn.SGD([network.w], 1.0), **weight, **options)
        run(model, data, len(data))
        return network.w.asnumpy()

    left = [samples[number] for number in (0, 1, 4, 5)]  # two rows in a micro-batch
    expected = trained(TokenBatches(left, 64, shapes=1))
    assert np.isfinite(expected).all() and expected.any()
    found = trained(TokenBatches(samples, 16), nonfinite="skip_micro")
    assert np.allclose(found, expected, rtol=1e-6)


class EvalLoss(Callback):
    """Keeps the loss of the evaluation."""

    def on_eval_end(self, run_context):
        self.loss = run_context.original_args().eval_results["eval_loss"]


def test_evaluation_is_that_of_one_padded_batch():
    samples, found = samples_of(lengths_of("lognormal", 30)), []
    for valid in (packed(samples), [one_batch(samples)]):
        seen = EvalLoss()
        run(driver_of(), packed(samples), 5, valid_dataset=valid, callbacks=seen)
        found.append(seen.loss)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_evaluate_counts_rows_of_padding():
    """What the page says: divide by the number of samples."""

    class Last(nn.Cell):
        def construct(self, words):
            return ops.one_hot(words[:, 0], WORDS)

    data = TokenBatches([(np.full(length, length), length) for length in (3, 1, 2)], 32, pad=(0, IGNORED))
    assert evaluate(Last(), data) == (3, 4)


# Windows by what they count


def windows_of(weights, number):
    """Return the sizes of windows: each ends with the micro-batch with which its weights reach a number."""
    sizes, size, total = [], 0, 0
    for weight in weights:
        size, total = size + 1, total + weight
        if total >= number:
            sizes.append(size)
            size = total = 0
    return [*sizes, size] if size else sizes


def test_windows_end_when_they_count_for_a_number():
    data = packed(samples_of(lengths_of("lognormal")), seed=2)
    micro_batches = list(data)
    sizes = windows_of([int(counted(*each)) for each in micro_batches], 100)
    model, expected = driver_of(), driver_of()
    seen = run(model, micro_batches, window_weight=100, epochs=2)
    wanted = run(expected, micro_batches, lambda updates: sizes[updates % len(sizes)], epochs=2)
    assert len(set(sizes)) > 1 and model.updates == 2 * len(sizes)
    assert [each._replace(seconds=0) for each in seen.records] == [each._replace(seconds=0) for each in wanted.records]
    assert (table_of(model) == table_of(expected)).all()
    assert seen.planned is None


def test_sums_of_fractions_fill_a_window():
    """Ten times 0.1 is a little less than 1 in Python's numbers."""
    model = slope_driver(weight=lambda x: 0.1)
    run(model, [micro_batch(value) for value in range(1, 21)], window_weight=1)
    assert model.updates == 2


def test_carried_tail_counts_for_the_next_window():
    model = slope_driver(tail="carry", weight=lambda x: 2 * len(x))
    run(model, [micro_batch(value, rows=2) for value in (1, 2, 3)], window_weight=8)
    assert (model.updates, model.micro_batches) == (1, 1)
    run(model, [micro_batch(5, rows=2)], window_weight=8)
    assert (model.updates, model.micro_batches) == (2, 0) and seen_gradient(model) == [1.5 + 4.0]


def test_windows_by_weight_that_can_not_be_are_rejected(tmp_path):
    """A coupled loss has no weights; several ranks, of which one carries a tail, have no common end to be saved."""
    network = nn.Dense(2, 2)
    coupled = GradientAccumulation(network, CoupledLoss(ops.mean), nn.SGD(network.trainable_params(), 1.0))
    with pytest.raises(ValueError, match="'window_weight' must be None with a CoupledLoss, .* but got 8"):
        run(coupled, [micro_batch(1, 2)], window_weight=8)
    carries = slope_driver(tail="carry")
    carries._group = Group(0, 2)
    with pytest.raises(ValueError, match="'window_weight' must be None with tail='carry' and a checkpointer"):
        run(carries, [micro_batch(1)], window_weight=8, checkpointer=Checkpointer(tmp_path))


def test_run_of_model_resumes_with_the_order_of_its_epoch(tmp_path):
    samples = samples_of(lengths_of("uniform"))

    def trained(epochs, states=None):
        network = Tagger()
        optimizer = nn.SGD(network.trainable_params(), 1.0)
        step = AccumulatedTrainStep((network, loss_of), optimizer, 2, weight=counted)
        data = GeneratorDataset(packed(samples, seed=3), ["words", "labels"], shuffle=False)
        callbacks = [FlushTail(), *([] if states is None else [SaveStates(states, step, data)])]
        begin = callbacks[-1].initial_epoch if states is not None else 0
        options = {"callbacks": callbacks, "initial_epoch": begin, "dataset_sink_mode": False}
        Model(step).train(epochs, data, **options)
        return network.table.embedding_table.asnumpy()

    trained(1, Checkpointer(tmp_path, resume="auto"))
    assert (trained(2, Checkpointer(tmp_path, resume="auto")) == trained(2)).all()


@pytest.mark.parametrize("stop", [3, 20, 40, 60])
def test_stopped_and_resumed(stop, tmp_path):
    """The same micro-batches and the same weights as without a stop, in another order in each epoch."""

    def trained(states=None):
        model = driver_of()
        data = packed(samples_of(lengths_of("uniform")), seed=3)
        run(model, data, window_weight=100, epochs=3, checkpointer=states)
        return model

    with pytest.raises(Stopped):
        trained(Checkpointer(tmp_path / "states", stop=stop_after(stop)))
    resumed, whole = trained(Checkpointer(tmp_path / "states", resume="auto")), trained()
    assert resumed.updates == whole.updates and (table_of(resumed) == table_of(whole)).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window_weight": 0}, ValueError, "'window_weight' must be a finite number > 0, but got 0.0"),
        ({"window_weight": 3, "mini_steps": 2}, ValueError, "must be given, but got mini_steps=2 and window_weight=3"),
        ({}, ValueError, "one of 'mini_steps', 'micro_batch_size' and 'window_weight' must be given, but got none"),
    ],
)
def test_wrong_windows_are_rejected(options, error, message):
    with pytest.raises(error, match=f"^For 'train_process', .*{message}"):
        run(slope_driver(), [micro_batch(1)], **options)


@pytest.mark.slow
@pytest.mark.usefixtures("default_mode")
def test_run_compiles_a_graph_for_each_shape(compiles):
    data = packed(samples_of(lengths_of("uniform")), shapes=3, seed=3)
    model = driver_of()
    run(model, data, window_weight=100, epochs=1)
    run_once = len(compiles)
    run(model, data, window_weight=100, epochs=2)
    assert len(data.shapes) == 3 and len(compiles) == run_once
    forwards = [name for name in compiles if name == "construct"]
    assert len(forwards) <= 3 + 3, compiles


def test_validation_does_not_move_the_epochs_of_training(tmp_path):
    """The same samples are validated: each epoch of training has its own order, also when it is resumed."""

    def trained(stop=None, **options):
        model, data = driver_of(), packed(samples_of(lengths_of("uniform", 20)), seed=3)
        states = Checkpointer(tmp_path / "states", stop=stop, **options) if options or stop else None
        run(model, data, 3, epochs=3, valid_dataset=data, checkpointer=states)
        return model

    with pytest.raises(Stopped):
        trained(stop_after(40))  # in the second epoch
    resumed, whole = trained(resume="auto"), trained()
    assert resumed.updates == whole.updates and (table_of(resumed) == table_of(whole)).all()
