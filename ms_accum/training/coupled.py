"""A loss that couples the rows of a batch, with the gradient of the large batch.

It is computed by gradient caching (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited
Setup", 2021). The loss needs all representations of a window at once, but not the activations of the network. So there
are three passes:

1. the representations of each micro-batch, without gradients; 2. the loss of all representations, and its gradient with
respect to each; 3. each micro-batch again: the sum of its representations times these gradients is differentiated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from .. import _check
from ..loss.known_losses import check_gradient, runnable, scalar
from ..loss.objective import Objective, inputs_of
from ..network.compiled import Compiled, call
from ..network.generators import random_layers
from ..network.held import held
from ..network.parameters import as_array
from ..ranks.group import Group, gather_rows, is_first
from .shares import Inputs, Result, Shared

_OWNER = "CoupledLoss"
_DRIVER = "GradientAccumulation"


@ops.constexpr
def _reject_call() -> bool:
    """Raise the error on the host, also while a step is compiled."""
    raise RuntimeError(f"For '{_OWNER}', the loss needs a complete window. Give it to GradientAccumulation.")


class CoupledLoss(nn.Cell):
    """A loss that compares the rows of a batch, such as InfoNCE or a triplet loss, over a complete window.

    Plain accumulation compares rows only within each micro-batch. With this loss `GradientAccumulation` gives the
    optimizer the gradient of the loss over all rows of the window. It runs each micro-batch forward twice, and stores
    the representations of the window, but the activations of only one micro-batch at a time.

    With several processes the loss is computed from the representations of all ranks, in the order of the ranks, which
    need the same number of windows in an epoch.

    Args:
        loss_fn (Union[Cell, Callable]): returns a scalar loss from the representations of the window, as one float32
            tensor for each output of the network, and the columns that the network does not get. If it has parameters
            to train, it must be a Cell.

    Raises:
        TypeError: If an argument has the wrong type.
        RuntimeError: If it is called. Only `GradientAccumulation` accepts it.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn, ops
        >>> from ms_accum import CoupledLoss, GradientAccumulation
        >>> net = nn.Dense(8, 4)
        >>> def separate(outputs, labels):
        ...     same = ops.cast(ops.expand_dims(labels, 1) == labels, ms.float32)
        ...     return ops.mean(ops.matmul(outputs, ops.transpose(outputs, (1, 0))) * (1 - 2 * same))
        >>> model = GradientAccumulation(net, CoupledLoss(separate), nn.SGD(net.trainable_params(), 0.1))
        >>> rows = np.random.randn(16, 8).astype(np.float32), np.arange(16, dtype=np.int32) & 1
        >>> model.train_process(1, [tuple(map(Tensor, rows))], micro_batch_size=4, report=(), ckpt_path=None)
        >>> model.updates
        1
    """

    couples_rows = True
    """bool, marks a loss whose value for a batch is not the mean of its values for parts of the batch."""

    def __init__(self, loss_fn: Callable):
        super().__init__(auto_prefix=False)
        if not callable(loss_fn) or isinstance(loss_fn, CoupledLoss):
            _check.raise_invalid(TypeError, _OWNER, "loss_fn", "a Cell or a function", type(loss_fn).__name__)
        self.loss_fn = loss_fn

    def construct(self, *inputs: Any) -> Any:
        return _reject_call()


class LossOfBatch(nn.Cell):
    """Returns a coupled loss from the columns of a batch, in a single pass.

    Args:
        network (Cell): returns one or several representations from its columns.
        coupled (CoupledLoss): the loss.
        inputs (int): the columns that the network gets, from the first.
    """

    def __init__(self, network: nn.Cell, coupled: CoupledLoss, inputs: int):
        super().__init__(auto_prefix=False)
        self.network, self.loss_fn, self.columns = network, runnable(coupled.loss_fn), inputs
        self.original_loss_fn = (coupled.loss_fn,)
        """tuple, the user's loss, unchanged; in a tuple, so that it is not a Cell inside this one."""

    def construct(self, *columns: Tensor) -> Any:
        representations = _in_float32(call(self.network, columns[: self.columns]))
        return call(self.loss_fn, (*representations, *columns[self.columns :]))


class Represent(Compiled):
    """The first pass: returns a tuple of representations from a micro-batch's columns.

    Args:
        loss_of_batch (LossOfBatch): the loss and its network.
        compiles (bool): whether it is compiled in PyNative mode.
    """

    def __init__(self, loss_of_batch: LossOfBatch, compiles: bool):
        super().__init__(_DRIVER, compiles, loss_of_batch.network)
        self.network = loss_of_batch.network

    def construct(self, *columns: Tensor) -> Any:
        return _in_float32(call(self.network, columns))


