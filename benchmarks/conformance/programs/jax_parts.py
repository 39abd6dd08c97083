"""What the programs of JAX's libraries share: the loss, the data, the optimizer of optax, the average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.conformance.case import IGNORED, Case, orthogonal
from benchmarks.conformance.oracle import BETAS, EPSILON, PENALTY


def start_of(case: Case) -> dict[str, Any]:
    """Return the weights before training."""
    return {"weights": jnp.array(case.start, case.dtype)}


def terms_of(case: Case) -> Any:
    """Return the function of weights, inputs and targets that gives sum and divisor of each term of the loss."""

    def terms(parameters: Any, inputs: Any, targets: Any) -> list[tuple[Any, Any]]:
        if case.batch_norm:
            inputs = (inputs - inputs.mean(0)) / jnp.sqrt(inputs.var(0) + 1e-5)
        logits = inputs @ parameters["weights"].T
        if case.loss == "squares":
            return [(jnp.square(logits - targets).sum(), jnp.array(float(targets.size)))]
        labels = jnp.where(targets == IGNORED, 0, targets)
        counted = jnp.array(case.class_weights or [1.0] * len(case.start))[labels] * (targets != IGNORED)
        each = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        made = [((counted * each).sum(), counted.sum())]
        if case.loss == "penalized":
            made.append((PENALTY * jnp.square(logits).sum(), jnp.array(float(len(logits)))))
        return made

    return terms


def loss_of(case: Case) -> Any:
    """Return the function of weights, inputs and targets that gives the loss of a micro-batch: what a user writes."""
    terms = terms_of(case)

    def loss(parameters: Any, inputs: Any, targets: Any) -> Any:
        found = terms(parameters, inputs, targets)
        return sum(total / divisor if case.reduction == "mean" else total for total, divisor in found)

    return loss


def optimizer_of(case: Case) -> optax.GradientTransformation:
    """Return the optimizer, with the clipping and the schedule in it, as optax combines them."""
    rates = jnp.array([case.rate(n) for n in range(len(case.inputs) * case.epochs)])
    rate: Any = (lambda count: rates[jnp.minimum(count, len(rates) - 1)]) if len(case.rates) > 1 else case.rate(0)
    if case.optimizer == "adamw":
        made = optax.adamw(rate, *BETAS, EPSILON, weight_decay=case.weight_decay)
    elif case.optimizer == "muon":
        steps = optax.stateless(lambda updates, _: jax.tree.map(orthogonal, updates))
        made = optax.chain(optax.trace(case.momentum), steps, optax.scale_by_learning_rate(rate))
    else:
        made = optax.sgd(rate)
    return made if case.clip is None else optax.chain(optax.clip_by_global_norm(case.clip), made)


def arrays(columns: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return columns as arrays of JAX."""
    return [(jnp.array(x), jnp.array(y)) for x, y in columns]


def numpy_of(parameters: dict[str, Any]) -> np.ndarray:
    """Return a copy of the weights."""
    return np.array(parameters["weights"], np.float64)
