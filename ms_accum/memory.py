"""What does training take of memory?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import mindspore as ms
from mindspore import Tensor, nn

from . import _bytes, _check
from ._as_found import left_as_found

_OWNER = "memory_report"
_FLOAT32 = 4


class MemoryReport(NamedTuple):
    """What training takes of memory, in bytes. As a text it is a table in MiB."""

    parameters: int
    """int, the network's, trained or not."""
    gradients: int
    """int, one for each parameter of the optimizer, in its type."""
    accumulators: int
    """int, one float32 for each of them; 0 for a window of 1."""
    optimizer_state: int
    """int, whatever else the optimizer keeps: moments, counters, a schedule."""
    activations: int | None
    """Optional[int], what the forward of a micro-batch keeps for its backward. None: not asked for, or not seen."""
    total: int
    """int, the sum of what is known."""

    def __str__(self) -> str:
        rows = {name: "unknown" if size is None else _bytes.mib(size) for name, size in self._asdict().items()}
        names, sizes = max(map(len, rows)), max(map(len, rows.values()))
        return "\n".join(f"{name:{names}}  {size:>{sizes}}" for name, size in rows.items())


def memory_report(
    network: nn.Cell,
    optimizer: Any,
    *,
    mini_steps: int,
    micro_batch: Any = None,
    loss_fn: Callable | None = None,
) -> MemoryReport:
    """Say what training takes of memory, before it begins. Nothing is trained, and nothing changed.

    For the activations a micro-batch goes forward and back once, in PyNative mode, and MindSpore tells
    what it keeps in between. That is a lower bound of what grows with the micro-batch: gradients flow back beside
    it, and the executor frees late. Measured peaks on CPU are in docs/memory.md.

    Args:
        network (Cell): the network to train.
        optimizer (Optimizer): what will train it.
        mini_steps (int): micro-batches in a window. 1 has no accumulators.
        micro_batch (Union[None, Tensor, tuple, list]): the columns of a sample micro-batch. Default: ``None``,
            activations stay unknown.
        loss_fn (Union[Cell, Callable, None]): from the network's output and the label to the loss.
            Default: ``None``, the network returns its loss itself.

    Returns:
        MemoryReport, bytes by what takes them.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `mini_steps` is less than 1, or the optimizer does not run on this device.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from ms_accum import memory_report
        >>> from model_zoo import MLP
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
    trained = _check.optimizer(_OWNER, optimizer).parameters
    window = _check.positive_int(_OWNER, "mini_steps", mini_steps)
    own = {id(parameter) for parameter in trained}
    activations = None
    if micro_batch is not None:
        with left_as_found(network, own, training=True):
            activations = _kept_for_backward(network, loss_fn, trained, _columns(micro_batch))
    parts = (
        _size(network.get_parameters()),
        _size(trained),
        _FLOAT32 * sum(parameter.size for parameter in trained) if window > 1 else 0,
        _size(parameter for parameter in optimizer.get_parameters() if id(parameter) not in own),
        activations,
    )
    return MemoryReport(*parts, total=sum(part or 0 for part in parts))


def _size(parameters: Any) -> int:
    return sum(parameter.size * parameter.itemsize for parameter in parameters)


def _columns(micro_batch: Any) -> tuple:
    columns = micro_batch if isinstance(micro_batch, (tuple, list)) else (micro_batch,)
    return tuple(column if isinstance(column, Tensor) else Tensor(column) for column in columns)


def _kept_for_backward(network: nn.Cell, loss_fn: Callable | None, parameters: Any, columns: Sequence) -> int | None:
    """Return the bytes that are kept between forward and backward, each storage once; None if nothing was seen.

    Parameters and the micro-batch itself are there anyway. Under `ms.jit` MindSpore does not tell.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1  # the tensor itself would be a cycle with the graph that keeps it

    def forward(*inputs: Any) -> Any:
        with ms.saved_tensors_hooks(pack, saved.__getitem__):
            return network(*inputs) if loss_fn is None else loss_fn(network(inputs[0]), *inputs[1:])

    loss, _ = ms.value_and_grad(forward, None, parameters)(*columns)
    loss.asnumpy()  # PyNative runs behind: wait until it is done
    there = _storages((*network.get_parameters(), *columns))
    kept = {pointer: size for pointer, size in _storages(saved).items() if pointer not in there}
    seen = bool(saved)
    saved.clear()
    return sum(kept.values()) if seen else None


def _storages(tensors: Sequence) -> dict[int, int]:
    """Return the bytes of each storage by its address: several tensors may share one."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
