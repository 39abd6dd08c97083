"""JAX: windows with `optax.MultiSteps`, or with `lax.scan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax

from benchmarks.programs import networks_jax
from benchmarks.programs.workload import LEARNING_RATE, MOMENTUM, Network, Train, Trainer, one_by_one, run


class Loop:
    """Parameters, the optimizer's state, and a compiled function that is called with both as donated buffers."""

    def __init__(self, network: str, scan: bool):
        self._params, logits = networks_jax.make(network)
        self._scans = scan
        # XLA's convolutions on CPU want the channels last.
        self._axes = (0, 2, 3, 1) if network == "lenet5" else None

        def loss_fn(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, inputs), targets)
            return losses.mean()

        self._loss_and_grad = jax.value_and_grad(loss_fn)

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._params))

    def load(self, micro_batches: Sequence[tuple]) -> list:
        """Return the window as arrays, for the scan as one pair of stacked ones."""
        columns = [
            (inputs.transpose(self._axes) if self._axes else inputs, targets) for inputs, targets in micro_batches
        ]
        if self._scans:
            return [tuple(map(jnp.stack, zip(*columns)))]
        return [(jnp.asarray(inputs), jnp.asarray(targets)) for inputs, targets in columns]

    def windows_of(self, window: int) -> Train:
        """Start the optimizer anew, and compile for this size of the window; one of 1 needs no wrapper."""
        optimizer = optax.sgd(LEARNING_RATE, MOMENTUM)
        if window > 1 and not self._scans:
            optimizer = optax.MultiSteps(optimizer, every_k_schedule=window)
        self._state = optimizer.init(self._params)
        update = self._scan(optimizer, window) if self._scans else self._micro_step(optimizer)
        compiled = jax.jit(update, donate_argnums=(0, 1))

        def step(inputs: jax.Array, targets: jax.Array) -> jax.Array:
            self._params, self._state, loss = compiled(self._params, self._state, inputs, targets)
            return loss

        return one_by_one(step, wait=lambda: jax.block_until_ready(self._params))

    def _micro_step(self, optimizer: Any) -> Callable[..., tuple]:
        """One call a micro-batch; the optimizer wrapper counts and updates in the compiled function."""

        def micro_step(params: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> tuple:
            loss, grads = self._loss_and_grad(params, inputs, targets)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        return micro_step

    def _scan(self, optimizer: Any, window: int) -> Callable[..., tuple]:
        """One call a window: a loop over its stacked micro-batches, and the update, in one compiled function."""

        def update(params: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> tuple:
            def add(grad_sum: Any, micro_batch: tuple) -> tuple:
                loss, grads = self._loss_and_grad(params, *micro_batch)
                return jax.tree.map(jnp.add, grad_sum, grads), loss

            grad_sum, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (inputs, targets))
            mean = jax.tree.map(lambda total: total / window, grad_sum)
            updates, state = optimizer.update(mean, state, params)
            return optax.apply_updates(params, updates), state, losses[-1]

        return update


def make(network: Network, scan: bool = False) -> Trainer:
    """Return the loop with MultiSteps, or with `--scan`."""
    loop = Loop(network, scan)
    return Trainer({"jax": jax.__version__, "optax": optax.__version__}, loop.size, loop.load, loop.windows_of)


if __name__ == "__main__":
    run(make)
