"""How soon is PyTorch's LeNet5 right, and how often?"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable
from typing import Callable

import torch
from mnist_torch import loader
from protocol import serve
from torch import nn
from torch.nn import functional

WINDOW = 4


def lenet5() -> nn.Module:
    """Return the layers of `model_zoo.LeNet5`, with PyTorch's own initial weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def train_epoch(network: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable) -> None:
    """Train with the usual loop: each loss divided by the window's size, an update after the window."""
    network.train()
    rest = iter(batches)
    while window := list(itertools.islice(rest, WINDOW)):
        for images, labels in window:
            (functional.cross_entropy(network(images), labels) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def evaluate(network: nn.Module, batches: Iterable) -> float:
    """Return the share of right answers."""
    network.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in batches:
            correct += int((network(images).argmax(1) == labels).sum())
            total += len(labels)
    return correct / total


def build() -> tuple[dict, Callable[[], dict]]:
    """Read the data and build the network; the clock runs from here on, whenever we do."""
    began = time.perf_counter()
    torch.manual_seed(arguments.seed)
    train = loader(arguments.data, "train", 32, 32, arguments.workers)
    test = loader(arguments.data, "test", 32, 100, arguments.workers)
    network = lenet5()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9)

    def epoch() -> dict:
        """Train an epoch, and evaluate."""
        began = time.perf_counter()
        train_epoch(network, optimizer, train)
        accuracy = evaluate(network, test)
        return {"seconds": time.perf_counter() - began, "accuracy": accuracy}

    about = {"versions": {"torch": torch.__version__}, "seconds": time.perf_counter() - began}
    return about, epoch


if __name__ == "__main__":  # the workers import this file where they are not forked
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder with train/ and test/")
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    serve(build)
