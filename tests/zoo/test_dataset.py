"""`create_dataset`: its batches, and errors about invalid arguments."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

from idx_files import make_digits, rows_of, write_mnist
from model_zoo import create_dataset
from model_zoo.data.digits import load_digits_split
from model_zoo.data.images import resize

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def folder(tmp_path):
    """A folder with small files in MNIST's format."""
    return write_mnist(tmp_path / "data")


def test_digits_have_documented_shape():
    train, test = create_dataset(), create_dataset(usage="test")
    assert train.get_dataset_size() == 45 and test.get_dataset_size() == 12
    assert train.get_col_names() == ["image", "label"]
    assert train.get_batch_size() == 32
    image, label = next(train.create_tuple_iterator(num_epochs=1))
    assert (image.shape, image.dtype) == ((32, 1, 32, 32), ms.float32)
    assert (label.shape, label.dtype) == ((32,), ms.int32)
    assert len(rows_of(train)) == 1437 and len(rows_of(test)) == 360


def test_digits_split_is_fixed_and_disjoint():
    np.random.seed(0)
    train, test = load_digits_split(None, "train"), load_digits_split(None, "test")
    np.random.seed(1)
    assert np.array_equal(load_digits_split(None, None).images, train.images)
    assert test.labels[:12].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5, 2, 8]
    together = {image.tobytes() for image in (*train.images, *test.images)}
    assert len(together) == len(train.images) + len(test.images) == 1797
    assert train.images.min() == 0 and train.images.max() == 255


def test_pixels_and_labels_equal_files(folder):
    images, labels = make_digits(32, seed=1)
    dataset = create_dataset(folder, 32, usage="test", image_size=28)
    image, label = next(dataset.create_tuple_iterator(num_epochs=1, output_numpy=True))
    np.testing.assert_allclose(image[:, 0], (images / 255 - 0.1307) / 0.3081, rtol=0, atol=1e-6)
    assert label.tolist() == labels.tolist()


def test_resize_is_bilinear():
    ramp = np.broadcast_to(np.arange(0, 256, 8, dtype=np.uint8), (1, 32, 32))
    halved = resize(ramp, 16)
    assert np.array_equal(halved[0, 0], np.arange(4, 256, 16))
    flat = np.full((3, 28, 28), 200, np.uint8)
    assert (resize(flat, 32) == 200).all()
    assert resize(flat, 28) is flat


# Bad arguments


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"batch_size": 0}, ValueError, "'batch_size' must be an int >= 1, but got 0."),
        ({"batch_size": 1438}, ValueError, "'batch_size' must be <= 1437, the number of train images, but got 1438"),
        (
            {"batch_size": 480, "num_shards": 3},
            ValueError,
            "'batch_size' must be <= 479, the number of train images of a shard, but got 480",
        ),
        ({"usage": "all"}, ValueError, "'usage' must be one of ('train', 'test'), but got 'all'"),
        ({"image_size": 4096}, ValueError, "'image_size' must be an int in [8, 128], but got 4096."),
        ({"seed": -1}, ValueError, "'seed' must be an int >= 0, but got -1."),
        ({"num_shards": 2000}, ValueError, "'num_shards' must be <= 1437, the number of train images, but got 2000."),
        ({"num_shards": 2, "shard_id": 2}, ValueError, "'shard_id' must be an int in [0, 1], but got 2."),
        ({"data_path": "a\0b"}, ValueError, "'data_path' must be a path, but got 'a\\x00b'."),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(arguments, error, reason):
    with pytest.raises(error) as caught:
        create_dataset(**arguments)
    message = str(caught.value)
    assert message.startswith(f"For 'create_dataset', {reason}")
    assert len(message.splitlines()) == 1
