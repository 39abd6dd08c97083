"""The loss of a micro-batch, and what it counts for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Callable

import mindspore as ms
from mindspore import Tensor, nn

from .. import _check
from ..layers import warn_about_batch_norm
from ..ranks.agreement import name_of
from ..ranks.group import Group
from .additivity import AdditivityCheck, numbers_rows, trying
from .columns import ColumnsCheck, amount_of
from .known_losses import (
    REDUCTIONS,
    WithLoss,
    as_number,
    check_gradient,
    check_reduction,
    divisor_of,
    row_count,
    why_not_additive,
)
from .terms import LossOfTerms, Terms, WeighedTerms, are_several

_CHECKS = ("first", "off")


class Objective:
    """The loss and the weight of a micro-batch, and warnings about both.

    Args:
        owner (str): the name used in error messages.
        network (Cell), loss_fn, reduction, weight, coefficients, check, inputs: as for `GradientAccumulation`.
        options (Options): the ranks, and whether the forward is compiled in PyNative mode.
    """

    def __init__(
        self,
        owner: str,
        network: nn.Cell,
        loss_fn: Callable | None,
        options: Mapping[str, Any],
        *,
        reduction: str,
        weight: Any,
        coefficients: Any,
        check: str,
        inputs: int | None,
    ):
        self._owner, self._given_weight = owner, weight
        self._data = _check.TRAIN if owner == "GradientAccumulation" else _check.Argument(owner, _check.TRAIN.name)
        if isinstance(loss_fn, type):
            _check.raise_class(owner, "loss_fn", "an object", loss_fn)
        if inputs is not None and loss_fn is None:
            rule, remedy = "None without a loss function", "The network gets all columns."
            _check.raise_invalid(ValueError, owner, "inputs", rule, inputs, remedy)
        self.network = network
        self.loss_fn = loss_fn
        self.inputs = inputs_of(owner, inputs)
        """int, the first columns, which the network gets if there is a loss function; the others are labels."""
        self.reduction = _check.one_of(owner, "reduction", reduction, REDUCTIONS)
        """str, ``"mean"`` or ``"sum"``."""
        self.terms = self._terms(weight, coefficients, options["group"])
        """Optional[Terms], the terms of the loss, if it has several."""
        self.weight: Any = None if self.terms else Weight(owner, weight, reduction, loss_fn, self.inputs)
        """Optional[Weight], the weight of a micro-batch, if the loss is one."""
        self.summing = check_reduction(owner, loss_fn, reduction) == "sum"
        """bool, whether losses are sums, which are added as they are."""
        way_out = "(network, loss_fn)" if owner == "AccumulatedTrainStep" else "a 'loss_fn'"
        way_out = f"Give {way_out}, or a network that returns its loss."
        self.columns = ColumnsCheck(network, loss_fn, self.inputs, way_out)
        accepts = self.columns.of_output()
        self.evaluated = network if loss_fn is None else WithLoss(network, loss_fn, self.inputs, accepts)
        if self.terms is not None:
            self.evaluated = LossOfTerms(owner, network, loss_fn, self.inputs, self.terms)
        """Cell, returns a micro-batch's loss, or its terms, from its columns."""
        self.forward = self.evaluated if self.terms is None else WeighedTerms(self.evaluated)
        """Cell, what is trained."""
        check_gradient(owner, self.forward, options["compile"])
        self._accepted: set[tuple] = set()  # the types of columns that have been checked
        checks = _check.one_of(owner, "check", check, _CHECKS) == "first" and weight is None and reduction == "mean"
        self._additivity: AdditivityCheck | None = None  # until it has a result
        if checks:  # in a Cell of its own, because labels of a part may number more rows than it has
            forward = network if loss_fn is None else WithLoss(network, loss_fn, self.inputs)
            self._additivity = AdditivityCheck(owner, forward, self.weight_of)

    @property
    def settings(self) -> dict[str, Any]:
        """dict, what must be equal in a resumed run, and on all ranks; of what is optional only what is given."""
        inputs = {} if self.inputs == 1 else {"inputs": self.inputs}
        weight, settings = as_number(self._given_weight), {"reduction": self.reduction, **inputs}
        if self.terms is not None:
            return {**settings, **self.terms.settings}
        if weight is None:
            return settings
        return {**settings, "weight": weight if isinstance(weight, (int, float)) else name_of(weight)}

    @property
    def facts(self) -> dict[str, Any]:
        """dict, what else must be equal on all ranks, in words that follow "all ranks must have the same"."""
        return {"'loss_fn'": name_of(self.loss_fn)}

    def _terms(self, weight: Any, coefficients: Any, group: Group | None) -> Terms | None:
        """Return the terms of the loss; None if it is one."""
        if not are_several(self._owner, weight, coefficients):
            return None
        if self.reduction != "mean":
            remedy = "Each term is divided by what it averages over."
            _check.raise_invalid(ValueError, self._owner, "reduction", "'mean' with several terms", "'sum'", remedy)
        return Terms(weight, coefficients, group=group, inputs=self.inputs, owner=self._owner)

    def labels(self, columns: tuple) -> tuple:
        """Return the columns that are not the network's, or the last if it gets all of them."""
        return columns[-1:] if self.loss_fn is None else columns[self.inputs :]

    def divisors(self, columns: tuple) -> tuple[float, ...]:
        """Return what each term of a micro-batch's loss is divided by; of a loss that is one, its weight."""
        return (self.weight.of(columns),) if self.terms is None else self.terms.counted(columns)

    def weight_of(self, columns: tuple) -> float:
        """Return what a micro-batch counts for in the first term of its loss."""
        return self.divisors(columns)[0]

    def warn(self, *, training: bool = False) -> None:
        """Warn about layers and losses for which a window of several micro-batches differs from one large batch.

        Args:
            training (bool): whether all layers will be in training mode. Default: ``False``, they are as they are now.
        """
        warn_about_batch_norm(self.network, training=training)
        reason = why_not_additive(self.loss_fn)
        if reason:
            _check.warn(
                f"For '{self._owner}', {type(self.loss_fn).__name__} is {reason}: the loss of a window is not the mean "
                "over its micro-batches, so accumulation trains another loss than a large batch. Use a loss that is a "
                "mean.",
            )

    def check_micro_batch(self, micro_batch: tuple, alone: bool, trained: Collection[Any]) -> None:
        """Reject invalid micro-batches; check with those that can tell whether the loss is a mean over rows.

        Args:
            micro_batch (tuple): its columns.
            alone (bool): whether it is the only one in its window.
            trained (Collection[Parameter]): Parameters that a forward does not change.
        """
        types = tuple([(column.ndim, column.dtype) for column in micro_batch])
        if types not in self._accepted:
            self.columns.check(self._data, micro_batch)
            numbers = {column.shape[0] for column in micro_batch if column.ndim}
            if len(numbers) > 1 or self.columns.are_unusual(self.network):
                self._try_outside_graphs(micro_batch, trained)
            self._accepted.add(types)
            if not ((self.weight and self.weight.is_guess) or any(map(numbers_rows, micro_batch[1:]))):
                self._additivity = None  # the loss is a known mean, which compares no rows
        if self._additivity is not None and not alone:
            self._additivity.check(micro_batch, trained)
            if self._additivity.over:
                self._additivity = None

    def _try_outside_graphs(self, micro_batch: tuple, trained: Collection[Any]) -> None:
        """Reject columns that do not fit together; a network may join or split rows, and have any number of classes.

        MindSpore's compiler would add its stack to the error, and leave a folder.
        """
        with trying(self.evaluated, trained, ms.PYNATIVE_MODE, training=True):
            try:
                self.evaluated(*micro_batch)
            except Exception as error:  # what runs in graphs only raises others
                if isinstance(error, (ValueError, IndexError)):
                    self.columns.raise_in_one_line(error)


