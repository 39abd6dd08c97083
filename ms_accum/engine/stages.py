"""The user's own stages of a window's end, between clipping and the optimizer."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from .. import _check
from ..network import tree
from ..network.calls import call
from ..network.optimizers import is_sharded, parameters_in
from ..network.state import state, unique_name
from .loss_scale import own_scale

Stage = Callable[[tuple[Tensor, ...], Tensor], Any]
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_RETURNS = "Return one for each of 'optimizer.parameters', or (gradients, keep)."


@ms.jit_class
class UserStage:
    """Calls a function or an object of the user's as ``stage(gradients, norm)``, which returns gradients.

    Or ``(gradients, keep)``; if `keep` is false, the window is skipped. It is called for gradients that are finite, so
    what it remembers never meets NaN.

    Args:
        owner (str): the name used in error messages.
        number (int): its place, from 1.
        stage (Stage): what is called.
        parameters (Sequence[Parameter]): the trained parameters.
    """

    def __init__(self, owner: str, number: int, stage: Any, parameters: Sequence[Parameter]):
        self.owner, self.stage = owner, stage
        self.name = _name_of(stage)
        self.what = f"the gradients of stage {number} ({self.name})"
        self.trained = tuple(parameters)
        self.skipped = state(f"{unique_name('stage')}.skipped", 0, ms.int32)
        """Parameter, the windows so far that it skipped."""
        own = {"windows_skipped": self.skipped, **dict(_own_parameters(stage))}
        self.state = {f"stages.{number}.{name}": parameter for name, parameter in own.items()}
        """dict[str, Parameter], its Parameters in a training state, by name."""
        self.touched = tuple(self.state.values())

    def __call__(self, end: Any) -> Any:
        gradients, keep = tree.in_float32(end["gradients"]), end["keep"]
        if ops.depend(keep, self.touched):  # see `Boundary.touch`
            gradients, keep = self._changed(gradients, end["norm"])
        end["gradients"] = gradients
        end["keep"] = keep
        return end

    def _changed(self, gradients: Any, norm: Any) -> Any:
        """Return what the stage returns, as gradients and whether to keep the window."""
        changed, keep = call(self.stage, (gradients, norm)), True
        if isinstance(changed, (tuple, list)) and len(changed) == 2 and isinstance(changed[0], (tuple, list)):
            changed, keep = changed
        if not isinstance(changed, (tuple, list)):
            raise TypeError(f"For '{self.owner}', {self.what} must be a tuple of Tensors. {_RETURNS}")
        tree.check_number(self.owner, self.what, changed, self.trained, _RETURNS)
        changed = tree.check_shapes(self.owner, self.what, tuple(changed), self.trained, _RETURNS)
        keep = ops.reshape(ops.cast(keep, ms.bool_), ())
        counted = ops.assign_add(self.skipped, ops.cast(ops.logical_not(keep), ms.int32))
        return tree.in_float32(changed), ops.depend(keep, counted)


def user_stages(owner: str, stages: Any, optimizer: Any) -> tuple[UserStage, ...]:
    """Return the stages of the user's argument, or raise an error if it is invalid."""
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        _check.raise_invalid(TypeError, owner, "stages", "a list of functions or objects", repr(stages))
    for stage in stages:
        if not (isinstance(stage, (*_FUNCTIONS, nn.Cell)) or hasattr(type(stage), "__ms_class__")):
            rule, remedy = "functions, Cells, or objects of a class with @ms.jit_class", "They are compiled."
            _check.raise_invalid(TypeError, owner, "stages", rule, repr(stage), remedy)
    if stages and is_sharded(optimizer):
        remedy = "A rank has only its parts of the gradients."
        _check.raise_invalid(ValueError, owner, "stages", "() with a ZeroOptimizer", f"{len(stages)}", remedy)
    if stages and own_scale(optimizer) != 1.0:
        rule, remedy = "() with an optimizer that has a loss_scale", "Give the scale as 'loss_scale' here."
        _check.raise_invalid(ValueError, owner, "stages", rule, f"{len(stages)}", remedy)
    return tuple(UserStage(owner, number, stage, optimizer.parameters) for number, stage in enumerate(stages, 1))


def _name_of(stage: Any) -> str:
    """Return the name of a function, or of the class of an object."""
    function = stage.func if isinstance(stage, functools.partial) else stage
    return getattr(function, "__qualname__", type(function).__name__)


def _own_parameters(stage: Any) -> Iterator[tuple[str, Parameter]]:
    """Yield the Parameters of an object with their names; those without a name of their own get one for graphs."""
    if isinstance(stage, nn.Cell):
        yield from stage.parameters_and_names()
        return
    for name, value in getattr(stage, "__dict__", {}).items():
        for number, parameter in enumerate(parameters_in(value)):
            if parameter.name == "Parameter":  # MindSpore's, which must not occur twice in a graph
                parameter.name = f"{unique_name('stage')}.{name}"
            parameter.requires_grad = False
            yield f"{name}.{number}" if number else name, parameter
