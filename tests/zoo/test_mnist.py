"""MNIST is found in each layout, and damaged files are rejected in one line."""

from __future__ import annotations

import dataclasses
import gzip
import os
import struct

import numpy as np
import pytest

from idx_files import idx_images, idx_labels, make_digits, rows_of, write_mnist
from model_zoo import DataError, create_dataset


@pytest.fixture
def folder(tmp_path):
    """A folder with small files in MNIST's format."""
    return write_mnist(tmp_path / "data")


# Where the files are


@pytest.mark.parametrize(
    ("layout", "entry"),
    [
        ("split", ""),
        ("flat", ""),
        ("dots", ""),
        ("torchvision", ""),
        ("torchvision", "MNIST"),
        ("torchvision", "MNIST/raw"),
    ],
)
def test_folder_layouts(tmp_path, layout, entry):
    path = write_mnist(tmp_path, layout=layout) / entry
    for usage, rows in ((None, 64), ("train", 64), ("test", 32)):
        assert len(rows_of(create_dataset(str(path), 8, usage=usage))) == rows


def test_folder_of_one_split_needs_no_usage(folder):
    assert len(rows_of(create_dataset(os.path.join(folder, "train"), 32, 1))) == 64
    assert len(rows_of(create_dataset(os.path.join(folder, "test"), 32))) == 32


def test_folder_above_unzipped_archive(tmp_path):
    write_mnist(tmp_path / "MNIST_Data")
    assert create_dataset(tmp_path, 16, usage="test").get_dataset_size() == 2


@pytest.mark.parametrize("name", ["with a space", "手写数字", 'it\'s "quoted"', "ünï\u2028code"])
def test_unusual_paths(tmp_path, name):
    path = write_mnist(tmp_path / name)
    assert create_dataset(path, 16).get_dataset_size() == 4
    (path / "train" / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(ValueError, match="empty") as caught:
        create_dataset(path, 16)
    assert len(str(caught.value).splitlines()) == 1


def test_symbolic_links(tmp_path, folder):
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    assert create_dataset(tmp_path / "link", 16).get_dataset_size() == 4
    moved = tmp_path / "elsewhere"
    (folder / "train" / "train-images-idx3-ubyte").rename(moved)
    (folder / "train" / "train-images-idx3-ubyte").symlink_to(moved)
    assert create_dataset(folder, 16).get_dataset_size() == 4


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(write_mnist(tmp_path / "home" / "data").parent))
    assert create_dataset("~/data", 16).get_dataset_size() == 4


# Bad files

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
GOOD_IMAGES, GOOD_LABELS = idx_images(make_digits(64, 0)[0]), idx_labels(make_digits(64, 0)[1])


@dataclasses.dataclass(frozen=True)
class Damage:
    """One bad file: its name, its content (None if it is missing), and a part of the error message."""

    name: str
    content: bytes | None
    reason: str


