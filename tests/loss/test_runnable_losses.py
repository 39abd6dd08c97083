"""Are these losses computed correctly: a `functools.partial` in graphs, BCEWithLogitsLoss in PyNative mode?"""

from __future__ import annotations

from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from helpers import run, values
from ms_accum import AccumulatedTrainStep, CoupledLoss, FlushTail, GradientAccumulation, TrainForwardBackward

RNG = np.random.RandomState(1)
X = RNG.randn(14, 6).astype(np.float32)
BITS = (RNG.rand(14, 3) < 0.5).astype(np.float32)
CLASSES = (np.arange(14) % 3).astype(np.int32)
WEIGHT = np.array([1.0, 2.0, 3.0], np.float32)


def dense():
    ms.set_seed(1)
    return nn.Dense(6, 3)


def pieces(labels):
    """Micro-batches of 8 and 6 rows."""
    return [(Tensor(X[rows]), Tensor(labels[rows])) for rows in (slice(8), slice(8, 14))]


def trained(loss_fn, micro_batches, mini_steps=2, **options):
    """Return the weight after a window of SGD with rate 1."""
    network = dense()
    model = GradientAccumulation(network, loss_fn, nn.SGD(network.trainable_params(), 1.0))
    run(model, micro_batches, mini_steps, **options)
    assert model.updates == 1
    return network.weight.asnumpy()


# BCEWithLogitsLoss outside graphs

of_logits = ops.binary_cross_entropy_with_logits
LOSSES = {
    "nn": lambda: nn.BCEWithLogitsLoss(),
    "mint": lambda: mint.nn.BCEWithLogitsLoss(),
    "ops": lambda: of_logits,
    "mint's function": lambda: mint.nn.functional.binary_cross_entropy_with_logits,
    "partial": lambda: partial(of_logits, reduction="mean"),
    "weighted": lambda: nn.BCEWithLogitsLoss(weight=Tensor(WEIGHT), pos_weight=Tensor(WEIGHT[::-1].copy())),
    "weighted partial": lambda: partial(of_logits, weight=Tensor(WEIGHT), pos_weight=Tensor(WEIGHT[::-1].copy())),
}


def expected(name):
    """Return the weight after one step with all rows, in float64."""
    start = dense().weight.asnumpy().astype(np.float64)
    weight, positive = (WEIGHT, WEIGHT[::-1]) if "weighted" in name else (np.ones(3), np.ones(3))
    x, y, share = X.astype(np.float64), BITS, 1 / (1 + np.exp(-(X @ start.T + dense().bias.asnumpy())))
    of_logit = weight * ((1 - y) * share - positive * y * (1 - share))
    return start - of_logit.T @ x / y.size


def miss(name):
    """Return the relative error of the driver's gradient, after another shape has been differentiated."""
    ms.grad(of_logits)(Tensor(np.zeros((5, 2), np.float32)), Tensor(np.zeros((5, 2), np.float32)))
    right = expected(name)
    return np.abs(trained(LOSSES[name](), pieces(BITS)) - right).max() / np.abs(right - dense().weight.asnumpy()).max()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", LOSSES)
def test_uneven_micro_batches_are_exact_in_pynative_mode(name):
    assert miss(name) < 1e-5


class WithInner(nn.Cell):
    """A network that returns its loss."""

    def __init__(self, loss=nn.BCEWithLogitsLoss):
        super().__init__()
        self.dense, self.loss = nn.Dense(6, 3), loss()

    def construct(self, x, y):
        return self.loss(self.dense(x), y)


class Compiled(WithInner):
    @ms.jit
    def construct(self, x, y):
        return self.loss(self.dense(x), y)


ERROR = "'{}' must be one without the mean of nn.BCEWithLogitsLoss in PyNative mode, .* Use compile=True, or reduction="


@pytest.mark.usefixtures("eager")
def test_network_that_contains_the_loss_is_rejected_in_pynative_mode():
    network = WithInner()
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    with pytest.raises(ValueError, match="For 'GradientAccumulation', " + ERROR.format("network")):
        GradientAccumulation(network, None, optimizer)
    with pytest.raises(ValueError, match="For 'TrainForwardBackward', " + ERROR.format("network")):
        TrainForwardBackward(network, optimizer, optimizer.parameters.clone("sums", "zeros"))
    with pytest.raises(ValueError, match="For 'CoupledLoss', " + ERROR.format("loss_fn")):
        GradientAccumulation(nn.Dense(2, 2), CoupledLoss(network), nn.SGD(nn.Dense(2, 2).trainable_params(), 0.1))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("make", [lambda: WithInner(partial(nn.BCEWithLogitsLoss, "sum")), Compiled])
def test_networks_with_right_gradients_are_accepted_in_pynative_mode(make):
    network = make()
    GradientAccumulation(network, None, nn.SGD(network.trainable_params(), 1.0), reduction="sum", check="off")


# Partials in graphs

ignoring = partial(ops.cross_entropy, ignore_index=0)


def similar(output, labels, scale):
    return ops.cross_entropy(ops.matmul(output, output.T) * scale, labels)


def after(cell, output, labels):
    return similar(cell(output), labels, 1.0)


def known(data, labels, ignored):
    return (labels != ignored).sum()


@pytest.mark.parametrize(
    "weight",
    [pytest.param(None, marks=pytest.mark.slow), partial(known, ignored=0)],
    ids=["its own weight", "a partial as weight"],
)
def test_partial_in_a_train_step(weight):
    network = dense()
    step = AccumulatedTrainStep((network, ignoring), nn.SGD(network.trainable_params(), 1.0), 2, weight=weight)
    data = [tuple(column.asnumpy() for column in piece) for piece in pieces(CLASSES)]
    Model(step).train(1, GeneratorDataset(data, ["x", "y"], shuffle=False), FlushTail(), dataset_sink_mode=False)
    assert step.updates == 1
    right = trained(nn.CrossEntropyLoss(ignore_index=0), [(Tensor(X), Tensor(CLASSES))], 1)
    assert np.abs(network.weight.asnumpy() - right).max() < 1e-6


def test_partial_with_parameters_in_a_coupled_loss_is_rejected():
    network, head = dense(), nn.SequentialCell(nn.Dense(3, 3))  # with a prefix in the names of its parameters
    loss_fn = CoupledLoss(partial(after, head))
    optimizer = nn.SGD([*network.trainable_params(), *head.trainable_params()])
    with pytest.raises(ValueError, match="a Cell with the parameters which it trains among its own"):
        GradientAccumulation(network, loss_fn, optimizer)


def test_partial_of_a_cell_keeps_parameter_names():
    class Scaled(nn.Cell):
        def __init__(self):
            super().__init__()
            self.scale = ms.Parameter(Tensor([1.0]), name="scale")

        def construct(self, output, labels, factor=1.0):
            return (self.scale * output).mean() * factor

    network, loss_fn = dense(), Scaled()
    parameters = [*network.trainable_params(), *loss_fn.trainable_params()]
    names = [parameter.name for parameter in parameters]
    model = GradientAccumulation(network, partial(loss_fn, factor=2.0), nn.SGD(parameters, 1.0))
    start = values(parameters)
    run(model, pieces(CLASSES), 2)
    assert [parameter.name for parameter in parameters] == names
    assert all((new != old).any() for new, old in zip(values(parameters), start))
