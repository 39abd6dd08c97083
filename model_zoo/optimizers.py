"""The optimizers of the programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspore import nn

OPTIMIZERS = ("momentum", "sgd", "adam", "adamw")


def make_optimizer(
    name: str, parameters: list, *, lr: float, momentum: float, weight_decay: float, beta2: float | None = None
) -> nn.Optimizer:
    """Return one of `OPTIMIZERS` by name, for a program's flags.

    Args:
        name (str): ``"momentum"``, ``"sgd"``, ``"adam"`` or ``"adamw"``.
        parameters (list): The parameters to train, as for MindSpore's optimizers.
        lr (Union[float, LearningRateSchedule]): The learning rate.
        momentum (float): The momentum; not used by Adam and AdamW.
        weight_decay (float): The weight decay.
        beta2 (Optional[float]): The decay of the second moment of Adam and AdamW. Default: ``None``, 0.999.

    Returns:
        Optimizer, of `mindspore.nn`.
    """
    from mindspore import nn  # here, because flags need the names before MindSpore is imported

    if name in ("adam", "adamw"):
        adaptive: Any = nn.Adam if name == "adam" else nn.AdamWeightDecay
        return adaptive(parameters, lr, beta2=0.999 if beta2 is None else beta2, weight_decay=weight_decay)
    kind = nn.SGD if name == "sgd" else nn.Momentum
    return kind(parameters, learning_rate=lr, momentum=momentum, weight_decay=weight_decay)
