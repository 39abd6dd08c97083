"""Layers whose implementations, and whose gradients, are fast on MindSpore's CPU."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer


class LayerNorm(nn.Cell):
    """LayerNorm over the last axis, computed in float32. The gradient kernel of `nn.LayerNorm` uses only one thread."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = Parameter(initializer("ones", (width,)), name="gamma")
        self.beta = Parameter(initializer("zeros", (width,)), name="beta")
        # Attributes, because AMP's O1 rewrites the source, and loses names of the module and functions of `ops`.
        self.cast, self.mean, self.square, self.rsqrt = ops.Cast(), ops.ReduceMean(True), ops.Square(), ops.Rsqrt()
        self.type = ms.float32

    def construct(self, x: Any) -> Any:
        """Return `x`, standardized to mean 0 and variance 1 along the last axis, times gamma plus beta."""
        exact = self.cast(x, self.type)
        centred = exact - self.mean(exact, -1)
        scale = self.rsqrt(self.mean(self.square(centred), -1) + 1e-5)
        return self.cast(centred * scale * self.gamma + self.beta, x.dtype)


class GELU(nn.Cell):
    """The exact GELU. The gradient of `nn.GELU(approximate=False)` contains slow divisions and powers."""

    def __init__(self) -> None:
        super().__init__()
        self.erf = ops.Erf()

    def construct(self, x: Any) -> Any:
        """Return `x` times the probability that a standard normal number is less than `x`."""
        return x * (0.5 + 0.5 * self.erf(x * 0.7071067811865476))
