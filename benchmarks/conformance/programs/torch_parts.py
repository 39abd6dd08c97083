"""What the programs of PyTorch's libraries share: the network, the loss, the data, the optimizer, the schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.conformance.case import IGNORED, Case, Result, orthogonal
from benchmarks.conformance.oracle import BETAS, EPSILON, PENALTY

torch.set_num_threads(1)
# The torchvision that pip finds is for CUDA; what imports it needs these operators to be known, and none calls them.
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


class Network(nn.Module):
    """The network of a case."""

    def __init__(self, case: Case):
        super().__init__()
        start = torch.tensor(case.start, dtype=getattr(torch, case.dtype))
        self.norm = nn.BatchNorm1d(start.shape[1], affine=False) if case.batch_norm else nn.Identity()
        self.linear = nn.Linear(start.shape[1], start.shape[0], bias=False, dtype=start.dtype)
        self.linear.weight.data = start

    def forward(self, inputs: Any) -> Any:
        return self.linear(self.norm(inputs))


def loss_of(case: Case) -> Any:
    """Return the function of outputs and targets that gives the loss of a micro-batch: what a user writes."""
    if case.loss == "squares":
        return nn.MSELoss(reduction=case.reduction)
    weights = None if case.class_weights is None else torch.tensor(case.class_weights)
    entropy = nn.CrossEntropyLoss(weight=weights, ignore_index=IGNORED, reduction=case.reduction)

    def loss(outputs: Any, targets: Any) -> Any:
        penalty = PENALTY * outputs.square().sum() / len(outputs) if case.loss == "penalized" else 0.0
        return entropy(outputs.flatten(0, -2), targets.long().flatten()) + penalty

    return loss


def items_of(case: Case, targets: Any) -> Any:
    """Return what the mean of a cross entropy is divided by: labels that are not ignored, or their class weights."""
    counted = targets[targets != IGNORED].long()
    return counted.numel() if case.class_weights is None else torch.tensor(case.class_weights)[counted].sum()


def divided_of(case: Case) -> Any:
    """Return the function of outputs, targets and a number that gives a sum over labels divided by this number.

    For libraries that count what a window has. A sum stays one, and a penalty is added as it is: a mean over rows.
    """
    plain = replace(case, loss="cross_entropy", reduction="sum") if case.loss == "penalized" else case
    sum_of = loss_of(replace(plain, reduction="sum"))

    def loss(outputs: Any, targets: Any, items: Any) -> Any:
        penalty = PENALTY * outputs.square().sum() / len(outputs) if case.loss == "penalized" else 0.0
        return sum_of(outputs, targets) / (items if case.reduction == "mean" else 1) + penalty

    return loss


def tensors(columns: Any) -> list[tuple[Any, Any]]:
    """Return columns as tensors."""
    return [(torch.tensor(x), torch.tensor(y)) for x, y in columns]


def loader(case: Case, rank: int = 0) -> DataLoader:
    """Return a loader of the micro-batches, which are complete in its data set."""
    return DataLoader(tensors(case.micro_batches(rank)), batch_size=1, collate_fn=_only, shuffle=False)


def _only(batch: list) -> Any:
    """Return the micro-batch. With batch_size=None some libraries can't skip batches."""
    return batch[0]


def optimizer_of(case: Case, network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; `updates_of` counts its steps."""
    parameters, rate = list(network.parameters()), case.rate(0)
    if case.optimizer == "adamw":
        made: Any = torch.optim.AdamW(parameters, rate, BETAS, EPSILON, weight_decay=case.weight_decay)
    elif case.optimizer == "muon":
        made = Muon(parameters, rate, case.momentum)
    else:
        made = torch.optim.SGD(parameters, rate, momentum=case.momentum, weight_decay=case.weight_decay)
    made.taken = 0
    made.register_step_post_hook(_count)
    return made


def _count(optimizer: Any, *_: Any) -> None:
    optimizer.taken += 1


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal."""

    def __init__(self, parameters: Any, lr: float, momentum: float):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["momentum"] = group["momentum"] * state.get("momentum", 0.0) + parameter.grad
                parameter.sub_(group["lr"] * orthogonal(state["momentum"]))
        return loss


def schedule_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule, to be stepped as the library says."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: case.rate(step) / case.rate(0))


def result(network: Any, optimizer: Any, **more: Any) -> Result:
    """Return what training has come to."""
    return Result(weights(network), optimizer.taken, **more)


def weights(network: Any) -> Any:
    """Return a copy of the weights."""
    (only,) = [value for name, value in network.named_parameters() if name.endswith("linear.weight")]
    return only.detach().double().numpy().copy()
