"""The default settings for training on each data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .models import MODELS


class TextSizes(NamedTuple):
    """The default sizes of a network that takes text: the fields are flags."""

    context: int = 64
    layers: int = 4
    width: int = 128
    heads: int = 4
    vocabulary: str = "characters"


class Recipe(NamedTuple):
    """The default settings for a data set. All recipes have windows of 4, and a momentum of 0.9 where it is used."""

    model: str
    epochs: int
    batch_size: int
    optimizer: str
    lr: float
    weight_decay: float = 0
    text: TextSizes | None = None
    """Optional[TextSizes], for a data set of text."""

    def rates(self, optimizer: str) -> tuple[float, float]:
        """Return the learning rate and the weight decay; the other kind of optimizers gets its usual ones."""
        if (optimizer in ADAPTIVE) == (self.optimizer in ADAPTIVE):
            return self.lr, self.weight_decay
        return (ADAPTIVE_LR if optimizer in ADAPTIVE else SGD_LR), 0.0


RECIPES = {
    "mnist": Recipe("lenet5", 10, 32, "momentum", 0.01),  # the r1.0 tutorial's
    "digits": Recipe("lenet5", 25, 32, "momentum", 0.04),  # 40 times fewer images
    # From ColossalAI's tutorial on gradient accumulation, which stops after one window; the number of epochs is from
    # its ResNet example.
    "cifar10": Recipe("resnet18", 80, 128, "sgd", 0.1, 5e-4),
    "text": Recipe("gpt", 5, 16, "adamw", 0.001, text=TextSizes()),
    "sentences": Recipe("gpt", 15, 16, "adamw", 0.003, text=TextSizes(layers=2, width=64)),
}
EMBEDDED = ("digits", "sentences")
ADAPTIVE, ADAPTIVE_LR, SGD_LR = ("adam", "adamw"), 0.001, 0.1


def by_dataset(field: str) -> str:
    """Return the values of a field as text, for the help of a flag."""
    names: dict[object, list[str]] = {}
    for dataset, recipe in RECIPES.items():
        values = recipe.text if field in TextSizes._fields else recipe
        if values is not None:
            names.setdefault(getattr(values, field), []).append(dataset)
    return ", ".join(f"{value} on {_listed(datasets)}" for value, datasets in names.items())


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def dataset_for(model: str | None, data_path: str | None) -> str:
    """Return the data set if only the model is given, or the path, or neither."""
    if model is not None and MODELS[model].takes_text:
        return "sentences" if data_path is None else "text"
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
    recipe = RECIPES[dataset]
    if dataset in EMBEDDED and (data_path is not None or download):
        others = "--data_path is for text" if recipe.text else "--data_path and --download are for mnist, cifar10"
        raise ValueError(f"argument --dataset: {dataset} are embedded; {others}")
    if recipe.text and download:
        raise ValueError("argument --download: fetches mnist or cifar10, not text")
    if dataset not in EMBEDDED and data_path is None:
        remedy = "give a file, or a folder of .txt files" if recipe.text else "--download fetches it there"
        raise ValueError(f"argument --data_path: must be given for {dataset}; {remedy}")
    model = model or recipe.model
    if not _fits(model, dataset):
        rows = "text" if recipe.text else f"the images of {dataset}"
        raise ValueError(f"argument --model: {model} does not accept {rows}; {recipe.model} does")
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
    if optimizer not in ADAPTIVE and flags["beta2"] is not None:
        raise ValueError(f"argument --beta2: {optimizer} has none; adam and adamw have")
    lr, weight_decay = recipe.rates(optimizer)
    batch_size = min(recipe.batch_size, flags["effective_batch"] or recipe.batch_size)
    defaults: dict[str, Any] = {"batch_size": batch_size, "lr": lr, "weight_decay": weight_decay, "momentum": 0.9}
    defaults["epochs"] = recipe.epochs if flags["max_updates"] is None else None
    defaults.update(_text_sizes(recipe, dataset, flags))
    missing = {name: value for name, value in defaults.items() if flags[name] is None}
    return {**flags, "dataset": dataset, "model": model, "optimizer": optimizer, **missing}


def _text_sizes(recipe: Recipe, dataset: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default sizes of a network that takes text; for images, no flag of theirs may be given."""
    if recipe.text is not None:
        return recipe.text._asdict()
    for name in (*TextSizes._fields, "untied_head"):
        if flags[name]:
            raise ValueError(f"argument --{name}: is for text; {dataset} are images")
    return {}


def _fits(model: str, dataset: str) -> bool:
    """Return whether a model accepts the rows of a data set; the model of each recipe accepts its own."""
    return MODELS[model].channels == MODELS[RECIPES[dataset].model].channels
