"""The end of a window as one operator of our own: divides, updates, averages, and empties the accumulators."""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim as experimental

from ..network import tree
from ..network.kernels import operator
from ..network.optimizers import parameters_in
from ..network.private import has_hooks, runs_on_device
from .config import WindowConfig


@ms.jit_class
class NativeUpdate:
    """Updates in the place of an optimizer whose rule is in `native.cc`, and of `Ema`.

    Args:
        config (WindowConfig): what the window works with.
        rule (Union[_OfNN, _AdamW]): the optimizer's rule.
        emptied (tuple[Parameter]): the accumulators to be zero after it, also if nothing is updated.
        in_one_pass (bool): whether the gradients are these accumulators, so that one pass is enough.
    """

    def __init__(self, config: WindowConfig, rule: Any, emptied: tuple, *, in_one_pass: bool):
        owner, optimizer = config.owner, config.optimizer

        def check() -> bool:
            """Raise an error if the optimizer would compute something else by now. Runs when a graph is compiled."""
            if type(_rule_of(optimizer)) is not type(rule):
                raise RuntimeError(
                    f"For '{owner}', 'optimizer' must keep its rule and its hooks, but got others. "
                    f"Use a new {owner} for the changed optimizer."
                )
            return True

        self.check = ops.constexpr(check, reuse_result=False)
        empties = bool(emptied) and in_one_pass
        self.kernels, self.emptied = config.kernels, () if empties else emptied
        self.rule = rule
        self.parameters = config.parameters
        self.ema = config.ema
        self.averages = () if self.ema is None else self.ema.averages
        self.operator = operator(config.kernels.library, rule.name, ms.bool_)
        # All groups have the same counters, so the last one advances them.
        self.counters = (*[()] * (len(rule.spans) - 1), rule.counters)
        self.groups = tuple(
            (number, start, stop, Tensor([stop - start, empties, bool(self.averages), len(counters)], ms.int32))
            for number, ((start, stop), counters) in enumerate(zip(rule.spans, self.counters))
        )

    def __call__(self, end: Any) -> Any:
        """Update, or skip. A branch is not needed, and costs more than a small update."""
        self.check()
        finite, gradients, divisor = end["keep"], end["gradients"], end["divisor"]
        factor = Tensor(1.0, ms.float32) if divisor is None else 1.0 / divisor
        ema_decay = Tensor(0.0, ms.float32) if self.ema is None else self.ema.kept(finite)
        gradients = tree.in_float32(gradients)
        updated: Any = ()
        for number, start, stop, layout in self.groups:
            sign, rates, decays, unscale, own = self.rule.numbers(number)
            states: Any = ()
            for state in self.rule.states:
                states = states + state[start:stop]
            updated = self.operator(
                finite,
                ops.cast(factor if sign is None else factor * sign, ms.float32),
                ema_decay,
                ops.cast(rates, ms.float32),  # a schedule may compute in another type
                ops.cast(decays, ms.float32),
                ops.cast(unscale, ms.float32),
                layout,
                *own,
                *self.counters[number],
                *gradients[start:stop],
                *self.parameters[start:stop],
                *states,
                *self.averages[start:stop],
            )
        if self.emptied:
            updated = (updated, self.kernels.clear(self.emptied))
        end["keep"] = ops.depend(finite, updated)
        return end


def native_update(config: WindowConfig, emptied: tuple, *, in_one_pass: bool, as_computed: bool) -> NativeUpdate | None:
    """Return the operator that computes what the optimizer would; None if there is none.

    `as_computed` gradients may be trained parameters themselves, as that of a in a * b is b. The operator sees to it
    where it updates all of them, but not where it is called for one group after the other.
    """
    rule = None if config.kernels.library is None else _rule_of(config.optimizer)
    if rule is None or (as_computed and len(rule.spans) > 1):
        return None
    return NativeUpdate(config, rule, emptied, in_one_pass=in_one_pass)


# The rules: what `native.cc` needs of each optimizer


class _Names(NamedTuple):
    """What the operator for an optimizer of `mindspore.nn` needs, by the names of the optimizer's attributes."""

    operator: str
    """The operator of `native.cc`."""
    states: tuple[str, ...]
    """The kinds of state."""
    changed: tuple[str, ...] = ()
    """The numbers that an update changes."""
    numbers: tuple[str, ...] = ()
    """The numbers after those, which may change between graphs."""
    fixed: tuple[str, ...] = ()
    """The numbers after those, which MindSpore's operators have had since they were made."""
    unless: tuple[str, ...] = ()
    """What is true if the optimizer has another rule."""


# What else is read of an optimizer. MindSpore documents none of it; without a name, MindSpore's optimizer updates.
_READ_OF_NN = ("global_step", "is_group", "is_group_lr", "exec_weight_decay", "decay_flags", "need_scale")
_READ_OF_ADAMW = ("param_groups", "lrs", "exp_avg", "exp_avg_sq", "state_step", "group_start_id")
_OF_NN = {
    nn.SGD: _Names("sgd", ("accum", "stat"), numbers=("momentum",), fixed=("dampening", "nesterov")),
    # MindSpore's CPU kernel ignores `use_nesterov`.
    nn.Momentum: _Names("momentum", ("moments",), numbers=("momentum",), unless=("use_nesterov",)),
    nn.Adam: _Names(
        "adam",
        ("moment1", "moment2"),
        changed=("beta1_power", "beta2_power"),
        numbers=("beta1", "beta2", "eps"),
        fixed=("use_nesterov",),
        unless=("use_lazy", "use_offload", "use_amsgrad"),
    ),
    nn.AdamWeightDecay: _Names("adam_weight_decay", ("moments1", "moments2"), numbers=("beta1", "beta2", "eps")),
}


