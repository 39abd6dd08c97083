"""Graphs with a branch, which the calling thread does not run itself."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum.network.compiled import Branch, branch


class Through(nn.Cell):
    def __init__(self):
        super().__init__()
        self.through_branch = Branch()

    def construct(self, number):
        return self.through_branch(number)


@pytest.mark.usefixtures("graph_mode")
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
