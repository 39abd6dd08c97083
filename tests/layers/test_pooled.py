"""Are pooled running statistics those of the large batch?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from helpers import cross_entropy, values
from ms_accum import CheckpointError, GradientAccumulation, TrainForwardBackward, pool_batch_norm
from ms_accum.layers.batch_norm import warn_about_batch_norm
from ms_accum.network.state import zeros_like
from ms_accum.saving.model_file import load_model, save_model
from reference import miss

pytestmark = pytest.mark.host
KINDS = [(nn.BatchNorm1d, (3,)), (nn.BatchNorm1d, (3, 5)), (nn.BatchNorm2d, (3, 4, 4)), (nn.BatchNorm3d, (3, 2, 4, 4))]
ROWS = (4, 2, 7)


class End(nn.Cell):
    """What the update graph does with the statistics."""

    def __init__(self, pooled):
        super().__init__(auto_prefix=False)
        self.pooled = pooled

    def construct(self, updated):
        return self.pooled.after_window(updated)


def micro_batches(rng, shape, rows=ROWS):
    """Micro-batches whose means and variances differ."""
    return [Tensor(rng.randn(n, *shape) * n + 5 * k, ms.float32) for k, n in enumerate(rows)]


def one_layer(kind):
    return nn.SequentialCell(kind(3, momentum=0.8)).set_train()


def statistics(network):
    """Return those of the first layer."""
    layer = getattr(network[0], "bn2d", network[0])
    return values([layer.moving_mean, layer.moving_variance])


def after(network, inputs, pooled=None, updated=True):
    """Return the running statistics after a window."""
    for x in inputs:
        network(x)
    if pooled is not None:
        End(pooled)(Tensor(updated))
    return statistics(network)


def of_large_batch(kind, windows):
    network = one_layer(kind)
    for window in windows:
        network(ops.cat(window))
    return statistics(network)


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_statistics_equal_those_of_large_batch(kind, shape, rng):
    network, windows = one_layer(kind), [micro_batches(rng, shape), micro_batches(rng, shape, (3, 6))]
    pooled = pool_batch_norm(network)
    for window in windows:
        found = after(network, window, pooled)
    assert miss(found, of_large_batch(kind, windows), 1e-5) <= 1


def mean_of_means(inputs):
    """What equal weights for uneven micro-batches, and their variances alone, would give."""
    means, variances = zip(*[(x.asnumpy().mean(0), x.asnumpy().var(0, ddof=1)) for x in inputs])
    return [0.2 * np.mean(means, 0), 0.8 + 0.2 * np.mean(variances, 0)]


def test_other_averages_differ_from_large_batch(rng):
    kind, window = nn.BatchNorm1d, micro_batches(rng, (3,))
    expected = of_large_batch(kind, [window])
    assert miss(after(one_layer(kind), window), expected, 1e-5) >= 100
    assert miss(mean_of_means(window), expected, 1e-5) >= 100


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_large_mean_keeps_precision_of_variance(offset, rng):
    """Sums of squares of what is far from zero would lose the variance."""
    network, window = one_layer(nn.BatchNorm1d), [x + offset for x in micro_batches(rng, (3,))]
    pooled = pool_batch_norm(network)
    known = np.concatenate([x.asnumpy() for x in window]).mean(0)
    network[0].moving_mean.set_data(Tensor(known + 1, ms.float32))
    rows = np.concatenate([x.asnumpy() for x in window]).astype(np.float64)
    assert miss(after(network, window, pooled)[1:], [0.8 + 0.2 * rows.var(0, ddof=1)], 1e-5) <= 1


class Loss(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.network, self.loss = network, cross_entropy()

    def construct(self, x, y):
        return self.loss(self.network(x), y)


@pytest.mark.graph
@pytest.mark.filterwarnings("ignore:BatchNorm layers")
def test_each_micro_batch_is_counted_once(rng):
    """In graph mode, differentiated, in two layers: and the gradients are those of BatchNorm."""
    inputs = [Tensor(rng.randn(4, 3) + k, ms.float32) for k in range(3)]
    labels = Tensor(np.zeros((3, 4)), ms.int32)
    found = []
    for pool in (True, False):
        network = one_layer(nn.BatchNorm1d)
        network.append(nn.BatchNorm1d(3, momentum=0.5))
        network.set_train()
        pooled = pool_batch_norm(network) if pool else None
        optimizer = nn.SGD(network.trainable_params(), 1.0)
        grad_sum = zeros_like(f"sums{pool}.grad_sum", optimizer.parameters)
        forward_backward = TrainForwardBackward(Loss(network), optimizer, grad_sum)
        forward_backward.set_train()
        for _ in range(2):
            for x, y in zip(inputs, labels):
                forward_backward(x, y)
            if pool:
                End(pooled)(Tensor(True))
                assert not network[0].window_sums.asnumpy().any()
        found.append((statistics(network), values(grad_sum)))
    assert miss(found[0][0], of_large_batch(nn.BatchNorm1d, [inputs] * 2), 1e-5) <= 1
    assert miss(found[1][0], found[0][0], 1e-5) >= 100
    assert miss(found[0][1], found[1][1], 1e-6) <= 1


class Step(nn.Cell):
    """A micro-batch and, in a branch of the same graph, the end of a window of 3."""

    def __init__(self, network, pooled, touched):
        super().__init__(auto_prefix=False)
        self.network, self.pooled, self.touched = network, pooled, touched
        self.count = ms.Parameter(Tensor(0, ms.int32), name="count", requires_grad=False)

    def construct(self, x):
        out = self.network(x)
        count = self.count + 1
        full = ops.depend(count >= 3, (out, ops.assign(self.count, count)))
        return self.end(ops.depend(full, self.touched) if self.touched else full)

    def end(self, full):
        if full:
            self.pooled.after_window(Tensor(True))
            ops.assign(self.count, Tensor(0, ms.int32))
        return full


def loaded(network):
    """Load running statistics as a user does; each network gets tensors of its own."""
    ms.load_param_into_net(
        network,
        {name: ms.Parameter(Tensor([5.0, 6.0, 7.0]), name=name) for name in ("0.moving_mean", "0.moving_variance")},
    )


def difference_in_branch(rng, touch):
    """Return by how much statistics differ from the large batch's if others are loaded between two windows."""
    network, big = one_layer(nn.BatchNorm1d), one_layer(nn.BatchNorm1d)
    pooled = pool_batch_norm(network)
    step = Step(network, pooled, pooled.parameters if touch else ())
    for _ in range(2):
        inputs = micro_batches(rng, (3,), (4, 4, 4))
        for x in inputs:
            step(x)
        big(ops.cat(inputs))
        left = miss(statistics(network), statistics(big), 1e-5)
        loaded(network)
        loaded(big)
    return left