class LossOfRepresentations(Compiled):
    """The second pass: the loss of a window, and its gradient for the representations and the loss's parameters.

    Args:
        loss_of_batch (LossOfBatch): the loss and its network.
        number (int): the number of tensors that the network returns.
        parameters (Sequence[Parameter]): the trained parameters of the loss.
        compiles (bool): whether it is compiled in PyNative mode.
    """

    def __init__(self, loss_of_batch: LossOfBatch, number: int, parameters: list[Parameter], compiles: bool):
        super().__init__(_DRIVER, compiles, loss_of_batch.loss_fn)
        self.loss_fn = loss_of_batch.loss_fn
        weights = ms.ParameterTuple(parameters) if parameters else None
        self.differentiate = ms.value_and_grad(self.forward, tuple(range(number)), weights)

    def forward(self, *inputs: Any) -> Any:
        return scalar(_OWNER, call(self.loss_fn, inputs), True)

    def construct(self, *inputs: Any) -> Any:
        return call(self.differentiate, inputs)


class SumOfProducts(nn.Cell):
    """The third pass: a number whose gradient is a micro-batch's contribution to the gradient of the window's loss.

    Args:
        loss_of_batch (LossOfBatch): the loss and its network.
        parameters (Sequence[Parameter]): the trained parameters of the loss.

    Inputs:
        - **\\*inputs** (tuple[Tensor]) - the network's columns, then the loss's gradient with respect to each of the
          micro-batch's representations, and to each of the loss's parameters.
    """

    def __init__(self, loss_of_batch: LossOfBatch, parameters: list[Parameter]):
        super().__init__(auto_prefix=False)
        self.network, self.loss_fn, self.columns = loss_of_batch.network, loss_of_batch.loss_fn, loss_of_batch.columns
        self.parameters = tuple(parameters)

    def construct(self, *inputs: Any) -> Any:
        factors = (*_in_float32(call(self.network, inputs[: self.columns])), *self.parameters)
        total = Tensor(0.0, ms.float32)
        for factor, gradient in zip(factors, inputs[self.columns :]):
            total = total + ops.sum(ops.cast(factor, ms.float32) * gradient)
        return total


def _in_float32(output: Any) -> Any:
    """Return the output of a network as a tuple of float32 tensors."""
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return tuple([ops.cast(tensor, ms.float32) for tensor in outputs])


def objective_of(owner: str, network: nn.Cell, loss_fn: Any, options: Any, **weights: Any) -> Objective:
    """Return the objective of a driver; a `CoupledLoss`, which is computed once per window, needs no weights.

    Args:
        owner (str): the name used in error messages.
        network, loss_fn, options, weights: as for `Objective`.
    """
    if not isinstance(loss_fn, CoupledLoss):
        return Objective(owner, network, loss_fn, options, **weights)
    if weights["coefficients"] is not None:
        _check.raise_invalid(ValueError, owner, "coefficients", "None with a CoupledLoss", weights["coefficients"])
    if weights["weight"] is not None:
        _check.raise_invalid(
            ValueError, owner, "weight", "None with a CoupledLoss, which is for a complete window", "another"
        )
    if weights["reduction"] != "mean":
        remedy = "The loss of a window is computed once, and nothing is divided."
        got = repr(weights["reduction"])
        _check.raise_invalid(ValueError, owner, "reduction", "'mean' with a CoupledLoss", got, remedy)
    random = random_layers(network)
    if random:
        rule = "one whose second forward repeats the first with a CoupledLoss"
        remedy = "Call replace_dropout(network) first."
        _check.raise_invalid(ValueError, owner, "network", rule, f"Dropout in '{random[0]}'", remedy)
    if isinstance(runnable(loss_fn.loss_fn), nn.Cell):
        check_gradient(_OWNER, runnable(loss_fn.loss_fn), options["compile"], "loss_fn")
    of_batch = LossOfBatch(network, loss_fn, inputs_of(owner, weights["inputs"]))
    return Objective(owner, of_batch, None, options, **{**weights, "weight": 1.0, "inputs": None})


def trained_by_loss(loss_of_batch: LossOfBatch, trained: Iterable[Parameter]) -> list[Parameter]:
    """Return the trained parameters that belong to the loss.

    Raises:
        ValueError: If the loss uses others, which are no Parameters of a Cell: their gradients would be lost.
    """
    trained_ids = {id(parameter) for parameter in trained}
    loss_fn = loss_of_batch.original_loss_fn[0]
    parameters = loss_fn.get_parameters() if isinstance(loss_fn, nn.Cell) else ()
    own = [each for each in parameters if id(each) in trained_ids]
    lost = trained_ids - {id(parameter) for parameter in own}
    for name, parameter in held(loss_fn):
        if id(parameter) in lost:
            rule = "a Cell with the parameters which it trains among its own (get_parameters)"
            kind = "function" if inspect.isroutine(loss_fn) else type(loss_fn).__name__
            _check.raise_invalid(ValueError, _OWNER, "loss_fn", rule, f"a {kind} that uses '{name or parameter.name}'")
    return own


