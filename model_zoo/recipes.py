"""The default settings for training on each data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SIZES = ("context", "layers", "heads", "width")
"""tuple[str], the sizes of a network that takes text."""
EMBEDDED = ("digits", "sentences")
ADAPTIVE, ADAPTIVE_LR, SGD_LR = ("adam", "adamw"), 0.001, 0.1


class Recipe(NamedTuple):
    """The default settings for a data set. All recipes have windows of 4, and a momentum of 0.9 where it is used."""

    model: str
    epochs: int
    batch_size: int
    optimizer: str
    lr: float
    weight_decay: float = 0
    text: Mapping[str, int] | None = None
    """Optional[Mapping], the `SIZES` of the network, for a data set of text."""

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
    "text": Recipe("gpt", 5, 16, "adamw", 0.001, text={"context": 64, "layers": 4, "heads": 4, "width": 128}),
    "sentences": Recipe("gpt", 15, 16, "adamw", 0.003, text={"context": 64, "layers": 2, "heads": 4, "width": 64}),
}
