"""Ours: the kernels of a forward-backward, by MindSpore's profiler."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any, Callable

import networks_ms
from cost_ours import Plain
from mindspore import Profiler, nn
from ours import VERSIONS, tuned
from protocol import flags_of, serve
from workload import Network, micro_batches


def build(network: Network, batch: int) -> tuple[dict, Callable[..., dict]]:
    """Make and compile a forward-backward."""
    trained = tuned(networks_ms.make(network))
    step = Plain(nn.WithLossCell(trained, networks_ms.loss()), networks_ms.momentum(trained), update=False)
    (inputs,) = networks_ms.tensors(micro_batches(network, batch, 1))
    for _ in range(3):
        step(*inputs).asnumpy()

    def profile(count: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            profiler = Profiler(output_path=folder, start_profile=False)
            profiler.start()
            for _ in range(count):
                step(*inputs).asnumpy()
            profiler.stop()
            profiler.analyse()
            (path,) = Path(folder).rglob("cpu_op_type_info_*.csv")
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        return {
            "kernels": [
                [row["op_type"], int(row["type_occurrences"]) / count, float(row["total_compute_time"]) / count]
                for row in rows
            ]
        }

    return {"versions": VERSIONS}, profile


if __name__ == "__main__":
    serve(build, **flags_of(build))
