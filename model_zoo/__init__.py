"""What is trained in the examples: small networks and their images.

The networks and what they are trained with are here, their images in `model_zoo.data`. Nothing imports `ms_accum`.
"""

from __future__ import annotations

from model_zoo._check import DataError
from model_zoo.data import DEFAULT_URL, DOWNLOADS, create_dataset, download_cifar10, download_mnist
from model_zoo.lenet import LeNet5
from model_zoo.mlp import MLP
from model_zoo.models import MODELS
from model_zoo.optimizers import OPTIMIZERS, make_optimizer
from model_zoo.recipes import RECIPES
from model_zoo.resnet import ResNet18

__all__ = [
    "DEFAULT_URL",
    "DataError",
    "MLP",
    "MODELS",
    "DOWNLOADS",
    "OPTIMIZERS",
    "RECIPES",
    "LeNet5",
    "ResNet18",
    "create_dataset",
    "download_cifar10",
    "download_mnist",
    "make_optimizer",
]
