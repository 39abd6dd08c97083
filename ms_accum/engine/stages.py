"""The user's own stages of a window's end, between clipping and the optimizer."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from .. import _check
from ..network import tree
from ..network.compiled import call
from ..network.optimizers import is_sharded
from ..network.parameters import unique_name, untrained
from ..network.private import is_jit_class
from .loss_scale import own_scale

Stage = Callable[[tuple[Tensor, ...], Tensor], Any]
_RETURNS = "Return one for each of 'optimizer.parameters', or (gradients, keep)."


@ms.jit_class
class UserStage:
    """Calls a function or an object of the user's as ``stage(gradients, norm)``, which returns gradients.

    Or ``(gradients, keep)``. If `keep` is false, or what it returns is not finite, it skips the window: that lowers no
    loss scale, and is no error with ``nonfinite="raise"``, because the window's own norm is finite. It is called for
    gradients that are finite, so what it remembers never meets NaN.

    Args:
        owner (str): the name used in error messages.
        number (int): its place, from 0.
        stage (Stage): what is called.
        trained (Sequence[Parameter]): the trained parameters.
        known (dict[int, str]): the names of all Parameters that are not its own, by id. Its own are added.
    """

    def __init__(self, owner: str, number: int, stage: Any, trained: Sequence[Parameter], known: dict[int, str]):
        self.owner, self.stage = owner, stage
        self.name = getattr(stage, "__qualname__", type(stage).__name__)
        self.what = f"the gradients of stages[{number}] ({self.name})"
        self.trained = tuple(trained)
        self.skipped = untrained(f"{unique_name('stage')}.skipped", 0, ms.int32)
        """Parameter, the windows so far that it skipped."""
        found = {"windows_skipped": self.skipped, **dict(_parameters(getattr(stage, "__self__", stage), set()))}
        self.touched = tuple(found.values())
        own = {name: parameter for name, parameter in found.items() if id(parameter) not in known}
        self.state = own
        """dict[str, Parameter], its own Parameters in a training state, by name."""
        self.changed = tuple(own.values())
        """tuple[Parameter], those that the end of a window changes."""
        self.settings = self.name
        """str, what must be equal in a resumed run, and on all ranks."""
        for name, parameter in own.items():
            if parameter.name == "Parameter" or parameter.name in known.values():  # a graph can't have two of one name
                parameter.name = f"{unique_name('stage')}.{name}"
            known[id(parameter)] = parameter.name

    def __call__(self, end: Any) -> Any:
        gradients, keep = tree.in_float32(end["gradients"]), end["keep"]
        if ops.depend(keep, self.touched):  # see `Boundary.touch`
            gradients, keep = self._changed(gradients, end["norm"])
        end["gradients"] = gradients
        end["keep"] = keep
        return end

    def _changed(self, gradients: tuple, norm: Tensor) -> Any:
        """Return what the stage returns, as gradients and whether to keep the window."""
        changed, keep = call(self.stage, (gradients, norm)), True
        if isinstance(changed, (tuple, list)) and len(changed) == 2 and isinstance(changed[0], (tuple, list)):
            changed, keep = changed
        if not (isinstance(changed, (tuple, list)) and tree.are_tensors(tuple(changed))):
            raise TypeError(f"For '{self.owner}', {self.what} must be a tuple of Tensors. {_RETURNS}")
        tree.check_number(self.owner, self.what, tuple(changed), self.trained, _RETURNS)
        changed = tree.check_shapes(self.owner, self.what, tuple(changed), self.trained, _RETURNS)
        if keep is None or (isinstance(keep, Tensor) and keep.shape not in ((), (1,))):
            raise ValueError(f"For '{self.owner}', 'keep' of stage {self.name} must be one bool.")
        changed = tree.in_float32(changed)
        keep = ops.logical_and(ops.reshape(ops.cast(keep, ms.bool_), ()), tree.all_finite(changed))
        counted = ops.assign_add(self.skipped, ops.cast(ops.logical_not(keep), ms.int32))
        return changed, ops.depend(keep, counted)


def user_stages(owner: str, stages: Any, optimizer: nn.Cell, network: nn.Cell | None) -> dict[str, UserStage]:
    """Return the stages of the user's argument by name, or raise an error if it is invalid."""
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        _check.raise_invalid(TypeError, owner, "stages", "a list of functions or objects", repr(stages))
    for stage in stages:
        called = getattr(stage, "__self__", stage)  # of a method the object, which a graph must know as well
        if not (isinstance(called, (types.FunctionType, nn.Cell)) or is_jit_class(type(called))):
            rule, remedy = "functions, Cells, or objects of a class with @ms.jit_class", "MindSpore compiles them."
            _check.raise_invalid(TypeError, owner, "stages", rule, repr(stage), remedy)
    if stages and is_sharded(optimizer):
        remedy = "A rank has only its parts of the gradients."
        _check.raise_invalid(ValueError, owner, "stages", "() with a ZeroOptimizer", f"{len(stages)}", remedy)
    if stages and own_scale(optimizer) != 1.0:
        rule, remedy = "() with an optimizer that has a loss_scale", "Give the scale as 'loss_scale' here."
        _check.raise_invalid(ValueError, owner, "stages", rule, f"{len(stages)}", remedy)
    others = [*optimizer.get_parameters(), *([] if network is None else network.get_parameters())]
    known = {id(parameter): parameter.name for parameter in others} if stages else {}
    made = [UserStage(owner, number, stage, optimizer.parameters, known) for number, stage in enumerate(stages)]
    # What a stage remembers is its own: in a resumed run it is looked for by place and class.
    return {f"stages[{number}] {stage.name.rpartition('.')[2]}": stage for number, stage in enumerate(made)}


def _parameters(value: Any, seen: set[int], name: str = "") -> Iterator[tuple[str, Parameter]]:
    """Yield the Parameters in an object of the user's, and in the objects in it, with the names of their attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Parameter):
        yield name, value
        return
    inside: Any = {}
    if isinstance(value, nn.Cell):  # which knows nothing of Parameters in its tuples and in other objects
        inside = {**dict(value.parameters_and_names()), **value.name_cells(), **vars(value)}
    elif isinstance(value, (Mapping, list, tuple)):
        inside = value if isinstance(value, Mapping) else dict(enumerate(value))
    elif is_jit_class(type(value)):
        inside = vars(value)
    for each, item in inside.items():
        yield from _parameters(item, seen, f"{name}.{each}" if name else str(each))
