"""PyTorch: the operators of a forward-backward, by its profiler."""

from __future__ import annotations

import os
from typing import Any, Callable

import networks_torch
import torch
from protocol import flags_of, serve
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch_loop import load
from workload import Network, micro_batches


def build(network: Network, batch: int) -> tuple[dict, Callable[..., dict]]:
    """Make a forward-backward."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trained = networks_torch.make(network)
    ((inputs, targets),) = load(micro_batches(network, batch, 1))

    def step() -> None:
        functional.cross_entropy(trained(inputs), targets).backward()

    for _ in range(3):
        step()

    def profiled(count: int) -> dict[str, Any]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(count):
                step()
        events = profiler.key_averages()
        return {
            "kernels": [[event.key, event.count / count, event.self_cpu_time_total / 1e3 / count] for event in events]
        }

    return {"versions": {"torch": torch.__version__}}, profiled


if __name__ == "__main__":
    serve(build, **flags_of(build))
