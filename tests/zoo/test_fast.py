"""The layers that are fast on CPU equal MindSpore's, with their gradients."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from model_zoo.fast import GELU, LayerNorm
from reference import miss

pytestmark = pytest.mark.usefixtures("eager")
PAIRS = {
    "LayerNorm": (lambda: LayerNorm(6), lambda: nn.LayerNorm((6,), epsilon=1e-5)),
    "GELU": (GELU, lambda: nn.GELU(approximate=False)),
}


def values_of(layer, x, share):
    """Return the output, and the gradients by the input and by the Parameters."""

    def weighted(x):
        return ops.sum(layer(x) * share)

    by_all = ms.grad(weighted, 0, layer.trainable_params() or None)(x)
    by_input, by_weights = by_all if layer.trainable_params() else (by_all, ())
    return [tensor.asnumpy() for tensor in (layer(x), by_input, *by_weights)]


@pytest.mark.parametrize("name", PAIRS)
def test_fast_layers_equal_mindspore_layers(name, rng):
    x, share = (Tensor(rng.randn(5, 4, 6) * 2 + 1, ms.float32) for _ in range(2))
    ours, theirs = (values_of(make(), x, share) for make in PAIRS[name])
    assert miss(ours, theirs, 1e-4, 1e-5) <= 1
