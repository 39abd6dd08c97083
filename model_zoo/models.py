"""The networks of the programs."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class Model(NamedTuple):
    """A network, and the size and the channels of its images. Flags use these before MindSpore is imported."""

    module: str
    kind: str
    image_size: int
    channels: int = 1

    def make(self) -> Any:
        """Return a new network."""
        return getattr(import_module(f".{self.module}", __package__), self.kind)()


MODELS = {
    "lenet5": Model("lenet", "LeNet5", 32),
    "mlp": Model("mlp", "MLP", 28),
    "resnet18": Model("resnet", "ResNet18", 32, channels=3),
    "small_resnet": Model("small_resnet", "SmallResNet", 32, channels=3),
}