class Coupled:
    """The loss of a window with a `CoupledLoss`, and the inputs of its third pass.

    The first pass computes representations, the second the loss and their gradients; the third, which is run like other
    windows, sums products with these gradients.

    Args:
        loss_of_batch (LossOfBatch): the network and the loss.
        loss_parameters (Sequence[Parameter]): trained parameters that belong to the loss.
        group (Optional[Group]): the ranks; one loss is computed from all their representations.
        compiles (bool): whether the passes are compiled in PyNative mode.
        undo (Callable): puts back what forwards have changed: the third pass must repeat the first.
    """

    runs_again = False

    def __init__(
        self,
        loss_of_batch: LossOfBatch,
        loss_parameters: Sequence[Parameter],
        group: Group | None,
        compiles: bool,
        undo: Callable[[], Any],
    ):
        self._loss_of_batch, self._group, self._compiles, self._undo = loss_of_batch, group, compiles, undo
        self._loss_parameters = list(loss_parameters)
        self._represent = Represent(loss_of_batch, compiles)
        self._second_pass: LossOfRepresentations | None = None
        self._loss = math.nan

    def can_update(self, window: Shared) -> bool:
        """Return whether the window can update."""
        return bool(window.number)

    def inputs(self, window: Shared) -> list[Inputs]:
        """Run the first two passes; return for each micro-batch the inputs of the third."""
        collected = [part.columns for part in window.parts]
        representations = [self._first_pass(micro_batch) for micro_batch in collected]
        self._undo()
        loss, gradients_by_micro_batch = self._cached(representations, collected)
        self._loss = float(loss.asnumpy())
        size = self._loss_of_batch.columns
        return [(None, (*columns[:size], *each)) for columns, each in zip(collected, gradients_by_micro_batch)]

    def sums(self, window: Shared, losses: Any) -> tuple[np.ndarray, list[int]]:
        """Return the loss, from one rank only, and the micro-batches: they are bad together."""
        del losses
        bad = [] if math.isfinite(self._loss) else [part.number for part in window.parts]
        return np.array([self._loss if is_first(self._group) else 0.0]), bad

    def result(self, sums: np.ndarray, window: Shared) -> Result:
        """Return the window's loss."""
        del window
        return float(sums[0]), {}

    def _first_pass(self, micro_batch: tuple) -> list[np.ndarray]:
        """Run the first pass of a micro-batch."""
        output = self._represent(*micro_batch[: self._loss_of_batch.columns])
        arrays = [tensor.asnumpy() for tensor in (output if isinstance(output, (tuple, list)) else [output])]
        if not all(array.ndim for array in arrays):
            remedy = "Make trained numbers parameters of a Cell that is the 'loss_fn'."
            rule = "one that returns representations with one row per sample, for a CoupledLoss"
            _check.raise_invalid(ValueError, "GradientAccumulation", "network", rule, "a single number", remedy)
        return arrays

    def _cached(self, representations: list, collected: list) -> tuple[Tensor, Iterator[list[Tensor]]]:
        """Run the second pass; return the loss, and for each micro-batch the gradients for the third pass."""
        gathered = [gather_rows(np.concatenate(parts), self._group) for parts in zip(*representations)]
        label_columns = zip(*[micro_batch[self._loss_of_batch.columns :] for micro_batch in collected])
        columns = [_joined(parts, self._group) for parts in label_columns]
        if self._second_pass is None:
            number, loss_parameters = len(gathered), self._loss_parameters
            self._second_pass = LossOfRepresentations(self._loss_of_batch, number, loss_parameters, self._compiles)
        loss, *gradients = _flat(self._second_pass(*[Tensor(rows) for rows, _ in gathered], *columns))
        of_rows, of_loss = gradients[: len(gathered)], gradients[len(gathered) :]
        row_gradients = [
            _cut(gradient.asnumpy()[first:], [len(part) for part in parts])
            for gradient, (_, first), parts in zip(of_rows, gathered, zip(*representations))
        ]
        loss_gradients = [self._counted_once(gradient, len(collected)) for gradient in of_loss]
        return loss, map(list, zip(*row_gradients, *loss_gradients))

    def _counted_once(self, gradient: Tensor, count: int) -> list[Tensor]:
        """Return the gradient for the first micro-batch of rank 0, and zeros for all others: it must count once."""
        array = gradient.asnumpy().astype(np.float32)
        zeros = Tensor(np.zeros_like(array))
        return [Tensor(array) if is_first(self._group) else zeros, *[zeros] * (count - 1)]


def _joined(parts: Sequence[Tensor], group: Group | None) -> Tensor:
    """Return a column of the window, and of all ranks."""
    rows = np.concatenate([as_array(part) for part in parts])
    return Tensor(gather_rows(rows, group)[0], parts[0].dtype)


def _cut(rows: np.ndarray, counts: Sequence[int]) -> list[Tensor]:
    """Cut rows into tensors of these numbers of rows; more rows may follow."""
    ends = np.cumsum(counts).tolist()
    return [Tensor(rows[end - count : end].astype(np.float32)) for end, count in zip(ends, counts)]


def _flat(results: Any) -> list[Tensor]:
    """Return the tensors of nested tuples."""
    if isinstance(results, ms.Tensor):
        return [results]
    return [tensor for result in results for tensor in _flat(result)]
