"""A loop by hand that is right in every case that it can run: it shows that the cases can be passed.

It reads a window first, so that it has each divisor before the first backward, and adds gradients in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from serving import serve_cases
from torch_parts import Network, loss_of, optimizer_of, result, schedule_of, tensors, weights
from torch_ranks import across_ranks, rank, total

from benchmarks.conformance.case import IGNORED, Case, Result
from benchmarks.conformance.oracle import PENALTY


def train(case: Case) -> Result:
    """Train each window's micro-batches as parts of one large batch."""
    network = Network(case)
    weight = network.linear.weight
    optimizer = optimizer_of(case, network)
    schedule = schedule_of(case, optimizer)
    terms = _terms(case)
    average = evaluated = None
    for size in case.windows:
        pieces = tensors(case.micro_batches(rank()))
        for start in range(0, len(pieces), size):
            window = pieces[start : start + size]
            if case.batch_norm:  # nothing is trained before it, so its statistics are those of the rows
                rows = torch.cat([x for x, _ in window])
                window = [((x - rows.mean(0)) / (rows.var(0, correction=0) + 1e-5).sqrt(), y) for x, y in window]
            window = [columns for columns in window if columns[0].isfinite().all()]
            divisors = [total(sum(numbers)) for numbers in zip(*(_divisors(case, y) for _, y in window))]
            divisors = [1.0] if case.reduction == "sum" else divisors
            gradient = torch.zeros(weight.shape, dtype=torch.float64)
            for inputs, targets in window:
                outputs = network.linear(inputs)
                sums = [term(outputs, targets) for term in terms]
                loss = sum(part / divisor for part, divisor in zip(sums, divisors) if divisor)
                gradient += torch.autograd.grad(loss, weight)[0]
            gradient = total(gradient)
            if case.clip is not None:
                gradient *= min(1.0, case.clip / float(gradient.norm()))
            weight.grad = gradient.to(weight.dtype)
            optimizer.step()
            schedule.step()
            now = weights(network)
            average = now if average is None else case.average and case.average * average + (1 - case.average) * now
        evaluated = weights(network) if evaluated is None else evaluated
    return result(network, optimizer, average=average if case.average else None, evaluated=evaluated)


def _divisors(case: Case, targets: Any) -> list[float]:
    """Return what each term of a micro-batch is divided by."""
    if case.loss == "squares":
        return [targets.numel()]
    counted = targets[targets != IGNORED].long()
    labels = len(counted) if case.class_weights is None else float(torch.tensor(case.class_weights)[counted].sum())
    return [labels, len(targets)]


def _terms(case: Case) -> list[Any]:
    """Return functions of the outputs and targets of a micro-batch, the terms of its loss as sums."""
    if case.loss == "squares":
        return [torch.nn.MSELoss(reduction="sum")]
    entropy = loss_of(replace(case, loss="cross_entropy", reduction="sum"))
    penalty = [lambda outputs, targets: PENALTY * outputs.square().sum()] if case.loss == "penalized" else []
    return [lambda outputs, targets: entropy(outputs.float(), targets), *penalty]


if __name__ == "__main__":
    every = "clip, schedule, ema, nan, own optimizer, class weights, N that changes, float16, two terms, BatchNorm"
    can = [*every.split(", "), "evaluation", "two ranks"]
    serve_cases(across_ranks(train, __file__), ["torch"], can, {"resume": "it saves nothing"})
