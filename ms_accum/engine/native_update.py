"""The end of a window as one operator of our own: divides, updates, averages, and empties the accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim as experimental

from ..network import tree
from ..network.kernels import operator
from ..network.optimizers import parameters_in
from .collaborators import Collaborators


@ms.jit_class
class NativeUpdate:
    """Updates in the place of an optimizer whose rule is in `native.cc`, and of `Ema.after_window`.

    Args:
        collaborators (Collaborators): what the window works with.
        rule (Union[_OfNN, _AdamW]): the optimizer's rule.
        empties (bool): whether the gradients are accumulators, which are zero after it, also if nothing is updated.
            Otherwise they are as before.
    """

    def __init__(self, collaborators: Collaborators, rule: Any, *, empties: bool):
        owner, optimizer = collaborators.owner, collaborators.optimizer

        def check() -> bool:
            """Raise an error if the optimizer would compute something else by now. Runs when a graph is compiled."""
            if type(_rule_of(optimizer)) is not type(rule):
                raise RuntimeError(
                    f"For '{owner}', 'optimizer' must keep its rule and its hooks, but got others. "
                    f"Use a new {owner} for the changed optimizer."
                )
            return True

        self.check = ops.constexpr(check, reuse_result=False)
        self.empties = empties
        """bool, whether the accumulators are zero after it."""
        self.rule = rule
        self.parameters = collaborators.parameters
        self.ema = collaborators.ema
        self.averages = () if self.ema is None else self.ema.averages
        self.operator = operator(collaborators.kernels.library, rule.name, ms.bool_)
        last = len(rule.spans) - 1
        counted = [len(rule.counters) if number == last else 0 for number in range(last + 1)]  # once for all groups
        self.groups = tuple(
            (number, start, stop, Tensor([stop - start, empties, bool(self.averages), counters], ms.int32))
            for number, (start, stop), counters in zip(range(last + 1), rule.spans, counted)
        )
        self.counters = tuple(rule.counters if counters else () for counters in counted)

    def __call__(self, finite: Any, gradients: Any, divisor: Any) -> Any:
        """Update if `finite`, which is returned. A branch is not needed, and costs more than a small update."""
        self.check()
        factor = Tensor(1.0, ms.float32) if divisor is None else 1.0 / divisor
        kept = Tensor(0.0, ms.float32) if self.ema is None else self.ema.kept(finite)
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
                kept,
                ops.cast(rates, ms.float32),  # a schedule may compute in another type
                ops.cast(decays, ms.float32),
                unscale,
                layout,
                *own,
                *self.counters[number],
                *gradients[start:stop],
                *self.parameters[start:stop],
                *states,
                *self.averages[start:stop],
            )
        return ops.depend(finite, updated)


def native_update(collaborators: Collaborators, *, empties: bool) -> NativeUpdate | None:
    """Return the operator that computes what the optimizer would; None if there is none."""
    rule = None if collaborators.kernels.library is None else _rule_of(collaborators.optimizer)
    return None if rule is None else NativeUpdate(collaborators, rule, empties=empties)


# The rules: what `native.cc` needs to know of each optimizer


@ms.jit_class
class _OfNN:
    """An optimizer of `mindspore.nn`.

    Args:
        name (str): the operator.
        optimizer (Optimizer): the optimizer.
        states (tuple): its kinds of state.
        own (Any): returns the numbers of its rule, in a graph.
    """

    def __init__(self, name: str, optimizer: nn.Optimizer, states: tuple, own: Any):
        self.name = name
        self.optimizer = optimizer
        self.states = tuple(tuple(state) for state in states)
        self.own = own
        self.changed = (optimizer.beta1_power, optimizer.beta2_power) if name == "adam" else ()
        """tuple, more Parameters that the operator changes."""
        self.counters = (optimizer.global_step,)
        self.spans = ((0, len(optimizer.parameters)),)

    def numbers(self, group: int) -> Any:
        """Return the sign of gradients, if it changes, the rates, the decays, what unscales, and its own numbers."""
        optimizer = self.optimizer
        rates = optimizer.get_lr()
        rates = _one_for_each(rates) if optimizer.is_group_lr else rates
        decays = Tensor(0.0, ms.float32)
        if optimizer.exec_weight_decay:
            decays = optimizer.get_weight_decay()
            decays = _one_for_each(decays) if optimizer.is_group else ops.cast(decays, ms.float32)
            decays = decays * Tensor(optimizer.decay_flags, ms.float32)
        unscale = optimizer.reciprocal_scale if optimizer.need_scale else Tensor(1.0, ms.float32)
        return None, rates, decays, unscale, self.own()


def _one_for_each(numbers: Any) -> Any:
    """Return one number for each parameter as a Tensor."""
    return ops.stack([ops.reshape(ops.cast(number, ms.float32), ()) for number in numbers])


def _in_float32(*numbers: Any) -> Any:
    """Return the numbers in the type that the operator reads."""
    return tuple([ops.cast(number, ms.float32) for number in numbers])


@ms.jit_class
class _Momentum:
    def __init__(self, optimizer: nn.Momentum):
        self.optimizer = optimizer

    def __call__(self) -> Any:
        return _in_float32(self.optimizer.momentum)


@ms.jit_class
class _SGD:
    def __init__(self, optimizer: nn.SGD):
        self.optimizer = optimizer
        # MindSpore's operators have these two since they were made.
        self.fixed = Tensor(optimizer.dampening, ms.float32), Tensor(optimizer.nesterov, ms.float32)

    def __call__(self) -> Any:
        return (*_in_float32(self.optimizer.momentum), *self.fixed)


@ms.jit_class
class _Adam:
    def __init__(self, optimizer: nn.Adam):
        self.optimizer = optimizer
        self.nesterov = Tensor(optimizer.use_nesterov, ms.float32)

    def __call__(self) -> Any:
        optimizer = self.optimizer
        powers = optimizer.beta1_power, optimizer.beta2_power  # which the operator changes
        return (*powers, *_in_float32(optimizer.beta1, optimizer.beta2, optimizer.eps), self.nesterov)


@ms.jit_class
class _AdamWeightDecay:
    def __init__(self, optimizer: nn.AdamWeightDecay):
        self.optimizer = optimizer

    def __call__(self) -> Any:
        return _in_float32(self.optimizer.beta1, self.optimizer.beta2, self.optimizer.eps)


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
        own = _in_float32(beta1, beta2, settings.get("eps"), ops.sqrt(correction2))
        sign = -1.0 if settings.get("maximize") else None
        return sign, rate / correction1, shrinks, Tensor(1.0, ms.float32), own


def _rule_of(optimizer: Any) -> Any:
    """Return the rule of an optimizer; None if `native.cc` does not have it, or the user has changed it."""
    kind = type(optimizer)
    changed = {"construct", "get_lr", "get_weight_decay"} & vars(optimizer).keys()
    if kind not in _RULES or changed or optimizer._forward_pre_hook or optimizer._forward_hook:
        return None
    rule = _RULES[kind](optimizer)
    if rule is None:
        return None
    arrays = [*optimizer.parameters, *(array for state in rule.states for array in state), *rule.changed]
    return rule if all(array.dtype == ms.float32 for array in arrays) else None


def _of_nn(name: str, optimizer: Any, states: tuple, own: Any) -> _OfNN | None:
    """Return the rule of an optimizer of `mindspore.nn`, unless it does more than its rule, or in another order."""
    schedules = [part for part in _flat([optimizer.learning_rate, optimizer.weight_decay]) if isinstance(part, nn.Cell)]
    cells = [cell for schedule in schedules for _, cell in schedule.cells_and_names()]
    # The rate is computed also if the window is skipped: a schedule of the user's that counts would advance.
    users = [cell for cell in cells if not type(cell).__module__.startswith("mindspore.")]
    counts = any(True for cell in users for _ in parameters_in(vars(cell)))
    more = optimizer.use_parallel or any(getattr(optimizer, "group_grad_centralization", ()))
    return None if more or counts else _OfNN(name, optimizer, states, own)


def _flat(items: Sequence[Any]) -> list[Any]:
    return [part for item in items for part in (item if isinstance(item, (tuple, list)) else (item,))]


def _momentum(optimizer: nn.Momentum) -> _OfNN | None:
    if optimizer.use_nesterov:  # which MindSpore's CPU kernel ignores
        return None
    return _of_nn("momentum", optimizer, (optimizer.moments,), _Momentum(optimizer))


def _sgd(optimizer: nn.SGD) -> _OfNN | None:
    return _of_nn("sgd", optimizer, (optimizer.accum, optimizer.stat), _SGD(optimizer))


def _adam(optimizer: nn.Adam) -> _OfNN | None:
    if optimizer.use_lazy or optimizer.use_offload or optimizer.use_amsgrad or not optimizer._is_device:
        return None
    return _of_nn("adam", optimizer, (optimizer.moment1, optimizer.moment2), _Adam(optimizer))


def _adam_weight_decay(optimizer: nn.AdamWeightDecay) -> _OfNN | None:
    states = optimizer.moments1, optimizer.moments2
    return _of_nn("adam_weight_decay", optimizer, states, _AdamWeightDecay(optimizer))


def _adamw(optimizer: experimental.AdamW) -> _AdamW | None:
    return None if any(group.get("amsgrad") for group in optimizer.param_groups) else _AdamW(optimizer)


_RULES = {
    nn.Momentum: _momentum,
    nn.SGD: _sgd,
    nn.Adam: _adam,
    nn.AdamWeightDecay: _adam_weight_decay,
    experimental.AdamW: _adamw,
}
