"""Do windows end where a brute-force reference ends them?"""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

from ms_accum import split_batch, updates_per_epoch
from reference import windows

SIZES = range(1, 18)
WINDOWS = range(1, 9)
EPOCHS = 3
TAILS = ("flush", "carry", "drop")


@pytest.mark.parametrize("tail", TAILS)
def test_updates_per_epoch(tail):
    for size in SIZES:
        for window in WINDOWS:
            made, _ = windows(size, window, EPOCHS, tail)
            expected = [sum(ended.epoch == epoch for ended in made) for epoch in range(1, EPOCHS + 1)]
            assert [updates_per_epoch(size, window, tail, epoch=e) for e in range(1, EPOCHS + 1)] == expected


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0, 4), ValueError, "'micro_batches' must be an int >= 1, but got 0"),
        ((4, 0), ValueError, "'mini_steps' must be an int >= 1, but got 0"),
        ((4, 2, "keep"), ValueError, "'tail' must be one of 'flush', 'carry', 'drop', but got 'keep'"),
    ],
)
def test_updates_per_epoch_rejects_invalid_arguments(arguments, error, match):
    with pytest.raises(error, match=f"For 'updates_per_epoch', {match}"):
        updates_per_epoch(*arguments)


def test_updates_per_epoch_rejects_invalid_epoch():
    with pytest.raises(ValueError, match="'epoch' must be an int >= 1, but got 0"):
        updates_per_epoch(4, 2, "carry", epoch=0)


def test_split_batch_splits_every_column():
    images, labels = np.arange(20).reshape(10, 2), np.arange(10)
    pieces = list(split_batch((images, labels), 4))
    assert [len(rows) for _, rows in pieces] == [4, 4, 2]
    assert np.array_equal(np.concatenate([rows for rows, _ in pieces]), images)
    assert np.array_equal(np.concatenate([rows for _, rows in pieces]), labels)


@pytest.mark.parametrize(("rows", "size", "expected"), [(4, 4, [4]), (4, 9, [4]), (4, 1, [1] * 4), (5, 2, [2, 2, 1])])
def test_split_batch_of_one_tensor(rows, size, expected):
    assert [piece.shape[0] for (piece,) in split_batch(Tensor(np.zeros((rows, 2))), size)] == expected


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            {"x": np.zeros(4)},
            TypeError,
            "must be tensors or arrays, but got dict. Give its values: tuple(batch.values()).",
        ),
        ((np.zeros(4), 5), TypeError, "must be tensors or arrays, but got int."),
        (np.float32(3.0), ValueError, "must be tensors with one row per sample, but got one that is a single number."),
        ((), ValueError, "must be tensors with the same number of rows, but got none."),
    ],
    ids=["dict", "a number beside", "number", "nothing"],
)
def test_split_batch_rejects_what_is_no_batch_of_tensors(batch, error, message):
    with pytest.raises(error) as caught:
        split_batch(batch, 2)
    assert str(caught.value) == f"For 'split_batch', 'batch' {message}"


def test_split_batch_rejects_invalid_sizes():
    with pytest.raises(ValueError, match="'micro_batch_size' must be an int >= 1, but got 0"):
        next(split_batch(np.zeros(4), 0))
    with pytest.raises(ValueError, match=r"'batch' must be tensors with the same number of rows, but got \[3, 4\]"):
        next(split_batch((np.zeros(4), np.zeros(3)), 2))
