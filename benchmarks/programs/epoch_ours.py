"""Ours: an epoch with everything around it, and without."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Callable

import mindspore as ms
from ours import driver, tuned
from protocol import flags_of, serve, timed

from model_zoo import MODELS, create_dataset
from ms_accum.programs.callbacks import MetricsFile
from ms_accum.training.progress import progress

BATCH = 32


def build(data: str, network: str, window: int = 4) -> tuple[dict, Callable[..., dict]]:
    """Make one driver, whose epochs read the dataset or find the same micro-batches ready in memory."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    model = MODELS[network]
    train = driver(tuned(model.make())).train_process
    dataset = create_dataset(data, BATCH, usage="train", image_size=model.image_size)
    ready = [tuple(batch) for batch in dataset.create_tuple_iterator(num_epochs=1)]

    def epoch(what: str) -> dict:
        """Run an epoch: "whole" as train.py does it, "training" without data, metrics file and progress."""
        whole = what == "whole"
        report = (progress(), MetricsFile(str(Path(folder, "metrics.jsonl")))) if whole else ()
        seconds, _ = timed(train, 1, dataset if whole else ready, window, report=report, ckpt_path=None)
        return {"seconds": seconds, "micro_batches": len(ready)}

    return {"versions": {"mindspore": ms.__version__}}, epoch


with tempfile.TemporaryDirectory() as folder:
    serve(build, **flags_of(build))
