"""Are sparse gradients accumulated like dense ones?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from helpers import compiled_step, run, values
from ms_accum import Accumulator, GradientAccumulation, ZeroOptimizer
from ways import WAYS, Trained

ROWS = 10


class Words(nn.Cell):
    """An embedding before or after another layer: MindSpore compiles these into different graphs."""

    def __init__(self, make, late):
        super().__init__()
        random = np.random.RandomState(1)
        if late:
            self.head = nn.Dense(4, 3)
        self.words = make(ROWS, 4)
        self.words.embedding_table.set_data(Tensor(random.rand(ROWS, 4), ms.float32))
        if not late:
            self.head = nn.Dense(4, 3)
        self.head.weight.set_data(Tensor(random.rand(3, 4), ms.float32))
        self.head.bias.set_data(Tensor(random.rand(3), ms.float32))

    def construct(self, x):
        return self.head(self.words(x))


def data():
    """Words that come twice in a micro-batch, some that come in one only, and one that never does."""
    random = np.random.RandomState(2)
    rows = (4, 4, 4, 2, 4)
    return [(Tensor(random.randint(0, ROWS - 1, n), ms.int32), Tensor(random.rand(n, 3), ms.float32)) for n in rows]


def trained(make, late, window, **options):
    network = Words(make, late)
    optimizer = nn.Adam(network.trainable_params(), 0.1)
    model = GradientAccumulation(network, nn.MSELoss(), optimizer, clip_norm=0.05, **options)
    run(model, data(), window)
    return values(network.trainable_params())


@pytest.mark.slow
@pytest.mark.parametrize(("window", "late"), [(3, False), (1, True)])
def test_driver_trains_as_with_dense_gradients(window, late):
    found, expected = trained(nn.EmbeddingLookup, late, window), trained(nn.Embedding, late, window)
    for sparse, dense in zip(found, expected):
        np.testing.assert_allclose(sparse, dense, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("late", "window"), [(True, 2)])
def test_custom_step_trains_as_with_dense_gradients(late, window):
    left = []
    for make in (nn.EmbeddingLookup, nn.Embedding):
        network = Words(make, late)
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        accumulator = Accumulator(optimizer, window, reduction="mean", network=network)
        step = compiled_step(network, nn.MSELoss(), accumulator, optimizer)
        for x, y in data():
            step(x, y)
        assert accumulator.flush() == (window == 2) and accumulator.updates == 3 + 2 * (window == 1)
        left.append(values(network.trainable_params()))
    for sparse, dense in zip(*left):
        np.testing.assert_allclose(sparse, dense, rtol=1e-6, atol=1e-7)


class Squares(nn.Cell):
    """The mean of the squares of what a network returns, as its own loss."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x):
        return ops.mean(ops.square(self.network(x)))


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_accumulator_without_network_rejects_sparse_gradients(late):
    network = Words(nn.EmbeddingLookup, late)
    optimizer = nn.LazyAdam(network.trainable_params(), 0.1)
    step = compiled_step(network, nn.MSELoss(), Accumulator(optimizer, 2, reduction="mean"), optimizer)
    with pytest.raises(ValueError, match="'network' must be given with sparse gradients"):
        step(*data()[0])


# Outside graphs MindSpore returns the looked up rows without their numbers


WITHOUT_ROWS = "returns those of nn.EmbeddingLookup without their rows. "
REMEDY = "nn.Embedding, or nn.EmbeddingLookup with target='DEVICE' and sparse=False"


