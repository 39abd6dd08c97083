"""optax.microbatch, which splits the rows of a batch, and runs a function for each part in a loop of one graph.

The function returns sums and what to divide by, which are summed, as is the default. Updates that are not finite are
not applied.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax_parts import arrays, numpy_of, optimizer_of, start_of, terms_of
from serving import serve_cases

from benchmarks.conformance.case import Case, Result


def gradient_of(case: Case) -> Any:
    """Return the function that gives the gradient of a window's rows, in parts of as many rows."""
    terms = terms_of(case)

    def sums(parameters: Any, inputs: Any, targets: Any) -> Any:
        values, pull = jax.vjp(lambda p: terms(p, inputs, targets), parameters)
        zeros = jax.tree.map(lambda value: 0 * value, values)
        found = []
        for number, (_, divisor) in enumerate(values):
            chosen = [(total + (n == number), zero) for n, (total, zero) in enumerate(zeros)]
            found.append((pull(chosen)[0], divisor))
        return found

    def gradient(parameters: Any, inputs: Any, targets: Any, rows: int) -> Any:
        found = optax.microbatch(sums, argnums=(1, 2), microbatch_size=rows)(parameters, inputs, targets)
        divided = [jax.tree.map(lambda g, d=d: g / d if case.reduction == "mean" else g, g) for g, d in found]
        return jax.tree.map(lambda *each: sum(each), *divided)

    return gradient


def train(case: Case) -> Result:
    """Train with windows as batches."""
    optimizer, gradient = optax.apply_if_finite(optimizer_of(case), max_consecutive_errors=5), gradient_of(case)

    def step(parameters: Any, state: Any, inputs: Any, targets: Any, rows: int) -> Any:
        updates, state = optimizer.update(gradient(parameters, inputs, targets, rows), state, parameters)
        return optax.apply_updates(parameters, updates), state

    compiled = jax.jit(step, static_argnums=4)
    parameters = start_of(case)
    state = optimizer.init(parameters)
    average = evaluated = None
    taken, rows = 0, len(case.inputs[0])
    for window, batches in zip(case.windows, case.large_batches()):
        # Rows are of equal number in most cases; else as many parts as the window has micro-batches.
        ragged = len({len(x) for x in case.inputs}) > 1
        for inputs, targets in arrays(batches):
            parameters, state = compiled(parameters, state, inputs, targets, len(inputs) // window if ragged else rows)
            taken += 1
            if case.average:
                average = optax.incremental_update(parameters, average or parameters, 1 - case.average)
        evaluated = numpy_of(parameters) if evaluated is None else evaluated
    averaged = None if average is None else numpy_of(average)
    return Result(numpy_of(parameters), taken - int(state.total_notfinite), average=averaged, evaluated=evaluated)


if __name__ == "__main__":
    every = "clip, schedule, ema, nan, own optimizer, class weights, N that changes, float16, two terms, BatchNorm"
    serve_cases(
        train,
        ["optax", "jax"],
        can=[*every.split(", "), "evaluation"],
        cannot={
            "resume": "a window is one call, within which nothing can be saved",
            "two ranks": "not tried: optax adds nothing to what JAX reduces",
        },
    )
