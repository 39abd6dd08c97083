"""Do the three Cells work in a user's loop, as in the tutorial, and does only the first contain a forward?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from helpers import Slope, cross_entropy, micro_batch, values
from ms_accum import GradientAccumulation, TrainClear, TrainForwardBackward, TrainOptim
from ms_accum.network.parameters import untrained
from reference import miss
from ways import Half


class ByHand:
    """The r1.0 tutorial's set-up: the user owns `grad_sum` and `zeros`, and counts the micro-batches."""

    def __init__(self, network, optimizer, *, mean=False, sens=1.0, clip_norm=None):
        self.optimizer = optimizer
        self.grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
        zeros = optimizer.parameters.clone(prefix="zeros", init="zeros")
        self.weight_sum = untrained("weight_sum", 0.0, ms.float32) if mean else None
        self.forward_backward = TrainForwardBackward(
            network, optimizer, self.grad_sum, sens, weight_sum=self.weight_sum
        )
        self.optim = TrainOptim(optimizer, self.grad_sum, weight_sum=self.weight_sum, clip_norm=clip_norm)
        self.clear = TrainClear(self.grad_sum, zeros, weight_sum=self.weight_sum)

    def window(self, micro_batches):
        losses = [float(self.forward_backward(*columns).asnumpy()) for columns in micro_batches]
        updated, _ = self.optim()
        self.clear()
        return losses, bool(updated.asnumpy())


def slope_by_hand(*, loss_scale=1.0, **options):
    network = Slope()
    optimizer = nn.SGD([network.w], 1.0, loss_scale=loss_scale)
    return network, ByHand(network, optimizer, **options)


def test_loss_is_returned_unscaled():
    network, cells = slope_by_hand(mean=True, sens=16.0, loss_scale=16.0)
    network.w.set_data(Tensor([2.0], ms.float32))
    assert float(cells.forward_backward(*micro_batch(3, rows=4)).asnumpy()) == 6.0


def test_weights_are_applied_in_float32():
    """A gradient of 100 times 1,024 rows would be infinite there."""
    network = Half()
    cells = ByHand(network, nn.SGD([network.w], 1.0), mean=True)
    for rows in (1024, 4):
        cells.forward_backward(*micro_batch(100.0, 3.0, rows=rows))
    updated, norm = cells.optim()
    assert updated.asnumpy() and miss(values([network.w]), [[-100.0, -3.0]], 1e-6) <= 1
    assert float(norm.asnumpy()) == pytest.approx(10009**0.5) and float(cells.weight_sum.asnumpy()) == 1028


def test_optimizer_loss_scale_cancels_sens():
    network, cells = slope_by_hand(sens=1024.0, loss_scale=1024.0)
    cells.forward_backward(*micro_batch(3))
    assert values(cells.grad_sum) == [3072.0]
    updated, norm = cells.optim()
    assert (bool(updated.asnumpy()), float(norm.asnumpy())) == (True, 3.0)
    assert values([network.w]) == [-3.0]


def test_non_scalar_loss_is_rejected():
    network = nn.WithLossCell(nn.Dense(2, 3), nn.CrossEntropyLoss(reduction="none"))
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    cells = ByHand(network, optimizer)
    with pytest.raises(ValueError, match="the loss must be a scalar, but got shape"):
        cells.forward_backward(Tensor(np.zeros((4, 2)), ms.float32), Tensor(np.zeros(4), ms.int32))


def test_invalid_sens_is_rejected():
    with pytest.raises(ValueError, match="For 'TrainForwardBackward', 'sens' must be a finite number > 0, but got"):
        slope_by_hand(sens=0.0)


def test_second_update_without_clear_reuses_the_sum():
    network, cells = slope_by_hand()
    cells.forward_backward(*micro_batch(3, rows=2))
    assert cells.optim()[0] and cells.optim()[0]
    assert values([network.w]) == [-6.0]


def test_weight_without_weight_sum_is_rejected():
    _, cells = slope_by_hand()
    with pytest.raises(ValueError, match="'weight' must come with a 'weight_sum', but got none"):
        cells.forward_backward(*micro_batch(3), weight=7.0)


def test_weight_sum_in_only_one_cell_is_rejected():
    network = Slope()
    optimizer = nn.SGD([network.w], 1.0)
    grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
    TrainForwardBackward(network, optimizer, grad_sum, weight_sum=untrained("weight_sum", 0.0, ms.float32))
    with pytest.raises(ValueError, match="For 'TrainOptim', 'weight_sum' must be given, as in the other Cell with"):
        TrainOptim(optimizer, grad_sum)


def test_optimizer_of_another_network_is_rejected():
    network, other = Slope(), nn.Dense(2, 2)
    optimizer = nn.SGD(other.trainable_params(), 1.0)
    grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
    message = "'optimizer' must be one of the network's parameters, but got one that has none of them"
    with pytest.raises(ValueError, match=f"For 'TrainForwardBackward', {message}"):
        TrainForwardBackward(network, optimizer, grad_sum)
    with pytest.raises(ValueError, match=f"For 'GradientAccumulation', {message}"):
        GradientAccumulation(network, None, optimizer)


def test_accumulators_of_another_network_are_rejected():
    network = Slope(3)
    optimizer = nn.SGD([network.w], 1.0)
    for grad_sum in ((), (Parameter(ops.zeros(2), name="other"),)):
        with pytest.raises(ValueError, match="For 'TrainForwardBackward', 'grad_sum' must"):
            TrainForwardBackward(network, optimizer, grad_sum)
        with pytest.raises(ValueError, match="For 'TrainOptim', 'grad_sum' must"):
            TrainOptim(optimizer, grad_sum)


def test_accumulators_are_not_parameters_of_the_cells():
    network = nn.Dense(6, 3)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    cells = ByHand(nn.WithLossCell(network, cross_entropy()), optimizer, mean=True)
    for cell in (cells.forward_backward, cells.optim, cells.clear):
        assert not [name for name in cell.parameters_dict() if "grad_sum" in name or "weight_sum" in name]
        assert {id(p) for p in cell.trainable_params()} <= {id(p) for p in network.trainable_params()}


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_clear_works_after_a_clear_of_unused_accumulators(mode):
    """MindSpore left out the assignments of such a graph, of which no result was used."""
    ms.set_context(mode=mode)
    grad_sum = tuple(ms.Parameter(Tensor(np.zeros(size), ms.float32), name=f"sum.{size}") for size in (3, 4))
    weight_sum = untrained("weight_sum", 0.0, ms.float32)
    clear = TrainClear(grad_sum, weight_sum=weight_sum)
    for _ in range(2):
        clear()
        assert [float(abs(total.asnumpy()).max()) for total in (*grad_sum, weight_sum)] == [0.0, 0.0, 0.0]
        AddOnes((*grad_sum, weight_sum))()


class AddOnes(nn.Cell):
    def __init__(self, totals):
        super().__init__(auto_prefix=False)
        self.totals = totals

    def construct(self):
        return [ops.assign_add(total, ops.ones_like(total)) for total in self.totals][0]
