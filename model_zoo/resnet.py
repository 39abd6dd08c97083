"""ResNet-18 for images of 32x32."""

from __future__ import annotations

from typing import Any

from mindspore import nn
from mindspore.common.initializer import HeNormal

from ._check import check_int

# The channels of each stage, and the stride of its first block; a stage has two blocks.
_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


class ResNet18(nn.Cell):
    """ResNet-18 for images of 32x32: a 3x3 stem with stride 1, and no max pooling.

    This is the variant for which 95 % on CIFAR-10 is published (not run here). The variant for ImageNet, with a 7x7
    stem of stride 2 and max pooling, reduces such an image to a single pixel in the last stage: it needs a fifteenth of
    the arithmetic, and its accuracy is much lower. Layers are named as in torchvision (`conv1`, `bn1`,
    `layer1.0.conv1`, ..., `fc`). Convolutions are initialized with He's normal distribution over the fan-out.

    BatchNorm normalizes each micro-batch by its own statistics, so accumulation does not equal the large batch.

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
        >>> from model_zoo import ResNet18
        >>> sum(parameter.size for parameter in ResNet18().trainable_params())
        11173962
    """

    def __init__(self, num_class: int = 10) -> None:
        super().__init__()
        num_class = check_int("ResNet18", "num_class", num_class, low=1)
        self.conv1 = _convolution(3, 64, kernel=3)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.layer1, self.layer2, self.layer3, self.layer4 = _stages(64)
        self.fc = nn.Dense(512, num_class)

    def construct(self, x: Any) -> Any:
        """Return the logits of a batch of images."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class _Block(nn.Cell):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels: int, out: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, out, kernel=3, stride=stride)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = _convolution(out, out, kernel=3)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        self.downsample: nn.SequentialCell | None = None
        if stride != 1 or channels != out:
            shortcut = _convolution(channels, out, kernel=1, stride=stride)
            self.downsample = nn.SequentialCell(shortcut, nn.BatchNorm2d(out))

    def construct(self, x: Any) -> Any:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + shortcut)


def _stages(channels: int) -> list[nn.SequentialCell]:
    """Return the four stages, after a stem with this number of channels."""
    stages = []
    for out, stride in _STAGES:
        blocks = _Block(channels, out, stride=stride), _Block(out, out, stride=1)
        stages.append(nn.SequentialCell(*blocks))
        channels = out
    return stages


def _convolution(channels: int, out: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without a bias, which BatchNorm has; only the stride changes the size of the image."""
    init = HeNormal(mode="fan_out", nonlinearity="relu")
    padding = {"pad_mode": "pad", "padding": kernel // 2}
    return nn.Conv2d(channels, out, kernel, stride, **padding, has_bias=False, weight_init=init)
