"""What is trained?"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Callable

import mindspore as ms
from mindspore import nn

from .. import _check
from ..network.batch_norm import warn_about_batch_norm
from . import columns
from .additivity import AdditivityCheck, warn_about_loss, warn_about_numbers, warn_about_shapes
from .first_look import check_compiles, check_numbers, check_taken
from .forms import check_gradient
from .gradients import WithLoss
from .reductions import REDUCTIONS, check_loss
from .weights import Weight

CHECKS = ("first", "off")


class Objective:
    """The loss and the weight of a micro-batch, and warnings about both.

    Args:
        owner (str): the name used in error messages.
        network (Cell), loss_fn, reduction, weight, check, group: as for `GradientAccumulation`.
        of_window (bool): whether the loss is computed once, for all rows of a window. Default: ``False``.
    """

    def __init__(
        self,
        owner: str,
        network: nn.Cell,
        loss_fn: Callable | None,
        reduction: str,
        weight: Any,
        check: str,
        group: Any,
        of_window: bool = False,
    ):
        self._owner = owner
        who = _check.TRAIN.owner if owner == "GradientAccumulation" else owner
        self._data = _check.Argument(who, _check.TRAIN.name)
        if isinstance(loss_fn, type):
            name = loss_fn.__name__
            _check.refuse(TypeError, owner, "loss_fn", "an object", f"the class {name}", f"Write {name}().")
        self.network, self.loss_fn = network, loss_fn
        self.reduction = _check.one_of(owner, "reduction", reduction, REDUCTIONS)
        """str, ``"mean"`` or ``"sum"``."""
        self.weight = Weight(owner, weight, reduction, loss_fn, group)
        """Weight, the weight of a micro-batch."""
        self.summing = check_loss(owner, loss_fn, reduction) == "sum"
        """bool, whether losses are sums, which are added as they are."""
        self.forward = network if loss_fn is None else WithLoss(network, loss_fn)
        """Cell, returns a micro-batch's loss from its columns."""
        check_gradient(owner, self.forward)
        self._columns = columns.taken(loss_fn)
        self._wanted = _check.one_of(owner, "check", check, CHECKS) == "first"
        self._tried: set[tuple] = set()
        self._of_window = of_window
        self._compares_rows = False  # by labels that are numbers of rows
        self._warned = False
        self._to_be_checked = self._wanted and reduction == "mean" and self.weight.is_guess
        self._additivity = AdditivityCheck(owner, self.forward, self.weight.counted)
        self._shapes: tuple | None = None
        self._shapes_differ = False

    def warn(self) -> None:
        """Warn about layers and losses for which a window of several micro-batches differs from one large batch."""
        warn_about_batch_norm(self.network)
        warn_about_loss(self._owner, self.loss_fn)

    def check_micro_batch(self, micro_batch: tuple, alone: bool, trained: Collection[Any]) -> None:
        """Reject invalid micro-batches; check with the first ones whether the loss is a weighted mean.

        Args:
            micro_batch (tuple): its columns.
            alone (bool): whether it is the only one in its window.
            trained (Collection[Parameter]): Parameters that a forward does not change.
        """
        columns.check(self._data, micro_batch, self._columns)
        self._try(micro_batch, trained)
        if self._compares_rows:
            check_numbers(micro_batch, self._data)
            if not (alone or self._warned):
                self._warned = True
                warn_about_numbers(self._owner)
        if alone or not self._to_be_checked:
            return
        self._look_at_shapes(micro_batch)
        if micro_batch[0].shape[0] > 1 and not self._additivity.failed:
            self._additivity.look_at(micro_batch, trained)
            if self._additivity.failed and any(map(columns.numbers_rows, micro_batch[1:])):
                self._compares_rows = self._warned = True

    def _try(self, micro_batch: tuple, trained: Collection[Any]) -> None:
        """Reject columns that the network or the loss does not accept; checked once per type of columns."""
        kinds = tuple((column.ndim, column.dtype) for column in micro_batch)
        if not self._wanted or kinds in self._tried or not all(column.size for column in micro_batch):
            return
        self._tried.add(kinds)
        if ms.get_context("mode") == ms.GRAPH_MODE:
            check_compiles(self.loss_fn, owner=self._data.owner)
        numbered = check_taken(
            self.network, self.loss_fn, self.forward, micro_batch, trained, self._data, self._of_window
        )
        self._compares_rows = self._compares_rows or (numbered and not self._of_window)

    def check_valid_batch(self, batch: tuple) -> None:
        """Reject an invalid batch of the validation data set."""
        columns.check(_check.VALID, batch, self._columns)
        if self._wanted and all(column.size for column in batch):
            check_taken(self.network, self.loss_fn, self.forward, batch, self.network.trainable_params(), _check.VALID)

    def _look_at_shapes(self, micro_batch: tuple) -> None:
        """Warn once if the rows of labels differ in size."""
        shapes = tuple(column.shape[1:] for column in micro_batch[1:])
        if self._shapes_differ:
            return
        if self._shapes is None:
            self._shapes = shapes
        others = [(one, other) for one, other in zip(self._shapes, shapes) if one != other]
        if others:
            self._shapes_differ = True
            warn_about_shapes(self._owner, *(("rows", *shape) for shape in others[0]))
