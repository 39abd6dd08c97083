"""Does a loss that couples the rows of a batch get the gradient of the large batch?"""

from __future__ import annotations

from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.amp import DynamicLossScaler

from helpers import joined, restore
from ms_accum import (
    AccumulatedTrainStep,
    Checkpointer,
    CoupledLoss,
    GradientAccumulation,
    Stopped,
    TrainForwardBackward,
)
from towers import ROWS, Tempered, Tower, Towers, Whole, gradients_and_loss, info_nce, miss, pairs

pytestmark = pytest.mark.usefixtures("eager")


def triplets(rows, labels):
    """For all triplets: the distance of those of one class, and a margin, against those of two."""
    apart = ops.sum(ops.square(ops.expand_dims(rows, 1) - rows), -1)
    same = ops.cast(ops.expand_dims(labels, 1) == labels, ms.float32)
    miss = ops.relu(ops.expand_dims(apart, 2) - ops.expand_dims(apart, 1) + 0.5)
    return ops.mean(miss * ops.expand_dims(same, 2) * (1 - ops.expand_dims(same, 1)))


def labelled(rng, rows=ROWS):
    return [
        (Tensor(rng.randn(count, 6).astype(np.float32)), Tensor(rng.randint(0, 3, count).astype(np.int32)))
        for count in rows
    ]


