"""MNIST is found in each layout, and damaged files are rejected in one line."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest

from idx_files import idx_images, idx_labels, make_digits, rows_of, write_mnist
from model_zoo import DataError, create_dataset

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def folder(tmp_path):
    """A folder with small files in MNIST's format."""
    return write_mnist(tmp_path / "data")


@pytest.mark.parametrize(
    ("layout", "entry"),
    [("split", ""), ("flat", ""), ("dots", ""), ("torchvision", ""), ("torchvision", "MNIST/raw")],
)
def test_folder_layouts(tmp_path, layout, entry):
    path = write_mnist(tmp_path, layout=layout) / entry
    for usage, rows in ((None, 64), ("train", 64), ("test", 32)):
        assert len(rows_of(create_dataset(str(path), 8, usage=usage))) == rows


def test_folder_of_one_split_and_folder_above_the_archive(tmp_path):
    folder = write_mnist(tmp_path / "MNIST_Data")
    assert len(rows_of(create_dataset(folder / "test", 32))) == 32
    assert create_dataset(tmp_path, 16, usage="test").get_dataset_size() == 2


@pytest.mark.parametrize("name", ["with a space", "手写数字", 'it\'s "quoted"', "ünï\u2028code"])
def test_unusual_paths(tmp_path, name):
    path = write_mnist(tmp_path / name)
    (tmp_path / "link").symlink_to(path, target_is_directory=True)
    assert create_dataset(path, 16).get_dataset_size() == create_dataset(tmp_path / "link", 16).get_dataset_size() == 4
    (path / "train" / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        create_dataset(path, 16)
    assert len(str(caught.value).splitlines()) == 1


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(write_mnist(tmp_path / "home" / "data").parent))
    assert create_dataset("~/data", 16).get_dataset_size() == 4


# Damaged files

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
GOOD_IMAGES, GOOD_LABELS = idx_images(make_digits(64, 0)[0]), idx_labels(make_digits(64, 0)[1])
DAMAGE = {
    "empty": (IMAGES, b"", "begins with 0x,"[:-1]),
    "short images": (IMAGES, GOOD_IMAGES[:-1], "50175 bytes after the header"),
    "trailing label": (LABELS, GOOD_LABELS + b"x", "65 bytes after the header"),
    "wrong magic": (IMAGES, b"PK\x03\x04" + GOOD_IMAGES[4:], "begins with 0x504b0304"),
    "fewer labels": (
        LABELS,
        idx_labels(np.zeros(63)),
        "each of the 64 images in 'train-images-idx3-ubyte', but got 63",
    ),
    "27x28": (IMAGES, idx_images(np.zeros((64, 27, 28))), "28x28, but got 27x28"),
    "2**32-1 images": (IMAGES, struct.pack(">4I", 2051, 2**32 - 1, 28, 28) + GOOD_IMAGES[16:], "4294967295 images"),
    "no images": (IMAGES, struct.pack(">4I", 2051, 0, 28, 28), "and at least one"),
    "label 10": (LABELS, GOOD_LABELS[:-1] + b"\x0a", "from 0 to 9, but got label 10 in row 63"),
}


@pytest.mark.parametrize(("name", "content", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_rejected_in_one_line(folder, name, content, reason):
    path = folder / "train" / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        create_dataset(folder, 16, usage="train")
    message = str(caught.value)
    assert message.startswith(f"For 'create_dataset', the file {str(path)!r} must ") and reason in message
    assert len(message.splitlines()) == 1 and message.endswith(
        "Download MNIST, for example with 'train.py --download --data_path FOLDER'."
    )


def test_file_of_any_size_is_rejected_before_it_is_read(folder):
    path = folder / "train" / LABELS
    path.write_bytes(struct.pack(">2I", 2049, 2**32 - 1))
    os.truncate(path, 8 + 2**32 - 1)  # sparse, with as many labels as its header says
    with pytest.raises(DataError, match=r"at least one, at most 1,000,000, but got 4294967295 bytes"):
        create_dataset(folder, 16, usage="train")


@pytest.mark.parametrize("missing", ["a label file", "a split", "everything", "the folder", "a folder: it is a file"])
def test_missing_files_are_rejected_in_one_line(folder, tmp_path, missing):
    path, usage = folder, "train"
    if missing == "a label file":
        (folder / "train" / LABELS).unlink()
    elif missing == "a split":
        path, usage = folder / "train", "test"
    elif missing == "everything":
        (tmp_path / "empty").mkdir()
        path = tmp_path / "empty"
    elif missing == "the folder":
        path = tmp_path / "absent"
    else:
        path = folder / "train" / IMAGES
    with pytest.raises(FileNotFoundError) as caught:
        create_dataset(path, usage=usage)
    message = str(caught.value)
    assert "must be a folder with MNIST's four files" in message and len(message.splitlines()) == 1
    name = {"a label file": LABELS, "a split": "t10k-images-idx3-ubyte"}.get(missing, IMAGES)
    assert f"but got {str(path)!r}: there is no file '{folder if missing == 'a label file' else path}" in message
    assert f"/{name}'. Download MNIST" in message
