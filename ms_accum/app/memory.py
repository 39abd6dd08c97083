"""Reports the memory that training needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from .. import _check
from ..network.optimizers import check_optimizer
from ..network.parameters import excluding
from ..network.restoring import restoring
from ..ranks.zero import ZeroOptimizer

_OWNER = "memory_report"


@_check.documented
class MemoryReport(NamedTuple):
    """The memory that training needs, in bytes, by purpose. Printed, it is a table in MiB."""

    parameters: int
    """int, all parameters of the network, trained or not."""
    gradients: int
    """int, one gradient for each parameter of the optimizer, in the parameter's type."""
    accumulators: int
    """int, one float32 accumulator for each of these parameters; 0 for a window of 1."""
    optimizer_state: int
    """int, everything else in the optimizer: moments, counters, a schedule."""
    activations: int | None
    """Optional[int], tensors stored in the forward pass for the backward pass; None if they were not measured."""
    total: int
    """int, the sum of the amounts above, without unknown ones."""

    def __str__(self) -> str:
        sizes = {
            name: "unknown" if size is None else f"{size / 2**20:,.2f} MiB" for name, size in self._asdict().items()
        }
        width = max(map(len, sizes.values()))
        return "\n".join(f"{name:15}  {size:>{width}}" for name, size in sizes.items())


def memory_report(
    network: nn.Cell,
    optimizer: nn.Optimizer | ZeroOptimizer,
    *,
    mini_steps: int,
    micro_batch: Tensor | Sequence[Any] | None = None,
    loss_fn: Callable | None = None,
) -> MemoryReport:
    """Report the memory that training needs, before training. Nothing is trained or changed.

    To measure activations, one micro-batch runs forward and backward in PyNative mode, with a hook that gets the stored
    tensors. The result is a lower bound of the memory that grows with the micro-batch: intermediate gradients need
    more, and the executor frees memory late.

    Args:
        network (Cell): the network to train.
        optimizer (Optimizer): its optimizer.
        mini_steps (int): the number of micro-batches in a window; a window of 1 has no accumulators.
        micro_batch (Union[None, Tensor, tuple, list]): the columns of a sample micro-batch. Default: ``None``,
            activations are not measured.
        loss_fn (Union[Cell, Callable, None]): returns the loss from the network's output and the label.
            Default: ``None``, the network returns the loss itself.

    Returns:
        MemoryReport, the bytes by purpose.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `mini_steps` is less than 1, or the optimizer does not run on this device.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from model_zoo import MLP
        >>> from ms_accum import memory_report
        >>> net = MLP()
        >>> print(memory_report(net, nn.Adam(net.trainable_params()), mini_steps=4))
        parameters        2.55 MiB
        gradients         2.55 MiB
        accumulators      2.55 MiB
        optimizer_state   5.11 MiB
        activations        unknown
        total            12.77 MiB
    """
    _check.instance(_OWNER, "network", network, nn.Cell, "a Cell")
    trained = check_optimizer(_OWNER, optimizer).parameters
    window = _check.positive_int(_OWNER, "mini_steps", mini_steps)
    activations = None
    if micro_batch is not None:
        with restoring(network, trained, training=True, loss_fn=loss_fn):
            activations = _bytes_stored_for_backward(network, loss_fn, trained, _columns(micro_batch))
    sizes = {
        "parameters": _size(network.get_parameters()),
        "gradients": _size(trained),
        "accumulators": sum(4 * parameter.size for parameter in trained) if window > 1 else 0,  # float32
        "optimizer_state": _size(excluding(optimizer.get_parameters(), trained)),
    }
    return MemoryReport(**sizes, activations=activations, total=sum(sizes.values()) + (activations or 0))


def _size(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _columns(micro_batch: Any) -> tuple[Tensor, ...]:
    columns = micro_batch if isinstance(micro_batch, (tuple, list)) else (micro_batch,)
    return tuple(column if isinstance(column, Tensor) else Tensor(column) for column in columns)


def _bytes_stored_for_backward(
    network: nn.Cell, loss_fn: Callable | None, parameters: Any, columns: Sequence[Tensor]
) -> int | None:
    """Return the bytes stored between forward and backward; None if the hook was not called, as under `ms.jit`.

    Each storage is counted once; Parameters and the micro-batch itself are not counted.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1  # returning the tensor would create a reference cycle with the graph

    def forward(*inputs: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(pack, saved.__getitem__):
            return network(*inputs) if loss_fn is None else loss_fn(network(inputs[0]), *inputs[1:])

    loss, _ = ms.value_and_grad(forward, None, parameters)(*columns)
    loss.asnumpy()  # PyNative runs asynchronously: wait until it is done
    if not saved:
        return None
    excluded = _storages((*network.get_parameters(), *columns))
    stored = _storages(saved)
    saved.clear()
    return sum(size for address, size in stored.items() if address not in excluded)


def _storages(tensors: Sequence) -> dict[int, int]:
    """Return the bytes of each storage by its address; tensors may share a storage."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
