"""Networks, their parameters, gradients and optimizers, in one process.

Provides: functions on gradients inside graphs (`tree`), accumulators, reading and comparing Parameters (`parameters`),
training flags (`training_mode`), MindSpore's optimizers with their learning rates and settings (`optimizers`), and the
random number generators; graphs, and what is constant in them (`compiled`); MindSpore's private names (`private`). Of
other rooms it imports only our operators (`native`).
"""

import re

import mindspore as ms

from .. import _check

_NEWEST = "2.10"
"""str, the newest version of MindSpore with which all tests have passed; CONTRIBUTING says how to try another."""


def _warn_if_newer(version: str) -> None:
    """Warn if a version of MindSpore is newer than the newest that was tested."""
    found, newest = ([int(number) for number in re.findall(r"\d+", text)[:2]] for text in (version, _NEWEST))
    if found > newest:
        _check.warn(
            f"For 'ms_accum', MindSpore {version} is newer than the newest that was tested: 2.7.2 to {_NEWEST}. "
            "Run python -m ms_accum.selftest before you trust results."
        )


_warn_if_newer(ms.__version__)
