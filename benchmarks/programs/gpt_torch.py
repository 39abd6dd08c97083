"""PyTorch: a GPT and a loop as in nanoGPT, from the weights, batches and rates that ours has written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Literal

import language_files
import numpy as np
import torch
from protocol import flags_of, serve, timed
from torch import nn
from torch.nn import functional as F

BETA1, EPS = 0.9, 1e-6  # the defaults of MindSpore's AdamWeightDecay


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a LayerNorm, with all three inputs in one layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.projection, self.feed_forward_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of its input: (rows, tokens, width)."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """`model_zoo.GPT` with tied weights: the same function, whatever its parameters are called."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next tokens."""
        positions = self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(self.embedding(tokens) + positions)))


class AdamWeightDecay(torch.optim.Optimizer):
    """The rule of MindSpore's `nn.AdamWeightDecay`, which is BERT's: the moments are not corrected for their start."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters."""
        for group in self.param_groups:
            beta2, decay, rate = group["beta2"], group["weight_decay"], group["lr"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                mean, square, gradient = state["mean"], state["square"], parameter.grad
                mean.lerp_(gradient, 1 - BETA1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                if decay:
                    parameter.mul_(1 - rate * decay)
                parameter.addcdiv_(mean, square.sqrt().add_(EPS), value=-rate)


def named_as_here(weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return weights that are named as in MindSpore by the names of `GPT`, with query, key and value in one."""
    here = {}
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".query"):
            three = [weights[f"{stem.removesuffix('query')}{part}.{kind}"] for part in ("query", "key", "value")]
            here[f"{stem.removesuffix('attention.query')}qkv.{kind}"] = np.concatenate(three)
        elif not stem.endswith((".key", ".value")):
            renamed = {"gamma": "weight", "beta": "bias", "embedding_table": "weight"}
            here[f"{stem.replace('attention.projection', 'projection')}.{renamed.get(kind, kind)}"] = weight
    here["head.weight"] = here["embedding.weight"]
    return {name: torch.from_numpy(weight) for name, weight in here.items()}


def optimizer_of(network: nn.Module, rule: str, *, beta2: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return MindSpore's rule, which decays all but LayerNorms; or nanoGPT's, which decays matrices."""
    named = list(network.named_parameters())
    if rule == "adamw":
        decayed = {name for name, parameter in named if parameter.dim() > 1}
    else:
        decayed = {name for name, _ in named if "norm" not in name}
    groups = [
        {"params": [parameter for name, parameter in named if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]
    if rule == "adamw":
        return torch.optim.AdamW(groups, betas=(BETA1, beta2))
    return AdamWeightDecay(groups, {"beta2": beta2, "lr": 0.0})


def tensors(columns: language_files.Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns as PyTorch needs them: classes must be int64."""
    tokens, targets = columns
    return torch.from_numpy(tokens), torch.from_numpy(targets).long()


def trainer(start: language_files.Start, network: nn.Module, rule: str, rows: int) -> Iterator[float]:
    """Return the loop of nanoGPT's train.py; each of its turns is an update, of which it yields the loss."""
    recipe = start.recipe
    optimizer = optimizer_of(network, rule, beta2=recipe["beta2"], weight_decay=recipe["weight_decay"])
    for window, rate in zip(start.windows, start.rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        micro_batches = [tensors(columns) for columns in language_files.parts(window, rows)]
        total = 0.0
        for tokens, targets in micro_batches:
            loss = F.cross_entropy(network(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
            loss = loss / len(micro_batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(network.parameters(), recipe["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total


@torch.no_grad()
def loss_of(network: nn.Module, test: language_files.Columns) -> float:
    """Return the mean loss over all tokens."""
    total = 0.0
    for tokens, targets in map(tensors, language_files.parts(test, 100)):
        losses = F.cross_entropy(network(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        total += float(losses.double().sum())
    return total / language_files.predicted(test[1])


def build(folder: str, rows: int = 12, rule: Literal["mindspore", "adamw"] = "mindspore") -> tuple[dict, Callable]:
    """Build the network and its loop; `rows` are those of a micro-batch."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    start = language_files.read(folder)
    weights = named_as_here(start.weights)
    (vocabulary, width), context = weights["embedding.weight"].shape, len(weights["position.weight"])
    network = GPT(vocabulary, context, width, start.recipe["heads"], start.recipe["layers"])
    network.load_state_dict(weights)
    coming, targets = trainer(start, network, rule, rows), iter([targets for _, targets in start.windows])

    def answer(updates: int = 0) -> dict[str, Any]:
        """Train, or without updates evaluate."""
        if not updates:
            return {"loss": loss_of(network, start.test), "tokens": language_files.predicted(start.test[1])}
        seconds, losses = timed(lambda: [next(coming) for _ in range(updates)])
        tokens = sum(language_files.predicted(next(targets)) for _ in range(updates))
        return {"seconds": seconds, "losses": losses, "tokens": tokens}

    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {"versions": {"torch": torch.__version__}, "parameters": parameters}, answer


if __name__ == "__main__":
    serve(build, **flags_of(build))
