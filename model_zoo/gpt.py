"""A small language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindspore import nn, ops
from mindspore.common.initializer import Normal

from ._check import check_bool, check_int
from .fast import GELU, LayerNorm


class GPT(nn.Cell):
    """A small causal Transformer with the architecture of GPT-2.

    It has embeddings of tokens and positions, blocks with LayerNorm before the attention and before the feed-forward
    network, and a linear layer to the logits of the next token. Attention is written with plain operators, because
    `nn.TransformerEncoder` does not compile on MindSpore's CPU. A token attends only to itself and to earlier tokens,
    so padding at the end of a sequence does not change the logits of its tokens. There is no Dropout.

    Args:
        vocab_size (int): The number of different tokens.
        context (int): The maximum length of a sequence. Default: ``64``.
        width (int): The size of a token's embedding, a multiple of `heads`. Default: ``64``.
        heads (int): The number of attention heads. Default: ``4``.
        layers (int): The number of blocks. Default: ``2``.
        tie_weights (bool): Whether the last linear layer has the weights of the embedding of tokens, as in GPT-2.
            Default: ``False``.

    Inputs:
        - **tokens** (Tensor) - Token numbers, int32 of shape (N, T) with T at most `context`.

    Outputs:
        Tensor, the logits of the next token, of shape (N, T, vocab_size).

    Raises:
        TypeError: If an argument is not an int.
        ValueError: If an argument is less than 1, `width` is not a multiple of `heads`, or a sequence is longer than
            `context`.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> import mindspore as ms
        >>> from model_zoo import GPT
        >>> GPT(10, context=8)(ms.ops.zeros((2, 5), ms.int32)).shape
        (2, 5, 10)
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 64,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        *,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        vocab_size = check_int("GPT", "vocab_size", vocab_size, low=1)
        self.context = check_int("GPT", "context", context, low=1)
        heads, layers = check_int("GPT", "heads", heads, low=1), check_int("GPT", "layers", layers, low=1)
        width = check_int("GPT", "width", width, low=heads)
        if width % heads:
            raise ValueError(f"For 'GPT', 'width' must be a multiple of {heads} heads, but got {width}.")
        self.embedding = nn.Embedding(vocab_size, width, embedding_table=Normal(0.02))
        self.position = nn.Embedding(context, width, embedding_table=Normal(0.02))
        self.blocks = nn.SequentialCell(*(_Block(width, heads) for _ in range(layers)))
        self.norm = LayerNorm(width)
        self.head = _dense(width, vocab_size, has_bias=False)
        if check_bool("GPT", "tie_weights", tie_weights):
            self.head.weight = self.embedding.embedding_table

    def construct(self, tokens: Any) -> Any:
        """Return the logits of the next token after each token."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"For 'GPT', 'tokens' must be at most {self.context} per row, but got {length}.")
        x = self.embedding(tokens) + self.position(ops.arange(length))
        return self.head(self.norm(self.blocks(x)))


def sizes_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the sizes of a `GPT` whose parameters have these shapes, as far as they tell; 0 for what is not one."""
    (vocab_size, width), (context, _) = (
        shape if len(shape := shapes.get(f"{name}.embedding_table", ())) == 2 else (0, 0)
        for name in ("embedding", "position")
    )
    layers = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    return {"vocab_size": vocab_size, "context": context, "width": width, "layers": layers}


class _Block(nn.Cell):
    """Causal self-attention and a feed-forward network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.feed_forward_norm = LayerNorm(width)
        self.feed_forward = nn.SequentialCell(_dense(width, 4 * width), GELU(), _dense(4 * width, width))

    def construct(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class _Attention(nn.Cell):
    """Causal self-attention: for each token the mean of the values up to it, weighted by softmax(query key)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(width / heads)
        # Three layers, because splitting the output of a single one is slow on MindSpore's CPU.
        self.query, self.key, self.value = (_dense(width, width) for _ in range(3))
        self.projection = _dense(width, width)
        self.product = ops.BatchMatMul(transpose_b=True)
        # An attribute, as in `LayerNorm`.
        self.softmax = nn.Softmax(-1)
        self.hidden = -1e4  # representable in float16, and its softmax is 0

    def construct(self, x: Any) -> Any:
        rows, length, width = x.shape
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = self.product(query * self.scale, key)
        position = ops.arange(length)
        later = ops.cast(ops.expand_dims(position, 1) < position, scores.dtype)
        mixed = ops.matmul(self.softmax(scores + self.hidden * later), value)
        return self.projection(ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (rows, length, width)))

    def split(self, x: Any) -> Any:
        """Return the vectors by head: (N, heads, T, width / heads)."""
        rows, length, width = x.shape
        x = ops.reshape(x, (rows, length, self.heads, width // self.heads))
        return ops.transpose(x, (0, 2, 1, 3))


def _dense(width: int, out: int, *, has_bias: bool = True) -> nn.Dense:
    return nn.Dense(width, out, weight_init=Normal(0.02), bias_init="zeros", has_bias=has_bias)
