"""How do batches come out of a dataset?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mindspore import Tensor


def _as_tensors(batch: Any) -> tuple:
    columns = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(column if isinstance(column, Tensor) else Tensor(column) for column in columns)


def epochs_of(dataset: Any, epochs: int) -> Iterator[Iterable[tuple]]:
    """Yield, for each epoch, an iterable over its batches as tuples of Tensors.

    A MindSpore dataset gets one iterator for all epochs: with a new one for each, its shuffle would
    start from the same seed every time and repeat one order.
    """
    if not hasattr(dataset, "create_tuple_iterator"):
        for _ in range(epochs):
            yield map(_as_tensors, dataset)
        return
    iterator = dataset.create_tuple_iterator(num_epochs=epochs)
    for _ in range(epochs):
        yield iterator


def batches_per_epoch(dataset: Any) -> int | None:
    """Return how many batches an epoch has, or None where the dataset does not know."""
    if hasattr(dataset, "get_dataset_size"):
        return dataset.get_dataset_size()
    return len(dataset) if hasattr(dataset, "__len__") else None
