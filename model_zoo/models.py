"""The networks of the programs."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class Model(NamedTuple):
    """A network, and the size and the channels of its images, which are 0 if it takes text.

    Flags use these before MindSpore is imported.
    """

    module: str
    kind: str
    image_size: int
    channels: int = 1

    @property
    def takes_text(self) -> bool:
        """bool, whether it predicts the next token of a text; otherwise it classifies images."""
        return not self.channels

    def make(self, **sizes: Any) -> Any:
        """Return a new network; `sizes` are the arguments of one that takes text."""
        return getattr(import_module(f".{self.module}", __package__), self.kind)(**sizes)


MODELS = {
    "lenet5": Model("lenet", "LeNet5", 32),
    "mlp": Model("mlp", "MLP", 28),
    "resnet18": Model("resnet", "ResNet18", 32, channels=3),
    "small_resnet": Model("small_resnet", "SmallResNet", 32, channels=3),
    "gpt": Model("gpt", "GPT", 0, channels=0),
}
