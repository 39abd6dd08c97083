"""optax.MultiSteps, an optimizer that accumulates the gradients that it is given, with its options.

It gets the N of each window, so that a last one is short, sums where losses are sums, and leaves out gradients that are
not finite.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_parts import arrays, loss_of, numpy_of, optimizer_of, start_of
from serving import serve_cases

from benchmarks.conformance.case import Case, Result


def optimizer_for(case: Case) -> optax.MultiSteps:
    """Return the optimizer; its `every_k_schedule` gets the number of the update."""
    count = len(case.inputs)
    sizes = [min(size, count - start) for size in case.windows for start in range(0, count, size)]
    table = jnp.array(sizes)
    every = case.window if len(set(sizes)) == 1 else lambda step: table[jnp.minimum(step, len(sizes) - 1)]
    mean = case.reduction == "mean"
    return optax.MultiSteps(optimizer_of(case), every, mean, should_skip_update_fn=optax.skip_not_finite)


def train(case: Case) -> Result:
    """Train by the loop of the documentation: an update for each micro-batch, which is zero within a window."""
    optimizer, differentiated = optimizer_for(case), jax.grad(loss_of(case))

    @jax.jit
    def step(parameters: Any, state: Any, inputs: Any, targets: Any) -> Any:
        updates, state = optimizer.update(differentiated(parameters, inputs, targets), state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = start_of(case)
    state = optimizer.init(parameters)
    average = evaluated = None
    done = 0
    for _ in case.windows:
        for inputs, targets in arrays(case.micro_batches()):
            parameters, state = step(parameters, state, inputs, targets)
            if case.average and optimizer.has_updated(state):
                average = optax.incremental_update(parameters, average or parameters, 1 - case.average)
            done += 1
            if done == case.stop_after:
                parameters, state = resumed(case, parameters, state)
        evaluated = numpy_of(parameters) if evaluated is None else evaluated
    averaged = None if average is None else numpy_of(average)
    return Result(numpy_of(parameters), int(state.gradient_step), average=averaged, evaluated=evaluated)


def resumed(case: Case, parameters: Any, state: Any) -> Any:
    """Return weights and state from a file: a state of optax is a tree of arrays."""
    new = start_of(case)
    tree = jax.tree.structure((new, optimizer_for(case).init(new)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "state.npz")
        np.savez(file, *jax.tree.leaves((parameters, state)))
        with np.load(file) as saved:
            return jax.tree.unflatten(tree, [jnp.array(saved[name]) for name in saved.files])


if __name__ == "__main__":
    every = "clip, schedule, ema, nan, own optimizer, class weights, N that changes, float16, two terms, BatchNorm"
    serve_cases(
        train,
        ["optax", "jax"],
        can=[*every.split(", "), "resume", "evaluation"],
        cannot={"two ranks": "not tried: optax adds nothing to what JAX reduces"},
    )
