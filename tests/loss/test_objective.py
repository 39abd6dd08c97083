"""Are the tensors of weights cached, and is the cache limited?"""

from __future__ import annotations

from ms_accum.loss.objective import Weight


def test_weight_tensors_are_cached_up_to_a_limit():
    weight = Weight("test", lambda *columns: 1.0, "mean")
    assert weight.as_tensor(3.0) is weight.as_tensor(3.0)
    for number in range(1, 3000):
        assert weight.as_tensor(float(number)).asnumpy() == number
        assert len(weight._tensors) <= 1024
