"""`ZeroOptimizer`: an optimizer whose state is sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from .. import _check
from ..network import tree
from ..network.parameters import as_array
from .group import Group, gather, group_of
from .reduction import Part, full_of, part_of

_OWNER = "ZeroOptimizer"
_SUFFIX = ".slice"
# Optimizers that update each element independently, so that a slice is updated exactly as in the full parameter.
ELEMENTWISE = (
    nn.SGD,
    nn.Momentum,
    nn.Adam,
    nn.AdamWeightDecay,
    nn.AdaMax,
    nn.Adadelta,
    nn.Adagrad,
    nn.ASGD,
    nn.FTRL,
    nn.ProximalAdagrad,
    nn.RMSProp,
    nn.Rprop,
)


class Unsharded:
    """A Parameter of the sharded optimizer, which is read and written like the complete one, by all ranks together.

    Args:
        parameter (Parameter): this rank's Parameter.
        part (Optional[Part]): the position of this rank's part; None for what is equal on all ranks, such as a factor.
        group (Optional[Group]): the ranks.
    """

    def __init__(self, parameter: Parameter, part: Part | None, group: Group | None):
        self.name = parameter.name.removesuffix(_SUFFIX)
        self.dtype = parameter.dtype
        self.shape = parameter.shape if part is None else part.shape
        self._parameter = parameter
        self._part = part
        self._group = group

    def astype(self, dtype: Any) -> Unsharded:
        """Return self: `asnumpy` returns float32 for every type that NumPy lacks."""
        del dtype
        return self

    def asnumpy(self) -> np.ndarray:
        """Gather the parts of all ranks."""
        if self._part is None:
            return as_array(self._parameter)
        values = self._parameter.astype(ms.float32).asnumpy()
        return gather(values, self._group)[: self._part.full_size].reshape(self.shape)

    def take_part(self) -> None:
        """Take part in the gathering for a rank that reads it."""
        self.asnumpy()

    def put(self, array: np.ndarray) -> None:
        """Store the array, or this rank's part of it."""
        values = array if self._part is None else self._part.extract(array)
        ops.assign(self._parameter, Tensor(values).astype(self.dtype))


class ZeroOptimizer(nn.Cell):
    """Shard an optimizer's state over the ranks (ZeRO-1): each rank stores moments for its part of every parameter.

    Each rank updates its part, then all parts are all-gathered. Use it in place of the optimizer in the driver, the
    Cells and the `Accumulator`; the training result is the same. In a single process the state is complete. With
    ``sync_every_micro_batch=True`` there, the accumulators are sharded as well (ZeRO-2).

    Args:
        make (Callable): returns the optimizer for this rank's parts. It gets them in the structure of `parameters`: a
            list of Parameters, or of parameter groups. A part is flat; its name begins with its parameter's name.
        parameters (Union[list[Parameter], list[dict]]): the parameters to train, as for the optimizer itself.
        group (Union[str, None, Group]): the ranks that train together: ``"auto"`` for all that a launcher started,
            ``None`` for this process alone. Default: ``"auto"``.

    Inputs:
        - **gradients** (tuple[Tensor]) - those of the full parameters, equal on all ranks, or of this rank's parts.

    Raises:
        TypeError: If `make` is not callable.
        ValueError: If the optimizer does not update each element independently.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import GradientAccumulation, ZeroOptimizer
        >>> net = MLP()
        >>> optimizer = ZeroOptimizer(lambda parts: nn.Adam(parts, 0.001), net.trainable_params())
        >>> model = GradientAccumulation(net, nn.CrossEntropyLoss(), optimizer)
        >>> model.train_process(1, create_dataset(image_size=28), mini_steps=4, report=(), ckpt_path=None)
        >>> model.updates
        12
    """

    def __init__(
        self,
        make: Callable[[list], nn.Optimizer],
        parameters: Sequence[Any],
        *,
        group: Group | str | None = "auto",
    ):
        super().__init__(auto_prefix=False)
        if not callable(make):
            _check.raise_invalid(TypeError, _OWNER, "make", "a function from parts to an optimizer", repr(make))
        self.group = group_of(_OWNER, group)
        rank, ranks, _ = self.group or Group(0, 1)
        full = {parameter.name: parameter for parameter in _listed(parameters)}
        parts = {name: Part(parameter, rank, ranks) for name, parameter in full.items()}
        slices = {name: _slice_of(full[name], part) for name, part in parts.items()}
        self.inner = _elementwise(make(_replaced(list(parameters), slices)))
        order = [parameter.name.removesuffix(_SUFFIX) for parameter in self.inner.parameters]
        self.parameters = ParameterTuple([full[name] for name in order])
        self.parts = [parts[name] for name in order]
        self.loss_scale = self.inner.loss_scale
        self.all_gather = None if self.group is None else _all_gather(self.group)

    def get_lr(self) -> Any:
        """Return the learning rate of the next update."""
        return self.inner.get_lr()

    def construct(self, gradients: tuple) -> Any:
        # Values that were loaded, or copied from rank 0, are in the full parameters, so the parts are cut from these.
        for part, piece, parameter in zip(self.parts, self.inner.parameters, self.parameters):
            ops.assign(piece, part_of(parameter, part))
        updated = self.inner(tuple(part_of(gradient, part) for gradient, part in zip(gradients, self.parts)))
        parts = ops.depend(tree.flattened(self.inner.parameters), updated)
        rows = self._rows(parts)
        start = 0
        for part, parameter in zip(self.parts, self.parameters):
            stop = start + part.size
            ops.assign(parameter, ops.cast(full_of(tree.columns(rows, start, stop), part), parameter.dtype))
            start = stop
        return updated

    def _rows(self, parts: Tensor) -> Tensor:
        """Return the parts of all ranks, one per row."""
        gathered = parts if self.all_gather is None else self.all_gather(parts)
        return ops.reshape(gathered, (-1, parts.shape[0]))

    def complete_state(self) -> dict[str, Any]:
        """Return its unsharded state for a training state, under the names of the unsharded optimizer."""
        parts = {piece.name: part for piece, part in zip(self.inner.parameters, self.parts)}
        state: dict[str, Any] = {parameter.name: parameter for parameter in self.parameters}
        for parameter in self.inner.get_parameters():
            if parameter.name in parts:  # a copy of a part of the full parameter
                continue
            part = _part_of_moment(parameter, parts)
            if part is None and not parameter.name.endswith(_SUFFIX):
                state[parameter.name] = parameter
            else:
                unsharded = Unsharded(parameter, part, self.group)
                state[unsharded.name] = unsharded
        return state


