"""Does the check detect losses that are not means over rows, and does it leave the network unchanged?"""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from helpers import micro_batch, run
from ms_accum import AccumulatedTrainStep, FlushTail, GradientAccumulation
from ms_accum.loss import additivity
from reference import digest

pytestmark = pytest.mark.usefixtures("eager")


class Masked(nn.Cell):
    """Returns its loss: the mean over the rows that a mask keeps. With BatchNorm a forward pass changes its state."""

    def __init__(self, per_row=False, normed=True):
        super().__init__()
        self.dense, self.per_row = nn.Dense(4, 1), per_row
        self.norm = nn.BatchNorm1d(4) if normed else nn.Identity()

    def construct(self, x, mask):
        error = ops.square(self.dense(self.norm(x)))[:, 0]
        return error.mean() if self.per_row else (error * mask).sum() / mask.sum()


class Rounded(Masked):
    """Returns its loss in float16."""

    def construct(self, x, mask):
        return ops.cast(super().construct(x, mask), ms.float16)


def data(rng, rows=(6, 6)):
    """Return micro-batches with a mask that keeps the first third of the rows, and few others."""
    return [
        (
            Tensor(rng.randn(n, 4), ms.float32),
            Tensor(np.r_[np.ones(n // 3 + 1), np.eye(1, n - n // 3 - 1)[0]], ms.float32),
        )
        for n in rows
    ]


def driver(network, **options):
    return GradientAccumulation(network, None, nn.SGD(network.trainable_params(), 0.1), **options)


def warnings_of(model, batches, mini_steps=2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model, batches, mini_steps)
    return [str(warning.message) for warning in caught if "the loss of a micro-batch" in str(warning.message)]


def test_masked_mean_warns_once_with_its_losses(rng):
    model = driver(Masked())
    (message,) = warnings_of(model, data(rng, [6] * 6))
    assert message.startswith("For 'GradientAccumulation', the loss of a micro-batch of 6 rows is ")
    assert "Give 'weight', what the loss divides by, a dict for several terms; or check='off'." in message
    assert warnings_of(model, data(rng)) == []


class Summed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([1.0], ms.float32), name="w")

    def construct(self, x):
        return ops.square(x - self.w).sum()


def test_sum_is_named():
    """No weight makes it exact."""
    network = Summed()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 0.1))
    with pytest.warns(RuntimeWarning, match="is the sum of its parts, .*: give reduction='sum', or a loss") as caught:
        run(model, [(Tensor(np.arange(8.0).reshape(4, 2), ms.float32),)] * 2, 2)
    assert len(caught) == 1 and "weight" not in str(caught[0].message)


@pytest.mark.parametrize(
    ("network", "options", "mini_steps"),
    [
        (Masked(per_row=True), {}, 2),
        (Masked(), {"weight": lambda x, mask: float(mask.sum().asnumpy())}, 2),
        (Masked(), {"check": "off"}, 2),
        (Masked(), {"reduction": "sum"}, 2),
        (Masked(), {}, 1),
        (Rounded(per_row=True), {}, 2),
    ],
    ids=["per row", "weighted", "off", "sum", "window of 1", "float16"],
)
def test_no_warning_for_weighted_means_or_without_the_check(network, options, mini_steps, rng):
    assert warnings_of(driver(network, **options), data(rng), mini_steps) == []


def test_check_changes_no_state(rng):
    """BatchNorm's statistics, the random generator and the mode are the same with the check and without it."""
    states = []
    for check in ("first", "off"):
        ms.set_seed(2)
        network = Masked()
        warnings_of(driver(network, check=check), data(np.random.RandomState(1)))
        states.append([digest(network.get_parameters()), ms.get_rng_state().asnumpy().tolist(), ms.get_context("mode")])
    assert states[0] == states[1]


