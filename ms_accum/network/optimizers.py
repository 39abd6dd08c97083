"""MindSpore's optimizers: which may be used here, whether they train, their learning rate and their settings.

For a `ZeroOptimizer` all functions use the optimizer inside it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer
from mindspore.experimental.optim.lr_scheduler import ExponentialLR, StepLR

from .. import _check
from . import private
from .compiled import in_graphs
from .parameters import as_array, digest_of, excluding

# Tested with the CPU wheel: these optimizers can be constructed, but fail in their first update, after a complete
# window. Each is listed with an optimizer to use instead.
_NOT_ON_CPU = {
    "mindspore.nn.Lamb": "nn.AdamWeightDecay",
    "mindspore.nn.LARS": "nn.Momentum",
    "mindspore.mint.AdamW": "mindspore.experimental.optim.AdamW",
    "mindspore.mint.FusedAdamW": "mindspore.experimental.optim.AdamW",
}
_NOT_IN_PYNATIVE = ("mindspore.mint.SGD", "mindspore.mint.Adam")

_LONGEST_ARRAY = 64


def inner_of(optimizer: nn.Cell) -> Any:
    """Return the optimizer that updates: for a `ZeroOptimizer` the inner one."""
    return getattr(optimizer, "inner", optimizer)


def kind_of(optimizer: nn.Cell) -> str:
    """Return the class name of the optimizer that updates."""
    return type(inner_of(optimizer)).__name__


def is_sharded(optimizer: nn.Cell) -> bool:
    """Return whether an optimizer's state is sharded over several ranks."""
    return inner_of(optimizer) is not optimizer and optimizer.group is not None


def runs_compiled(optimizer: nn.Cell) -> bool:
    """Return whether MindSpore runs an optimizer as a graph outside of graphs, too, and nothing else with it."""
    return hasattr(optimizer.construct, "__wrapped__") and not private.has_hooks(optimizer)


# Checks


def check_optimizer(owner: str, optimizer: nn.Cell, compiles: bool = True) -> None:
    """Raise an error unless this is an optimizer that runs on this device."""
    kinds = (nn.Optimizer, ExperimentalOptimizer, nn.LARS)
    _check.instance(owner, "optimizer", inner_of(optimizer), kinds, "a MindSpore optimizer")
    frozen = [parameter.name for parameter in optimizer.parameters if not parameter.requires_grad]
    if frozen:
        rule, value = "one of parameters that require gradients", f"'{frozen[0]}', which is frozen"
        _check.raise_invalid(ValueError, owner, "optimizer", rule, value, "Freeze before you create it.")
    if ms.get_context("device_target") == "CPU":
        _check_runs_on_cpu(owner, optimizer, compiles)


def _check_runs_on_cpu(owner: str, optimizer: nn.Cell, compiles: bool) -> None:
    kind = type(optimizer)
    name = ".".join([*kind.__module__.split(".")[:2], kind.__name__])
    instead = _NOT_ON_CPU.get(name)
    if instead:
        rule, remedy = "one that MindSpore runs on CPU", f"Use {instead}, or another device."
        _check.raise_invalid(ValueError, owner, "optimizer", rule, kind.__name__, remedy)
    # For these two MindSpore raises no error: the optimizer runs and does not change the parameters.
    if name in _NOT_IN_PYNATIVE and not in_graphs(compiles):
        value = f"mint.optim.{kind.__name__} in PyNative mode"
        remedy = f"Use compile=True, or mindspore.experimental.optim.{kind.__name__}."
        _check.raise_invalid(ValueError, owner, "optimizer", "one that trains", value, remedy)
    if isinstance(optimizer, nn.AdaFactor) and optimizer.is_group:
        value, remedy = "AdaFactor with parameter groups", "Use it without groups, or nn.Adam."
        _check.raise_invalid(ValueError, owner, "optimizer", "one that trains", value, remedy)


def check_trains(owner: str, optimizer: nn.Cell, network: nn.Cell) -> None:
    """Raise an error if the optimizer has none of the network's parameters; it may have others in addition."""
    ids = {id(parameter) for parameter in network.get_parameters()}
    if ids and not any(id(parameter) in ids for parameter in optimizer.parameters):
        _check.raise_invalid(
            ValueError, owner, "optimizer", "one of the network's parameters", "one that has none of them"
        )


