"""The order of batches, epoch by epoch."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

from idx_files import write_mnist
from model_zoo import create_dataset
from model_zoo.data.batches import Batches
from model_zoo.data.images import ImageRows, Split

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def folder(tmp_path):
    """A folder with small files in MNIST's format."""
    return write_mnist(tmp_path / "data")


def epoch_of(dataset):
    """Return one fresh epoch's labels, batch by batch."""
    return [label.asnumpy() for _, label in dataset.create_tuple_iterator(num_epochs=1)]


def same(left, right):
    """Return whether two epochs are equal batch by batch."""
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def test_one_iterator_equals_one_iterator_per_epoch(folder):
    expected = [epoch_of(dataset) for dataset in [create_dataset(folder, 8)] for _ in range(3)]
    for num_epochs in (3, -1):
        iterator = create_dataset(folder, 8).create_tuple_iterator(num_epochs=num_epochs)
        for epoch in expected:
            assert same([label.asnumpy() for _, label in iterator], epoch)


def test_endless_iterators_do_not_consume_next_epoch(folder):
    dataset, expected = create_dataset(folder, 8), create_dataset(folder, 8)
    for _ in range(20):
        # The tutorials' loop: a new iterator for each epoch, endless by default.
        labels = [batch["label"].asnumpy() for batch in dataset.create_dict_iterator()]
        assert same(labels, epoch_of(expected))


def test_epoch_can_be_set(folder):
    dataset = create_dataset(folder, 8)
    epochs = [epoch_of(dataset) for _ in range(4)]
    resumed = create_dataset(folder, 8)
    resumed.source.begin_with_epoch(2)
    assert same(epoch_of(resumed), epochs[2]) and same(epoch_of(resumed), epochs[3])
    next(resumed.create_tuple_iterator())
    assert resumed.source.next_epoch == 5  # an iterator that is given up is an epoch, too
    with pytest.raises(ValueError, match="'epoch' must be an int >= 0, but got -1"):
        dataset.source.begin_with_epoch(-1)


@pytest.mark.parametrize(("global_seed", "meant"), [(None, 0), (5, 5)])
def test_seed_defaults_to_mindspore_seed_or_zero(folder, monkeypatch, global_seed, meant):
    # MindSpore can set a seed, but not unset one.
    monkeypatch.setattr(ms, "get_seed", lambda: global_seed)
    labels = epoch_of(create_dataset(folder, 8))
    assert same(labels, epoch_of(create_dataset(folder, 8, seed=meant)))
    assert not same(labels, epoch_of(create_dataset(folder, 8, seed=meant + 1)))


@pytest.mark.parametrize(
    ("usage", "shuffle", "shuffled"),
    [("train", None, True), ("test", None, False), ("train", False, False), ("test", True, True)],
)
def test_shuffle(folder, usage, shuffle, shuffled):
    labels = np.concatenate(epoch_of(create_dataset(folder, 32, usage=usage, shuffle=shuffle)))
    assert np.array_equal(labels, np.arange(len(labels)) % 10) is not shuffled
    assert sorted(labels) == sorted(np.arange(len(labels)) % 10)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "shards"), [(10, 3), (9, 2), (9, 4), (17, 2)])
def test_all_shards_have_same_number_of_batches(batch_size, rows, shards):
    """Where one shard has a row less, and that row would be a batch: the others would wait for it forever."""
    images = np.arange(rows, dtype=np.uint8).reshape(rows, 1, 1)
    split = Split("train", images, images.ravel().astype(np.int32), 0.0, 1.0)
    options = {"batch_size": batch_size, "seed": 1, "num_shards": shards}
    sources = [Batches(ImageRows(split), shard_id=shard, **options) for shard in range(shards)]
    assert len({len(source) for source in sources}) == 1
    labels = [[source[number][1] for number in range(len(source))] for source in sources]
    assert all(len(batch) for shard in labels for batch in shard)
    assert sorted(np.concatenate([batch for shard in labels for batch in shard])) == list(range(rows))
