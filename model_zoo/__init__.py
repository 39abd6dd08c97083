"""What is trained in the examples: small networks and their images.

Nothing here imports `ms_accum`; scikit-learn and `download` are imported only where they are used.
"""

from __future__ import annotations

from model_zoo._check import DataError
from model_zoo.dataset import create_dataset
from model_zoo.download import DEFAULT_URL, DOWNLOADS, download_cifar10, download_mnist
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
