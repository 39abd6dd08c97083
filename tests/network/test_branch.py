"""Graphs with a branch, which the calling thread does not run itself."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import ms_accum.accumulator
import ms_accum.engine.cells
import ms_accum.training.runners
from ms_accum.network.compiled import Branch, branch
from ways import Trained

USERS = (ms_accum.engine.cells, ms_accum.accumulator, ms_accum.training.runners)


class Through(nn.Cell):
    def __init__(self):
        super().__init__()
        self.through_branch = Branch()

    def construct(self, number):
        return self.through_branch(number)


@pytest.mark.graph
@pytest.mark.parametrize("dtype", [ms.float32, ms.float16], ids=str)
@pytest.mark.parametrize("number", [-0.0, 1e-7, 3.3, np.inf, np.nan])
def test_number_is_returned_as_it_is(number, dtype):
    given = Tensor(number, dtype)
    found = Through()(given)
    assert found.dtype == dtype and found.asnumpy().tobytes() == given.asnumpy().tobytes()


@pytest.mark.parametrize(("compiles", "cores", "pays"), [(True, 2, True), (True, 12, False), (False, 2, False)])
def test_branch_is_used_where_it_pays(compiles, cores, pays, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    assert isinstance(branch(compiles), Branch) is pays
    assert (branch(compiles) is None) is not pays


class Slope(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 1, weight_init="ones")

    def construct(self, x):
        return (self.dense(x) ** 2).mean()


@pytest.mark.parametrize(("way", "window"), [("driver", 1), ("step", 2)])
def test_branch_changes_no_byte(way, window, monkeypatch):
    def trained():
        ms.set_seed(1)
        system = Trained(way, Slope(), window, 0.1)
        data = [(Tensor(np.random.RandomState(seed).rand(4, 3), ms.float32),) for seed in range(4)]
        system.train(data)
        return [parameter.asnumpy().tobytes() for parameter in system.optimizer.parameters]

    found, made = trained(), []
    for user in USERS:
        monkeypatch.setattr(user, "branch", made.append)
    assert trained() == found and all(made)
