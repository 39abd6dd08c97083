"""Which collaborators does a window have?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _check
from ..layers.batch_norm import pooled_of
from .ema import Ema
from .loss_scale import DynamicScale, scale_of
from .noise_scale import NoiseScale
from .nonfinite import SKIP_MICRO, SKIP_WINDOW, SkipMicro, policy_of

OWNERS = ("loss_scale", "nonfinite", "ema")
"""tuple[str], the owners of Parameters in training states that are optional for a run."""


class Numerics(NamedTuple):
    """The collaborators that the forward and the boundary share. What is absent is not in the graph."""

    scale: float = 1.0
    """The loss scale, if it is constant."""
    dynamic: DynamicScale | None = None
    """The loss scale, if it is dynamic."""
    skips: SkipMicro | None = None
    """Leaves out micro-batches."""
    after: tuple = ()
    """Objects whose `after_window` is called at the end of a window."""
    policy: str = SKIP_WINDOW
    """What to do with gradients that are not finite."""
    ema: Ema | None = None
    """The average of the weights."""
    noise: NoiseScale | None = None
    """Estimates the noise scale from the norms of gradients."""

    @property
    def changing(self) -> Any:
        """Optional[Parameter], the dynamic loss scale."""
        return None if self.dynamic is None else self.dynamic.value

    @property
    def scales(self) -> bool:
        """bool, whether there is a loss scale."""
        return self.scale != 1.0 or self.dynamic is not None

    @property
    def value(self) -> float:
        """float, the current loss scale."""
        return self.scale if self.dynamic is None else float(self.dynamic.value.asnumpy())

    @property
    def state(self) -> dict[str, Any]:
        """dict, the Parameters in a training state, by owner and name."""
        held: dict[str, Any] = {}
        if self.dynamic is not None:
            held |= {f"loss_scale.{name}": each for name, each in self.dynamic.state.items()}
        if self.skips is not None:
            held["nonfinite.left_out"] = self.skips.left_out
        if self.ema is not None:
            held |= {f"ema.{name}": each for name, each in self.ema.state.items()}
        return held

    @property
    def changed(self) -> list[Any]:
        """list[Parameter], those that the end of a window changes or reads, in addition to the optimizer's."""
        of_skips = [] if self.skips is None else [self.skips.counts, self.skips.own]
        return [*self.state.values(), *of_skips, *(parameter for each in self.after for parameter in each.parameters)]

    def clear(self) -> None:
        """Discard what layers have collected in an open window."""
        for each in self.after:
            if hasattr(each, "clear"):
                each.clear()

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run, without those that were not given."""
        given: dict[str, Any] = {}
        if self.scales:
            given["loss_scale"] = self.scale if self.dynamic is None else "dynamic"
        if self.policy != SKIP_WINDOW:
            given["nonfinite"] = self.policy
        if self.ema is not None:
            given["ema"] = self.ema.settings
        if self.noise is not None:
            given["noise_scale"] = self.noise.settings
        return given

    @property
    def facts(self) -> dict[str, Any]:
        """dict, what a training state holds of them that is not a Parameter."""
        return {"noise": None if self.noise is None else self.noise.state}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Continue from the facts of a training state."""
        if self.noise is not None:
            self.noise.load(facts["noise"])

    @property
    def equal_on_ranks(self) -> dict[str, Any]:
        """dict, what must be equal on all ranks, in the words of `ranks.agreement.agree`."""
        scale, dynamic = f"{self.value:g}", self.dynamic
        if dynamic is not None:
            scale = f"a dynamic one of {scale}, times {dynamic.factor:g} after {dynamic.window} updates"
        return {
            "'loss_scale'": scale,
            "'nonfinite'": self.policy,
            "'ema'": None if self.ema is None else self.ema.settings,
            "'noise_scale'": "none" if self.noise is None else "given",
        }

    @property
    def shared(self) -> dict[str, Any]:
        """dict, the arguments of a Cell that shares these collaborators."""
        return {
            "loss_scale": self.dynamic or (None if self.scale == 1.0 else self.scale),
            "nonfinite": self.skips or SKIP_WINDOW,
        }

    @property
    def overflows(self) -> int:
        """int, the windows so far that lowered the loss scale."""
        return 0 if self.dynamic is None else int(self.dynamic.overflows.asnumpy())

    @property
    def left_out(self) -> int:
        """int, the micro-batches left out so far."""
        return 0 if self.skips is None else int(self.skips.left_out.asnumpy())


NONE = Numerics()
"""Numerics, without collaborators."""


def numerics_of(
    owner: str,
    optimizer: Any,
    *,
    loss_scale: Any = None,
    nonfinite: str = SKIP_WINDOW,
    ema: Any = None,
    noise_scale: Any = None,
    in_graph: bool = False,
) -> Numerics:
    """Return the collaborators for the user's arguments.

    Args:
        owner (str): the name used in error messages.
        optimizer (Optimizer): updates the parameters that `ema` averages.
        loss_scale, nonfinite, ema, noise_scale: the arguments, or existing collaborators to share.
        in_graph (bool): whether the end of a window is inside the user's graph. Default: ``False``.
    """
    scale, dynamic = scale_of(owner, loss_scale, optimizer)
    policy = policy_of(owner, nonfinite, in_graph=in_graph)
    skips = nonfinite if isinstance(nonfinite, SkipMicro) else SkipMicro() if policy == SKIP_MICRO else None
    after: tuple = tuple(pooled_of(optimizer.parameters))
    if ema is not None:
        _check.instance(owner, "ema", ema, Ema, "an Ema").begin(optimizer.parameters)
        after = (ema, *after)
    if noise_scale is not None:
        _check.instance(owner, "noise_scale", noise_scale, NoiseScale, "a NoiseScale")
    return Numerics(scale, dynamic, skips, after, policy, ema, noise_scale)
