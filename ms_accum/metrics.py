"""What is measured?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import nn

from . import _check, parallel
from ._as_found import training_mode
from ._batches import epochs_of
from .averages import option_of

# One bad batch is an accident; this many windows in a row without a finite gradient are a run that learns nothing.
SKIPPED_IN_A_ROW = 10


class UpdateRecord(NamedTuple):
    """What is known of a window once it has ended."""

    epoch: int
    """The epoch, from 1."""
    step: int
    """Which window of the epoch it was, from 1; `step` is the tutorial's word in the printed line."""
    update: int
    """Updates so far, this one included."""
    loss: float
    """The mean loss over the window: sum of weight times loss by sum of weights."""
    lr: float
    """The learning rate of this update (of the first parameter group)."""
    grad_norm: float
    """The norm of the window's gradient, before clipping."""
    samples: int
    """Rows in the window."""
    seconds: float
    """Time since the previous update."""
    skipped: bool
    """True if the gradient was not finite and the optimizer was not called."""


class WindowLoss:
    """The mean loss of a window: sums are carried, the division comes last.

    Args:
        summing (bool): the losses are sums over rows, so that they count once each, not by weight.
    """

    def __init__(self, summing: bool = False):
        self._summing = summing
        self.clear()

    def clear(self) -> None:
        """Forget the window."""
        self._terms: list[tuple[Any, float]] = []
        self._sums = (0.0, 0.0)
        self.samples = 0

    def add(self, loss: Any, weight: float, samples: int) -> None:
        """Take a micro-batch in. The loss stays on the device until the window's mean is asked for."""
        self._terms.append((loss, weight))
        self.samples += samples

    @property
    def mean(self) -> float:
        """The mean loss so far; NaN for a window without weight."""
        total, weights = self._carry()
        return total / weights if weights else float("nan")

    def _carry(self) -> tuple[float, float]:
        """Return the sums of the losses and of the weights so far."""
        total, weights = self._sums
        for loss, weight in self._terms:
            total += float(loss.asnumpy()) * (1.0 if self._summing else weight)
            weights += weight
        self._sums, self._terms = (total, weights), []
        return self._sums

    @property
    def state(self) -> list[float]:
        """What `load` needs to go on from here."""
        return [*self._carry(), self.samples]

    def load(self, state: Sequence[float]) -> None:
        """Go on from there."""
        total, weights, samples = state
        self._sums, self._terms, self.samples = (total, weights), [], int(samples)


class SkippedInARow:
    """How many windows in a row had no finite gradient; too many end the run.

    Args:
        owner (str): whose run it is, for the wording of the error.
    """

    def __init__(self, owner: str):
        self._owner = owner
        self.count = 0
        """int, how many at the moment."""

    def add(self, record: UpdateRecord) -> None:
        """Count a window, unless nothing counted in it: that says nothing about gradients."""
        if not record.samples:
            return
        self.count = self.count + 1 if record.skipped else 0
        if self.count >= SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"For '{self._owner}', the gradients of {self.count} windows in a row were not finite. "
                "Lower the learning rate or the loss scale, set 'clip_norm', or look for NaN in the data."
            )


def loss_reduction(loss_fn: Any) -> str | None:
    """Return "mean", "sum" or "none" as the loss function tells it, or None where it doesn't.

    Many losses of MindSpore say it in an attribute, some in that of their operator, and leave what they inherit
    from `LossBase` at its default; that is right for the others.
    """
    operators = loss_fn._primitives.values() if isinstance(loss_fn, nn.Cell) else ()
    for teller in (loss_fn, *operators):
        kind = getattr(teller, "reduction", None)
        if kind in ("mean", "sum", "none"):
            return kind
    if not isinstance(loss_fn, nn.Cell):
        kind = option_of(loss_fn, "reduction")
        return kind if kind in ("mean", "sum", "none") else None
    if not isinstance(loss_fn, nn.LossBase):
        return None
    if not loss_fn.reduce:
        return "none"
    return "mean" if loss_fn.average else "sum"


def check_loss(owner: str, loss_fn: Any, reduction: str) -> str | None:
    """Return what `loss_reduction` does; refuse a loss that would train something else than `reduction` says."""
    kind = loss_reduction(loss_fn)
    if kind == "none":
        _check.refuse(ValueError, owner, "loss_fn", "a loss with reduction='mean' or 'sum'", "'none'")
    if kind == "sum" and reduction == "mean":
        raise ValueError(
            f"For '{owner}', 'reduction' must be 'sum' for a loss that sums, but got 'mean'. "
            "Give reduction='sum' here, or reduction='mean' to the loss."
        )
    return kind


def evaluate(network: nn.Cell, dataset: Iterable) -> tuple[int, int]:
    """Count the samples that `network` puts into the right class.

    Args:
        network (Cell): from images to one score a class. Its training mode is left as it was.
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
    correct = total = 0
    with training_mode(network, False):
        for image, label in next(epochs_of(dataset, 1)):
            guess, answer = np.argmax(network(image).asnumpy(), axis=1), label.asnumpy()
            if answer.shape != guess.shape:
                raise ValueError(f"For 'evaluate', labels must have the shape {guess.shape}, but got {answer.shape}.")
            correct += int(np.sum(guess == answer))
            total += len(guess)
    return correct, total


def evaluate_together(network: nn.Cell, part: Iterable, group: parallel.Group | None) -> list[int]:
    """Do so over all ranks, each with its part, and with the statistics of BatchNorm that rank 0 has, and saves."""
    if group is not None:
        parallel.take_from_rank_0([parameter for parameter in network.get_parameters() if not parameter.requires_grad])
    return parallel.total(evaluate(network, part), group)
