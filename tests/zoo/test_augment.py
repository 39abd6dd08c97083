"""Augmentation moves images as specified, and reproducibly."""

from __future__ import annotations

import numpy as np
import pytest

from cifar_files import write_cifar10
from idx_files import rows_of
from model_zoo import create_dataset
from model_zoo.data.augment import draw_moves, move

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def folder(tmp_path):
    """A folder with small files in CIFAR-10's format: 100 training rows."""
    return write_cifar10(tmp_path / "data")


def cifar10(folder, batch_size=8, **arguments):
    return create_dataset(folder, batch_size, dataset="cifar10", seed=3, **arguments)


def move_one_image(image, top, left, mirrored):
    """Return one image, pixel by pixel."""
    out = np.zeros_like(image)
    for y in range(32):
        for x in range(32):
            row, column = y + top - 4, (31 - x if mirrored else x) + left - 4
            if 0 <= row < 32 and 0 <= column < 32:
                out[:, y, x] = image[:, row, column]
    return out


def test_move_crops_padded_image_and_mirrors(rng):
    images = rng.randint(1, 256, (20, 3, 32, 32)).astype(np.uint8)
    moves = draw_moves(20, seed=1, number=0)
    before = images.copy()
    moved = move(images, moves)
    assert np.array_equal(moved, [move_one_image(*case) for case in zip(images, *moves.T)])
    assert np.array_equal(images, before) and moved.flags["C_CONTIGUOUS"]


@pytest.mark.parametrize(("batch_size", "num_shards"), [(7, 1), (33, 3)])
def test_moves_do_not_depend_on_batch_size_or_shards(folder, batch_size, num_shards):
    shards = [cifar10(folder, batch_size, num_shards=num_shards, shard_id=n) for n in range(num_shards)]
    complete = cifar10(folder, 8)
    for _ in range(2):
        parts = [row for shard in shards for row in rows_of(shard)]
        assert sorted(parts) == sorted(rows_of(complete))
