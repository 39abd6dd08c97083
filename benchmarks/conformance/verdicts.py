"""What became of a case: right, or how far off and by which fault; and what is not a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import oracle
from .case import Case

RIGHT, OFF, POISONED, WARNS, SILENT = "right", "off", "poisoned", "warns", "silent"
REFUSES, CANNOT, UNTRIED, DIED = "refuses", "cannot", "untried", "died"
EXPLAINED = 2e-3
"""float, how near a result must be to that of a fault to be named after it."""
ROUNDED = 1e-2
"""float, the same in float16."""
_BATCH_NORM = re.compile(r"batch.?norm", re.IGNORECASE)


class Judge:
    """Compares results of a case with what is expected, and with what known faults end with.

    Args:
        case (Case): the case.
    """

    def __init__(self, case: Case):
        self.case = case
        self._compared = "average" if case.average else "evaluated" if case.evaluates else "weights"
        self._expected = oracle.expected(case)
        self._faults = oracle.faults_of_float16(case) if case.dtype == "float16" else oracle.faults(case)

    def verdict(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a cell from the answer of a program."""
        for kind in (CANNOT, REFUSES, DIED):
            if kind in answer:
                untried = answer[kind].startswith("not tried")
                return {"verdict": UNTRIED if untried else kind, "words": answer[kind]}
        got = {name: answer[name] for name in ("weights", "average", "evaluated") if answer.get(name) is not None}
        if self._compared not in got:
            return {"verdict": CANNOT, "words": f"no {self._compared}"}
        arrays = {name: np.array(value, np.float64) for name, value in got.items()}
        cell = {"updates": answer["updates"], "expected_updates": self._expected[0].updates}
        if answer.get("reductions") is not None:
            cell["reductions"] = answer["reductions"]
        if not np.isfinite(arrays[self._compared]).all():
            return {"verdict": POISONED, **cell}
        error = min(self._error(arrays[self._compared], right, self._compared) for right in self._expected)
        cell["error"] = float(f"{error:.3g}")
        if error <= self.case.tolerance:
            return {"verdict": RIGHT, **cell}
        if self.case.batch_norm:
            warned = _BATCH_NORM.search(answer["words"])
            return {"verdict": WARNS if warned else SILENT, **cell}
        return {"verdict": OFF, **cell, "fault": self._fault(arrays)}

    def _fault(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Return the fault, with the fewest causes, whose results these are."""
        for names in (tuple(arrays), (self._compared,)):
            for fault, made in self._faults.items():
                if all(self._is(arrays[name], made, name) for name in names):
                    return fault
        return None

    def _is(self, got: np.ndarray, made: oracle.Trained, name: str) -> bool:
        """Return whether a result is that of a fault."""
        wanted = getattr(made, name)
        moved = max(np.linalg.norm(wanted - np.array(self.case.start)), 1e-6)
        return bool(np.linalg.norm(got - wanted) < (ROUNDED if self.case.dtype == "float16" else EXPLAINED) * moved)

    def _error(self, got: np.ndarray, right: oracle.Trained, name: str) -> float:
        """Return the distance from what is right, of how far the weights have moved."""
        wanted = getattr(right, name)
        return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted - np.array(self.case.start)))