@pytest.mark.graph
def test_loaded_statistics_are_used_in_branch(rng):
    assert difference_in_branch(rng, touch=True) <= 1


@pytest.mark.slow
@pytest.mark.graph
def test_branch_without_dependency_on_statistics_is_detected(rng):
    assert difference_in_branch(rng, touch=False) >= 100


@pytest.mark.modes
def test_skipped_window_is_discarded(rng):
    network, (first, *others) = one_layer(nn.BatchNorm1d), micro_batches(rng, (3,))
    pooled = pool_batch_norm(network)
    before = statistics(network)
    assert all(np.array_equal(*pair) for pair in zip(after(network, [first], pooled, updated=False), before))
    assert miss(after(network, others, pooled), of_large_batch(nn.BatchNorm1d, [others]), 1e-5) <= 1


@pytest.mark.modes
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_statistics_are_discarded(bad, rng):
    network, inputs = one_layer(nn.BatchNorm1d), micro_batches(rng, (3,))
    pooled = pool_batch_norm(network)
    spoilt = inputs[0].asnumpy().copy()
    spoilt[0, 1] = bad
    found = after(network, [Tensor(spoilt)], pooled)
    assert np.isfinite(found).all()
    assert [array[1] for array in found] == [0, 1]
    expected = of_large_batch(nn.BatchNorm1d, [inputs])
    assert miss([array[1] for array in after(network, inputs, pooled)], [array[1] for array in expected], 1e-5) <= 1