def words(count):
    """Return a micro-batch of this number of words."""
    return [(Tensor(np.arange(count) // 2, ms.int32),)]


@pytest.mark.host
@pytest.mark.parametrize("count", [4, ROWS], ids=["fewer words", "words for all rows"])
@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_outside_graphs_are_rejected(way, count):
    """If the number of words is that of the rows, so is the gradient's, which was added to the wrong rows."""
    network = Squares(Words(nn.EmbeddingLookup, True))
    remedy = "Call the Accumulator in a step with ms.jit .*" if way in ("accumulator", "loop") else "Use compile=True, "
    with pytest.raises(
        ValueError, match=f"got sparse ones of .*embedding_table. .*{WITHOUT_ROWS}{remedy}or .*{REMEDY}"
    ):
        Trained(way, network).train(words(count))


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_frozen_table_trains_outside_graphs(way):
    network = Squares(Words(nn.EmbeddingLookup, True))
    table = network.network.words.embedding_table
    trained, before = Trained(way, network), table.asnumpy()
    table.requires_grad = False
    assert trained.train(words(ROWS)).updates == 1
    np.testing.assert_array_equal(table.asnumpy(), before)


@pytest.mark.parametrize("way", ["driver", "cells", "step", "loop"])
def test_sparse_gradients_with_compile_false_are_rejected(way):
    with pytest.raises(ValueError, match="must be dense outside graphs, but got sparse ones of"):
        Trained(way, Squares(Words(nn.EmbeddingLookup, False)), compile=False).train(words(ROWS))


def dense_lookup(rows, columns):
    return nn.EmbeddingLookup(rows, columns, target="DEVICE", sparse=False)


@pytest.mark.host
@pytest.mark.parametrize("make", [nn.Embedding, dense_lookup])
@pytest.mark.parametrize("nonfinite", ["skip_window", "skip_micro"])
def test_layers_that_the_error_names_train_outside_graphs(make, nonfinite):
    network = Squares(Words(make, False))
    assert Trained("loop", network, nonfinite=nonfinite).train(words(ROWS)).updates == 1


def loop_without_network(differentiate):
    """Train with an `Accumulator` that can't know about the table."""
    network = Squares(Words(nn.EmbeddingLookup, False))
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    grad_fn = differentiate(ms.value_and_grad(network, None, optimizer.parameters))
    Accumulator(optimizer, 2, reduction="mean")(grad_fn(*words(4)[0])[1], 4)


@pytest.mark.host
def test_accumulator_without_network_rejects_rows_by_their_shape():
    with pytest.raises(
        ValueError, match=rf"got \(4, 4\) for \(10, 4\)\. Differentiate .*{WITHOUT_ROWS}Call .*{REMEDY}"
    ):
        loop_without_network(lambda grad_fn: grad_fn)


def test_accumulator_outside_of_the_compiled_gradient_rejects_rows():
    def compiled(grad_fn):
        @ms.jit
        def gradients(x):
            return grad_fn(x)

        return gradients

    with pytest.raises(
        ValueError, match=f"'grads' must be Tensors, but got sparse ones. .*{WITHOUT_ROWS}Call .*{REMEDY}"
    ):
        loop_without_network(compiled)


class Table(nn.Cell):
    """The mean of the squares of rows of a table, as its own loss."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingLookup(6, 2)
        self.table.embedding_table.set_data(Tensor(np.linspace(0.5, 1.0, 12).reshape(6, 2), ms.float32))

    def construct(self, x):
        return ops.mean(ops.square(self.table(ops.cast(x, ms.int32))))


def on_the_host(make):
    """Return what makes the optimizer with MindSpore's kernels for sparse gradients."""

    def made(parameters):
        optimizer = make(parameters)
        optimizer.target = "CPU"
        return optimizer

    return made


def undecayed(parameters):
    return [{"params": parameters, "weight_decay": 0.0}]


# Whether all the words of a micro-batch differ: where they don't, `nn.Adam` on CPU squares the gradient of each one.
EQUAL = {
    "Adam": (lambda p: nn.Adam(p, 0.1), True),
    "Adam nesterov": (lambda p: nn.Adam(p, 0.1, use_nesterov=True), True),
    "Adam on the host": (on_the_host(lambda p: nn.Adam(p, 0.1)), False),
    "Adam without decay for the table": (on_the_host(lambda p: nn.Adam(undecayed(p), 0.1, weight_decay=0.1)), False),
    "ProximalAdagrad on the host": (on_the_host(lambda p: nn.ProximalAdagrad(p, learning_rate=0.1)), False),
}
OTHER = {
    "FTRL": (lambda p: nn.FTRL(p, learning_rate=0.1), "FTRL"),
    "FTRL on the host": (on_the_host(lambda p: nn.FTRL(p, learning_rate=0.1)), "FTRL"),
    "LazyAdam": (lambda p: nn.LazyAdam(p, 0.1), "LazyAdam"),
    "lazy": (lambda p: nn.Adam(p, 0.1, use_lazy=True), "Adam with use_lazy=True"),
    "decay": (lambda p: nn.Adam(p, 0.1, weight_decay=0.1), "Adam with 'weight_decay' for the table"),
    "nesterov": (
        on_the_host(lambda p: nn.Adam(p, 0.1, use_nesterov=True)),
        "Adam with use_nesterov=True and target='CPU'",
    ),
    "l1": (
        on_the_host(lambda p: nn.ProximalAdagrad(p, learning_rate=0.1, l1=0.1)),
        "ProximalAdagrad with 'l1' or 'l2'",
    ),
    "l2": (
        on_the_host(lambda p: nn.ProximalAdagrad(p, learning_rate=0.1, l2=0.1)),
        "ProximalAdagrad with 'l1' or 'l2'",
    ),
    "ProximalAdagrad with decay": (
        on_the_host(lambda p: nn.ProximalAdagrad(p, learning_rate=0.1, weight_decay=0.1)),
        "ProximalAdagrad with 'weight_decay' for the table",
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OTHER)
def test_optimizer_with_own_sparse_rule_is_rejected(kind, way):
    make, named = OTHER[kind]
    message = f"'optimizer' must be one that updates equally with the sparse .*, but got {named}. Use nn.Embedding, or"
    for window in (1, 2):
        with pytest.raises(ValueError, match=message):
            Trained(way, Table(), window, make=make)


@pytest.mark.host
def test_sharded_optimizer_with_own_sparse_rule_is_rejected():
    def sharded(parameters):
        return ZeroOptimizer(lambda parts: nn.FTRL(parts, learning_rate=0.1), parameters, group=None)

    with pytest.raises(ValueError, match="but got FTRL. Use nn.Embedding"):
        Trained("driver", Table(), make=sharded)


@pytest.mark.host
@pytest.mark.parametrize("make", [lambda p: nn.FTRL(p, learning_rate=0.1), lambda p: nn.Adam(p, 0.1, weight_decay=0.1)])
def test_optimizer_with_own_sparse_rule_accepts_dense_gradients(make):
    network = Words(nn.Embedding, False)
    assert trained_once(network, make(network.trainable_params())).updates == 1


def trained_once(network, optimizer):
    model = GradientAccumulation(network, nn.MSELoss(), optimizer)
    run(model, data()[:2], 2)
    return model


def by_mindspore(make, words):
    """Train with plain MindSpore."""
    network = Table()
    optimizer = make(network.trainable_params())
    grad_fn = ms.value_and_grad(network, None, optimizer.parameters)

    @ms.jit
    def step(x):
        loss, grads = grad_fn(x)
        return ops.depend(loss, optimizer(grads))

    for indices in words:
        step(Tensor(indices, ms.float32))
    return values(network.trainable_params())[0]


def accumulated(make, words):
    network = Table()
    Trained("driver", network, 1, make=make).train([(Tensor(indices, ms.float32),) for indices in words])
    return values(network.trainable_params())[0]


WORDS = {True: ([0, 1, 2], [2, 3, 0], [3, 1, 4]), False: ([0, 1, 1], [2, 1, 0], [3, 3, 3])}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EQUAL)
def test_accepted_optimizers_train_as_in_mindspore(kind):
    """With windows of 1; the last row is never looked up."""
    make, distinct = EQUAL[kind]
    expected = by_mindspore(make, WORDS[distinct])
    np.testing.assert_allclose(accumulated(make, WORDS[distinct]), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_gradients_of_repeated_words_are_summed_before_adam():
    """MindSpore's default on CPU squares each of them: a fault that docs/limits.md names."""
    make, words = EQUAL["Adam"][0], WORDS[False]
    found = accumulated(make, words)
    assert np.abs(found - by_mindspore(make, words)).max() > 0.001
    np.testing.assert_allclose(found, by_mindspore(EQUAL["Adam on the host"][0], words), rtol=1e-6, atol=1e-7)
