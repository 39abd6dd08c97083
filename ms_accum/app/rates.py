"""Learning rates by update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule


class _RateByUpdate(LearningRateSchedule):
    """A schedule with one rate per update; the last rate is used for all later updates."""

    def __init__(self, rates: Sequence[float]):
        super().__init__()
        self.rates = Tensor(rates, ms.float32)
        self.last = len(rates) - 1

    def construct(self, global_step: Any) -> Any:
        return self.rates[ops.minimum(global_step, self.last)]


def rate_by_update(rates: Sequence[float]) -> Any:
    """Return an optimizer's `learning_rate` with one rate per update; the last is used for all later updates."""
    return rates[0] if len(rates) == 1 else _RateByUpdate(rates)
