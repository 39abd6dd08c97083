"""Each data set has its recipe, which flags override."""

from __future__ import annotations

import pytest

from model_zoo import DOWNLOADS, MODELS, OPTIMIZERS, RECIPES
from model_zoo.recipes import EMBEDDED, by_dataset, choose, dataset_for
from programs import settings_of

CIFAR10 = ("--dataset=cifar10", "--data_path=x")


def rates(*argv):
    settings = settings_of(*argv)
    return settings.optimizer, settings.lr, settings.momentum, settings.weight_decay


@pytest.mark.parametrize(
    ("argv", "dataset", "model", "epochs", "rows"),
    [
        ([], "digits", "lenet5", 25, 32),
        (["--data_path=x"], "mnist", "lenet5", 10, 32),
        (["--dataset=mnist", "--data_path=x", "--model=mlp"], "mnist", "mlp", 10, 32),
        (CIFAR10, "cifar10", "resnet18", 80, 128),
        (["--model=resnet18", "--data_path=x"], "cifar10", "resnet18", 80, 128),
        (["--model=gpt"], "sentences", "gpt", 15, 16),
        (["--model=gpt", "--data_path=x"], "text", "gpt", 5, 16),
        ([*CIFAR10, "--epochs=3", "--batch_size=8"], "cifar10", "resnet18", 3, 8),
    ],
)
def test_recipe_sets_dataset_model_and_epochs(argv, dataset, model, epochs, rows):
    settings = settings_of(*argv)
    assert (settings.dataset, settings.model, settings.epochs, settings.batch_size) == (dataset, model, epochs, rows)
    assert settings.mini_steps == 4


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ("momentum", 0.04, 0.9, 0)),
        (["--data_path=x"], ("momentum", 0.01, 0.9, 0)),
        (CIFAR10, ("sgd", 0.1, 0.9, 5e-4)),
        ([*CIFAR10, "--optimizer=momentum", "--lr=0.2"], ("momentum", 0.2, 0.9, 5e-4)),
        ([*CIFAR10, "--momentum=0", "--weight_decay=0"], ("sgd", 0.1, 0, 0)),
        ([*CIFAR10, "--optimizer=adamw"], ("adamw", 0.001, 0.9, 0)),
        (["--model=gpt"], ("adamw", 0.003, 0.9, 0)),
        (["--model=gpt", "--optimizer=sgd"], ("sgd", 0.1, 0.9, 0)),
        ([*CIFAR10, "--optimizer=adam", "--weight_decay=0.1", "--lr=0.5"], ("adam", 0.5, 0.9, 0.1)),
    ],
)
def test_recipe_sets_optimizer(argv, expected):
    assert rates(*argv) == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("cifar10", "lenet5", "x", None), "--model: lenet5 does not accept the images of cifar10; resnet18 does"),
        (("mnist", "resnet18", "x", None), "--model: resnet18 does not accept the images of mnist; lenet5 does"),
        (("digits", "resnet18", None, None), "--model: resnet18 does not accept the images of digits; lenet5 does"),
        (("cifar10", None, None, True), "--data_path: must be given for cifar10; --download fetches it there"),
        ((None, "resnet18", None, None), "--data_path: must be given for cifar10; --download fetches it there"),
        ((None, None, None, True), "--download: needs --data_path"),
        (("digits", None, None, True), "--dataset: digits are embedded"),
        (("digits", None, "x", None), "--dataset: digits are embedded"),
        (("sentences", None, "x", None), "--dataset: sentences are embedded; --data_path is for text"),
        (("text", None, None, None), "--data_path: must be given for text; give a file, or a folder of .txt files"),
        (("text", None, "x", True), "--download: fetches mnist or cifar10, not text"),
        (("text", "lenet5", "x", None), "--model: lenet5 does not accept text; gpt does"),
        (("mnist", "gpt", "x", None), "--model: gpt does not accept the images of mnist; lenet5 does"),
    ],
)
def test_contradictory_flags_are_rejected(arguments, reason):
    with pytest.raises(ValueError) as caught:
        choose(*arguments)
    assert str(caught.value).startswith(f"argument {reason}")


def test_recipe_models_accept_their_images():
    assert set(DOWNLOADS) == set(RECIPES) - {*EMBEDDED, "text"}
    for dataset, recipe in RECIPES.items():
        assert choose(dataset, None, None if dataset in EMBEDDED else "x", None) == (dataset, recipe.model)
        assert recipe.optimizer in OPTIMIZERS and recipe.model in MODELS


def test_dataset_is_inferred_from_model_and_folder():
    assert [dataset_for(model, None) for model in MODELS] == ["digits"] * 2 + ["cifar10"] * 2 + ["sentences"]
    assert [dataset_for(model, "x") for model in MODELS] == ["mnist"] * 2 + ["cifar10"] * 2 + ["text"]
    assert (dataset_for(None, None), dataset_for(None, "x")) == ("digits", "mnist")


def test_recipe_descriptions():
    assert by_dataset("optimizer") == "momentum on mnist and digits, sgd on cifar10, adamw on text and sentences"
    assert by_dataset("weight_decay") == "0 on mnist, digits, text and sentences, 0.0005 on cifar10"
    assert by_dataset("layers") == "4 on text, 2 on sentences"
