"""The exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from .. import _check
from ..network import tree
from ..network.parameters import as_array, unique_name, untrained, zeros_like

_OWNER = "Ema"


@ms.jit_class
class Ema:
    """The exponential moving average (EMA) of the trained weights, updated once per update.

    Pass it as `ema` to `GradientAccumulation`, `AccumulatedTrainStep`, `Accumulator` or `TrainOptim`. It starts with
    the weights after the first update; each later update sets it to ``decay * average + (1 - decay) * weights``. During
    the first `warm_up` updates it is the plain mean of the weights so far, unless `decay` gives more weight to new
    ones. A skipped window changes nothing. Untrained Parameters, such as BatchNorm's running statistics, are not
    averaged. Use a new `Ema` for each optimizer.

    Args:
        decay (float): the weight of the old average, >= 0 and < 1.
        warm_up (int): the number of first updates with a plain mean. Default: 0.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import Ema, GradientAccumulation
        >>> net, ema = MLP(), Ema(0.9, warm_up=5)
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        >>> model = GradientAccumulation(net, nn.CrossEntropyLoss(), optimizer, ema=ema)
        >>> model.train_process(1, create_dataset(image_size=28), mini_steps=4, report=(), ckpt_path=None)
        >>> with ema.applied():
        ...     print(ema.updates, ema.is_applied)
        12 True
    """

    def __init__(self, decay: float, warm_up: int = 0):
        self._decay = _check_decay(_OWNER, decay)
        if type(warm_up) is not int or warm_up < 0:
            _check.raise_invalid(ValueError, _OWNER, "warm_up", "an int >= 0", repr(warm_up))
        self._warm_up = warm_up
        self._weights: tuple = ()
        self.averages: tuple = ()
        """tuple[Parameter], the averages, in the order of the weights."""
        self._applied = False
        self.times_applied = 0
        """int, the number of times that the averages were applied."""
        name = unique_name("ema")
        self._name, self._updates = name, untrained(f"{name}.updates", 0, ms.int32)

    def begin(self, parameters: Sequence[Any]) -> None:
        """Create float32 averages of these Parameters; raise an error if it already averages others."""
        if [*map(id, parameters)] == [*map(id, self._weights)]:
            return
        if self.averages:
            _check.raise_invalid(ValueError, _OWNER, "ema", "a new one for each optimizer", "one that is in use")
        self._weights = tuple(parameters)
        self.averages = zeros_like(self._name, self._weights)

    def __call__(self, end: Any) -> Any:
        """Update the average if the weights were updated: a stage of a window's end."""
        updated = end["keep"]
        decay = ops.where(updated, self.kept(updated), Tensor(1.0, ms.float32))
        end["keep"] = ops.depend(updated, tree.update_averages(self.averages, self._weights, decay))
        return end

    def kept(self, updated: Tensor) -> Any:
        """Count an update, if it is one; return the weight of the old average, in the graph that ends a window."""
        ops.assign_add(self._updates, ops.cast(updated, ms.int32))
        count = ops.cast(self._updates, ms.float32)
        one, decay = Tensor(1.0, ms.float32), Tensor(self._decay, ms.float32)
        mean = (count - one) / ops.maximum(count, one)  # 0 at the first update, so that the initial zeros do not count
        return ops.where(count <= max(self._warm_up, 1), ops.minimum(decay, mean), decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the network's weights to the averages inside the ``with`` block, and restore them afterwards.

        Raises:
            RuntimeError: If there is no average yet, or the averages are already applied, or there were updates inside
                the block, which are lost.
        """
        if not self.averages:
            raise RuntimeError(
                "For 'Ema', 'applied' needs averages: pass the Ema as 'ema' to a driver or a step, and train with that."
            )
        if self._applied:
            raise RuntimeError("For 'Ema', the averages are already applied.")
        if not self.updates:
            raise RuntimeError("For 'Ema', there is no average before the first update.")
        copies, updates_before = [as_array(weight).copy() for weight in self._weights], self.updates
        try:
            self._applied = True
            self.times_applied += 1
            _assign(self._weights, map(as_array, self.averages))
            yield
        finally:
            _assign(self._weights, copies)
            self._applied = False
        if self.updates != updates_before:  # by a compiled step, which can't see that the averages are applied
            updates = _check.quantity(self.updates - updates_before, "update")
            raise RuntimeError(
                f"For 'Ema', 'applied' must be left before training, but got {updates} inside the block, which are "
                "lost: the weights are those from before the block."
            )

    @property
    def decay(self) -> float:
        """float, the weight of the old average; constant in the compiled graphs."""
        return self._decay

    @property
    def warm_up(self) -> int:
        """int, the number of first updates with a plain mean."""
        return self._warm_up

    @property
    def is_applied(self) -> bool:
        """bool, whether the network currently has the averaged weights."""
        return self._applied

    @property
    def updates(self) -> int:
        """int, the number of updates in the average."""
        return int(self._updates.asnumpy())

    @property
    def changed(self) -> tuple:
        """tuple[Parameter], those that the end of a window changes."""
        return (self._updates, *self.averages)

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run, and on all ranks."""
        return {"decay": self.decay, "warm_up": self.warm_up}

    @property
    def state(self) -> dict[str, Parameter]:
        """dict, its Parameters in a training state, by name."""
        named = {f"of.{weight.name}": average for weight, average in zip(self._weights, self.averages)}
        return {"updates": self._updates, **named}


def _check_decay(owner: str, decay: float) -> float:
    """Return the weight of the old value in an average, or raise an error if it is not a number >= 0 and < 1."""
    rule = "a number >= 0 and < 1"
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        _check.raise_invalid(TypeError, owner, "decay", rule, repr(decay))
    if not 0 <= decay < 1:
        _check.raise_invalid(ValueError, owner, "decay", rule, decay)
    return float(decay)


def check_not_applied(owner: str, ema: Ema | None) -> None:
    """Raise an error if the averages are applied: the block would later restore the weights, and lose the training."""
    if ema is not None and ema.is_applied:
        raise RuntimeError(f"For '{owner}', the averages of 'ema' are applied. Leave that block before training.")


def averaged(ema: Ema | None) -> AbstractContextManager[None]:
    """Apply the averages inside the block, if there are any and they are not applied yet."""
    return ema.applied() if ema is not None and ema.updates and not ema.is_applied else nullcontext()


def _assign(parameters: Sequence[Any], arrays: Any) -> None:
    for parameter, array in zip(parameters, arrays):
        ops.assign(parameter, Tensor(array).astype(parameter.dtype))
