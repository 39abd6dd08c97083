"""CIFAR-10 is read as its files have it, and invalid files are rejected in one line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cifar_files import make_records, write_cifar10
from model_zoo import DataError, create_dataset
from model_zoo.data.cifar import FILES, RECORD, ROWS, TOP, load_cifar10

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def folder(tmp_path):
    """A folder with small files in CIFAR-10's format."""
    return write_cifar10(tmp_path / "data")


def error_of(folder, usage="train", *, error=DataError):
    """Return the message of the error about a folder."""
    with pytest.raises(error) as caught:
        create_dataset(folder, 10, dataset="cifar10", usage=usage)
    message = str(caught.value)
    assert message.startswith("For 'create_dataset', ") and len(message.splitlines()) == 1
    return message


@pytest.mark.skipif("CIFAR10_DATA" not in os.environ, reason="the environment variable CIFAR10_DATA names no folder")
def test_real_cifar10():
    train, test = (load_cifar10(Path(os.environ["CIFAR10_DATA"]), usage) for usage in ("train", "test"))
    assert np.bincount(train.labels).tolist() == [5000] * 10 and np.bincount(test.labels).tolist() == [1000] * 10


@pytest.mark.parametrize("top", ["", TOP])
def test_pixels_and_labels_equal_files(tmp_path, top):
    folder = write_cifar10(tmp_path / "data", top=top)
    dataset = create_dataset(folder, 10, dataset="cifar10", usage="test")
    images, labels = next(dataset.create_tuple_iterator(num_epochs=1, output_numpy=True))
    records = make_records(10, seed=5)
    assert (images.shape, images.dtype, labels.dtype) == ((10, 3, 32, 32), np.float32, np.int32)
    assert labels.tolist() == records[:, 0].tolist()
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    pixels = records[:, 1:].reshape(10, 3, 32, 32).transpose(0, 2, 3, 1) / 255
    expected = ((pixels - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(images, expected, rtol=0, atol=1e-6)


def test_training_split_is_five_files_in_order(folder):
    split = load_cifar10(folder, "train")
    expected = np.concatenate([make_records(20, seed) for seed in range(5)])
    assert np.array_equal(split.images.reshape(100, -1), expected[:, 1:])
    assert np.array_equal(split.labels, expected[:, 0]) and split.images.flags["C_CONTIGUOUS"]


DAMAGED = {
    "a byte too few": (bytes(20 * RECORD - 1), "but got 61459 bytes"),
    "a record too few": (bytes(19 * RECORD), "same number of records as 'data_batch_1.bin', 20, but got 19"),
    "a label of CIFAR-100": (bytes(7 * RECORD) + b"\x0a" + bytes(13 * RECORD - 1), "but got label 10 in row 7"),
    "too long": (bytes((ROWS + 1) * RECORD), "contain 1 to 10000 complete records of 3073 bytes"),
}


@pytest.mark.parametrize(("content", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_rejected(folder, content, reason):
    path = folder / "data_batch_3.bin"
    path.write_bytes(content)
    message = error_of(folder)
    assert f"the file {str(path)!r} must " in message and reason in message


def test_huge_file_is_rejected_without_reading(tmp_path):
    with open(tmp_path / "test_batch.bin", "wb") as file:
        file.truncate(2**40 // RECORD * RECORD)  # with no block on the disk
    assert "contain 1 to 10000 complete records" in error_of(tmp_path, "test")


@pytest.mark.parametrize("name", [FILES["train"][3], FILES["test"][0]])
def test_missing_file_is_rejected(folder, name):
    (folder / name).unlink()
    usage = "test" if name in FILES["test"] else "train"
    assert f"there is no file {str(folder / name)!r}" in error_of(folder, usage, error=FileNotFoundError)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dataset": "cifar100"}, "'dataset' must be one of ('mnist', 'digits', 'cifar10'), but got 'cifar100'."),
        ({"dataset": "cifar10"}, "'data_path' must be the folder of dataset='cifar10', but got None."),
        ({"dataset": "digits", "data_path": "x"}, "'data_path' must be None for the embedded digits, but got 'x'."),
        ({"dataset": "cifar10", "data_path": "x", "image_size": 28}, "'image_size' must be 32 for dataset='cifar10'"),
    ],
)
def test_contradictory_arguments_are_rejected(arguments, reason):
    with pytest.raises(ValueError) as caught:
        create_dataset(**arguments)
    assert str(caught.value).startswith(f"For 'create_dataset', {reason}")
