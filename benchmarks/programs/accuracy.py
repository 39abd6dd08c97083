"""Train LeNet5 on MNIST epoch by epoch, and evaluate after each: ours or PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Callable, Literal

from protocol import by_epoch, flags_of, serve

WINDOW, BATCH, TEST_BATCH = 4, 32, 100


def ours(data: str, seed: int, workers: int) -> Iterator:
    """Train with the driver; without `data` on the embedded digits."""
    import mindspore as ms
    from ours import driver, tuned

    from model_zoo import LeNet5, create_dataset
    from ms_accum import evaluate

    yield {"mindspore": ms.__version__}
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(seed)
    train = create_dataset(data or None, BATCH, usage="train", seed=seed)
    test = create_dataset(data or None, TEST_BATCH, usage="test")
    network = tuned(LeNet5())
    model = driver(network)

    def epoch() -> float:
        model.train_process(1, train, mini_steps=WINDOW, report=(), ckpt_path=None)
        correct, total = evaluate(network, test)
        return correct / total

    yield epoch


def torch(data: str, seed: int, workers: int) -> Iterator:
    """Train with the usual loop: each loss divided by the window's size, an update after the window."""
    import torch
    from mnist_torch import loader
    from networks_torch import lenet5
    from torch.nn import functional

    yield {"torch": torch.__version__}
    torch.manual_seed(seed)
    train = loader(data, "train", 32, BATCH, workers)
    test = loader(data, "test", 32, TEST_BATCH, workers)
    network = lenet5()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9)

    def epoch() -> float:
        network.train()
        rest = iter(train)
        while window := list(itertools.islice(rest, WINDOW)):
            for images, labels in window:
                (functional.cross_entropy(network(images), labels) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return evaluate()

    @torch.no_grad()
    def evaluate() -> float:
        network.eval()
        right = [(network(images).argmax(1) == labels) for images, labels in test]
        return sum(int(matches.sum()) for matches in right) / sum(map(len, right))

    yield epoch


def build(
    framework: Literal["ours", "torch"], data: str = "", seed: int = 1, workers: int = 0
) -> tuple[dict, Callable[[], dict]]:
    """Read the data, a folder with train/ and test/, and build the network. From here on the clock runs when we do."""
    return by_epoch({"ours": ours, "torch": torch}[framework](data, seed, workers))


if __name__ == "__main__":  # PyTorch's workers import this file where they are not forked
    serve(build, **flags_of(build))
