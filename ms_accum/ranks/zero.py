"""How is the optimizer's state sharded over the ranks?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from .. import _check
from ..network import tree
from .parallel import AUTO, Group, gather, group_of
from .parts import Part, part_of, whole_of

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


class Sharded:
    """A sharded Parameter of the optimizer, which all ranks together read and write like an unsharded one.

    Args:
        parameter (Parameter): this rank's part.
        part (Part): the position of this part.
        group (Optional[Group]): the ranks.
    """

    def __init__(self, parameter: Parameter, part: Part, group: Group | None):
        self.name = parameter.name[: -len(_SUFFIX)]
        self.dtype, self.shape = parameter.dtype, part.shape
        self._parameter, self._part, self._group = parameter, part, group

    def astype(self, dtype: Any) -> Sharded:
        """Return self: `asnumpy` gathers float32 for every type of the Parameter."""
        del dtype
        return self

    def asnumpy(self) -> np.ndarray:
        """Gather the parts of all ranks."""
        own = self._parameter.astype(ms.float32).asnumpy()
        row = gather(own, self._group)[: self._part.whole]
        return row.reshape(self.shape)

    def take_part(self) -> None:
        """Take part in the gathering for a rank that reads it."""
        self.asnumpy()

    def put(self, array: np.ndarray) -> None:
        """Store this rank's part of the array."""
        ops.assign(self._parameter, Tensor(self._part.of(array)).astype(self.dtype))


class Common:
    """A Parameter of the optimizer for a part that is equal on all ranks, such as a factor, under its unsharded name.

    Args:
        parameter (Parameter): the Parameter.
    """

    def __init__(self, parameter: Parameter):
        self.name = parameter.name[: -len(_SUFFIX)]
        self.dtype, self.shape = parameter.dtype, parameter.shape
        self._parameter = parameter

    def astype(self, dtype: Any) -> Any:
        """Return the Parameter's values in another type."""
        return self._parameter.astype(dtype)

    def asnumpy(self) -> np.ndarray:
        """Return the Parameter's values."""
        return self._parameter.asnumpy()

    def put(self, array: np.ndarray) -> None:
        """Set the Parameter."""
        ops.assign(self._parameter, Tensor(array).astype(self.dtype))


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
        >>> from ms_accum import GradientAccumulation, ZeroOptimizer
        >>> from ms_accum.zoo import MLP, create_dataset
        >>> net = MLP()
        >>> optimizer = ZeroOptimizer(lambda parts: nn.Adam(parts, 0.001), net.trainable_params())
        >>> model = GradientAccumulation(net, nn.CrossEntropyLoss(), optimizer)
        >>> model.train_process(1, create_dataset(image_size=28), mini_steps=4, report=(), ckpt_path=None)
        >>> model.updates
        12
    """

    def __init__(self, make: Callable[[list], Any], parameters: Sequence[Any], *, group: Any = AUTO):
        super().__init__(auto_prefix=False)
        if not callable(make):
            _check.refuse(TypeError, _OWNER, "make", "a function from parts to an optimizer", repr(make))
        self.group = group = group_of(_OWNER, group)
        wholes = {parameter.name: parameter for parameter in _listed(parameters)}
        parts = {name: Part(whole, *(group or (0, 1))) for name, whole in wholes.items()}
        slices = {name: _slice_of(wholes[name], part) for name, part in parts.items()}
        self.inner = _elementwise(make(_replaced(list(parameters), slices)))
        order = [each.name[: -len(_SUFFIX)] for each in self.inner.parameters]
        self.parameters = ParameterTuple([wholes[name] for name in order])
        self.parts = [parts[name] for name in order]
        self.loss_scale = self.inner.loss_scale
        self.all_gather = None if group is None else ops.AllGather()

    def get_lr(self) -> Any:
        """Return the learning rate of the next update."""
        return self.inner.get_lr()

    def construct(self, gradients: Any) -> Any:
        # Values that were loaded, or copied from rank 0, are in the full parameters, so the parts are cut from these.
        for part, own, whole in zip(self.parts, self.inner.parameters, self.parameters):
            ops.assign(own, part_of(whole, part))
        done = self.inner(tuple(part_of(gradient, part) for gradient, part in zip(gradients, self.parts)))
        parts = ops.depend(tree.flattened(self.inner.parameters), done)
        first, rows = 0, self._rows(parts)
        for part, whole in zip(self.parts, self.parameters):
            behind = first + part.size
            ops.assign(whole, ops.cast(whole_of(tree.stretch(rows, first, behind), part), whole.dtype))
            first = behind
        return done

    def _rows(self, parts: Any) -> Any:
        """Return the parts of all ranks, one per row."""
        gathered = parts if self.all_gather is None else self.all_gather(parts)
        return ops.reshape(gathered, (-1, parts.shape[0]))

    def complete_state(self) -> dict[str, Any]:
        """Return its unsharded state for a training state, under the names of the unsharded optimizer."""
        parts = {own.name: part for own, part in zip(self.inner.parameters, self.parts)}
        state: dict[str, Any] = {whole.name: whole for whole in self.parameters}
        for parameter in self.inner.get_parameters():
            if parameter.name in parts:  # a copy of a slice of the full parameter
                continue
            of = _part_of(parameter, parts)
            kept: Any = Common(parameter) if parameter.name.endswith(_SUFFIX) else parameter
            kept = kept if of is None else Sharded(parameter, parts[of], self.group)
            state[kept.name] = kept
        return state


def _part_of(moment: Parameter, parts: dict[str, Part]) -> str | None:
    """Return the name of the part to which a moment of the optimizer belongs, found by name and shape."""
    fit = [name for name, part in parts.items() if moment.name.endswith(f".{name}") and moment.shape == (part.size,)]
    return max(fit, key=len, default=None)  # "moment1.a.weight" belongs to "a.weight", not to "weight"


def _slice_of(whole: Parameter, part: Part) -> Parameter:
    own = Tensor(part.of(whole.astype(ms.float32).asnumpy())).astype(whole.dtype)
    return Parameter(own, name=whole.name + _SUFFIX, requires_grad=True)


def _listed(parameters: Sequence[Any]) -> list[Parameter]:
    """Return the Parameters as a list; they may be given in groups."""
    listed: list[Parameter] = []
    for each in parameters:
        listed += each.get("params", ()) if isinstance(each, dict) else (each,)
    return listed


def _replaced(parameters: Any, slices: dict[str, Parameter]) -> Any:
    """Return the same structure with parts instead of Parameters."""
    if isinstance(parameters, Parameter):
        return slices[parameters.name]
    if isinstance(parameters, dict):
        named = ("params", "order_params")
        return {key: _replaced(value, slices) if key in named else value for key, value in parameters.items()}
    return [_replaced(each, slices) for each in parameters]


def _elementwise(optimizer: Any) -> Any:
    """Return the optimizer, or raise an error unless it updates each element independently."""
    rule = "an optimizer that updates each element independently"
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        _check.refuse(ValueError, _OWNER, "make", f"{rule} ({kinds})", type(optimizer).__name__)
    if any(getattr(optimizer, "group_grad_centralization", ())):
        _check.refuse(ValueError, _OWNER, "make", rule, "one with 'grad_centralization', which computes a mean")
    return optimizer
