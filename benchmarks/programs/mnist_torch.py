"""MNIST as PyTorch's users read it.

As `torchvision.datasets.MNIST` with ToTensor and Normalize: all bytes in memory, the transforms on each image when it
is asked for. All are resized once, as ours are. Not with torchvision itself: its wheel does not load beside every build
of PyTorch, and its transforms, which go by way of Pillow, took more than three times as long as these.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

_PREFIX = {"train": "train", "test": "t10k"}


class Mnist(Dataset):
    """The images of a split, transformed one by one, with their labels.

    Args:
        folder (Path): with train/ and test/.
        usage (str): "train" or "test".
        size (int): side of the images.
    """

    def __init__(self, folder: str | Path, usage: str, size: int):
        stem = Path(folder, usage, _PREFIX[usage])
        images = _read(f"{stem}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28)
        self._images = _resized(images, size) if size != 28 else images
        self._labels = _read(f"{stem}-labels-idx1-ubyte", 8).long()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._images[index].float()
        return image.div_(255).sub_(0.1307).div_(0.3081), int(self._labels[index])


def loader(folder: str | Path, usage: str, size: int, batch: int, workers: int) -> DataLoader:
    """Return the batches of a split, shuffled for training."""
    return DataLoader(Mnist(folder, usage, size), batch, shuffle=usage == "train", num_workers=workers)


def _resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return images of other sides, some at a time: as numbers they need four times the memory."""
    made = (functional.interpolate(some.float(), (size, size), mode="bilinear") for some in images.split(1000))
    return torch.cat([some.round_().byte() for some in made])


def _read(path: str, header: int) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8, offset=header))
