"""Creates the dataset of batches."""

from __future__ import annotations

from os import PathLike
from typing import Any

from mindspore.dataset import GeneratorDataset

from .._check import check_bool, check_choice, check_int, check_path
from .batches import batched, seed_of
from .cifar import SIDE, load_cifar10
from .digits import load_digits_split
from .images import ImageRows, resize
from .mnist import load_mnist

_NAME = "create_dataset"
_LOAD: dict[str, Any] = {"mnist": load_mnist, "digits": load_digits_split, "cifar10": load_cifar10}


def create_dataset(
    data_path: str | PathLike[str] | None = None,
    batch_size: int = 32,
    repeat_size: int = 1,
    num_parallel_workers: int = 1,
    *,
    usage: str | None = None,
    image_size: int = 32,
    shuffle: bool | None = None,
    seed: int | None = None,
    drop_remainder: bool = False,
    num_shards: int = 1,
    shard_id: int = 0,
    dataset: str | None = None,
) -> GeneratorDataset:
    """Create a dataset of batches of MNIST, the embedded digits, or CIFAR-10.

    The columns are `image`, normalized float32 of shape (N, 1, image_size, image_size), or (N, 3, 32, 32) for CIFAR-10,
    and `label`, int32 of shape (N,). Training images of CIFAR-10 are cropped from padded copies and mirrored at random.
    This is a function of (seed, pass, row), so it does not depend on the batch size, the shards, or where a run
    resumes.

    The first iterator of the dataset begins with epoch 0, the next with epoch 1, and so on; an iterator over several
    epochs counts from its first. `dataset.source.next_epoch` is the epoch with which the next iterator begins; to
    resume, set it with `dataset.source.begin_with_epoch(number)`.

    Args:
        data_path (str): The folder of MNIST's four IDX files, in the layout of MindSpore's tutorials (``train/`` and
            ``test/``, or one of the two), of torchvision or of gunzip, or the folder of CIFAR-10's binary files.
            Default: ``None``, the 1,797 digits in scikit-learn.
        batch_size (int): The number of rows in a batch. Default: ``32``.
        repeat_size (int): The number of passes over the rows in an epoch. Default: ``1``.
        num_parallel_workers (int): Not used; accepted for compatibility with the tutorials. Default: ``1``.
        usage (str): ``"train"`` or ``"test"``. Default: ``None``, the split that the folder contains (train if both).
        image_size (int): The side of the images: 32 for LeNet5, 28 for MLP, always 32 for CIFAR-10. Default: ``32``.
        shuffle (bool): Whether each epoch has a different random order. Default: ``None``, for the training split only.
        seed (int): The seed of the order, and of crops and mirroring. Default: ``None``, `mindspore.get_seed()`, or 0
            if it is not set.
        drop_remainder (bool): Whether a shorter last batch is dropped. Default: ``False``.
        num_shards (int): The number of shards of the rows. Default: ``1``.
        shard_id (int): The shard to use: every num_shards-th row of the epoch's order. Each row is in exactly one
            shard, and the sizes of shards differ by at most one. Default: ``0``.
        dataset (str): ``"mnist"``, ``"digits"`` or ``"cifar10"``. Default: ``None``, MNIST with a `data_path`, the
            digits without one.

    Returns:
        GeneratorDataset, the batches.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
        DataError: If a file is damaged; a subclass of ValueError.
        FileNotFoundError: If the folder or one of its files is missing.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> from model_zoo import create_dataset
        >>> train = create_dataset(batch_size=32, seed=1)
        >>> train.get_dataset_size()
        45
        >>> image, label = next(train.create_tuple_iterator(num_epochs=1))
        >>> image.shape, label.shape
        ((32, 1, 32, 32), (32,))
    """
    check_int(_NAME, "image_size", image_size, low=8, high=128)
    if usage is not None:
        check_choice(_NAME, "usage", usage, choices=("train", "test"))
    if dataset is None:
        dataset = "digits" if data_path is None else "mnist"
    check_choice(_NAME, "dataset", dataset, choices=tuple(_LOAD))
    if (dataset == "digits") != (data_path is None):
        rule = "be None for the embedded digits" if dataset == "digits" else f"be the folder of dataset='{dataset}'"
        raise ValueError(f"For '{_NAME}', 'data_path' must {rule}, but got {data_path!r}.")
    if dataset == "cifar10" and image_size != SIDE:
        raise ValueError(f"For '{_NAME}', 'image_size' must be {SIDE} for dataset='cifar10', but got {image_size}.")

    split = _LOAD[dataset](None if data_path is None else check_path(_NAME, "data_path", data_path), usage)
    is_training, seed = split.usage == "train", seed_of(_NAME, seed)
    shuffle = is_training if shuffle is None else check_bool(_NAME, "shuffle", shuffle)
    return batched(
        _NAME,
        ImageRows(
            split._replace(images=resize(split.images, image_size)),
            seed if dataset == "cifar10" and is_training else None,
        ),
        ["image", "label"],
        f"{split.usage} images",
        is_training=is_training,
        batch_size=batch_size,
        repeat_size=repeat_size,
        seed=seed if shuffle else None,
        num_shards=num_shards,
        shard_id=shard_id,
        drop_remainder=drop_remainder,
    )
