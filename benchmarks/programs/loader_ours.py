"""How fast do batches come out of `model_zoo.create_dataset`?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

import mindspore
from loading import BATCH, flags, serve_loader

from model_zoo import create_dataset


def make() -> Callable[[], Iterable]:
    """Read the data; an epoch is what the driver iterates over."""
    dataset = create_dataset(arguments.data, BATCH, usage="train", image_size=arguments.size, seed=1)
    return lambda: dataset.create_tuple_iterator(num_epochs=1)


arguments = flags()
serve_loader({"mindspore": mindspore.__version__}, make)
