"""Who keeps which part of the optimizer's state?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from . import _check, _tree
from ._parts import Part, part_of, whole_of
from .parallel import AUTO, Group, gather, group_of

_OWNER = "ZeroOptimizer"
_SUFFIX = ".slice"
# Those whose update of an element looks at nothing but that element: a slice is updated as it would be in the whole.
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
    """A Parameter of the optimizer that is in parts on all ranks, as if it were whole: read and written by all at once.

    Args:
        parameter (Parameter): this rank's part.
        part (Part): which that is.
        group (Optional[Group]): the ranks.
    """

    def __init__(self, parameter: Parameter, part: Part, group: Group | None):
        self.name = parameter.name[: -len(_SUFFIX)]
        self.dtype, self.shape = parameter.dtype, part.shape
        self._parameter, self._part, self._group = parameter, part, group

    def astype(self, dtype: Any) -> Sharded:
        """Return it: what is gathered is float32 whatever the Parameter is."""
        del dtype
        return self

    def asnumpy(self) -> np.ndarray:
        """Gather it."""
        own = self._parameter.astype(ms.float32).asnumpy()
        row = gather(own, self._group)[: self._part.whole]
        return row.reshape(self.shape)

    def put(self, array: np.ndarray) -> None:
        """Keep this rank's part of it."""
        ops.assign(self._parameter, Tensor(self._part.of(array)).astype(self.dtype))


class ZeroOptimizer(nn.Cell):
    r"""An optimizer whose state is dealt out to the ranks: each has the moments of its part of every parameter.

    A rank updates its part, and all parts are gathered. It takes the place of the optimizer in the driver, the Cells
    and the `Accumulator`, and trains as that would. Alone, a process keeps everything.

    Args:
        make (Callable): returns the optimizer of the parts, which it is given as `parameters` are: a list of
            Parameters, or of groups. A part is flat; its name begins as its parameter's.
        parameters (Union[list[Parameter], list[dict]]): what to train, as for the optimizer itself.
        group (Union[str, None, Group]): the ranks. Default: ``"auto"``, all that a launcher started.

    Inputs:
        - **gradients** (tuple[Tensor]) - those of whole parameters, the same on all ranks, or of this rank's parts.

    Raises:
        TypeError: If `make` is not callable.
        ValueError: If the optimizer needs more of a parameter than an element at a time.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from ms_accum import GradientAccumulation, ZeroOptimizer
        >>> from model_zoo import MLP, create_dataset
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
        # What was loaded, or taken from rank 0, is in the whole parameters: they are right, not the parts.
        for part, own, whole in zip(self.parts, self.inner.parameters, self.parameters):
            ops.assign(own, part_of(whole, part))
        done = self.inner(tuple(part_of(gradient, part) for gradient, part in zip(gradients, self.parts)))
        parts = ops.depend(_tree.flattened(self.inner.parameters), done)
        first, rows = 0, self._rows(parts)
        for part, whole in zip(self.parts, self.parameters):
            behind = first + part.size
            ops.assign(whole, ops.cast(whole_of(_tree.stretch(rows, first, behind), part), whole.dtype))
            first = behind
        return done

    def _rows(self, parts: Any) -> Any:
        """Return the parts of all ranks, a row each."""
        gathered = parts if self.all_gather is None else self.all_gather(parts)
        return ops.reshape(gathered, (-1, parts.shape[0]))

    def whole_state(self) -> dict[str, Any]:
        """Return what a training state holds of it, under the names that the optimizer alone would give."""
        parts = {own.name: part for own, part in zip(self.inner.parameters, self.parts)}
        state: dict[str, Any] = {whole.name: whole for whole in self.parameters}
        for parameter in self.inner.get_parameters():
            if parameter.name in parts:  # says nothing that the whole one doesn't
                continue
            of = _part_of(parameter, parts)
            kept = parameter if of is None else Sharded(parameter, parts[of], self.group)
            state[kept.name] = kept
        return state


def _part_of(moment: Parameter, parts: dict[str, Part]) -> str | None:
    """Return the name of the part that a Parameter of the optimizer is a moment of, as its own name and shape say."""
    fit = [name for name, part in parts.items() if moment.name.endswith(f".{name}") and moment.shape == (part.size,)]
    return max(fit, key=len, default=None)  # "moment1.a.weight" is not of "weight"


def _slice_of(whole: Parameter, part: Part) -> Parameter:
    own = Tensor(part.of(whole.astype(ms.float32).asnumpy())).astype(whole.dtype)
    return Parameter(own, name=whole.name + _SUFFIX, requires_grad=True)


def _listed(parameters: Sequence[Any]) -> list[Parameter]:
    """Return the Parameters, which may be in groups."""
    listed: list[Parameter] = []
    for each in parameters:
        listed += each.get("params", ()) if isinstance(each, dict) else (each,)
    return listed


def _replaced(parameters: Any, slices: dict[str, Parameter]) -> Any:
    """Return the same structure of parts."""
    if isinstance(parameters, Parameter):
        return slices[parameters.name]
    if isinstance(parameters, dict):
        named = ("params", "order_params")
        return {key: _replaced(value, slices) if key in named else value for key, value in parameters.items()}
    return [_replaced(each, slices) for each in parameters]


def _elementwise(optimizer: Any) -> Any:
    """Return an optimizer whose parts can be updated apart, or refuse it."""
    rule = "an optimizer that updates elements apart"
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        _check.refuse(ValueError, _OWNER, "make", f"{rule} ({kinds})", type(optimizer).__name__)
    if any(getattr(optimizer, "group_grad_centralization", ())):
        _check.refuse(ValueError, _OWNER, "make", rule, "one with 'grad_centralization', which takes a mean")
    return optimizer