def test_micro_batches_of_one_row_are_pooled(rng):
    """Their own variance is 0/0."""
    network, rows = one_layer(nn.BatchNorm1d), [Tensor(rng.randn(1, 3), ms.float32) for _ in range(4)]
    pooled = pool_batch_norm(network)
    assert miss(after(network, rows, pooled), of_large_batch(nn.BatchNorm1d, [rows]), 1e-5) <= 1


def test_window_without_forward_changes_nothing():
    network = one_layer(nn.BatchNorm1d)
    pooled = pool_batch_norm(network)
    before = statistics(network)
    assert all(np.array_equal(*pair) for pair in zip(after(network, [], pooled), before))


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_evaluation_and_gradients_equal_those_of_batch_norm(kind, shape, rng):
    x, weights = Tensor(rng.randn(5, *shape), ms.float32), Tensor(rng.randn(5, *shape), ms.float32)
    found = []
    for pool in (True, False):
        network = one_layer(kind)
        if pool:
            pool_batch_norm(network)
        parameters = ms.ParameterTuple(network.trainable_params())
        step = ms.value_and_grad(lambda x, network=network: ops.reduce_sum(network(x) * weights), 0, parameters)
        value, (to_x, to_parameters) = step(x)
        found.append(values([value, to_x, *to_parameters, one_layer(kind).set_train(False)(x)]))
    assert all(np.array_equal(*pair) for pair in zip(*found))


def test_layers_are_replaced_in_place_with_their_parameters():
    network = nn.SequentialCell(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.SequentialCell(nn.BatchNorm3d(3)))
    network.append(nn.BatchNorm2d(3, use_batch_statistics=False))
    before = [parameter.name for parameter in network.get_parameters()]
    pooled = pool_batch_norm(network, group=None)
    after = [parameter.name for parameter in network.get_parameters()]
    assert sorted(after) == sorted([*before, "1.window_sums", "2.0.bn2d.window_sums"])
    assert len(pooled.sums) == 2 and pooled.state == {}
    assert repr(network[1]) == "PooledBatchNorm(num_features=3, eps=1e-05, momentum=0.9)"
    with pytest.raises(ValueError, match="without one. Leave out this call"):
        pool_batch_norm(network)
    with pytest.raises(TypeError, match="but got BatchNorm2d. Put it into a SequentialCell"):
        pool_batch_norm(nn.BatchNorm2d(3))


def test_warning_for_pooled_batch_norm():
    network = one_layer(nn.BatchNorm2d)
    pool_batch_norm(network)
    with pytest.warns(UserWarning, match=r"BatchNorm layers \(1, the first is '0'\)"):
        warn_about_batch_norm(network)


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
def test_trial_run_leaves_no_sums(rng):
    """The driver may run a micro-batch to look at the loss, and restores the network."""
    network = nn.SequentialCell(nn.BatchNorm1d(3, momentum=0.9), nn.Dense(3, 2))
    pool_batch_norm(network)
    model = GradientAccumulation(network, cross_entropy(), nn.SGD(network.trainable_params(), 0.1))
    inputs = micro_batches(rng, (3,))
    data = [(x, Tensor(np.zeros(len(x)), ms.int32)) for x in inputs]
    model.train_process(1, data, 2, report=(), ckpt_path=None)
    first, second, third = (x.asnumpy() for x in inputs)
    mean = 0.9 * (0.1 * np.concatenate([first, second]).mean(0)) + 0.1 * third.mean(0)
    assert network[0].moving_mean.asnumpy() == pytest.approx(mean, rel=1e-5)
    assert not network[0].window_sums.asnumpy().any()


def test_loading_model_without_sums_explains_error(tmp_path):
    plain, other = one_layer(nn.BatchNorm2d), one_layer(nn.BatchNorm2d)
    pool_batch_norm(other)
    save_model(plain, tmp_path / "plain.ckpt")
    save_model(other, tmp_path / "pooled.ckpt")
    with pytest.raises(CheckpointError, match=r"missing 0\.window_sums.*Load it before pool_batch_norm"):
        load_model(other, tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=r"unexpected 0\.window_sums.*Call pool_batch_norm"):
        load_model(plain, tmp_path / "pooled.ckpt")
