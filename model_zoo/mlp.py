"""The network of MindSpore's quickstart."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from ._check import check_int


class MLP(nn.Cell):
    """Three dense layers, 784-512-512-num_class: the network of MindSpore's 2.x quickstart.

    Args:
        num_class (int): The number of classes. Default: ``10``.

    Inputs:
        - **x** (Tensor) - Images, float32 of shape (N, 1, 28, 28).

    Outputs:
        Tensor, logits of shape (N, num_class).

    Raises:
        TypeError: If `num_class` is not an int.
        ValueError: If `num_class` is less than 1.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> import mindspore as ms
        >>> from model_zoo import MLP
        >>> MLP()(ms.ops.zeros((2, 1, 28, 28))).shape
        (2, 10)
    """

    def __init__(self, num_class: int = 10) -> None:
        super().__init__()
        num_class = check_int("MLP", "num_class", num_class, low=1)
        layers = [nn.Dense(28 * 28, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, num_class)]
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(layers)  # so named in the quickstart's checkpoints

    def construct(self, x: Any) -> Any:
        """Return the logits of a batch of images."""
        return self.dense_relu_sequential(self.flatten(x))
