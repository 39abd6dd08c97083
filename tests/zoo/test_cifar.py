"""CIFAR-10 is read correctly from each layout, and invalid files are rejected in one line."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from cifar_files import make_records, write_cifar10
from idx_files import rows_of, write_mnist
from model_zoo import DataError, create_dataset
from model_zoo.data.cifar import FILES, RECORD, ROWS, TOP, load_cifar10


@pytest.fixture
def folder(tmp_path):
    """A folder with small files in CIFAR-10's format."""
    return write_cifar10(tmp_path / "data")


def cifar10(folder, batch_size=10, **arguments):
    return create_dataset(folder, batch_size, dataset="cifar10", **arguments)


def error_of(folder, usage="train", *, error=DataError):
    """Return the message of the error about a folder."""
    with pytest.raises(error) as caught:
        cifar10(folder, usage=usage)
    message = str(caught.value)
    assert message.startswith("For 'create_dataset', ") and len(message.splitlines()) == 1
    return message


@pytest.mark.skipif("CIFAR10_DATA" not in os.environ, reason="the environment variable CIFAR10_DATA names no folder")
def test_real_cifar10():
    train, test = (load_cifar10(Path(os.environ["CIFAR10_DATA"]), usage) for usage in ("train", "test"))
    assert np.bincount(train.labels).tolist() == [5000] * 10 and np.bincount(test.labels).tolist() == [1000] * 10
    images = train.normalizer()(train.with_channels()[:10_000])
    assert images.mean((0, 2, 3)) == pytest.approx([0, 0, 0], abs=0.02)
    assert images.std((0, 2, 3)) == pytest.approx([1, 1, 1], abs=0.02)