CASES = {
    "two towers": (Towers, lambda: info_nce, 2, pairs),
    "labels": (Tower, lambda: triplets, 1, labelled),
    "a trained temperature": (Towers, Tempered, 2, pairs),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_that_of_the_large_batch(case, rng):
    """And that of plain accumulation, the planted fault, is not."""
    make, loss, columns, data = CASES[case]
    network, loss_fn, micro_batches = make(), loss(), data(rng)
    whole = Whole(network, loss_fn, columns)
    trained = whole.trainable_params()
    expected, loss = gradients_and_loss(whole, None, [joined(micro_batches)], 1, trained, check="off")
    found, shown = gradients_and_loss(network, CoupledLoss(loss_fn), micro_batches, 3, trained, inputs=columns)
    plain, _ = gradients_and_loss(whole, None, micro_batches, 3, trained, check="off")
    assert shown == pytest.approx(loss, rel=1e-6)
    assert miss(found, expected) < 1 and miss(plain, expected) > 100


@pytest.mark.usefixtures("eager")
def test_tails_and_split_batches_equal_smaller_large_batches(rng):
    network, data = Towers(), pairs(rng, (4, 4, 4))
    trained = network.trainable_params()
    start = [parameter.asnumpy().copy() for parameter in trained]

    def left(loss_fn, data, mini_steps=None, **options):
        restore(trained, start)
        used, inputs = (network, 2) if isinstance(loss_fn, CoupledLoss) else (Whole(network, info_nce), None)
        model = GradientAccumulation(used, loss_fn, nn.SGD(trained, 0.1), check="off", inputs=inputs)
        model.train_process(1, data, mini_steps, report=(), ckpt_path=None, **options)
        assert model.updates == 2
        return [parameter.asnumpy().copy() for parameter in trained]

    expected = left(None, [joined(data[:2]), data[2]], 1)
    assert miss(left(CoupledLoss(info_nce), data, 2), expected) < 1
    split = left(CoupledLoss(info_nce), [joined(data[:2]), data[2]], micro_batch_size=3)
    assert miss(split, expected) < 1


class Counted(nn.Cell):
    """Stands for a Dropout whose mask is a function of a counter."""

    def __init__(self):
        super().__init__()
        self.tower = Tower(6)
        self.counter = Parameter(Tensor(0, ms.int32), name="counter", requires_grad=False)

    def construct(self, x):
        count = ops.assign_add(self.counter, Tensor(1, ms.int32))
        return self.tower(x * ops.sin(ops.cast(count, ms.float32)))


@pytest.mark.usefixtures("eager")
def test_third_pass_repeats_masks_of_the_first(rng):
    network, data = Counted(), labelled(rng)
    trained = network.trainable_params()
    by_hand = [(x * float(np.sin(np.float32(count))), labels) for count, (x, labels) in enumerate(data, 1)]
    expected, _ = gradients_and_loss(Whole(network.tower, triplets, 1), None, [joined(by_hand)], 1, trained)
    found, _ = gradients_and_loss(network, CoupledLoss(triplets), data, 3, trained)
    assert int(network.counter.asnumpy()) == 3 and miss(found, expected) < 1


@pytest.mark.usefixtures("eager")
def test_batch_norm_statistics_are_updated_once_per_micro_batch(rng):
    def normalized():
        ms.set_seed(1)
        return nn.SequentialCell(nn.Dense(6, 5), nn.BatchNorm1d(5), nn.Dense(5, 4))

    network, other, data = normalized(), normalized(), labelled(rng)
    with pytest.warns(UserWarning, match="BatchNorm"):
        gradients_and_loss(network, CoupledLoss(triplets), data, 3, network.trainable_params())
    with pytest.warns(UserWarning, match="BatchNorm"):
        gradients_and_loss(Whole(other, triplets, 1), None, data, 3, other.trainable_params(), check="off")
    pairs = zip(network[1].untrainable_params(), other[1].untrainable_params())
    assert all(np.array_equal(one.asnumpy(), another.asnumpy()) for one, another in pairs)


@pytest.mark.usefixtures("eager")
def test_nonfinite_window_is_skipped(rng):
    network, data = Towers(), pairs(rng, (4, 4, 4, 4))
    data[1] = (data[1][0] * float("nan"), data[1][1])
    model = GradientAccumulation(network, CoupledLoss(info_nce), nn.SGD(network.trainable_params(), 0.1), inputs=2)
    model.train_process(1, data, 2, report=(), ckpt_path=None)
    assert (model.updates, model.skipped) == (1, 1)
    assert all(np.isfinite(parameter.asnumpy()).all() for parameter in network.trainable_params())


@pytest.mark.usefixtures("eager")
def test_stop_inside_a_window_and_resume(rng, tmp_path):
    data = pairs(rng, (4,) * 6)

    def run(folder, stop=None, resume=None):
        ms.set_seed(1)
        network = Towers()
        model = GradientAccumulation(
            network, CoupledLoss(info_nce), nn.Momentum(network.trainable_params(), 0.1, 0.9), tail="carry", inputs=2
        )
        states = Checkpointer(folder, stop=stop, resume=resume)
        model.train_process(2, data, 4, report=(), ckpt_path=None, checkpointer=states)
        return model.updates, [parameter.asnumpy() for parameter in network.trainable_params()]

    updates, expected = run(tmp_path / "at once")
    asked = iter([False] * 9 + [True] * 100)
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", stop=lambda: next(asked))
    again, found = run(tmp_path / "stopped", resume="auto")
    assert updates == again == 3 and all(np.array_equal(one, other) for one, other in zip(found, expected))


@pytest.mark.usefixtures("eager")
def test_evaluation_uses_the_loss_of_each_batch(rng):
    network, data = Towers(), pairs(rng)
    results = []

    class Keep(ms.train.Callback):
        def on_eval_end(self, run_context):
            results.append(run_context.original_args().metrics["eval_loss"])

    model = GradientAccumulation(network, CoupledLoss(info_nce), nn.SGD(network.trainable_params(), 0.1), inputs=2)
    model.train_process(1, data, 3, report=Keep(), ckpt_path=None, valid_dataset=data[:1])
    assert results == pytest.approx([float(Whole(network, info_nce)(*data[0]).asnumpy())], rel=1e-6)


def of_a_step(network, loss_fn, optimizer):
    return AccumulatedTrainStep((network, loss_fn), optimizer)


def of_the_cells(network, loss_fn, optimizer):
    grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
    return TrainForwardBackward(nn.WithLossCell(network, loss_fn), optimizer, grad_sum)


@pytest.mark.parametrize("make", [of_a_step, of_the_cells])
def test_step_and_cells_reject_coupled_loss(make):
    network = Tower()
    with pytest.raises(ValueError, match="CoupledLoss. Give it to GradientAccumulation as 'loss_fn'.$"):
        make(network, CoupledLoss(triplets), nn.SGD(network.trainable_params(), 0.1))


@pytest.mark.usefixtures("eager")
def test_direct_call_raises(rng):
    loss_fn = CoupledLoss(triplets)

    @ms.jit
    def step(rows, labels):
        return loss_fn(rows, labels)

    with pytest.raises(RuntimeError, match="^For 'CoupledLoss', the loss needs a .* Give it to GradientAccumulation."):
        step(*labelled(rng)[0])


class WithScale(nn.Cell):
    def __init__(self):
        super().__init__()
        self.tower, self.scale = Tower(6), Parameter(Tensor(1.0, ms.float32), name="scale")

    def construct(self, x):
        return self.tower(x), self.scale


def of_two(rows, scale, labels):
    return triplets(rows * scale, labels)


def wrong(network=Tower, loss_fn=triplets, columns=1, **options):
    network = network()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    return GradientAccumulation(network, CoupledLoss(loss_fn), optimizer, inputs=columns, **options)


class Losses:
    def __init__(self, network):
        self.network = network

    def scaled(self, rows, labels):
        return triplets(rows * self.network.scale, labels)


class Listed:
    """Callable; MindSpore does not see what is in its list."""

    def __init__(self, scale):
        self.scales = [scale]

    def __call__(self, rows, labels):
        return triplets(rows * self.scales[0], labels)


class CellWithList(nn.Cell):
    def __init__(self, scale):
        super().__init__()
        self.scales = {"one": scale}

    def construct(self, rows, labels):
        return triplets(rows * self.scales["one"], labels)


def using_the_networks(rng, how):
    network = WithScale()

    def scaled(rows, labels):
        return triplets(rows * network.scale, labels)

    def calling(rows, labels):
        return scaled(rows, labels)

    def with_scale(scale, rows, labels):
        return triplets(rows * scale, labels)

    ways = {"one that it calls": calling, "a method": Losses(network).scaled}
    ways |= {"an object": Listed(network.scale), "a Cell that holds it in a list": CellWithList(network.scale)}
    ways["an argument"] = partial(with_scale, network.scale)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    model = GradientAccumulation(network.tower, CoupledLoss(ways[how]), optimizer)
    model.train_process(1, labelled(rng), 3, report=(), ckpt_path=None)


@pytest.mark.parametrize(
    "how", ["one that it calls", "a method", "an argument", "an object", "a Cell that holds it in a list"]
)
def test_loss_function_that_uses_trained_parameters_is_rejected(how, rng):
    with pytest.raises(
        ValueError,
        match="'loss_fn' must be a Cell .*but got a .* that uses '(network|argument 0|scales)'",
    ):
        using_the_networks(rng, how)


def train(rng, *arguments, **options):
    wrong(*arguments, **options).train_process(1, labelled(rng), 3, report=(), ckpt_path=None)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda rng: CoupledLoss("info_nce"), TypeError, "'loss_fn' must be a Cell or a function, but got str"),
        (lambda rng: CoupledLoss(CoupledLoss(triplets)), TypeError, "but got CoupledLoss"),
        (lambda rng: wrong(columns=0), ValueError, "'inputs' must be an int >= 1"),
        (lambda rng: wrong(weight=2), ValueError, "'weight' must be None with a CoupledLoss"),
        (lambda rng: wrong(reduction="sum"), ValueError, "'reduction' must be 'mean' with a CoupledLoss"),
        (lambda rng: wrong(lambda: nn.SequentialCell(Tower(), nn.Dropout(p=0.1))), ValueError, "Call replace_dropout"),
        (lambda rng: train(rng, WithScale, of_two), ValueError, "Make trained numbers parameters"),
    ],
)
def test_invalid_arguments_are_rejected(make, error, message, rng):
    with pytest.raises(error, match=message):
        make(rng)


@pytest.mark.usefixtures("eager")
def test_skip_micro_is_rejected():
    network = Towers()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    with pytest.raises(ValueError, match="'nonfinite' must be the default with a CoupledLoss"):
        GradientAccumulation(network, CoupledLoss(info_nce), optimizer, nonfinite="skip_micro", inputs=2)


@pytest.mark.usefixtures("eager")
def test_loss_scale_does_not_change_gradients(rng):
    network, micro_batches = Towers(), pairs(rng)
    trained = network.trainable_params()
    expected, _ = gradients_and_loss(network, CoupledLoss(info_nce), micro_batches, 3, trained, inputs=2)
    for scale in (256, DynamicLossScaler(64.0, 2, 9)):
        found, _ = gradients_and_loss(
            network, CoupledLoss(info_nce), micro_batches, 3, trained, inputs=2, loss_scale=scale
        )
        assert miss(found, expected) < 1
