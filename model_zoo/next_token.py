"""The loss of networks that predict the next token of a text."""

from __future__ import annotations

from typing import Any, Callable

import mindspore as ms
from mindspore import nn, ops


def count_targets(tokens: Any, targets: Any) -> int:
    """Return the number of targets of a micro-batch that count: what its mean loss is divided by."""
    del tokens
    return int((targets.asnumpy() >= 0).sum())


class LossOfTargets(nn.Cell):
    """The loss of each target: -ln of its probability, and 0 for padding.

    Inputs:
        - **logits** (Tensor) - The scores of the next tokens, of shape (N, T, vocabulary).
        - **targets** (Tensor) - The next tokens, int32 of shape (N, T); negative for padding.

    Outputs:
        Tensor, float32 of shape (N, T).
    """

    def __init__(self) -> None:
        super().__init__()
        # Attributes, as in `LayerNorm`.
        self.cast, self.log_softmax, self.expand = ops.Cast(), nn.LogSoftmax(-1), ops.ExpandDims()
        self.gather, self.squeeze, self.maximum = ops.GatherD(), ops.Squeeze(2), ops.Maximum()
        self.type = ms.float32

    def construct(self, logits: Any, targets: Any) -> Any:
        """Return the losses."""
        counts = self.cast(targets >= 0, self.type)
        chosen = self.expand(self.maximum(targets, 0), 2)
        scores = self.log_softmax(self.cast(logits, self.type))
        return -self.squeeze(self.gather(scores, 2, chosen)) * counts


class NextTokenLoss(nn.Cell):
    """The mean loss of a network that predicts the next token, over the targets that are not padding; 0 if all are.

    `weight` is what it is divided by, in a window of micro-batches too.

    Inputs:
        - **logits** (Tensor) - The scores of the next tokens, of shape (N, T, vocabulary).
        - **targets** (Tensor) - The next tokens, int32 of shape (N, T); negative for padding, such as -100.

    Outputs:
        Tensor, float32, the mean of -ln p.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> from model_zoo import GPT, NextTokenLoss, create_text_dataset
        >>> text = create_text_dataset(batch_size=8, context=16, seed=1)
        >>> network = GPT(len(text.source.data.vocabulary.characters), context=16)
        >>> tokens, targets = next(text.create_tuple_iterator(num_epochs=1))
        >>> loss_fn = NextTokenLoss()
        >>> round(float(loss_fn(network(tokens), targets))), loss_fn.weight(tokens, targets)
        (3, 128)
    """

    @property
    def weight(self) -> Callable[..., int]:
        """Callable, the number of targets that count, from the columns (tokens, targets)."""
        return count_targets

    def __init__(self) -> None:
        super().__init__()
        self.losses = LossOfTargets()
        self.cast, self.sum, self.maximum = ops.Cast(), ops.ReduceSum(), ops.Maximum()
        self.type = ms.float32

    def construct(self, logits: Any, targets: Any) -> Any:
        """Return the mean."""
        count = self.sum(self.cast(targets >= 0, self.type))
        return self.sum(self.losses(logits, targets)) / self.maximum(count, 1.0)


class LossOfTokens(nn.Cell):
    """The loss of each target, from the tokens before it, for evaluations.

    Args:
        network (Cell): from tokens to the scores of the next one.

    Inputs:
        - **tokens** (Tensor), **targets** (Tensor) - int32 of shape (N, T).

    Outputs:
        Tensor, float32 of shape (N, T).
    """

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)  # the names of the network's parameters stay
        self.network, self.losses = network, LossOfTargets()

    def construct(self, tokens: Any, targets: Any) -> Any:
        """Return the losses."""
        return self.losses(self.network(tokens), targets)
