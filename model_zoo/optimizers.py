"""Which optimizers do the programs know?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspore import nn

OPTIMIZERS = ("momentum", "sgd", "adam", "adamw")


def make_optimizer(name: str, parameters: list, *, lr: float, momentum: float, weight_decay: float) -> nn.Optimizer:
    """Return an optimizer by name; Adam and AdamW have no momentum of this kind."""
    from mindspore import nn  # programs use the names for flags, before

    if name in ("adam", "adamw"):
        adaptive: Any = nn.Adam if name == "adam" else nn.AdamWeightDecay
        return adaptive(parameters, lr, weight_decay=weight_decay)
    kind = nn.SGD if name == "sgd" else nn.Momentum
    return kind(parameters, learning_rate=lr, momentum=momentum, weight_decay=weight_decay)
