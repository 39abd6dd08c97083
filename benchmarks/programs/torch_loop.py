"""How long does a window take in PyTorch?"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from workload import HEADS, LAYERS, LEARNING_RATE, MLP_WIDTH, MOMENTUM, TOKENS, VOCABULARY, WIDTH, run


def _lenet5() -> nn.Module:
    # MindSpore's convolutions have no bias unless asked for one.
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def _mlp(width: int) -> nn.Module:
    layers = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return nn.Sequential(nn.Flatten(), *layers)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of its input: (batch, tokens, width)."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """A small language model: from tokens to the logits of the next ones, of shape (batch * tokens, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.blocks(self.embedding(tokens) + self.positions)).flatten(0, 1)


def _network(name: str) -> nn.Module:
    if name == "lenet5":
        return _lenet5()
    return Transformer() if name == "transformer" else _mlp(MLP_WIDTH[name])


class Loop:
    """The usual loop: gradients add up in `.grad` until `zero_grad`."""

    versions = {"torch": torch.__version__}

    def __init__(self, arguments: argparse.Namespace):
        torch.manual_seed(1)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        network = _network(arguments.network)
        self.parameters = sum(parameter.numel() for parameter in network.parameters())
        self._optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE, MOMENTUM)

        def loss_fn(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(network(inputs), targets)

        self._loss_fn = torch.compile(loss_fn) if arguments.compile else loss_fn

    def set_window(self, window: int) -> None:
        """Nothing to do: the host counts."""

    def load(self, micro_batches: Sequence[tuple]) -> list:
        """Return the window as tensors; classes must be int64."""
        return [(torch.from_numpy(inputs), torch.from_numpy(targets).long()) for inputs, targets in micro_batches]

    def train(self, windows: Sequence[Any]) -> float:
        """Run these windows; the loss is read once for each."""
        shown = 0.0
        for window in windows:
            for inputs, targets in window:
                loss = self._loss_fn(inputs, targets)
                (loss / len(window)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            shown = loss.item()
        return shown


if __name__ == "__main__":
    run(Loop, "--compile")
