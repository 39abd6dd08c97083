"""A small ResNet whose accumulated gradients are exact."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Constant, HeNormal, initializer

from ._check import check_int

_STEM, _WIDTHS = 32, (48, 96, 192)
# The gain with which ReLU keeps the variance of a normal number (Brock et al. 2021, arXiv:2101.08692).
_GAIN = math.sqrt(2 / (1 - 1 / math.pi))


class SmallResNet(nn.Cell):
    """A residual network without normalization of activations, for images of 32x32.

    A convolution with 32 channels at 32 pixels, then three stages of one residual block, with 48, 96 and 192 channels
    at 16, 8 and 4 pixels. The weights of the convolutions are standardized, and there is no BatchNorm behind them: no
    row's output depends on another row, so accumulated gradients equal those of the big batch.

    Args:
        num_class (int): The number of classes. Default: ``10``.

    Inputs:
        - **x** (Tensor) - Images, float32 of shape (N, 3, 32, 32).

    Outputs:
        Tensor, logits of shape (N, num_class).

    Raises:
        TypeError: If `num_class` is not an int.
        ValueError: If `num_class` is less than 1.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> from model_zoo import SmallResNet
        >>> sum(parameter.size for parameter in SmallResNet().trainable_params())
        1096970
    """

    def __init__(self, num_class: int = 10) -> None:
        super().__init__()
        num_class = check_int("SmallResNet", "num_class", num_class, low=1)
        channels, cells = _STEM, [_Standardized(3, _STEM, 1), nn.ReLU()]
        for out in _WIDTHS:
            cells += [_Standardized(channels, out, 2), nn.ReLU(), _Block(out)]
            channels = out
        self.stages = nn.SequentialCell(*cells)
        self.pool = ops.ReduceMean()
        self.head = nn.Dense(channels, num_class)

    def construct(self, x: Any) -> Any:
        """Return the logits of a batch of images."""
        return self.head(self.pool(self.stages(x), (2, 3)))


class _Block(nn.Cell):
    """Two convolutions and the identity; the gain of the second convolution starts at 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = _Standardized(channels, channels, 1), _Standardized(channels, channels, 1, 0.0)
        self.relu = nn.ReLU()

    def construct(self, x: Any) -> Any:
        return self.relu(x + self.second(self.relu(self.first(x))))


class _Standardized(nn.Cell):
    """A 3x3 convolution whose weights have mean 0 and variance 1 / fan-in in each channel, times a trained gain."""

    def __init__(self, channels: int, out: int, stride: int, gain: float = _GAIN) -> None:
        super().__init__()
        self.shape, fan_in = (out, channels, 3, 3), 9 * channels
        self.weight = Parameter(initializer(HeNormal(mode="fan_in"), self.shape, ms.float32), name="weight")
        self.gain = Parameter(initializer(Constant(gain), (out, 1), ms.float32), name="gain")
        self.bias = Parameter(initializer("zeros", (out,), ms.float32), name="bias")
        self.convolution = ops.Conv2D(out, 3, pad_mode="pad", pad=1, stride=stride)
        # Sums over rows, and copies along them, are matrix products, because gradients of means are slow on CPU.
        self.sum, self.copy = ops.ones((fan_in, 1), ms.float32), ops.ones((1, fan_in), ms.float32)
        self.mean = self.sum / fan_in
        self.product, self.square, self.rsqrt, self.add = ops.MatMul(), ops.Square(), ops.Rsqrt(), ops.BiasAdd()

    def construct(self, x: Any) -> Any:
        """Return the convolution of `x` with the standardized weights."""
        rows = self.weight.reshape(self.shape[0], -1)
        centred = rows - self.product(self.product(rows, self.mean), self.copy)
        scale = self.gain * self.rsqrt(self.product(self.square(centred), self.sum) + 1e-4)
        weight = centred * self.product(scale, self.copy)
        return self.add(self.convolution(x, weight.reshape(self.shape)), self.bias)
