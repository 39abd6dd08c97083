"""The options that all ways to train have, and what follows from them: what a window works with, resolved once."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from mindspore import Parameter, nn

from .. import _check, native
from ..network import tree
from ..network.compiled import check_compile
from ..network.kernels import kernels
from ..network.optimizers import all_parameters, check_optimizer, check_trains
from ..network.parameters import has_half, set_initial_values
from ..ranks.group import AUTO, Group, group_of
from ..ranks.reduction import Summing, summing
from .ema import Ema
from .loss_scale import DynamicScale, LossScale, scale_of
from .nonfinite import SKIP_MICRO, SKIP_WINDOW, SkipMicro, policy_of
from .stages import Stage, user_stages

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
    hidden = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL  # what is surplus, to be rejected
    own = {name: each for name, each in signature.parameters.items() if each.kind not in hidden}
    types = Options.__annotations__
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name].__forward_arg__)
        for name, default in DEFAULTS.items()
        if name not in own
    ]
    of_class.__init__.__signature__ = signature.replace(parameters=[*own.values(), *options])
    if not kind.__doc__:  # python -OO
        return kind
    texts = (Options.__doc__ or "").partition("    Args:\n")[2].partition("\n\n")[0]
    before, raises, after = kind.__doc__.partition("    Raises:\n")
    kind.__doc__ = f"{before}    Args: Options\n{texts}\n\n{raises}{after}"
    return kind


@dataclass(frozen=True, eq=False)
class WindowConfig:
    """What a window works with. What is absent is not in the graph."""

    owner: str
    """The name used in error messages."""
    optimizer: nn.Cell
    """Updates the parameters."""
    compiles: bool
    """Whether Cells are compiled in PyNative mode, too."""
    kernels: Any
    """Measure and empty gradients: MindSpore's, or our own."""
    divides: bool
    """Whether the window's gradient is divided by the sum of the weights."""
    shares: bool
    """Whether weights are the micro-batches' shares of the window, which add up to 1."""
    half: bool
    """Whether gradients may be float16, of which a loss scale is a sign, too."""
    clip_norm: float | None
    """The maximum norm of the window's gradient."""
    group: Group | None
    """The ranks that train together; None for a single process."""
    summing: Summing
    """When gradients are summed over the ranks, and the shapes of the accumulators."""
    policy: str
    """What to do with gradients that are not finite."""
    scale: LossScale | DynamicScale
    """The loss scale."""
    skips: SkipMicro | None
    """Leaves out micro-batches."""
    ema: Ema | None
    """The average of the weights."""
    stages: dict[str, Any]
    """What changes the window's gradient between clipping and the update, in this order, by option."""

    @property
    def parts(self) -> dict[str, Any]:
        """dict, what takes part in a window, by the name of its option: each has `state`, `changed` and `settings`."""
        named = {"loss_scale": self.scale, "nonfinite": self.skips, "ema": self.ema, **self.stages}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def state(self) -> dict[str, Any]:
        """dict, the Parameters in a training state, by owner and name."""
        states = {name: part.state for name, part in self.parts.items()}
        return {f"{owner}.{name}": parameter for owner, state in states.items() for name, parameter in state.items()}

    @property
    def changed(self) -> list[Any]:
        """list[Parameter], those that the end of a window changes or reads, in addition to the optimizer's."""
        return [parameter for part in self.parts.values() for parameter in part.changed]

    @property
    def settings(self) -> dict[str, Any]:
        """dict, what must be equal in a resumed run and on all ranks; of what is optional only what is given."""
        policy = {} if self.policy == SKIP_WINDOW else {"nonfinite": self.policy}
        of_parts = {name: part.settings for name, part in self.parts.items() if part.settings is not None}
        return {"clip_norm": self.clip_norm, **policy, **of_parts}

    @property
    def facts(self) -> dict[str, Any]:
        """dict, what must be equal on all ranks, in words that follow "all ranks must have the same"."""
        return {
            **{f"'{name}'": value for name, value in self.settings.items()},
            "'compile'": self.compiles,
            "'sync_every_micro_batch'": self.summing.of_micro_batch is not None,
            "loss scale": f"{self.scale.number:g}",
            f"C++ operators ({native.SWITCH}=0 turns them off)": "none" if self.kernels.library is None else "all",
        }

    @property
    def weight_in_loss(self) -> bool:
        """bool, whether a share multiplies the loss, at no cost: MindSpore needs an array to multiply a gradient.

        Not in float16, where the product may become 0. With our operators, which multiply while they add, it would save
        nothing; nor on ranks.
        """
        return self.shares and self.group is None and not self.half and self.kernels.library is None

    @property
    def ends_in_graph(self) -> bool:
        """bool, whether a window's end needs nothing from the host: no sum over ranks, no loss for its scale."""
        return self.group is None and self.scale.value is None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """tuple[Parameter], the trained parameters."""
        return tuple(self.optimizer.parameters)

    @property
    def left_out(self) -> int:
        """int, the micro-batches left out so far, on all ranks."""
        return 0 if self.skips is None else int(self.skips.left_out.asnumpy())


def resolve(
    owner: str,
    optimizer: nn.Cell,
    network: nn.Cell | None,
    options: Options,
    *,
    divides: bool,
    shares: bool = False,
    in_graph: bool = False,
    accumulators: Sequence[Parameter] = (),
) -> WindowConfig:
    """Check the arguments of a public class, and return what its window works with.

    Args:
        owner (str): the name used in error messages.
        optimizer (Optimizer): updates the parameters.
        network (Optional[Cell]): what is differentiated, if it is available.
        options (Options): all of them, from `checked`.
        divides (bool): whether the window's gradient is a weighted mean.
        shares (bool): whether weights are the micro-batches' shares of the window. Default: ``False``.
        in_graph (bool): whether the user ends windows in a graph, which can't raise an error. Default: ``False``.
        accumulators (Sequence[Parameter]): the accumulators, if the user made them. Default: none.
    """
    compiles, clip_norm, ema = options["compile"], options["clip_norm"], options["ema"]
    group: Any = options["group"]
    check_optimizer(owner, optimizer, compiles)
    used = kernels(compiles, accumulators)
    if clip_norm is not None:
        clip_norm = _check.positive_number(owner, "clip_norm", clip_norm)
    scale = scale_of(owner, options["loss_scale"], optimizer)
    policy = policy_of(owner, options["nonfinite"], in_graph=in_graph)
    if ema is not None:
        _check.instance(owner, "ema", ema, Ema, "an Ema", "Write Ema(0.999).").begin(optimizer.parameters)
    if network is not None:
        check_trains(owner, optimizer, network)
        tree.check_dense(owner, network, optimizer.parameters)
    in_network = [] if network is None else network.get_parameters()
    set_initial_values([*all_parameters(optimizer), *in_network, *accumulators])
    return WindowConfig(
        owner=owner,
        optimizer=optimizer,
        compiles=compiles,
        kernels=used,
        divides=divides,
        shares=shares,
        half=scale.is_used or (network is not None and has_half(network)),
        clip_norm=clip_norm,
        group=group,
        summing=summing(owner, optimizer, group, options["sync_every_micro_batch"], used),
        policy=policy,
        scale=scale,
        skips=SkipMicro() if policy == SKIP_MICRO else None,
        ema=ema,
        stages=user_stages(owner, options["stages"], optimizer, network),
    )
