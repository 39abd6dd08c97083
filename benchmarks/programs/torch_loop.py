"""PyTorch: windows of the usual loop."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch.nn import functional

from benchmarks.programs import networks_torch
from benchmarks.programs.workload import LEARNING_RATE, MOMENTUM, Network, Train, Trainer, one_by_one, run


def load(micro_batches: Sequence[tuple]) -> list:
    """Return the window as tensors; classes must be int64."""
    return [(torch.from_numpy(inputs), torch.from_numpy(targets).long()) for inputs, targets in micro_batches]


def make(network: Network, compile: bool = False) -> Trainer:
    """Return the usual loop, in which gradients add up in `.grad` until `zero_grad`."""
    torch.manual_seed(1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trained = networks_torch.make(network)
    optimizer = torch.optim.SGD(trained.parameters(), LEARNING_RATE, MOMENTUM)

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(trained(inputs), targets)

    loss_fn = torch.compile(forward) if compile else forward

    def windows_of(window: int) -> Train:
        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = loss_fn(inputs, targets)
            (loss / window).backward()
            return loss

        def end() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return one_by_one(step, end)

    parameters = sum(parameter.numel() for parameter in trained.parameters())
    return Trainer({"torch": torch.__version__}, parameters, load, windows_of)


if __name__ == "__main__":
    run(make)