@ms.jit_class
class _OfNN:
    """The rule of an optimizer of `mindspore.nn`.

    Args:
        optimizer (Optimizer): the optimizer.
        names (_Names): what the operator needs.
    """

    def __init__(self, optimizer: nn.Optimizer, names: _Names):
        self.name = names.operator
        self.optimizer = optimizer
        self.states = tuple(tuple(getattr(optimizer, name)) for name in names.states)
        self.changed = tuple(getattr(optimizer, name) for name in names.changed)
        """tuple, the numbers that the operator changes."""
        self.followed = names.numbers
        self.fixed = tuple(Tensor(getattr(optimizer, name), ms.float32) for name in names.fixed)
        self.counters = (optimizer.global_step,)
        self.spans = ((0, len(optimizer.parameters)),)

    def numbers(self, group: int) -> Any:
        """Return the sign of gradients, if it changes, the rates, the decays, what unscales, and its own numbers."""
        optimizer = self.optimizer
        rates = optimizer.get_lr()
        rates = tree.stacked(rates) if optimizer.is_group_lr else rates
        decays = Tensor(0.0, ms.float32)
        if optimizer.exec_weight_decay:
            decays = optimizer.get_weight_decay()
            decays = tree.stacked(decays) if optimizer.is_group else ops.cast(decays, ms.float32)
            decays = decays * Tensor(optimizer.decay_flags, ms.float32)
        unscale = optimizer.reciprocal_scale if optimizer.need_scale else Tensor(1.0, ms.float32)
        followed = [getattr(optimizer, name) for name in self.followed]
        return None, rates, decays, unscale, (*self.changed, *_in_float32(followed), *self.fixed)


def _in_float32(numbers: Any) -> Any:
    """Return the numbers in the type that the operator reads."""
    return tuple([ops.cast(number, ms.float32) for number in numbers])


@ms.jit_class
class _AdamW:
    """`mindspore.experimental.optim.AdamW`, which has its numbers in groups."""

    name = "adamw"
    changed = ()

    def __init__(self, optimizer: experimental.AdamW):
        self.optimizer = optimizer
        self.states = tuple(optimizer.exp_avg), tuple(optimizer.exp_avg_sq)
        self.counters = (optimizer.state_step,)
        self.spans = tuple(zip(optimizer.group_start_id, optimizer.group_start_id[1:]))

    def numbers(self, group: int) -> Any:
        """Do what `_OfNN.numbers` does. The corrections are those of MindSpore, operation by operation."""
        optimizer = self.optimizer
        settings = optimizer.param_groups[group]
        beta1, beta2 = settings["betas"]
        rate = optimizer.lrs[group]
        if isinstance(settings.get("lr"), float):
            rate = ops.cast(settings.get("lr"), ms.float32)
        step = optimizer.state_step + 1
        correction1, correction2 = 1 - ops.pow(beta1, step), 1 - ops.pow(beta2, step)
        shrinks = 1 - rate * settings.get("weight_decay")
        own = _in_float32((beta1, beta2, settings.get("eps"), ops.sqrt(correction2)))
        sign = -1.0 if settings.get("maximize") else None
        return sign, rate / correction1, shrinks, Tensor(1.0, ms.float32), own


def _rule_of(optimizer: Any) -> _OfNN | _AdamW | None:
    """Return the rule of an optimizer; None if `native.cc` does not have it, or the user has changed it."""
    kind = type(optimizer)
    if kind is experimental.AdamW:
        fits = _has(optimizer, _READ_OF_ADAMW) and not any(group.get("amsgrad") for group in optimizer.param_groups)
    else:
        fits = kind in _OF_NN and _has_only(optimizer, _OF_NN[kind])
    if not fits or {"construct", "get_lr", "get_weight_decay"} & vars(optimizer).keys():
        return None
    if has_hooks(optimizer):
        return None
    rule = _AdamW(optimizer) if kind is experimental.AdamW else _OfNN(optimizer, _OF_NN[kind])
    arrays = [*optimizer.parameters, *(array for state in rule.states for array in state), *rule.changed]
    return rule if all(array.dtype == ms.float32 for array in arrays) else None


def _has(optimizer: nn.Cell, names: tuple[str, ...]) -> bool:
    return all(hasattr(optimizer, name) for name in names)


def _has_only(optimizer: nn.Optimizer, names: _Names) -> bool:
    """Return whether an optimizer of `mindspore.nn` computes what its rule describes, and nothing else."""
    read = (*_READ_OF_NN, *names.states, *names.changed, *names.numbers, *names.fixed, *names.unless, "use_parallel")
    if not _has(optimizer, read):
        return False
    if any(getattr(optimizer, name) for name in names.unless) or not runs_on_device(optimizer):
        return False
    if optimizer.use_parallel or any(getattr(optimizer, "group_grad_centralization", ())):
        return False
    # The rate is computed also if the window is skipped: a schedule of the user's that counts would advance.
    schedules: list[Any] = []
    for setting in (optimizer.learning_rate, optimizer.weight_decay):
        schedules += setting if isinstance(setting, (tuple, list)) else (setting,)
    cells = [cell for schedule in schedules if isinstance(schedule, nn.Cell) for _, cell in schedule.cells_and_names()]
    users = [cell for cell in cells if not type(cell).__module__.startswith("mindspore.")]
    return not any(True for cell in users for _ in parameters_in(vars(cell)))
