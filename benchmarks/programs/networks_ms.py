"""The workload's networks in MindSpore, with their loss, optimizer and Tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from benchmarks.programs.workload import HEADS, LAYERS, LEARNING_RATE, MLP_WIDTH, MOMENTUM, TOKENS, VOCABULARY, WIDTH
from model_zoo import LeNet5
from model_zoo.fast import GELU, LayerNorm


class Block(nn.Cell):
    """Causal self-attention and a feed-forward network, each behind a LayerNorm, in forms that are fast on CPU.

    `nn.TransformerEncoder` does not compile on MindSpore's CPU backend.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(WIDTH)
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.projection = nn.Dense(WIDTH, WIDTH)
        self.feed_forward_norm = LayerNorm(WIDTH)
        self.feed_forward = nn.SequentialCell(nn.Dense(WIDTH, 4 * WIDTH), GELU(), nn.Dense(4 * WIDTH, WIDTH))
        self.mask = Tensor(np.triu(np.full((TOKENS, TOKENS), -1e9, np.float32), 1))
        self.product = ops.BatchMatMul(transpose_b=True)

    def construct(self, x: Any) -> Any:
        """Return the block's output, of the shape of its input: (batch * tokens, width)."""
        x = x + self.projection(self.attend(self.qkv(self.attention_norm(x))))
        return x + self.feed_forward(self.feed_forward_norm(x))

    def attend(self, qkv: Any) -> Any:
        """Return for each token the mean of the values of those before it, weighted by attention."""
        query, key, value = ops.split(qkv, WIDTH, 1)
        scores = self.product(self.heads(query) * (1 / math.sqrt(WIDTH // HEADS)), self.heads(key))
        mixed = ops.matmul(ops.softmax(scores + self.mask, -1), self.heads(value))
        return ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (-1, WIDTH))

    def heads(self, x: Any) -> Any:
        """Return the vectors by head: (batch, heads, tokens, width / heads)."""
        return ops.transpose(ops.reshape(x, (-1, TOKENS, HEADS, WIDTH // HEADS)), (0, 2, 1, 3))


class Transformer(nn.Cell):
    """A small language model: from tokens to the logits of the next ones, of shape (batch * tokens, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = Parameter(np.random.normal(0, 0.02, (TOKENS, WIDTH)).astype(np.float32), name="positions")
        self.blocks = nn.SequentialCell(*(Block() for _ in range(LAYERS)))
        self.norm = LayerNorm(WIDTH)
        self.head = nn.Dense(WIDTH, VOCABULARY)

    def construct(self, tokens: Any) -> Any:
        """Return the logits."""
        x = ops.reshape(self.embedding(tokens) + self.positions, (-1, WIDTH))
        return self.head(self.norm(self.blocks(x)))


def _mlp(width: int) -> nn.Cell:
    layers = (nn.Dense(784, width), nn.ReLU(), nn.Dense(width, width), nn.ReLU(), nn.Dense(width, 10))
    return nn.SequentialCell(nn.Flatten(), *layers)


def make(name: str) -> nn.Cell:
    """Return a network in graph mode, from seeded weights."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    if name == "lenet5":
        return LeNet5()
    return Transformer() if name == "transformer" else _mlp(MLP_WIDTH[name])


def momentum(network: nn.Cell) -> nn.Optimizer:
    """Return the optimizer."""
    return nn.Momentum(network.trainable_params(), LEARNING_RATE, MOMENTUM)


def loss() -> nn.Cell:
    """Return the mean cross entropy: this form of it is much faster on CPU than `nn.CrossEntropyLoss`."""
    return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")


def tensors(micro_batches: Sequence[tuple]) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches as Tensors."""
    return [(Tensor(inputs), Tensor(targets)) for inputs, targets in micro_batches]


def size(network: nn.Cell) -> int:
    """Return how many numbers are trained."""
    return sum(parameter.size for parameter in network.trainable_params())


def tuned(network: nn.Cell) -> nn.Cell:
    """Return the network, with the environment variables that ours sets; the import of ours is not paid by others."""
    from ms_accum import tune_cpu

    tune_cpu(network)
    return network


VERSIONS = {"mindspore": ms.__version__, "numpy": np.__version__}
