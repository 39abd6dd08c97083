"""ms_accum's driver with a fault planted in each case: none of its cells may be right. It is in no table."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import ours_driver
from ours_driver import across_ranks, train
from ours_parts import CAN, PACKAGES, Data, labels
from serving import serve_cases

from benchmarks.conformance.case import Case, Result

# By the case what is wrong: fields of the case as the program sees it, and options of the driver.
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "even windows": ({"windows": [3, 3]}, {}),
    "short last window": ({}, {"tail": "drop"}),
    "one row left": ({}, {"weight": 1.0}),
    "ragged rows": ({}, {"weight": 1.0}),
    "padded tokens": ({}, {"weight": lambda inputs, targets: inputs.shape[0]}),
    "padded tokens, tail": ({}, {"weight": lambda inputs, targets: inputs.shape[0]}),
    "class weights": ({}, {"weight": labels}),
    "sum losses": ({"rates": [0.0005]}, {}),
    "clip": ({"clip": None}, {}),
    "warm-up": ({"rates": [0.01 * n for n in range(2, 13)]}, {}),
    "AdamW": ({"weight_decay": 0.0}, {}),
    "NaN": ({}, {"nonfinite": "raise"}),
    "EMA": ({"average": 0.8**4}, {}),
    "Muon": ({"momentum": 0.0}, {}),
    "N that changes": ({"windows": [4, 4, 4]}, {}),
    "float16": ({"windows": [1024]}, {}),
    "two terms": ({}, {"weight": {"entropy": labels, "penalty": labels}}),
    "BatchNorm": ({}, {}),  # its warning is not shown, see below
    "resume": ({}, {}),  # the data are in another order after the stop, see below
    "evaluation": ({}, {"tail": "carry"}),
    "two ranks": ({}, {"group": None}),
}


class Shuffled(Data):
    """Micro-batches that are in another order in the run that resumes."""

    def __init__(self, case: Case, rank: int = 0, stop_after: int = 0):
        super().__init__(case, rank, stop_after)
        if case.stop_after and not stop_after:
            self.reverse()


def train_wrongly(case: Case) -> Result:
    """Train with the fault of a case."""
    fields, options = FAULTS[case.name]
    ours_driver.Data = Shuffled  # type: ignore[misc]
    if case.batch_norm:
        warnings.simplefilter("ignore")
    return train(replace(case, **fields), **options)


if __name__ == "__main__":
    serve_cases(across_ranks(train_wrongly, __file__), PACKAGES, CAN)
