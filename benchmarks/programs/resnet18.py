"""Train ResNet-18 on CIFAR-10 with ColossalAI's recipe, update by update: ours or PyTorch, from the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Literal

import numpy as np
from protocol import flags_of, serve, timed

from model_zoo.data.batches import Batches, Order
from model_zoo.data.cifar import load_cifar10
from model_zoo.data.images import ImageRows

WINDOW, SEED = 4, 1
RECIPE = {"momentum": 0.9, "weight_decay": 5e-4}
LR = 0.1

Window = list[tuple[np.ndarray, np.ndarray]]


def windows(data: str, rows: int) -> Iterator[Window]:
    """Yield the windows of the first epoch."""
    train = load_cifar10(Path(data), "train")
    batches = Batches(ImageRows(train, SEED), Order(len(train.labels), SEED), batch_size=rows)
    for first in range(0, len(batches) - WINDOW + 1, WINDOW):
        yield [batches[first + place] for place in range(WINDOW)]


def ours(weights: str) -> tuple[dict, Callable[[Window], float]]:
    """Make the driver, and write the weights with which it begins."""
    import mindspore as ms
    from mindspore import Tensor, nn
    from ours import VERSIONS, LastLoss, tuned

    from model_zoo import ResNet18
    from ms_accum import GradientAccumulation

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(SEED)
    network = tuned(ResNet18())
    np.savez(weights, **{parameter.name: parameter.asnumpy() for parameter in network.get_parameters()})
    # The fused loss of the other benchmarks returns inf where the right class has a probability below 1e-38.
    model = GradientAccumulation(network, nn.CrossEntropyLoss(), nn.SGD(network.trainable_params(), LR, **RECIPE))
    last = LastLoss()

    def update(window: Window) -> float:
        data = [tuple(Tensor(column) for column in micro_batch) for micro_batch in window]
        model.train_process(1, data, mini_steps=WINDOW, report=(last,), ckpt_path=None)
        return last.loss

    return VERSIONS, update


def torch(weights: str) -> tuple[dict, Callable[[Window], float]]:
    """Make the usual loop, from those weights."""
    import torch
    from networks_torch import ResNet18
    from torch.nn import functional

    network = ResNet18()
    named = {name: torch.from_numpy(value) for name, value in np.load(weights).items()}
    counters = [name for name in network.state_dict() if name.endswith("num_batches_tracked")]
    taken = {name: named[_mindspore(name)] for name in network.state_dict() if name not in counters}
    network.load_state_dict({**taken, **{name: torch.tensor(0) for name in counters}})
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), LR, **RECIPE)

    def update(window: Window) -> float:
        losses = []
        for images, labels in window:
            loss = functional.cross_entropy(network(torch.from_numpy(images)), torch.from_numpy(labels).long())
            (loss / len(window)).backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(losses) / len(losses)

    return {"torch": torch.__version__}, update


def _mindspore(name: str) -> str:
    """Return MindSpore's name of a parameter that PyTorch's BatchNorm has."""
    stem, _, last = name.rpartition(".")
    norm = "bn" in stem or stem.endswith("downsample.1")
    renamed = {"running_mean": "moving_mean", "running_var": "moving_variance", "weight": "gamma", "bias": "beta"}
    return f"{stem}.{renamed[last] if norm else last}"


def build(
    framework: Literal["ours", "torch"], data: str, weights: str, rows: int = 128
) -> tuple[dict, Callable[[], dict[str, Any]]]:
    """Build the network; each answer is an update."""
    versions, update = {"ours": ours, "torch": torch}[framework](weights)
    coming = windows(data, rows)

    def answer() -> dict[str, Any]:
        seconds, loss = timed(update, next(coming))
        return {"seconds": seconds, "loss": loss}

    return {"versions": versions}, answer


if __name__ == "__main__":
    serve(build, **flags_of(build))
