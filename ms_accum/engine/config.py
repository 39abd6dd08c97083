"""What a window works with: the arguments of a public class, checked and resolved once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import Parameter, nn

from .. import _check, native
from ..network import tree
from ..network.kernels import kernels
from ..network.optimizers import all_parameters, check_optimizer, check_trains
from ..network.parameters import has_half
from ..network.state import set_initial_values
from ..ranks.group import AUTO, Group, group_of
from ..ranks.reduction import Summing, summing
from .ema import Ema
from .loss_scale import DynamicScale, scale_of
from .nonfinite import SKIP_MICRO, SKIP_WINDOW, SkipMicro, policy_of
from .stages import Stage, UserStage, user_stages

OPTIONAL_PREFIXES = ("loss_scale", "nonfinite", "ema")
"""tuple[str], the prefixes of Parameters that only the training state, or only the resumed run, may have."""


@dataclass(frozen=True)
class WindowConfig:
    """What a window works with. What is absent is not in the graph."""

    owner: str
    """The name used in error messages."""
    optimizer: Any
    """Updates the parameters."""
    compiles: bool
    """Whether Cells are compiled in PyNative mode, too."""
    kernels: Any
    """Measure and empty gradients: MindSpore's, or our own."""
    weighted: bool
    """Whether the window's gradient is divided by the sum of the weights."""
    clip_norm: float | None
    """The maximum norm of the window's gradient."""
    group: Group | None
    """The ranks that train together; None for a single process."""
    summing: Summing
    """When gradients are summed over the ranks, and the shapes of the accumulators."""
    scale: float
    """The loss scale, if it is constant."""
    dynamic: DynamicScale | None
    """The loss scale, if it is dynamic."""
    skips: SkipMicro | None
    """Leaves out micro-batches."""
    policy: str
    """What to do with gradients that are not finite."""
    ema: Ema | None
    """The average of the weights."""
    stages: tuple[UserStage, ...]
    """What the user does with the window's gradient."""
    shares: bool
    """Whether weights are the micro-batches' shares of the window, which add up to 1."""
    half: bool
    """Whether gradients may be float16, of which a loss scale is a sign, too."""

    @property
    def weighs_loss(self) -> bool:
        """bool, whether a share multiplies the loss, at no cost: MindSpore needs an array to multiply a gradient.

        Not in float16, where the product may become 0. With our operators, which multiply while they add, it would save
        nothing; nor on ranks.
        """
        return self.shares and self.group is None and not self.half and self.kernels.library is None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """tuple[Parameter], the trained parameters."""
        return tuple(self.optimizer.parameters)

    @property
    def changing_scale(self) -> Parameter | None:
        """Optional[Parameter], the dynamic loss scale."""
        return None if self.dynamic is None else self.dynamic.value

    @property
    def scales(self) -> bool:
        """bool, whether there is a loss scale."""
        return self.scale != 1.0 or self.dynamic is not None

    @property
    def loss_scale(self) -> float:
        """float, the current loss scale; 1 if there is none."""
        return self.scale if self.dynamic is None else float(self.dynamic.value.asnumpy())

    @property
    def overflows(self) -> int:
        """int, the windows so far that lowered the loss scale."""
        return 0 if self.dynamic is None else int(self.dynamic.overflows.asnumpy())

    @property
    def left_out(self) -> int:
        """int, the micro-batches left out so far, on all ranks."""
        return 0 if self.skips is None else int(self.skips.left_out.asnumpy())

    @property
    def state(self) -> dict[str, Any]:
        """dict, the Parameters in a training state, by owner and name."""
        parameters: dict[str, Any] = {}
        if self.dynamic is not None:
            parameters |= {f"loss_scale.{name}": parameter for name, parameter in self.dynamic.state.items()}
        if self.skips is not None:
            parameters["nonfinite.left_out"] = self.skips.left_out
        if self.ema is not None:
            parameters |= {f"ema.{name}": parameter for name, parameter in self.ema.state.items()}
        for stage in self.stages:
            parameters |= stage.state
        return parameters

    @property
    def changed(self) -> list[Any]:
        """list[Parameter], those that the end of a window changes or reads, in addition to the optimizer's."""
        skip_counts = [] if self.skips is None else [self.skips.counts, self.skips.uncounted]
        of_ema = [] if self.ema is None else [*self.ema.parameters]
        return [*self.state.values(), *skip_counts, *of_ema]

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run; of what is optional only what is given."""
        settings: dict[str, Any] = {"clip_norm": self.clip_norm}
        if self.scales:
            settings["loss_scale"] = self.scale if self.dynamic is None else "dynamic"
        if self.policy != SKIP_WINDOW:
            settings["nonfinite"] = self.policy
        if self.ema is not None:
            settings["ema"] = self.ema.settings
        if self.stages:
            settings["stages"] = [stage.name for stage in self.stages]
        return settings

    @property
    def equal_on_ranks(self) -> dict[str, Any]:
        """dict, what must be equal on all ranks, in the words of `ranks.agreement.agree`."""
        scale, dynamic = f"{self.loss_scale:g}", self.dynamic
        if dynamic is not None:
            scale = f"a dynamic one of {scale}, times {dynamic.factor:g} after {dynamic.window} updates"
        return {
            "'compile'": self.compiles,
            "'clip_norm'": self.clip_norm,
            f"C++ operators ({native.SWITCH}=0 turns them off)": "none" if self.kernels.library is None else "all",
            "'loss_scale'": scale,
            "'nonfinite'": self.policy,
            "'ema'": None if self.ema is None else self.ema.settings,
            "'stages'": [stage.name for stage in self.stages],
        }


def resolve(
    owner: str,
    optimizer: Any,
    network: nn.Cell | None = None,
    *,
    weighted: bool,
    clip_norm: float | None = None,
    group: Any = AUTO,
    sync_every_micro_batch: bool = False,
    loss_scale: Any = None,
    nonfinite: Any = SKIP_WINDOW,
    ema: Ema | None = None,
    stages: Sequence[Stage] = (),
    compiles: bool,
    in_graph: bool = False,
    shares: bool = False,
    accumulators: Sequence[Parameter] = (),
) -> WindowConfig:
    """Check the arguments of a public class, and return what its window works with.

    Args:
        owner (str): the name used in error messages.
        optimizer (Optimizer): updates the parameters.
        network (Optional[Cell]): what is differentiated, if it is available. Default: ``None``.
        weighted (bool): whether the window's gradient is a weighted mean.
        clip_norm, group, sync_every_micro_batch, loss_scale, nonfinite, ema, stages: as for `GradientAccumulation`.
        compiles (bool): whether Cells are compiled in PyNative mode, from `check_compile`.
        in_graph (bool): whether the user ends windows in a graph, which can't raise an error. Default: ``False``.
        shares (bool): whether weights are the micro-batches' shares of the window. Default: ``False``.
        accumulators (Sequence[Parameter]): the accumulators, if the user made them. Default: none.
    """
    check_optimizer(owner, optimizer, compiles)
    used = kernels(compiles, accumulators)
    if clip_norm is not None:
        clip_norm = _check.positive_number(owner, "clip_norm", clip_norm)
    group = group_of(owner, group)
    scale, dynamic = scale_of(owner, loss_scale, optimizer)
    policy = policy_of(owner, nonfinite, in_graph=in_graph)
    skips = SkipMicro() if policy == SKIP_MICRO else None
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
        weighted=weighted,
        clip_norm=clip_norm,
        group=group,
        summing=summing(owner, optimizer, group, sync_every_micro_batch, used),
        scale=scale,
        dynamic=dynamic,
        skips=skips,
        policy=policy,
        ema=ema,
        stages=user_stages(owner, stages, optimizer, network),
        shares=shares,
        half=scale != 1.0 or dynamic is not None or (network is not None and has_half(network)),
    )
