"""How good is a network?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mindspore import nn

from .network.as_found import training_mode
from .ranks.parallel import Group, take_from_rank_0, total
from .window.batches import Data


def evaluate(network: nn.Cell, dataset: Iterable) -> tuple[int, int]:
    """Count the samples that `network` classifies correctly.

    Args:
        network (Cell): from images to one score per class. Its training mode is restored.
        dataset (Union[Dataset, Iterable]): batches of (image, label).

    Returns:
        tuple[int, int], the number of right answers and the number of samples.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from ms_accum import evaluate
        >>> from model_zoo import LeNet5, create_dataset
        >>> correct, total = evaluate(LeNet5(), create_dataset(batch_size=60, usage="test"))
        >>> total
        360
    """
    correct = rows = 0
    with training_mode(network, False):
        for image, label in next(Data(dataset).epochs(1)):
            guess, answer = np.argmax(network(image).asnumpy(), axis=1), label.asnumpy()
            if answer.shape != guess.shape:
                raise ValueError(f"For 'evaluate', labels must have the shape {guess.shape}, but got {answer.shape}.")
            correct += int(np.sum(guess == answer))
            rows += len(guess)
    return correct, rows


def evaluate_together(network: nn.Cell, part: Iterable, group: Group | None) -> list[int]:
    """Evaluate on all ranks, each on its part of the data, with BatchNorm's statistics of rank 0, which saves them."""
    if group is not None:
        take_from_rank_0([parameter for parameter in network.get_parameters() if not parameter.requires_grad])
    return total(evaluate(network, part), group)
