"""Measure an input pipeline of MNIST: ours, that of MindSpore's tutorial or PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable, Literal

from protocol import flags_of, serve, timed

BATCH = 32
SIZE = 32  # side of the images


def ours(data: str, workers: int) -> Iterator:
    """`model_zoo.create_dataset`; an epoch is what the driver iterates over."""
    import mindspore

    from model_zoo import create_dataset

    yield {"mindspore": mindspore.__version__}
    dataset = create_dataset(data, BATCH, usage="train", image_size=SIZE, seed=1)
    yield lambda: dataset.create_tuple_iterator(num_epochs=1)


def tutorial(data: str, workers: int) -> Iterator:
    """`MnistDataset` with the r1.0 tutorial's `create_dataset`, under today's names."""
    import mindspore
    from mindspore import dataset as ds
    from mindspore.dataset import transforms, vision

    yield {"mindspore": mindspore.__version__}
    dataset = ds.MnistDataset(str(Path(data, "train")))
    dataset = dataset.map(transforms.TypeCast(mindspore.int32), "label", num_parallel_workers=1)
    for operation in (
        vision.Resize((SIZE, SIZE), interpolation=vision.Inter.LINEAR),
        vision.Rescale(1 / 255, 0.0),
        vision.Rescale(1 / 0.3081, -0.1307 / 0.3081),
        vision.HWC2CHW(),
    ):
        dataset = dataset.map(operation, "image", num_parallel_workers=1)
    dataset = dataset.shuffle(buffer_size=10_000).batch(BATCH, drop_remainder=True)
    yield lambda: dataset.create_tuple_iterator(num_epochs=1)


def torch(data: str, workers: int) -> Iterator:
    """PyTorch's DataLoader; each pass over it is an epoch."""
    import mnist_torch
    import torch

    yield {"torch": torch.__version__}
    batches = mnist_torch.loader(data, "train", SIZE, BATCH, workers)
    yield lambda: batches


PIPELINES = {"ours": ours, "tutorial": tutorial, "torch": torch}


def build(pipeline: Literal["ours", "tutorial", "torch"], data: str, workers: int = 0) -> tuple[dict, Callable]:
    """Answer how long it takes to get the first batch ("ready"), and then an "epoch"; `data` has train/ and test/."""
    made = PIPELINES[pipeline](data, workers)
    versions = next(made)  # after the imports; what reads the data is measured
    kept: list[Callable[[], Iterable]] = []

    def first() -> tuple:
        kept[:] = [next(made)]
        return next(iter(kept[0]()))

    def ready() -> dict:
        seconds, (images, labels) = timed(first)
        return {"seconds": seconds, "images": list(images.shape), "labels": list(labels.shape)}

    def epoch() -> dict:
        seconds, rows = timed(lambda: [labels.shape[0] for _, labels in kept[0]()])
        return {"seconds": seconds, "batches": len(rows), "rows": sum(rows)}

    def mean() -> dict:
        """All loaders must yield the same images."""
        means = [float(images.mean()) for images, _ in kept[0]()]
        return {"mean": sum(means) / len(means)}

    answers = {"ready": ready, "epoch": epoch, "mean": mean}
    return {"versions": versions}, lambda what: answers[what]()


if __name__ == "__main__":  # PyTorch's workers import this file where they are not forked
    serve(build, **flags_of(build))
