"""The same seed and epoch give the same rows, to the byte, in every version of this project."""

from __future__ import annotations

import hashlib

import pytest

from cifar_files import write_cifar10
from idx_files import write_mnist
from model_zoo import create_dataset, create_text_dataset

pytestmark = pytest.mark.usefixtures("eager")
# SHA-256 of the first two epochs, all columns batch by batch; first 16 digits.
GOLDEN = {
    "mnist": "39c4bfaa00760d9f",
    "mnist of the tutorials' MLP": "77e54f72a7944cfe",
    "mnist, test split": "3798b7c558ef2963",
    "mnist, a shard without the remainder, two passes": "19d6503baac1f65a",
    "digits": "153180263abe5df8",
    "cifar10": "a3024f71bc13991f",
    "cifar10, test split": "4c49e861dd911fce",
    "cifar10, a shard": "bd0c9dc5d72b9117",
    "sentences": "ad90a520ff225443",
    "sentences, test split": "3e86fd31d562fe4d",
    "texts": "e374f5e9195c0a40",
}


def dataset_of(case, folder):
    if case.startswith("mnist"):
        write_mnist(folder)
    elif case.startswith("cifar10"):
        write_cifar10(folder)
    elif case == "texts":
        (folder / "b.txt").write_text("Two lines,\nand 汉字.\n" * 9, encoding="utf-8")
        (folder / "a.txt").write_text("The first by its name. " * 7, encoding="utf-8")
    shard = {"num_shards": 3, "shard_id": 1}
    return {
        "mnist": lambda: create_dataset(folder, 8, seed=3),
        "mnist of the tutorials' MLP": lambda: create_dataset(folder, 24, image_size=28, seed=5),
        "mnist, test split": lambda: create_dataset(folder, 24, usage="test"),
        "mnist, a shard without the remainder, two passes": lambda: create_dataset(
            folder, 5, 2, drop_remainder=True, seed=5, **shard
        ),
        "digits": lambda: create_dataset(seed=1),
        "cifar10": lambda: create_dataset(folder, 16, dataset="cifar10", seed=3),
        "cifar10, test split": lambda: create_dataset(folder, 16, dataset="cifar10", usage="test"),
        "cifar10, a shard": lambda: create_dataset(folder, 16, dataset="cifar10", seed=5, **shard),
        "sentences": lambda: create_text_dataset(batch_size=16, seed=1),
        "sentences, test split": lambda: create_text_dataset(context=32, usage="test"),
        "texts": lambda: create_text_dataset(folder, 4, context=10, seed=2),
    }[case]()


@pytest.mark.parametrize("case", GOLDEN)
def test_rows_of_two_epochs(case, tmp_path):
    dataset, digest = dataset_of(case, tmp_path), hashlib.sha256()
    for _ in range(2):
        for columns in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
            for column in columns:
                digest.update(f"{column.shape}{column.dtype}".encode() + column.tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[case]
