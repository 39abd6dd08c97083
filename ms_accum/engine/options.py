"""The options that all ways to train have: documented and checked here, resolved by `config.resolve`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from ..network.compiled import check_compile
from ..ranks.group import AUTO, Group, group_of
from .ema import Ema
from .nonfinite import SKIP_WINDOW
from .stages import Stage

if TYPE_CHECKING:
    from mindspore.amp import LossScaleManager, LossScaler

_Kind = TypeVar("_Kind", bound=type)


class OptionsButClip(TypedDict, total=False):
    """The options but `clip_norm`, which an `Accumulator` gets by position, too."""

    group: Group | str | None
    sync_every_micro_batch: bool
    loss_scale: float | LossScaler | LossScaleManager | None
    nonfinite: str
    ema: Ema | None
    stages: Sequence[Stage]
    compile: bool


class Options(OptionsButClip, total=False):
    """The options that `GradientAccumulation`, `AccumulatedTrainStep` and `Accumulator` have in common.

    They are keyword arguments of all three, and a dict of them can be handed on: ``Accumulator(optimizer, 4,
    **options)``.

    Args:
        clip_norm (Optional[float]): the maximum global norm of the window's gradient. Default: ``None``, no clipping.
        group (Union[str, None, Group]): the processes that train together, each on its own data: ``"auto"`` for all
            that a launcher started, ``None`` for this process alone. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether to sum gradients over the ranks in every micro-batch instead of once per
            window. With a `ZeroOptimizer` each rank then stores only its part of the sums (ZeRO-2). Default: ``False``.
        loss_scale (Union[None, float, LossScaler, LossScaleManager]): the factor for the loss in float16, by which the
            window's gradient is divided: a number, or an object of `mindspore.amp`. A dynamic one is lowered after an
            overflow; that window is skipped and counted in `overflows`. Default: ``None``, no scaling.
        nonfinite (str): what to do with gradients that are not finite: ``"skip_window"`` skips the window;
            ``"skip_micro"`` leaves out the micro-batch, with its weight, which for windows of 1 on one device is the
            same; ``"raise"`` ends the run with an error (not for an `Accumulator`). Default: ``"skip_window"``.
        ema (Optional[Ema]): maintains an average of the weights, which evaluations use. Default: ``None``.
        stages (Sequence[Callable]): functions, Cells or objects of a ``@ms.jit_class``, which are compiled, and called
            at the end of a window as ``stage(gradients, norm)``: with its gradient as the optimizer would get it, in
            the order of ``optimizer.parameters``, after clipping, and the norm before. Each returns gradients, or
            ``(gradients, keep)``, where a false `keep` skips the window. Default: ``()``.
        compile (bool): whether networks run as compiled graphs in PyNative mode too, MindSpore's default, which is
            several times faster. ``False`` runs them there operator by operator, for debugging. Default: ``True``.

    Examples:
        >>> from mindspore import nn
        >>> from ms_accum import Accumulator, Options
        >>> options: Options = {"clip_norm": 1.0, "nonfinite": "skip_micro"}
        >>> Accumulator(nn.SGD(nn.Dense(4, 2).trainable_params(), 0.1), 4, **options).clip_norm
        1.0
    """

    clip_norm: float | None


DEFAULTS: Options = {
    "clip_norm": None,
    "group": AUTO,
    "sync_every_micro_batch": False,
    "loss_scale": None,
    "nonfinite": SKIP_WINDOW,
    "ema": None,
    "stages": (),
    "compile": True,
}


def checked(owner: str, given: Options) -> Options:
    """Return all options, of which the group and `compile` are resolved, because more depends on them."""
    for name in given:
        if name not in DEFAULTS:
            similar = get_close_matches(name, DEFAULTS, 1)
            hint = f" Did you mean '{similar[0]}'?" if similar else ""
            raise TypeError(f"{owner}() got an unexpected keyword argument '{name}'.{hint}")
    options: Options = {**DEFAULTS, **given}
    options["group"] = group_of(owner, options["group"])
    options["compile"] = check_compile(owner, options["compile"])
    return options


def with_options(kind: _Kind) -> _Kind:
    """Show the options in the signature and in the text of a class that takes them as ``**options``."""
    of_class: Any = kind
    signature = inspect.signature(of_class.__init__)
    own = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
    types = Options.__annotations__
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in DEFAULTS.items()
        if name not in own
    ]
    of_class.__init__.__signature__ = signature.replace(parameters=[*own.values(), *options])
    texts = (Options.__doc__ or "").partition("    Args:\n")[2].partition("\n\n")[0]
    before, raises, after = (kind.__doc__ or "").partition("    Raises:\n")
    kind.__doc__ = f"{before}    Args: Options\n{texts}\n\n{raises}{after}"
    return kind
