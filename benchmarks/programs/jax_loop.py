"""How long does a window take in JAX, with `optax.MultiSteps` or with `lax.scan`?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import networks_jax
import optax
from workload import LEARNING_RATE, MOMENTUM, run


class _Trainer:
    """What both have: parameters, their optimizer, and a compiled function that is called with donated buffers."""

    versions = {"jax": jax.__version__, "optax": optax.__version__}

    def __init__(self, arguments: argparse.Namespace):
        self._params, logits = networks_jax.make(arguments.network)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self._params))
        # XLA's convolutions on CPU want the channels last.
        self._axes = (0, 2, 3, 1) if arguments.network == "lenet5" else None

        def loss_fn(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, inputs), targets)
            return losses.mean()

        self._loss_and_grad = jax.value_and_grad(loss_fn)

    def _column(self, inputs: Any) -> Any:
        return inputs.transpose(self._axes) if self._axes else inputs


class MultiSteps(_Trainer):
    """One call a micro-batch; the optimizer wrapper counts and updates in the compiled function."""

    def set_window(self, window: int) -> None:
        """Wrap the optimizer and compile anew; a window of 1 needs no wrapper."""
        optimizer = optax.sgd(LEARNING_RATE, MOMENTUM)
        if window > 1:
            optimizer = optax.MultiSteps(optimizer, every_k_schedule=window)
        self._state = optimizer.init(self._params)

        @partial(jax.jit, donate_argnums=(0, 1))
        def micro_step(params: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> tuple:
            loss, grads = self._loss_and_grad(params, inputs, targets)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self._micro_step = micro_step

    def load(self, micro_batches: Sequence[tuple]) -> list:
        """Return the window as arrays."""
        return [(jnp.asarray(self._column(inputs)), jnp.asarray(targets)) for inputs, targets in micro_batches]

    def train(self, windows: Sequence[Any]) -> float:
        """Run these windows; the loss is read once for each."""
        shown = 0.0
        for window in windows:
            for inputs, targets in window:
                self._params, self._state, loss = self._micro_step(self._params, self._state, inputs, targets)
            shown = float(loss)
        jax.block_until_ready(self._params)
        return shown


class Scan(_Trainer):
    """One call a window: a loop over its stacked micro-batches, and the update, in one compiled function."""

    def set_window(self, window: int) -> None:
        """Start the optimizer anew; the function compiles by itself for the window's shape."""
        optimizer = optax.sgd(LEARNING_RATE, MOMENTUM)
        self._state = optimizer.init(self._params)

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> tuple:
            def add(grad_sum: Any, micro_batch: tuple) -> tuple:
                loss, grads = self._loss_and_grad(params, *micro_batch)
                return jax.tree.map(jnp.add, grad_sum, grads), loss

            grad_sum, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (inputs, targets))
            mean = jax.tree.map(lambda total: total / window, grad_sum)
            updates, state = optimizer.update(mean, state, params)
            return optax.apply_updates(params, updates), state, losses[-1]

        self._update = update

    def load(self, micro_batches: Sequence[tuple]) -> tuple:
        """Return the window as two stacked arrays."""
        inputs, targets = zip(*micro_batches)
        return jnp.stack([self._column(column) for column in inputs]), jnp.stack(targets)

    def train(self, windows: Sequence[Any]) -> float:
        """Run these windows; the loss is read once for each."""
        shown = 0.0
        for inputs, targets in windows:
            self._params, self._state, loss = self._update(self._params, self._state, inputs, targets)
            shown = float(loss)
        jax.block_until_ready(self._params)
        return shown


if __name__ == "__main__":
    run(lambda arguments: (Scan if arguments.scan else MultiSteps)(arguments), "--scan")
