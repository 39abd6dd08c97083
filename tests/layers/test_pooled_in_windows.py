"""Do all ways to accumulate update pooled statistics at the end of their windows?"""

from __future__ import annotations

import gc
import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from helpers import micro_batch
from ms_accum import Checkpointer, Stopped, pool_batch_norm
from ms_accum.layers import batch_norm
from reference import miss
from runs import stop_after
from ways import WAYS, Trained

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm layers")  # also shown for pooled layers
ROWS = [4, 2, 7, 3, 3, 5]
BAD = [micro_batch(np.nan, 1.0, rows=3)] * 3


class Normed(nn.Cell):
    """The mean of w times what BatchNorm makes of x, as its own loss."""

    def __init__(self, *, pools=True, trains=True):
        super().__init__()
        self.bn = nn.BatchNorm1d(2, momentum=0.8)
        for parameter in self.bn.trainable_params():
            parameter.requires_grad = trains
        self.w = Parameter(Tensor(np.ones(2), ms.float32), name="w")
        if pools:
            pool_batch_norm(self)  # the returned object is not needed: the layers are found

    def construct(self, x):
        return ops.mean(ops.sum(self.bn(x) * self.w, 1))

    @property
    def statistics(self):
        return [self.bn.moving_mean.asnumpy(), self.bn.moving_variance.asnumpy()]


def data():
    rng = np.random.RandomState(5)
    return [(Tensor(rng.randn(n, 2) * n + 3 * k, ms.float32),) for k, n in enumerate(ROWS)]


def of_large_batches(windows):
    network = Normed(pools=False).set_train()
    for window in windows:
        network(ops.cat([columns[0] for columns in window]))
    return network.statistics


def trained(way, micro_batches, window=3, **options):
    network = Normed()
    return Trained(way, network.set_train(), window, lr=0.1, **options).train(micro_batches).network.statistics


@pytest.mark.modes
@pytest.mark.parametrize("way", WAYS)
def test_statistics_equal_those_of_large_batch(way):
    assert miss(trained(way, data()), of_large_batches([data()[:3], data()[3:]]), 1e-5, 1e-6) <= 1


@pytest.mark.host
@pytest.mark.parametrize("way", ["driver", "step"])
def test_layers_with_frozen_parameters_are_found(way):
    network = Normed(trains=False)
    Trained(way, network.set_train(), 3, lr=0.1).train(data())
    assert miss(network.statistics, of_large_batches([data()[:3], data()[3:]]), 1e-5, 1e-6) <= 1


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_statistics_with_windows_of_one(way):
    assert miss(trained(way, data(), 1), of_large_batches([[columns] for columns in data()]), 1e-5, 1e-6) <= 1


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_missing_end_of_window_is_detected(way, monkeypatch):
    monkeypatch.setattr(batch_norm.PooledStatistics, "after_window", lambda self, updated: updated)
    assert miss(trained(way, data()), of_large_batches([data()[:3], data()[3:]]), 1e-5, 1e-6) >= 100


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_skipped_window_does_not_change_statistics(way):
    assert miss(trained(way, [*BAD, *data()[:3], *BAD]), of_large_batches([data()[:3]]), 1e-5, 1e-6) <= 1


@pytest.mark.host
@pytest.mark.parametrize("way", ["driver", "accumulator"])
def test_discarded_window_does_not_change_statistics(way):
    run = Trained(way, Normed().set_train(), 3, lr=0.1, **({"tail": "drop"} if way == "driver" else {}))
    if way == "driver":
        run.train(data()[:5])
    else:
        for columns in data()[:5]:
            run.system(run.grad_fn(*columns)[1], columns[0].shape[0])
        run.system.clear()
    run.train(data()[3:])
    assert miss(run.network.statistics, of_large_batches([data()[:3], data()[3:]]), 1e-5, 1e-6) <= 1


@pytest.mark.host
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_resumed_run_is_the_same(tmp_path, stop):
    def run(**options):
        made = Trained("driver", Normed().set_train(), 3, lr=0.1)
        states = Checkpointer(tmp_path, **options) if options else None
        made.system.train_process(1, data(), 3, report=(), ckpt_path=None, checkpointer=states)
        return [array.tolist() for array in made.network.statistics]

    with pytest.raises(Stopped):
        run(stop=stop_after(stop))
    assert run(resume="auto") == run()


@pytest.mark.host
def test_statistics_are_freed_with_their_network():
    network = Normed()
    statistics = weakref.ref(batch_norm.pooled_of(network.trainable_params())[0])
    del network
    gc.collect()
    assert statistics() is None
