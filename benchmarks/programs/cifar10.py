"""Train SmallResNet on CIFAR-10 epoch by epoch, and evaluate after each: train.py, our driver with BatchNorm, PyTorch.

All three take the same batches.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Literal

from protocol import by_epoch, flags_of, serve

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "cifar10_small_resnet.yaml"
# Its recipe.
BATCH, WINDOW, EPOCHS, TEST_BATCH = 64, 2, 16, 100
LR, WARM_UP, MOMENTUM, WEIGHT_DECAY = 0.2, 400, 0.9, 5e-4

_ACCURACY = re.compile(r"epoch: \d+ update: \d+ evaluation: acc ([\d.]+)")


def rates(updates: int) -> list[float]:
    """Return the learning rates of a run: a linear warm-up, then a cosine to 0.

    Written again, because the environment of PyTorch lacks what train.py's settings import.
    """
    falls = updates - WARM_UP
    decay = [(1 + math.cos(math.pi * update / falls)) / 2 for update in range(falls)]
    return [LR * part for part in (*((update + 1) / WARM_UP for update in range(min(WARM_UP, updates))), *decay)]


def program(data: str, seed: int) -> Iterator:
    """Run train.py with its config, as a user would; it evaluates and saves after each epoch."""
    import mindspore as ms

    from model_zoo.data.cifar import load_cifar10

    yield {"mindspore": ms.__version__}
    updates = -(-len(load_cifar10(Path(data), "train").labels) // (BATCH * WINDOW))  # of an epoch
    # The benchmark ends this program and train.py together, and removes their temporary files.
    flags = [f"--config={CONFIG}", f"--data_path={data}", f"--seed={seed}", f"--output_dir={tempfile.mkdtemp()}"]
    command = [sys.executable, str(ROOT / "train.py"), *flags, f"--save_every={updates}"]
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **merged, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    matches = filter(None, map(_ACCURACY.match, process.stdout or ()))

    def epoch() -> float:
        match = next(matches, None)
        if match is None:
            raise RuntimeError(f"train.py ended before its last epoch, with exit code {process.wait()}")
        return float(match[1])

    yield epoch


def batch_norm(data: str, seed: int) -> Iterator:
    """Train the network with BatchNorm, which train.py does not offer, with the driver."""
    import mindspore as ms
    from mindspore import nn
    from ours import driver, tuned

    from model_zoo import SmallResNet, create_dataset
    from ms_accum import evaluate, updates_per_epoch

    yield {"mindspore": ms.__version__}
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(seed)
    train = create_dataset(data, BATCH, usage="train", seed=seed, dataset="cifar10")
    test = create_dataset(data, TEST_BATCH, usage="test", dataset="cifar10")
    network = tuned(SmallResNet(norm="batch"))
    updates = EPOCHS * updates_per_epoch(train.get_dataset_size(), WINDOW)
    options = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    model = driver(network, nn.SGD(network.trainable_params(), rates(updates), **options))

    def epoch() -> float:
        model.train_process(1, train, mini_steps=WINDOW, report=(), ckpt_path=None)
        correct, total = evaluate(network, test)
        return correct / total

    yield epoch


def torch(data: str, seed: int) -> Iterator:
    """Train with the usual loop, on the same batches as ours: each loss divided by the window's size."""
    import torch
    from networks_torch import SmallResNet
    from torch.nn import functional

    from model_zoo.data.batches import Batches
    from model_zoo.data.cifar import load_cifar10
    from model_zoo.data.images import ImageRows

    yield {"torch": torch.__version__}
    torch.manual_seed(seed)
    train, test = (load_cifar10(Path(data), usage) for usage in ("train", "test"))
    batches = Batches(ImageRows(train, seed), seed=seed, batch_size=BATCH)
    tested = Batches(ImageRows(test), batch_size=TEST_BATCH)
    network = SmallResNet()
    optimizer = torch.optim.SGD(network.parameters(), LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    by_update = iter(rates(EPOCHS * -(-len(batches) // WINDOW)))
    numbers = itertools.count()  # of the batches, over all epochs

    def outputs(images: Any, labels: Any) -> tuple:
        return network(torch.from_numpy(images)), torch.from_numpy(labels).long()

    def epoch() -> float:
        rest = itertools.islice(numbers, len(batches))
        while window := list(itertools.islice(rest, WINDOW)):
            optimizer.param_groups[0]["lr"] = next(by_update)
            for number in window:
                (functional.cross_entropy(*outputs(*batches[number])) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            results = [outputs(*tested[number]) for number in range(len(tested))]
        return sum(int((logits.argmax(1) == labels).sum()) for logits, labels in results) / len(test.labels)

    yield epoch


def build(
    framework: Literal["train.py", "batch_norm", "torch"], data: str, seed: int = 1
) -> tuple[dict, Callable[[], dict]]:
    """Read the data and build the network; its seconds are counted."""
    return by_epoch({"train.py": program, "batch_norm": batch_norm, "torch": torch}[framework](data, seed))


if __name__ == "__main__":
    serve(build, **flags_of(build))