class Counting(Masked):
    """Counts its calls, in Python, and shifts a queue of 1.2 MB."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.queue = Parameter(Tensor(np.arange(300000), ms.float32), name="queue", requires_grad=False)

    def construct(self, x, mask):
        self.calls += 1
        ops.assign(self.queue, ops.cat((self.queue[-1:], self.queue[:-1])))
        return super().construct(x, mask)


def test_network_is_not_checked_if_it_could_not_be_restored(rng, monkeypatch):
    monkeypatch.setattr(additivity, "_LARGEST_COPY", 2**20)
    model = driver(Counting())
    assert warnings_of(model, data(rng)) == [] and model.updates == 1


def test_network_with_fixed_batch_size_is_not_checked(rng):
    class Fixed(Masked):
        def construct(self, x, mask):
            if x.shape[0] != 6:
                raise ValueError("six rows")
            return super().construct(x, mask)

    model = driver(Fixed())
    assert warnings_of(model, data(rng)) == [] and model.updates == 1


@pytest.mark.usefixtures("graph_mode")
def test_loss_without_pynative_kernel_is_checked_in_a_graph(rng):
    """`mint`'s cross entropy, of a network that returns its loss, has no kernel in PyNative mode on CPU."""

    class Scored(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense, self.loss = nn.Dense(4, 3), mint.nn.CrossEntropyLoss()

        def construct(self, x, labels):
            return self.loss(self.dense(x), labels)

    labels = Tensor(np.array([0, 1, -100, -100, -100, -100, 2, 0]), ms.int32)
    data = [(Tensor(rng.randn(8, 4), ms.float32), labels)] * 2
    assert len(warnings_of(driver(Scored()), data)) == 1


def test_root_mean_square_loss_warns(rng):
    network = nn.Dense(4, 1)
    model = GradientAccumulation(network, nn.RMSELoss(), nn.SGD(network.trainable_params(), 0.1))
    batches = [(*micro_batch(1, 2, 3, 4, rows=2), Tensor(np.ones((2, 1)), ms.float32))] * 2
    with pytest.warns(
        RuntimeWarning, match="RMSELoss is the root of a mean; nn.MSELoss .* is not the mean over its micro-batches"
    ):
        run(model, batches, 2)


def test_unknown_check_option_is_rejected():
    with pytest.raises(ValueError, match="'check' must be one of 'first', 'off', but got 'always'"):
        driver(Masked(), check="always")


def test_frozen_bfloat16_parameter_is_restored(rng):
    """NumPy has no bfloat16, so the check can't copy the parameter."""

    class Half(Masked):
        def __init__(self):
            super().__init__(per_row=True)
            self.frozen = Parameter(Tensor([0.3], ms.bfloat16), name="frozen", requires_grad=False)

    network, mode = Half(), ms.get_context("mode")
    before = network.frozen.astype(ms.float32).asnumpy()
    assert warnings_of(driver(network), data(rng)) == []
    assert ms.get_context("mode") == mode and network.frozen.dtype == ms.bfloat16
    assert network.frozen.astype(ms.float32).asnumpy() == before


def test_part_without_unmasked_rows_tells(rng):
    mask = Tensor(np.r_[np.zeros(2), np.ones(6)], ms.float32)  # of the first quarter, nothing
    first = (Tensor(rng.randn(8, 4), ms.float32), mask)
    assert len(warnings_of(driver(Masked(normed=False)), [first, first])) == 1


def test_loss_near_zero_does_not_warn(rng):
    """Losses of policy gradients are near 0 at first, and their parts have different signs."""

    class Advantage(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(4, 1)

        def construct(self, x, advantage):
            return (0.0 * self.dense(x)[:, 0] + advantage).mean()

    advantage = rng.randn(16).astype(np.float32)
    batch = (Tensor(rng.randn(16, 4), ms.float32), Tensor(advantage - advantage.mean()))
    assert warnings_of(driver(Advantage()), [batch] * 2) == []


def test_columns_with_different_row_counts_are_not_split(rng):
    class Shared(Masked):
        def construct(self, x, table):
            return super().construct(x, table[0, 0] * x[:, 0] ** 2)

    batch = (Tensor(rng.randn(8, 4), ms.float32), Tensor(rng.randn(6, 4), ms.float32))
    assert warnings_of(driver(Shared(normed=False)), [batch] * 2) == []


def test_labels_of_different_lengths_warn_once(rng):
    """The loss is a function that averages over elements, so its divisor is unknown."""

    def loss(output, label):
        return ops.square(output - label).mean()

    network = nn.Dense(1, 1)
    model = GradientAccumulation(network, loss, nn.SGD(network.trainable_params(), 0.1))
    batches = [tuple(Tensor(rng.rand(4, n, 1), ms.float32) for _ in range(2)) for n in (12, 3, 12, 3)]
    with pytest.warns(RuntimeWarning, match=r"shapes \('rows', 12, 1\) and \('rows', 3, 1\) are weighted by") as caught:
        run(model, batches, 2)
    assert len(caught) == 1


# A check gives a result only if it could have failed


def of_labels(output, labels):
    """Return the mean over the labels that are not ignored; the library does not know this function."""
    return ops.cross_entropy(output, labels)


def labelled(rng, *ignored, rows=8, classes=3):
    """Return micro-batches in which the rows `ignored` have the label -100."""
    batches = []
    for without in ignored:
        labels = rng.randint(0, classes, rows).astype(np.int32)
        labels[list(without)] = -100
        batches.append((Tensor(rng.randn(rows, 4), ms.float32), Tensor(labels)))
    return batches


def classifier():
    network = nn.Dense(4, 3)
    return GradientAccumulation(network, of_labels, nn.SGD(network.trainable_params(), 0.1))


NONE, LAST = (), (5, 6, 7)
SEQUENCES = {
    "the second has ignored labels": ((NONE, LAST), 1),
    "the tenth has": ((*[NONE] * 9, LAST, NONE), 1),
    "the first half has labels only": ((range(4, 8), NONE), 1),
    "a single row has one": ((NONE, range(1, 8), NONE), 1),
    "none has": ((NONE,) * 12, 0),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_check_waits_for_a_micro_batch_that_can_tell(name, rng):
    ignored, times = SEQUENCES[name]
    assert len(warnings_of(classifier(), labelled(rng, *ignored))) == times


class OfTokens(nn.Cell):
    """Returns its loss, over the tokens that are not padding."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 3)

    def construct(self, x, labels):
        return ops.cross_entropy(self.dense(x).reshape(-1, 3), labels.reshape(-1), ignore_index=-100)


COMPLETE = (0, 0, 0, 0)
PADDED = {
    "rows that differ": [COMPLETE, COMPLETE, (0, 1, 3, 0), COMPLETE],
    "rows without any label": [COMPLETE, (5, 5, 5, 0), (5, 5, 0, 0)],
    "rows that are alike": [COMPLETE, (2, 2, 2, 2), (2, 2, 2, 2)],
    "micro-batches of one row": [(0,), (0,), (3,), (1,)],
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_that_comes_late_warns(name, rng):
    """Without the warning the weights of the test below are wrong by most of their movement."""
    assert len(warnings_of(driver(OfTokens()), padded(rng, PADDED[name]))) == 1


def test_padding_that_comes_late_warns_in_model(rng):
    network = OfTokens()
    step = AccumulatedTrainStep(network, nn.SGD(network.trainable_params(), 0.1), 2)
    rows = [tuple(column.asnumpy() for column in columns) for columns in padded(rng, PADDED["rows that are alike"])]
    with pytest.warns(RuntimeWarning, match="For 'AccumulatedTrainStep', the loss of a micro-batch of 5 rows is"):
        Model(step).train(1, GeneratorDataset(rows, ["x", "y"], shuffle=False), FlushTail(), dataset_sink_mode=False)


def padded(rng, lengths):
    """Return micro-batches of rows of 5 tokens, of which the last ones are padding."""
    labels = [rng.randint(0, 3, (len(rows), 5)).astype(np.int32) for rows in lengths]
    for of_rows, rows in zip(labels, lengths):
        for row, length in zip(of_rows, rows):
            row[5 - length :] = -100
    return [(Tensor(rng.randn(*of_rows.shape, 4), ms.float32), Tensor(of_rows)) for of_rows in labels]


@pytest.mark.parametrize("first", [1.0, 2.0])
def test_weights_that_differ_only_later_warn(first, rng):
    masks = [np.full(8, first), np.r_[np.full(3, 1.0), np.full(5, 4.0)]]
    batches = [(Tensor(rng.randn(8, 4), ms.float32), Tensor(mask, ms.float32)) for mask in masks]
    assert len(warnings_of(driver(Masked(normed=False)), batches)) == 1


def test_parts_with_equal_losses_give_no_result(rng):
    """All weights are 0, so every row has the loss log(3), and every weighting gives the same mean."""
    network = nn.Dense(4, 3, weight_init="zeros", bias_init="zeros")
    model = GradientAccumulation(network, of_labels, nn.SGD(network.trainable_params(), 10.0))
    assert warnings_of(model, labelled(rng, LAST, LAST), 2) == []
    assert len(warnings_of(model, labelled(rng, LAST, LAST), 2)) == 1  # after an update


def checks_of(model, batches, monkeypatch):
    checks = []
    original = additivity._losses
    monkeypatch.setattr(additivity, "_losses", lambda *args: checks.append(args) or original(*args))
    assert warnings_of(model, batches) == []
    return len(checks)


def test_mean_over_rows_is_compared_a_few_times(rng, monkeypatch):
    network = nn.Dense(4, 3)
    model = GradientAccumulation(network, of_all, nn.SGD(network.trainable_params(), 0.1))
    assert 1 <= checks_of(model, labelled(rng, *[NONE] * 40, rows=16), monkeypatch) <= 3


def of_all(output, labels):
    return ops.cross_entropy(output, labels, ignore_index=-1)