def inputs_of(owner: str, inputs: int | None) -> int:
    """Return the number of columns that the network gets; None is one."""
    return _check.positive_int(owner, "inputs", 1 if inputs is None else inputs)


class Weight:
    """Computes the weight of each micro-batch, on the host.

    Args:
        owner (str): the name used in error messages.
        weight (Union[None, float, Tensor, Callable]): ``None``, the number that the loss divides by; a number; or a
            function of the micro-batch's columns that returns one.
        reduction (str): ``"mean"``, which uses weights, or ``"sum"``, which does not.
        loss_fn (Union[Cell, Callable, None]): the loss.
        inputs (int): the number of columns before the labels. Default: 1.
    """

    def __init__(self, owner: str, weight: Any, reduction: str, loss_fn: Any = None, inputs: int = 1):
        if weight is not None and reduction == "sum":
            raise ValueError(f"For '{owner}', 'weight' must come with reduction='mean', but got 'sum'.")
        self._owner = owner
        divisor = divisor_of(loss_fn, inputs)
        self.is_guess = weight is None and divisor is None
        """bool, whether the weight is a guess (the rows), because neither the user nor the loss defines it."""
        is_function = callable(weight) and not isinstance(weight, Tensor)
        self._weight: float | Callable
        if weight is None:
            self._weight = divisor or row_count
        elif is_function:
            self._weight = weight
        else:
            self._weight = _check.positive_number(owner, "weight", as_number(weight))

    def of(self, micro_batch: tuple) -> float:
        """Return the weight of a micro-batch, >= 0."""
        if not callable(self._weight):
            return self._weight
        return amount_of(self._owner, self._weight, micro_batch)