DAMAGE = {
    "missing images": Damage(IMAGES, None, "is missing next to 'train-labels-idx1-ubyte'"),
    "missing labels": Damage(LABELS, None, "is missing next to 'train-images-idx3-ubyte'"),
    "empty images": Damage(IMAGES, b"", "an empty file"),
    "empty labels": Damage(LABELS, b"", "an empty file"),
    "cut header": Damage(IMAGES, GOOD_IMAGES[:9], "a header of 16 bytes, but got 9"),
    "cut magic": Damage(LABELS, GOOD_LABELS[:2], "a file that begins with 0x0000"),
    "short images": Damage(IMAGES, GOOD_IMAGES[:-1], "50175 bytes after the header"),
    "short labels": Damage(LABELS, GOOD_LABELS[:-1], "63 bytes after the header"),
    "trailing bytes": Damage(IMAGES, GOOD_IMAGES + b"x", "50177 bytes after the header"),
    "trailing label": Damage(LABELS, GOOD_LABELS + b"x", "65 bytes after the header"),
    "wrong magic": Damage(IMAGES, b"PK\x03\x04" + GOOD_IMAGES[4:], "begins with 0x504b0304"),
    "labels for images": Damage(IMAGES, GOOD_LABELS, "IDX file of images, but got a file of label"),
    "images for labels": Damage(LABELS, GOOD_IMAGES, "IDX file of labels, but got a file of image"),
    "gzip": Damage(IMAGES, gzip.compress(GOOD_IMAGES), "a gzip file. Run gunzip on it"),
    "fewer labels": Damage(LABELS, idx_labels(np.zeros(63)), "64 images and 63 labels"),
    "27x28": Damage(IMAGES, idx_images(np.zeros((64, 27, 28))), "28x28, but got 27x28"),
    "transposed": Damage(IMAGES, idx_images(np.zeros((49, 32, 32))), "28x28, but got 32x32"),
    "2**32-1 images": Damage(
        IMAGES, struct.pack(">4I", 2051, 2**32 - 1, 28, 28) + GOOD_IMAGES[16:], "4294967295 images"
    ),
    "2**32-1 everything": Damage(IMAGES, struct.pack(">4I", 2051, *[2**32 - 1] * 3), "but got 4294967295x4294967295"),
    "2**32-1 labels": Damage(LABELS, struct.pack(">2I", 2049, 2**32 - 1), "4294967295 labels"),
    "no images": Damage(IMAGES, struct.pack(">4I", 2051, 0, 28, 28), "a header with the number 0"),
    "label 10": Damage(LABELS, GOOD_LABELS[:-1] + b"\x0a", "from 0 to 9, but got label 10 in row 63"),
    "label 200": Damage(LABELS, GOOD_LABELS[:8] + b"\xc8" + GOOD_LABELS[9:], "label 200 in row 0"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_rejected_in_one_line(folder, damage):
    path = folder / "train" / damage.name
    path.unlink() if damage.content is None else path.write_bytes(damage.content)
    kind = FileNotFoundError if damage.content is None else DataError
    with pytest.raises(kind) as caught:
        create_dataset(folder, 16, usage="train")
    message = str(caught.value)
    assert damage.reason in message and str(path) in message
    assert message.startswith("For 'create_dataset', ") and len(message.splitlines()) == 1
    assert message.endswith((".", "'")) and ". " in message


def test_every_truncation_is_rejected(tmp_path):
    folder = write_mnist(tmp_path, train=2, test=0, layout="flat")
    for name in (IMAGES, LABELS):
        content = (folder / name).read_bytes()
        for length in (*range(min(len(content), 40)), len(content) - 1):
            (folder / name).write_bytes(content[:length])
            with pytest.raises(ValueError, match=name):
                create_dataset(folder, 1)
        (folder / name).write_bytes(content)
    assert create_dataset(folder, 1).get_dataset_size() == 2


def test_folder_without_mnist_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="must contain MNIST's train-images-idx3-ubyte"):
        create_dataset(tmp_path)


def test_missing_split_is_rejected(folder):
    with pytest.raises(FileNotFoundError, match="must contain MNIST's t10k-images-idx3-ubyte"):
        create_dataset(folder / "train", usage="test")


@pytest.mark.parametrize(
    ("data", "given", "named"),
    [
        ("MNIST_Data", "MNIST_Data/train", "MNIST_Data"),
        ("data/mnist", "data", "data/mnist"),
        ("MNIST_Data", "MNIST_Data/notes", "MNIST_Data"),
        (".", "train", "."),
    ],
)
def test_folder_that_was_probably_meant_is_named(tmp_path, monkeypatch, data, given, named):
    monkeypatch.chdir(tmp_path)
    write_mnist(data)
    os.makedirs(given, exist_ok=True)
    with pytest.raises(FileNotFoundError) as caught:
        create_dataset(given, usage="test")
    assert str(caught.value).endswith(f"without it. Give '{named}', which contains MNIST.")


def test_folder_above_current_folder_is_named(folder, monkeypatch):
    monkeypatch.chdir(folder / "train")
    with pytest.raises(FileNotFoundError, match=r"Give '\.\.', which contains MNIST\.$"):
        create_dataset(".", usage="test")


def test_folder_nearby_with_one_split_is_not_named(tmp_path):
    write_mnist(tmp_path / "data", train=0)
    with pytest.raises(FileNotFoundError, match=r"Download MNIST, for example"):
        create_dataset(tmp_path)


def test_only_compressed_files_are_rejected(tmp_path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(GOOD_IMAGES))
    with pytest.raises(FileNotFoundError, match="must be unpacked.*gunzip"):
        create_dataset(tmp_path)


def test_missing_folder_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be an existing folder"):
        create_dataset(tmp_path / "absent")


@pytest.mark.parametrize(("name", "reason"), [("MNIST_Data.zip", "Unpack it"), ("x.npz", "folder")])
def test_file_in_place_of_folder_is_rejected(tmp_path, name, reason):
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=f"must be a folder, but got the file .*{reason}"):
        create_dataset(tmp_path / name)
