"""How fast do batches come out of `MnistDataset` with the tutorial's pipeline?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Callable

import mindspore
from loading import BATCH, flags, serve_loader
from mindspore import dataset as ds
from mindspore.dataset import transforms, vision


def make() -> Callable[[], Iterable]:
    """Make the r1.0 tutorial's `create_dataset`, under today's names."""
    dataset = ds.MnistDataset(str(Path(arguments.data, "train")))
    dataset = dataset.map(transforms.TypeCast(mindspore.int32), "label", num_parallel_workers=1)
    for operation in (
        vision.Resize((arguments.size, arguments.size), interpolation=vision.Inter.LINEAR),
        vision.Rescale(1 / 255, 0.0),
        vision.Rescale(1 / 0.3081, -0.1307 / 0.3081),
        vision.HWC2CHW(),
    ):
        dataset = dataset.map(operation, "image", num_parallel_workers=1)
    dataset = dataset.shuffle(buffer_size=10_000).batch(BATCH, drop_remainder=True)
    return lambda: dataset.create_tuple_iterator(num_epochs=1)


arguments = flags()
serve_loader({"mindspore": mindspore.__version__}, make)