@pytest.mark.parametrize("top", ["", TOP])
def test_pixels_and_labels_equal_files(tmp_path, top):
    folder = write_cifar10(tmp_path / "data", top=top)
    images, labels = next(cifar10(folder, usage="test").create_tuple_iterator(num_epochs=1, output_numpy=True))
    records = make_records(10, seed=5)
    assert (images.shape, images.dtype, labels.dtype) == ((10, 3, 32, 32), np.float32, np.int32)
    assert labels.tolist() == records[:, 0].tolist()
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    pixels = records[:, 1:].reshape(10, 3, 32, 32).transpose(0, 2, 3, 1) / 255
    expected = ((pixels - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(images, expected, rtol=0, atol=1e-6)
    # The planted fault: blue first.
    assert np.abs(images[:, ::-1] - expected).max() > 0.1


def test_training_split_is_five_files_in_order(folder):
    split = load_cifar10(folder, "train")
    expected = np.concatenate([make_records(20, seed) for seed in range(5)])
    assert np.array_equal(split.images.reshape(100, -1), expected[:, 1:])
    assert np.array_equal(split.labels, expected[:, 0]) and split.images.flags["C_CONTIGUOUS"]


def test_default_split_is_existing_split(tmp_path):
    assert load_cifar10(write_cifar10(tmp_path / "both"), None).usage == "train"
    assert load_cifar10(write_cifar10(tmp_path / "test", train=0), None).usage == "test"


def test_files_of_full_size_are_read(tmp_path):
    (tmp_path / "test_batch.bin").write_bytes(bytes(ROWS * RECORD))
    assert len(load_cifar10(tmp_path, "test").labels) == 10_000


def test_number_of_batches(folder):
    assert cifar10(folder, 32).get_dataset_size() == 4 and cifar10(folder, 32, usage="test").get_dataset_size() == 1
    with pytest.raises(ValueError, match="'batch_size' must be <= 100, the number of train images, but got 101"):
        cifar10(folder, 101)


# Invalid arguments

DAMAGED = {
    "empty": (b"", "but got an empty file"),
    "a byte too few": (bytes(20 * RECORD - 1), "complete records of 3073 bytes, but got 61459 bytes, 3072 too many"),
    "a byte too many": (bytes(20 * RECORD + 1), "but got 61461 bytes, 1 too many"),
    "a page": (b"<html>moved</html>", "but got 18 bytes"),
    "a record too few": (
        bytes(19 * RECORD),
        "contain the same number of records as 'data_batch_1.bin', 20, but got 19",
    ),
    "a label of CIFAR-100": (
        bytes(7 * RECORD) + b"\x0a" + bytes(13 * RECORD - 1),
        "labels from 0 to 9, but got label 10",
    ),
    "too long": (bytes((ROWS + 1) * RECORD), "contain at most 10000 records, but got 10001"),
}


@pytest.mark.parametrize(("content", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_rejected(folder, content, reason):
    path = folder / "data_batch_3.bin"
    path.write_bytes(content)
    message = error_of(folder)
    assert f"the file {str(path)!r} must " in message and reason in message


def test_error_names_row_of_invalid_label(folder):
    (folder / "test_batch.bin").write_bytes(bytes(7 * RECORD) + b"\xff" + bytes(RECORD - 1))
    assert "label 255 in row 7" in error_of(folder, "test")


def test_huge_file_is_rejected_without_reading(tmp_path):
    with open(tmp_path / "test_batch.bin", "wb") as file:
        file.truncate(2**40 // RECORD * RECORD)  # with no block on the disk
    assert "contain at most 10000 records" in error_of(tmp_path, "test")


def test_flipped_label_bits(folder):
    """Nothing in the format covers pixels: only labels and the size are checked."""
    path, pick, rejections = folder / "data_batch_2.bin", random.Random(0), 0
    content = path.read_bytes()
    for _ in range(200):
        damaged = bytearray(content)
        row = pick.randrange(20)
        damaged[row * RECORD] ^= 1 << pick.randrange(8)
        path.write_bytes(damaged)
        if damaged[row * RECORD] > 9:
            rejections += 1
            assert f"in row {row}" in error_of(folder)
        else:
            assert load_cifar10(folder, "train").labels.max() <= 9
    assert rejections > 100


@pytest.mark.parametrize("name", [*FILES["train"], *FILES["test"]])
@pytest.mark.parametrize("top", ["", TOP])
def test_missing_file_is_rejected(tmp_path, name, top):
    folder = write_cifar10(tmp_path / "data", top=top)
    os.unlink(folder / top / name)
    usage = "test" if name in FILES["test"] else "train"
    message = error_of(folder, usage, error=FileNotFoundError)
    if usage == "train":
        assert f"the file {str(folder / top / name)!r} is missing next to" in message
    else:
        assert "must contain CIFAR-10's test_batch.bin (in the folder itself or in" in message


def test_folders_without_cifar10_are_rejected(tmp_path):
    write_mnist(tmp_path / "mnist")
    for path, error, reason in (
        ("nowhere", FileNotFoundError, "must be an existing folder"),
        ("mnist", FileNotFoundError, "must contain CIFAR-10's data_batch_1.bin"),
        ("pickled", FileNotFoundError, "with the pickled version for Python"),
        ("cifar-10-binary.tar.gz", DataError, "Unpack it"),
    ):
        (tmp_path / "pickled" / "cifar-10-batches-py").mkdir(parents=True, exist_ok=True)
        (tmp_path / "pickled" / "cifar-10-batches-py" / "test_batch").touch()
        (tmp_path / "cifar-10-binary.tar.gz").touch()
        assert reason in error_of(tmp_path / path, error=error)


@pytest.mark.parametrize(("given", "named"), [("data/cifar", "data"), (".", "data"), (f"data/{TOP}/x", f"data/{TOP}")])
def test_folder_that_was_probably_meant_is_named(tmp_path, monkeypatch, given, named):
    monkeypatch.chdir(tmp_path)
    write_cifar10("data", top=TOP)
    Path(given).mkdir(exist_ok=True)
    assert error_of(given, error=FileNotFoundError).endswith(f"without it. Give '{named}', which contains CIFAR-10.")


def test_cifar10_folder_for_mnist_is_rejected(folder):
    with pytest.raises(FileNotFoundError, match="with CIFAR-10. Give dataset='cifar10', or '--dataset cifar10'"):
        create_dataset(folder)


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"dataset": "cifar100"}, ValueError, "'dataset' must be one of ('mnist', 'digits', 'cifar10'), but got 'cif"),
        ({"dataset": 10}, TypeError, "'dataset' must be one of ('mnist', 'digits', 'cifar10'), but got type int."),
        ({"dataset": "cifar10"}, ValueError, "'data_path' must be the folder of dataset='cifar10', but got None."),
        ({"dataset": "mnist"}, ValueError, "'data_path' must be the folder of dataset='mnist', but got None."),
        ({"dataset": "digits", "data_path": "x"}, ValueError, "'data_path' must be None for the embedded digits, but"),
        (
            {"dataset": "cifar10", "data_path": "x", "image_size": 28},
            ValueError,
            "'image_size' must be 32 for dataset='cifar10', but got 28.",
        ),
    ],
)
def test_contradictory_arguments_are_rejected(arguments, error, reason):
    with pytest.raises(error) as caught:
        create_dataset(**arguments)
    assert str(caught.value).startswith(f"For 'create_dataset', {reason}")


def test_explicit_default_dataset_changes_nothing(tmp_path):
    write_mnist(tmp_path)
    assert rows_of(create_dataset(tmp_path, 8, dataset="mnist")) == rows_of(create_dataset(tmp_path, 8))
    assert rows_of(create_dataset(dataset="digits")) == rows_of(create_dataset())
