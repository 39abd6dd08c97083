"""What does each term of a loss count, and is it right in a loop of the user's own?"""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import several_terms as terms
from ms_accum import Terms

pytestmark = pytest.mark.usefixtures("eager")

DATA = terms.data_of((4, 2, 5), masked=[2])
X, Y = (Tensor(column) for column in DATA[0])


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("rows", 4),
        ("elements", 20),
        (2.5, 2.5),
        (Tensor(3.0), 3.0),
        (lambda x, y: (y >= 0).sum(), float((DATA[0][1] >= 0).sum())),
        (nn.MSELoss(), 20),
        (nn.CrossEntropyLoss(ignore_index=-1), float((DATA[0][1] >= 0).sum())),
    ],
    ids=["rows", "elements", "number", "tensor", "function", "loss over elements", "loss over labels"],
)
def test_counts(count, expected):
    assert Terms({"term": count}).counted((X, Y)) == (expected,)


def test_factors_are_shares_of_the_window():
    definition = Terms({"rows": "rows", "ones": 1}, {"rows": lambda updates: 10.0 * updates})
    found = [(factors.asnumpy().tolist(), counts) for factors, counts in definition.factors(DATA, updates=2)]
    shares = np.array([(rows / 11 * 20, 1 / 3) for rows in (4, 2, 5)])
    assert np.array([factors for factors, _ in found]) == pytest.approx(shares) and {counts for _, counts in found} == {
        (True, True)
    }


def test_number_is_a_term():
    definition = Terms({"a": 1, "off": 1}, {"a": 2.0})
    assert definition.scale({"off": 0.0, "a": ops.sum(X)}, Tensor([2.0, 1.0]), (True, True)) == 2 * ops.sum(X)


def nothing_less(x, y):
    return -1


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: Terms("rows"), "'weight' must be a dict from the names of terms, but got rows"),
        (lambda: Terms({"a": "tokens"}), "for each term, but got 'tokens' for 'a'"),
        (
            lambda: Terms({"a": nn.MSELoss("sum")}),
            "a loss that averages over a known number, if it is a loss, but got MSELoss for 'a'",
        ),
        (lambda: Terms({"a": 1}).scale({"a": None}, None, (True,)), "must be scalars, but got None for 'a'"),
        (lambda: Terms({"a": 1}, {"b": 1}), "'coefficients' must be for terms of 'weight' .a., but got one for 'b'"),
        (lambda: Terms({"a": 1}, {"a": "much"}), "'coefficients' must be finite numbers, or functions"),
        (lambda: Terms({"a": 1}, [1]), "'coefficients' must be a dict"),
        (
            lambda: Terms({"a": nothing_less}).factors(DATA),
            "'weight' must be a function that returns a finite number >= 0, but got -1 for 'a'",
        ),
        (
            lambda: Terms({"a": 1}).factors([]),
            "'window' must be a list of the columns of each micro-batch, but got ...",
        ),
        (lambda: Terms({"a": 1}, {"a": lambda updates: np.nan}).factors(DATA), "return a finite number, but got nan"),
        (lambda: Terms({"a": 1, "b": 1}).scale({"a": X}, None, (True, True)), "must return the terms of 'weight'"),
        (lambda: Terms({"a": 1}).scale({"a": ops.sum(X)}, None, (True, True)), "'counts' must be what 'factors'"),
    ],
)
def test_wrong_use_is_rejected(use, message):
    with pytest.raises((TypeError, ValueError), match=message):
        use()
