"""How soon is our LeNet5 right, and how often?"""

from __future__ import annotations

import argparse
import time
from typing import Callable

import mindspore as ms
from mindspore import nn
from protocol import serve

from model_zoo import LeNet5, create_dataset
from ms_accum import GradientAccumulation, evaluate, tune_cpu


def build() -> tuple[dict, Callable[[], dict]]:
    """Read the data and build the network; the clock runs from here on, whenever we do."""
    began = time.perf_counter()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(arguments.seed)
    train = create_dataset(arguments.data, 32, usage="train", seed=arguments.seed)
    test = create_dataset(arguments.data, 100, usage="test")
    network = LeNet5()
    tune_cpu(network)
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    driver = GradientAccumulation(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"), optimizer)

    def epoch() -> dict:
        """Train an epoch, and evaluate."""
        began = time.perf_counter()
        driver.train_process(1, train, mini_steps=4, report=(), ckpt_path=None)
        correct, total = evaluate(network, test)
        return {"seconds": time.perf_counter() - began, "accuracy": correct / total}

    about = {"versions": {"mindspore": ms.__version__}, "seconds": time.perf_counter() - began}
    return about, epoch


parser = argparse.ArgumentParser()
parser.add_argument("--data", help="folder with train/ and test/; without it the embedded digits")
parser.add_argument("--seed", type=int, default=1)
arguments = parser.parse_args()
serve(build)