def check_scheduler(owner: str, scheduler: Any, optimizer: nn.Cell) -> None:
    """Raise an error if a learning-rate scheduler is not valid; None means no scheduler."""
    if scheduler is None:
        return
    step = getattr(scheduler, "step", None)
    arguments = inspect.signature(step).parameters.values() if step else ()
    needed = [argument for argument in arguments if argument.default is argument.empty]
    if step is None or needed or getattr(scheduler, "optimizer", None) is not optimizer:
        rule = "one of mindspore.experimental.optim.lr_scheduler for this optimizer, whose 'step()' needs no argument"
        _check.raise_invalid(TypeError, owner, "scheduler", rule, type(scheduler).__name__)
    if any("lr_float" in group for group in scheduler.optimizer.param_groups):
        value, remedy = "one of mint.optim.SGD, which ignores it", "Use mindspore.experimental.optim.SGD."
        _check.raise_invalid(TypeError, owner, "scheduler", "None", value, remedy)


def warn_if_rate_vanishes(owner: str, scheduler: Any, updates: int | None) -> None:
    """Warn if a scheduler lowers the learning rate to nothing in this number of updates.

    It was probably written for one step per epoch. Only these two are certain to lower it so far: others may end at 0
    on purpose.
    """
    if updates is None or not isinstance(scheduler, (StepLR, ExponentialLR)) or not 0 < scheduler.gamma < 1:
        return
    period = getattr(scheduler, "step_size", 1)
    exponent = updates // period * math.log10(scheduler.gamma)
    if exponent < math.log10(np.finfo(np.float32).eps):
        _check.warn(
            f"For '{owner}', '{type(scheduler).__name__}' would multiply the learning rate by 1e{exponent:.0f} in "
            f"{updates:,} updates. The driver steps 'scheduler' after each update, not after each epoch: give its "
            "periods in updates."
        )


def warn_if_rates_are_of_micro_batches(
    owner: str, optimizer: nn.Cell, micro_batches: int, updates: Callable[[], int]
) -> None:
    """Warn if a list of learning rates has one for each micro-batch: updates would use its first part only.

    Args:
        owner (str): the name used in the warning.
        optimizer (Optimizer): has the rates.
        micro_batches (int): the micro-batches of the run.
        updates (Callable): returns its updates; it is called only if there is such a list.
    """
    schedules = getattr(inner_of(optimizer), "learning_rate", None)
    cells = [cell for _, cell in schedules.cells_and_names()] if isinstance(schedules, nn.Cell) else []
    lists = [as_array(each) for cell in cells if private.is_list_of_rates(cell) for each in cell.get_parameters()]
    if any(each.size == micro_batches and np.ptp(each) for each in lists) and updates() < micro_batches:
        _check.warn(
            f"For '{owner}', the optimizer has {micro_batches:,} learning rates, one for each micro-batch, but the run "
            f"has {updates():,} updates, each of which takes one: make the list for 'updates_per_epoch' times epochs."
        )


def warn_if_no_gradient(owner: str, norm: float) -> None:
    """Warn if the norm of the first window's gradient is 0."""
    if norm == 0:
        _check.warn(
            f"For '{owner}', all gradients of the window are 0, so nothing is learned: the loss does not depend on the "
            "optimizer's parameters. Was the optimizer made with those of the network that is trained?"
        )


# The learning rate


