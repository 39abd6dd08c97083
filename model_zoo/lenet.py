"""LeNet5."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from ._check import check_int


class LeNet5(nn.Cell):
    """LeNet-5 with ReLU and max pooling, as in MindSpore's r1.0 model zoo.

    It has two convolutions and three dense layers, with the names of the model zoo (`conv1`, `conv2`, `fc1`, `fc2`,
    `fc3`) and MindSpore's default initialization.

    Args:
        num_class (int): The number of classes. Default: ``10``.
        num_channel (int): The number of channels of the images. Default: ``1``.

    Inputs:
        - **x** (Tensor) - Images, float32 of shape (N, num_channel, 32, 32).

    Outputs:
        Tensor, logits of shape (N, num_class).

    Raises:
        TypeError: If `num_class` or `num_channel` is not an int.
        ValueError: If `num_class` or `num_channel` is less than 1.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> import mindspore as ms
        >>> from model_zoo import LeNet5
        >>> LeNet5()(ms.ops.zeros((2, 1, 32, 32))).shape
        (2, 10)
    """

    def __init__(self, num_class: int = 10, num_channel: int = 1) -> None:
        super().__init__()
        num_class = check_int("LeNet5", "num_class", num_class, low=1)
        num_channel = check_int("LeNet5", "num_channel", num_channel, low=1)
        self.conv1 = nn.Conv2d(num_channel, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(16 * 5 * 5, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, num_class)

    def construct(self, x: Any) -> Any:
        """Return the logits of a batch of images."""
        pooled = self.max_pool2d(self.relu(self.conv1(x)))
        pooled = self.max_pool2d(self.relu(self.conv2(pooled)))
        features = self.relu(self.fc1(self.flatten(pooled)))
        return self.fc3(self.relu(self.fc2(features)))
