"""A small language model whose feed-forward networks are mixtures of experts."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.common.initializer import Normal

from ._check import check_int
from .gpt import GPT

IGNORED = -100


class MixtureOfExperts(nn.Cell):
    """A feed-forward network of which each token uses one expert, the one that the router finds most probable.

    All experts are computed, which is simple and fast enough for small ones.

    Args:
        width (int): The size of a token's vector.
        experts (int): The number of experts.
        hidden (int): The size of an expert's hidden layer.

    Inputs:
        - **x** (Tensor) - Vectors of tokens, of shape (N, T, width).

    Outputs:
        tuple[Tensor], the output, of the same shape; and sums over the tokens, of size 2 * experts + 1: how many use
        each expert, the probabilities of each, and the number of tokens.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)
    """

    def __init__(self, width: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Dense(width, experts, weight_init=Normal(0.02), has_bias=False)
        self.enter = nn.Dense(width, experts * hidden, weight_init=Normal(0.02))
        self.leave = nn.CellList([nn.Dense(hidden, width, weight_init=Normal(0.02)) for _ in range(experts)])

    def construct(self, x: Any) -> Any:
        """Return the output, and the sums for the balance of the experts' load."""
        probabilities = ops.softmax(self.router(x), -1)
        chosen = ops.cast(ops.one_hot(ops.argmax(probabilities, -1), self.experts), probabilities.dtype)
        gates = chosen * probabilities
        hidden = ops.split(ops.relu(self.enter(x)), self.enter.out_channels // self.experts, -1)
        output = ops.zeros_like(x)
        for number in range(self.experts):
            output = output + self.leave[number](hidden[number]) * gates[..., number : number + 1]
        counts = ops.sum(ops.cast(chosen, ms.float32), (0, 1))
        sums = ops.sum(ops.cast(probabilities, ms.float32), (0, 1))
        return output, ops.cat((counts, sums, ops.ones((1,), ms.float32) * (x.shape[0] * x.shape[1])))


class MoEGPT(GPT):
    """A `GPT` whose blocks have a mixture of experts instead of a feed-forward network.

    Args:
        vocab_size (int): The number of different tokens.
        experts (int): The number of experts in each block. Default: ``4``.
        context (int): The maximum length of a sequence. Default: ``64``.
        width (int): The size of a token's embedding, a multiple of `heads`. Default: ``64``.
        heads (int): The number of attention heads. Default: ``4``.
        layers (int): The number of blocks. Default: ``2``.

    Inputs:
        - **tokens** (Tensor) - Token numbers, int32 of shape (N, T) with T at most `context`.

    Outputs:
        tuple[Tensor], the logits of the next token, of shape (N, T, vocab_size); and each block's sums for the balance
        of its experts, of shape (layers, 2 * experts + 1).

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> import mindspore as ms
        >>> from model_zoo import MoEGPT
        >>> logits, sums = MoEGPT(10, context=8)(ms.ops.zeros((2, 5), ms.int32))
        >>> logits.shape, sums.shape
        ((2, 5, 10), (2, 9))
    """

    def __init__(
        self, vocab_size: int, experts: int = 4, context: int = 64, width: int = 64, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__(vocab_size, context, width, heads, layers)
        self.experts = check_int("MoEGPT", "experts", experts, low=1)
        for block in self.blocks:
            block.feed_forward = MixtureOfExperts(width, experts, 4 * width)
        self.update_parameters_name()

    def construct(self, tokens: Any) -> Any:
        """Return the logits, and the sums of each block."""
        x = self.embedding(tokens) + self.position(ops.arange(tokens.shape[1]))
        sums: Any = []
        for block in self.blocks:
            x = x + block.attention(block.attention_norm(x))
            change, of_block = block.feed_forward(block.feed_forward_norm(x))
            x = x + change
            sums.append(of_block)
        return self.head(self.norm(x)), ops.stack(sums)


class LossWithBalance(nn.Cell):
    """The cross entropy over tokens, and the sums for the balance of the experts.

    The balance is a function of sums over all tokens of a batch: give `balance` as the function of a `WindowStatistic`.

    Inputs:
        - **outputs** (tuple[Tensor]) - What `MoEGPT` returns.
        - **labels** (Tensor) - The next tokens, int32 of shape (N, T); -100 is ignored.

    Outputs:
        dict, the term ``"ce"``, and the sums ``"balance"``.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)
    """

    def __init__(self) -> None:
        super().__init__()
        self.ce = nn.CrossEntropyLoss(ignore_index=IGNORED)

    def construct(self, outputs: Any, labels: Any) -> Any:
        """Return the term and the sums."""
        logits, sums = outputs
        return {"ce": self.ce(ops.reshape(logits, (-1, logits.shape[-1])), ops.reshape(labels, (-1,))), "balance": sums}


def balance(sums: Any) -> Any:
    """Return the mean over the blocks of the Switch Transformer's balance: 1 if all experts have the same load."""
    experts = (sums.shape[1] - 1) // 2
    shares, probabilities = sums[:, :experts] / sums[:, -1:], sums[:, experts:-1] / sums[:, -1:]
    return experts * ops.mean(ops.sum(shares * probabilities, 1))
