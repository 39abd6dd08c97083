"""Which forms of layers are fast on MindSpore's CPU, with their gradients?"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer


class LayerNorm(nn.Cell):
    """`nn.LayerNorm` over the last axis, computed in float32; the kernel of its gradient runs on one thread."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = Parameter(initializer("ones", (width,)), name="gamma")
        self.beta = Parameter(initializer("zeros", (width,)), name="beta")
        # Attributes: names of the module and functions of `ops` are lost where AMP's O1 rewrites the source.
        self.cast, self.mean, self.square, self.rsqrt = ops.Cast(), ops.ReduceMean(True), ops.Square(), ops.Rsqrt()
        self.type = ms.float32

    def construct(self, x: Any) -> Any:
        """Return `x`, shifted and scaled so that each row of the last axis has mean 0 and variance 1."""
        exact = self.cast(x, self.type)
        centred = exact - self.mean(exact, -1)
        scale = self.rsqrt(self.mean(self.square(centred), -1) + 1e-5)
        return self.cast(centred * scale * self.gamma + self.beta, x.dtype)


class GELU(nn.Cell):
    """`nn.GELU(approximate=False)`, the exact one, whose gradient divides and raises to powers."""

    def __init__(self) -> None:
        super().__init__()
        self.erf = ops.Erf()

    def construct(self, x: Any) -> Any:
        """Return `x` times the probability that a normal number is below it."""
        return x * (0.5 + 0.5 * self.erf(x * 0.7071067811865476))
