"""Continues a text with a network that predicts the next token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from ..network.compiled import compiled
from ..network.restoring import training_mode


def continued(
    network: nn.Cell, tokens: Sequence[int], count: int, *, context: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield the tokens that follow, one after the other.

    The network sees the last `context` tokens, always as one row of this length, so that it compiles once: a token
    depends on those before it only, not on the padding behind it. There is no cache of keys and values. Positions are
    absolute, so it would have to be filled again for each token of a text that is longer than `context`.

    Args:
        network (Cell): from tokens to the scores of the next one. Its training mode is restored after each token.
        tokens (Sequence[int]): those to begin with, at least one.
        count (int): the number of tokens to add.
        context (int): the largest number of tokens that the network takes.
        temperature (float): what scores are divided by: 1 for the network's own probabilities, 0 for the most probable
            token.
        seed (int): of the random choices.
    """
    scores_of = compiled("sample", network, True)
    random = np.random.default_rng(seed)
    row = list(tokens)
    for _ in range(count):
        context_tokens = row[-context:]
        padded = np.zeros((1, context), np.int32)
        padded[0, : len(context_tokens)] = context_tokens
        with training_mode(network, False):
            scores = scores_of(Tensor(padded))[0, len(context_tokens) - 1].asnumpy()
        row.append(choose(scores, temperature, random))
        yield row[-1]


def choose(scores: Any, temperature: float, random: np.random.Generator) -> int:
    """Return a token, chosen by its scores.

    Raises:
        ValueError: If a score is NaN, or the largest is infinite: the network has not been trained well.
    """
    scores = np.asarray(scores, np.float64)
    if not np.isfinite(scores.max()):
        raise ValueError("the scores of the network are not finite")
    if temperature == 0:
        return int(scores.argmax())
    with np.errstate(over="ignore"):  # a tiny temperature: all but the largest become -inf
        exponentials = np.exp((scores - scores.max()) / temperature)
    return int(np.searchsorted(np.cumsum(exponentials), random.random() * exponentials.sum(), side="right"))
