"""Which networks do the programs know?"""

from __future__ import annotations

from typing import Callable, NamedTuple

from mindspore import nn

from model_zoo.lenet import LeNet5
from model_zoo.mlp import MLP
from model_zoo.resnet import ResNet18


class Model(NamedTuple):
    """A network, the side and the channels of the images it takes."""

    make: Callable[[], nn.Cell]
    image_size: int
    channels: int = 1


MODELS = {"lenet5": Model(LeNet5, 32), "mlp": Model(MLP, 28), "resnet18": Model(ResNet18, 32, channels=3)}