def _all_gather(group: Group) -> Any:
    """Return what gathers the parts of all ranks, concatenated."""
    if group.name is None or ms.get_context("device_target") != "CPU":
        return group.collective(ops.AllGather)
    return _SumOfParts(group)


@ms.jit_class
class _SumOfParts:
    """Gathers parts over a named group where MindSpore can't, on CPU: sums them, with zeros in the places of others."""

    def __init__(self, group: Group):
        self.before, self.after = group.rank, group.size - 1 - group.rank
        self.all_reduce = group.collective(ops.AllReduce)

    def __call__(self, part: Tensor) -> Tensor:
        size, dtype = part.shape[0], part.dtype
        zeros = ops.zeros((self.before * size,), dtype), ops.zeros((self.after * size,), dtype)
        return self.all_reduce(ops.cat((zeros[0], part, zeros[1])))


def _part_of_moment(moment: Parameter, parts: dict[str, Part]) -> Part | None:
    """Return the part to which a moment of the optimizer belongs, found by name and shape."""
    names = [name for name, part in parts.items() if moment.name.endswith(f".{name}") and moment.shape == (part.size,)]
    return parts[max(names, key=len)] if names else None  # "moment1.a.weight" belongs to "a.weight", not to "weight"


def _slice_of(parameter: Parameter, part: Part) -> Parameter:
    values = Tensor(part.extract(parameter.astype(ms.float32).asnumpy())).astype(parameter.dtype)
    return Parameter(values, name=parameter.name + _SUFFIX, requires_grad=True)


def _listed(parameters: Sequence[Any]) -> list[Parameter]:
    """Return the Parameters as a list; they may be given in groups."""
    listed: list[Parameter] = []
    for item in parameters:
        listed += item.get("params", ()) if isinstance(item, dict) else (item,)
    return listed


def _replaced(parameters: Any, slices: dict[str, Parameter]) -> Any:
    """Return the same structure with parts instead of Parameters."""
    if isinstance(parameters, Parameter):
        return slices[parameters.name]
    if isinstance(parameters, dict):
        keys = ("params", "order_params")
        return {key: _replaced(value, slices) if key in keys else value for key, value in parameters.items()}
    return [_replaced(item, slices) for item in parameters]


def _elementwise(optimizer: nn.Optimizer | ZeroOptimizer) -> Any:
    """Return the optimizer, or raise an error unless it updates each element independently."""
    rule = "an optimizer that updates each element independently"
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        _check.raise_invalid(ValueError, _OWNER, "make", f"{rule} ({kinds})", type(optimizer).__name__)
    if any(getattr(optimizer, "group_grad_centralization", ())):
        _check.raise_invalid(ValueError, _OWNER, "make", rule, "one with 'grad_centralization', which computes a mean")
    return optimizer
