"""Small networks, recipes and data sets for the examples and the programs.

Networks and recipes are in this package, data sets in `model_zoo.data`. Nothing imports `ms_accum`. Each public name is
imported on first use, as in `ms_accum`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._check import DataError as DataError
    from .data.dataset import create_dataset as create_dataset
    from .data.download import DOWNLOADS as DOWNLOADS
    from .data.download import download_cifar10 as download_cifar10
    from .data.download import download_mnist as download_mnist
    from .data.text import create_text_dataset as create_text_dataset
    from .gpt import GPT as GPT
    from .lenet import LeNet5 as LeNet5
    from .mlp import MLP as MLP
    from .models import MODELS as MODELS
    from .next_token import NextTokenLoss as NextTokenLoss
    from .optimizers import OPTIMIZERS as OPTIMIZERS
    from .optimizers import make_optimizer as make_optimizer
    from .recipes import RECIPES as RECIPES
    from .resnet import ResNet18 as ResNet18
    from .small_resnet import SmallResNet as SmallResNet

_MODULES = {
    "DOWNLOADS": "data.download",
    "DataError": "_check",
    "GPT": "gpt",
    "LeNet5": "lenet",
    "MLP": "mlp",
    "MODELS": "models",
    "NextTokenLoss": "next_token",
    "OPTIMIZERS": "optimizers",
    "RECIPES": "recipes",
    "ResNet18": "resnet",
    "SmallResNet": "small_resnet",
    "create_dataset": "data.dataset",
    "create_text_dataset": "data.text",
    "download_cifar10": "data.download",
    "download_mnist": "data.download",
    "make_optimizer": "optimizers",
}
__all__ = list(_MODULES)


if not TYPE_CHECKING:  # a type checker would take every name for an object

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
