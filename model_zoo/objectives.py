"""Losses of several terms, each a mean over a number of its own, with what each is divided by."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from ._check import check_int

IGNORED = -100
DIVISIONS = ("grpo", "dr_grpo", "dapo")


class PolicyLoss(nn.Cell):
    """The policy-gradient loss with clipped ratios, and the divergence from a reference model, over generated tokens.

    With ``division="grpo"`` both are means over rows of each row's mean over its tokens, as in GRPO; with ``"dr_grpo"``
    sums over tokens divided by the rows times `max_tokens`, as in Dr. GRPO; with ``"dapo"`` means over all tokens, as
    in DAPO and BNPO. `weight` is what each is divided by, in a window of micro-batches too.

    Args:
        division (str): ``"grpo"``, ``"dr_grpo"`` or ``"dapo"``.
        max_tokens (int): The largest number of generated tokens, for ``"dr_grpo"``. Default: ``1``.
        clip (float): The ratio is limited to 1 - clip and 1 + clip. Default: ``0.2``.

    Inputs:
        - **logits** (Tensor) - The scores of the next tokens, of shape (N, T, vocabulary).
        - **targets** (Tensor) - The next tokens, int32 of shape (N, T).
        - **mask** (Tensor) - 1 for generated tokens, 0 for others, float32 of shape (N, T).
        - **advantages** (Tensor) - One number per row, float32 of shape (N,).
        - **old** (Tensor) - The log-probabilities of the targets when they were generated, of shape (N, T).
        - **reference** (Tensor) - Those of the reference model, of shape (N, T).

    Outputs:
        dict, the terms ``"policy"`` and ``"kl"``.

    Raises:
        ValueError: If `division` is not one of the three.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> from model_zoo import PolicyLoss
        >>> sorted(PolicyLoss("dapo").weight)
        ['kl', 'policy']
    """

    def __init__(self, division: str, max_tokens: int = 1, clip: float = 0.2) -> None:
        super().__init__()
        if division not in DIVISIONS:
            raise ValueError(f"For 'PolicyLoss', 'division' must be one of {DIVISIONS}, but got {division!r}.")
        self.division, self.low, self.high = division, 1.0 - clip, 1.0 + clip
        self.max_tokens = check_int("PolicyLoss", "max_tokens", max_tokens, low=1)

    @property
    def weight(self) -> dict[str, Any]:
        """dict, what each term is divided by, from the columns (tokens, targets, mask, advantages, old, reference)."""
        count: Any = generated if self.division == "dapo" else "rows"
        return {"policy": count, "kl": count}

    def construct(self, logits: Any, targets: Any, mask: Any, advantages: Any, old: Any, reference: Any) -> Any:
        """Return the terms."""
        chosen = ops.squeeze(ops.gather_elements(ops.log_softmax(logits, -1), 2, ops.expand_dims(targets, 2)), 2)
        ratio, advantages = ops.exp(chosen - old), ops.expand_dims(advantages, 1)
        clipped = ops.clamp(ratio, self.low, self.high)
        policy = -ops.minimum(ratio * advantages, clipped * advantages)
        kl = ops.exp(reference - chosen) - (reference - chosen) - 1
        return {"policy": self.divided(policy, mask), "kl": self.divided(kl, mask)}

    def divided(self, losses: Any, mask: Any) -> Any:
        """Return the mean of the tokens' losses."""
        sums = ops.sum(losses * mask, 1)
        if self.division == "grpo":
            return ops.mean(sums / ops.clamp(ops.sum(mask, 1), 1.0))
        if self.division == "dr_grpo":
            return ops.mean(sums / self.max_tokens)
        return ops.sum(sums) / ops.clamp(ops.sum(mask), 1.0)


def generated(tokens: Any, targets: Any, mask: Any, *others: Any) -> Any:
    """Return the number of generated tokens."""
    return mask.sum()


class DistillationLoss(nn.Cell):
    """The cross entropy over labelled tokens, and the divergence from a teacher over rows.

    Args:
        temperature (float): Divides the logits of both before the divergence, which is multiplied by its square.
            Default: ``2.0``.

    Inputs:
        - **logits** (Tensor) - The scores, of shape (N, T, vocabulary).
        - **labels** (Tensor) - The right tokens, int32 of shape (N, T); -100 is ignored.
        - **teacher** (Tensor) - The teacher's scores, of the shape of `logits`.

    Outputs:
        dict, the terms ``"ce"`` and ``"kl"``.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> from model_zoo import DistillationLoss
        >>> sorted(DistillationLoss().weight)
        ['ce', 'kl']
    """

    def __init__(self, temperature: float = 2.0) -> None:
        super().__init__()
        self.temperature = temperature
        self.ce = nn.CrossEntropyLoss(ignore_index=IGNORED)

    @property
    def weight(self) -> dict[str, Any]:
        """dict, what each term is divided by, from the columns (tokens, labels, teacher)."""
        return {"ce": self.ce, "kl": "rows"}

    def construct(self, logits: Any, labels: Any, teacher: Any) -> Any:
        """Return the terms."""
        ce = self.ce(ops.reshape(logits, (-1, logits.shape[-1])), ops.reshape(labels, (-1,)))
        student = ops.log_softmax(logits / self.temperature, -1)
        right = ops.log_softmax(teacher / self.temperature, -1)
        kl = ops.sum(ops.exp(right) * (right - student), (1, 2)) * self.temperature**2
        return {"ce": ce, "kl": ops.mean(kl)}


class AuxiliaryHeads(nn.Cell):
    """The cross entropies of a network's output and of its auxiliary classifiers, as GoogLeNet has them.

    Args:
        heads (int): The number of auxiliary classifiers. Default: ``2``.

    Inputs:
        - **outputs** (tuple[Tensor]) - The network's scores, then those of its auxiliary classifiers.
        - **labels** (Tensor) - The right classes, int32 of shape (N,); -100 is ignored.

    Outputs:
        dict, the terms ``"main"``, ``"auxiliary_1"``, ``"auxiliary_2"`` and so on.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> from model_zoo import AuxiliaryHeads
        >>> sorted(AuxiliaryHeads(2).coefficients.items())
        [('auxiliary_1', 0.3), ('auxiliary_2', 0.3)]
    """

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        heads = check_int("AuxiliaryHeads", "heads", heads, low=1)
        self.names = tuple(f"auxiliary_{number}" for number in range(1, heads + 1))
        self.ce = nn.CrossEntropyLoss(ignore_index=IGNORED)

    @property
    def weight(self) -> dict[str, Any]:
        """dict, what each term is divided by."""
        return {"main": self.ce, **dict.fromkeys(self.names, self.ce)}

    @property
    def coefficients(self) -> dict[str, float]:
        """dict, GoogLeNet's coefficients of the auxiliary terms."""
        return dict.fromkeys(self.names, 0.3)

    def construct(self, outputs: Any, labels: Any) -> Any:
        """Return the terms."""
        terms = {"main": self.ce(outputs[0], labels)}
        for number in range(len(self.names)):
            terms[self.names[number]] = self.ce(outputs[number + 1], labels)
        return terms