class LearningRate:
    """Returns the learning rate of the next update (of the first parameter); NaN if it is known only to the optimizer.

    Reading changes nothing. So it does not run a `get_lr` of the user's, which may count its calls or advance
    `global_step`, as those of MindCV do, nor a schedule of the user's that has Parameters.

    Args:
        optimizer (Optimizer): the optimizer.
    """

    def __init__(self, optimizer: nn.Cell):
        inner = inner_of(optimizer)
        self._optimizer = inner.opt if isinstance(inner, nn.LARS) else inner
        self._is_known = not _may_change(getattr(self._optimizer, "learning_rate", None))
        if isinstance(inner, nn.AdaFactor) and inner.relative_step:
            self._is_known = False

    def __call__(self) -> float:
        """Return the learning rate."""
        if not self._is_known:
            return math.nan
        if getattr(self._optimizer, "param_groups", None):
            return _number(self._of_first_group())
        rate = self._optimizer.learning_rate
        rate = rate[0] if self._optimizer.is_group_lr else rate  # those of other groups would take time
        return _number(rate(self._optimizer.global_step) if self._optimizer.dynamic_lr else rate)

    def _of_first_group(self) -> Any:
        """Return the rate that the optimizer uses for its first group."""
        rate = _rate_of_group(self._optimizer.param_groups[0])
        if not isinstance(rate, float) and not type(self._optimizer).__module__.startswith("mindspore.mint"):
            rate = self._optimizer.lrs[0]
        return rate


def _may_change(schedule: Any) -> bool:
    """Return whether a schedule, or one of several, is the user's and has Parameters, which it may change."""
    cells = [cell for _, cell in schedule.cells_and_names()] if isinstance(schedule, nn.Cell) else []
    return any(private.parameters_of(cell) and not type(cell).__module__.startswith("mindspore.") for cell in cells)


def _number(rate: Any) -> float:
    return float(rate.asnumpy().reshape(())) if hasattr(rate, "asnumpy") else float(rate)


def _rate_of_group(group: Mapping[str, Any]) -> Any:
    """Return the rate of a parameter group of `experimental.optim` or `mint.optim`: a Parameter or a number."""
    return group.get("lr_float", group.get("lr"))  # `mint.optim.SGD` has both, and uses the first


def rates_of(optimizer: nn.Cell) -> dict[str, str]:
    """Return what the learning rate depends on, by name, as texts. Nothing of the optimizer is run."""
    inner = inner_of(optimizer)
    parameters = settings_of(optimizer)
    step = getattr(inner, "global_step", None)
    if isinstance(step, Parameter):
        parameters.append(step)
    rates = {f"'{parameter.name}'": _array_text(as_array(parameter)) for parameter in parameters}
    for number, group in enumerate(getattr(inner, "param_groups", ())):
        rate = _rate_of_group(group)
        if isinstance(rate, float):  # the others are among the Parameters
            rates[f"'lr' of group {number}"] = repr(rate)
    return rates


def all_parameters(optimizer: nn.Cell) -> list[Parameter]:
    """Return the optimizer's Parameters, including those in lists, which `get_parameters` does not return."""
    in_lists = parameters_in([vars(cell) for _, cell in optimizer.cells_and_names()])
    return list({id(parameter): parameter for parameter in [*optimizer.get_parameters(), *in_lists]}.values())


# The settings


def settings_of(optimizer: nn.Cell) -> list[Parameter]:
    """Return the optimizer's Parameters that are settings: neither trained weights nor its state."""
    inner = inner_of(optimizer)
    named = [getattr(inner, name, None) for name in ("learning_rate", "momentum")]
    parameters = parameters_in([*named, list(getattr(inner, "param_groups", ()))])
    unique = {id(parameter): parameter for parameter in parameters}.values()
    return excluding(unique, [*inner.parameters, *optimizer.parameters])


def parameters_in(value: Any) -> Iterator[Parameter]:
    """Yield the Parameters in nested containers, Cells and schedulers."""
    if isinstance(value, Parameter):
        yield value
    elif isinstance(value, nn.Cell):
        yield from value.get_parameters()
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from parameters_in(item)
    elif hasattr(value, "last_epoch"):  # a scheduler, which is not a Cell
        yield from parameters_in({name: item for name, item in vars(value).items() if name != "optimizer"})


def _array_text(array: np.ndarray) -> str:
    """Return an array as text, exactly; a long one by its digest."""
    if array.size == 1:
        return str(array.ravel()[0])  # 0.1 in its own type, of which a Python float shows more digits
    if array.size <= _LONGEST_ARRAY:
        return f"[{', '.join(map(str, array.ravel()))}]"
    return f"{array.size:,} numbers with the digest {digest_of([array])[:12]}"
