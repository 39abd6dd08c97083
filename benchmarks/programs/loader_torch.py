"""How fast do batches come out of PyTorch's DataLoader?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

import torch
from loading import BATCH, flags, serve_loader
from mnist_torch import loader


def make() -> Callable[[], Iterable]:
    """Read the data; each pass over the loader is an epoch."""
    batches = loader(arguments.data, "train", arguments.size, BATCH, arguments.workers)
    return lambda: batches


if __name__ == "__main__":  # the workers import this file where they are not forked
    arguments = flags()
    serve_loader({"torch": torch.__version__}, make)
