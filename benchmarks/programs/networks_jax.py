"""The workload's networks in JAX.

Plain functions of a tree of parameters, without a library of layers.
"""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp

from benchmarks.programs.workload import HEADS, LAYERS, MLP_WIDTH, TOKENS, VOCABULARY, WIDTH

Logits = Callable[[Any, jax.Array], jax.Array]


def make(name: str) -> tuple[Any, Logits]:
    """Return a network's parameters, and the function from them and the inputs to logits."""
    keys = iter(jax.random.split(jax.random.key(1), 64))
    if name == "lenet5":
        return _lenet5(keys), lenet5
    if name == "transformer":
        return _transformer(keys), transformer
    width = MLP_WIDTH[name]
    return [_dense(keys, 784, width), _dense(keys, width, width), _dense(keys, width, 10)], mlp


def _dense(keys: Any, inputs: int, outputs: int) -> dict:
    bound = inputs**-0.5
    weight = jax.random.uniform(next(keys), (inputs, outputs), minval=-bound, maxval=bound)
    return {"w": weight, "b": jnp.zeros(outputs)}


def _conv(keys: Any, inputs: int, outputs: int) -> jax.Array:
    # No bias: MindSpore's convolutions have none unless asked for one.
    bound = (25 * inputs) ** -0.5
    return jax.random.uniform(next(keys), (5, 5, inputs, outputs), minval=-bound, maxval=bound)


def dense(p: dict, x: jax.Array) -> jax.Array:
    """Return x w + b."""
    return x @ p["w"] + p["b"]


def mlp(params: list, images: jax.Array) -> jax.Array:
    """Return the logits of a batch of images."""
    x = images.reshape(len(images), -1)
    for p in params[:-1]:
        x = jax.nn.relu(dense(p, x))
    return dense(params[-1], x)


def _lenet5(keys: Any) -> dict:
    sizes = ((400, 120), (120, 84), (84, 10))
    return {"conv": [_conv(keys, 1, 6), _conv(keys, 6, 16)], "dense": [_dense(keys, *size) for size in sizes]}


def lenet5(params: dict, images: jax.Array) -> jax.Array:
    """Return the logits of a batch of images, whose channels come last."""
    x = images
    for weight in params["conv"]:
        x = jax.lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return mlp(params["dense"], x)


def _transformer(keys: Any) -> dict:
    return {
        "embedding": jax.random.normal(next(keys), (VOCABULARY, WIDTH)),
        "positions": 0.02 * jax.random.normal(next(keys), (TOKENS, WIDTH)),
        "blocks": [_block(keys) for _ in range(LAYERS)],
        "norm": _norm(),
        "head": _dense(keys, WIDTH, VOCABULARY),
    }


def _norm() -> dict:
    return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}


def _block(keys: Any) -> dict:
    return {
        "attention_norm": _norm(),
        "qkv": _dense(keys, WIDTH, 3 * WIDTH),
        "projection": _dense(keys, WIDTH, WIDTH),
        "feed_forward_norm": _norm(),
        "up": _dense(keys, WIDTH, 4 * WIDTH),
        "down": _dense(keys, 4 * WIDTH, WIDTH),
    }


def norm(p: dict, x: jax.Array) -> jax.Array:
    """Return the LayerNorm of the last axis."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * p["scale"] + p["bias"]


def block(p: dict, x: jax.Array) -> jax.Array:
    """Return causal self-attention and a feed-forward network, each behind a LayerNorm."""
    qkv = dense(p["qkv"], norm(p["attention_norm"], x)).reshape(len(x), TOKENS, 3, HEADS, -1)
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    x = x + dense(p["projection"], mixed.reshape(x.shape))
    hidden = jax.nn.gelu(dense(p["up"], norm(p["feed_forward_norm"], x)), approximate=False)
    return x + dense(p["down"], hidden)


def transformer(params: dict, tokens: jax.Array) -> jax.Array:
    """Return the logits of the next tokens, of shape (batch * tokens, vocabulary)."""
    x = params["embedding"][tokens] + params["positions"]
    for p in params["blocks"]:
        x = block(p, x)
    return dense(params["head"], norm(params["norm"], x)).reshape(-1, VOCABULARY)
