"""The default settings for training on each data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .models import MODELS


class Recipe(NamedTuple):
    """The default settings for a data set. All recipes have windows of 4, and a momentum of 0.9 where it is used."""

    model: str
    epochs: int
    batch_size: int
    optimizer: str
    lr: float
    weight_decay: float = 0

    def rates(self, optimizer: str) -> tuple[float, float]:
        """Return the learning rate and the weight decay; those of the recipe are for SGD, Adam gets its usual ones."""
        return (ADAPTIVE_LR, 0.0) if optimizer in ADAPTIVE else (self.lr, self.weight_decay)


RECIPES = {
    "mnist": Recipe("lenet5", 10, 32, "momentum", 0.01),  # the r1.0 tutorial's
    "digits": Recipe("lenet5", 25, 32, "momentum", 0.04),  # 40 times fewer images
    # From ColossalAI's tutorial on gradient accumulation, which stops after one window; the number of epochs is from
    # its ResNet example.
    "cifar10": Recipe("resnet18", 80, 128, "sgd", 0.1, 5e-4),
}
ADAPTIVE, ADAPTIVE_LR = ("adam", "adamw"), 0.001


def by_dataset(field: str) -> str:
    """Return the values of a field as text, for the help of a flag."""
    names: dict[object, list[str]] = {}
    for dataset, recipe in RECIPES.items():
        names.setdefault(getattr(recipe, field), []).append(dataset)
    return ", ".join(f"{value} on {' and '.join(datasets)}" for value, datasets in names.items())


def dataset_for(model: str | None, data_path: str | None) -> str:
    """Return the data set if only the model is given, or the folder, or neither."""
    if model is not None and not _fits(model, "mnist"):
        return "cifar10"
    return "digits" if data_path is None else "mnist"


def choose(dataset: str | None, model: str | None, data_path: str | None, download: object) -> tuple[str, str]:
    """Return the data set and the model that the flags select.

    Raises:
        ValueError: If the flags contradict each other.
    """
    if dataset is None and model is None and download and data_path is None:
        raise ValueError("argument --download: needs --data_path, the folder to fetch MNIST into")
    dataset = dataset or dataset_for(model, data_path)
    if dataset == "digits" and (data_path is not None or download):
        raise ValueError("argument --dataset: digits are embedded; --data_path and --download are for mnist, cifar10")
    if dataset != "digits" and data_path is None:
        raise ValueError(f"argument --data_path: must be given for {dataset}; --download fetches it there")
    recipe = RECIPES[dataset]
    model = model or recipe.model
    if not _fits(model, dataset):
        raise ValueError(f"argument --model: {model} does not accept the images of {dataset}; {recipe.model} does")
    return dataset, model


def filled_in(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a program's flags, with the values of the data set's recipe for those that were not given.

    Raises:
        ValueError: If the flags contradict each other.
    """
    dataset, model = choose(flags["dataset"], flags["model"], flags["data_path"], flags["download"])
    recipe = RECIPES[dataset]
    optimizer = flags["optimizer"] or recipe.optimizer
    if optimizer in ADAPTIVE and flags["momentum"] is not None:
        raise ValueError(f"argument --momentum: {optimizer} has none")
    lr, weight_decay = recipe.rates(optimizer)
    batch_size = min(recipe.batch_size, flags["effective_batch"] or recipe.batch_size)
    defaults = {"epochs": recipe.epochs, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay}
    defaults["momentum"] = 0.9
    missing = {name: value for name, value in defaults.items() if flags[name] is None}
    return {**flags, "dataset": dataset, "model": model, "optimizer": optimizer, **missing}


def _fits(model: str, dataset: str) -> bool:
    """Return whether a model accepts the images of a data set; the model of each recipe accepts its own."""
    return MODELS[model].channels == MODELS[RECIPES[dataset].model].channels
