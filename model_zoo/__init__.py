"""What is trained in the examples: small networks and their images.

Nothing here imports `ms_accum`; scikit-learn and `download` are imported only where they are used.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

from mindspore import nn

from model_zoo._check import DataError
from model_zoo.dataset import create_dataset
from model_zoo.download import DEFAULT_URL, download_cifar10, download_mnist
from model_zoo.lenet import LeNet5
from model_zoo.mlp import MLP
from model_zoo.optimizers import OPTIMIZERS, make_optimizer
from model_zoo.resnet import ResNet18

__all__ = [
    "DEFAULT_URL",
    "DataError",
    "MLP",
    "MODELS",
    "OPTIMIZERS",
    "LeNet5",
    "ResNet18",
    "create_dataset",
    "download_cifar10",
    "download_mnist",
    "make_optimizer",
]


class Model(NamedTuple):
    """A network, the side and the channels of the images it takes."""

    make: Callable[[], nn.Cell]
    image_size: int
    channels: int = 1


MODELS = {"lenet5": Model(LeNet5, 32), "mlp": Model(MLP, 28), "resnet18": Model(ResNet18, 32, channels=3)}
