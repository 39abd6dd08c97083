"""How long does an epoch of ours take, with everything around it and without?"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import mindspore as ms
from mindspore import nn
from protocol import serve

from model_zoo import MODELS, create_dataset
from ms_accum import GradientAccumulation, tune_cpu
from ms_accum.report import MetricsFile, progress

BATCH = 32


class Epochs:
    """One driver, whose epochs read the dataset or find the same micro-batches ready in memory.

    Args:
        arguments (Namespace): with `data`, `network` and `window`.
        folder (Path): for the metrics.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        ms.set_context(mode=ms.GRAPH_MODE)
        ms.set_seed(1)
        model = MODELS[arguments.network]
        network = model.make()
        tune_cpu(network)
        self._dataset = create_dataset(arguments.data, BATCH, usage="train", image_size=model.image_size)
        self._ready = [tuple(batch) for batch in self._dataset.create_tuple_iterator(num_epochs=1)]
        optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
        self._driver = GradientAccumulation(
            network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"), optimizer
        )
        self._window = arguments.window
        self._metrics = str(folder / "metrics.jsonl")

    def __call__(self, what: str) -> dict:
        """Run an epoch: "whole" as train.py does it, "training" without data, metrics file and progress."""
        whole = what == "whole"
        data: Any = self._dataset if whole else self._ready
        report = (progress(), MetricsFile(self._metrics)) if whole else ()
        started = time.perf_counter()
        self._driver.train_process(1, data, self._window, report=report, ckpt_path=None)
        return {"seconds": time.perf_counter() - started, "micro_batches": len(self._ready)}


def build() -> tuple[dict, Callable[..., dict]]:
    """Make the driver and the data, outside the measured time."""
    return {"versions": {"mindspore": ms.__version__}}, Epochs(arguments, Path(folder))


parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True, help="folder with train/ and test/")
parser.add_argument("--network", choices=tuple(MODELS), required=True)
parser.add_argument("--window", type=int, default=4)
arguments = parser.parse_args()
with tempfile.TemporaryDirectory() as folder:
    serve(build)
