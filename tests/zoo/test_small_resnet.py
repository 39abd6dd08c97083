"""The network for CIFAR-10 equals a NumPy reference, and treats each row on its own."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor

from model_zoo import SmallResNet


def network():
    """Return a network whose blocks have an effect: by default their gains begin with 0."""
    ms.set_seed(1)
    net, random = SmallResNet(), np.random.RandomState(1)
    for name, parameter in net.parameters_dict().items():
        if name.endswith(("gain", "bias")):
            parameter.set_data(Tensor(random.uniform(0.5, 1.5, parameter.shape), ms.float32))
    return net.set_train()


def images(rng, count):
    return Tensor(rng.randn(count, 3, 32, 32), ms.float32), Tensor(rng.randint(0, 10, count), ms.int32)


def test_small_resnet_equals_numpy_reference(rng):
    net = network()
    weights = {name: parameter.asnumpy() for name, parameter in net.parameters_dict().items()}
    x, _ = images(rng, 2)
    actual, expected = net(x).asnumpy(), by_numpy(x.asnumpy(), weights)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def standardized(weight):
    rows = weight.reshape(len(weight), -1).astype(np.float64)
    rows = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) * rows.shape[1] + 1e-4)
    return rows.reshape(weight.shape)


def convolve(x, weight, stride=1):
    """Compute a convolution that keeps the image's size but for its stride."""
    around = weight.shape[-1] // 2
    x = np.pad(x, ((0, 0), (0, 0), (around, around), (around, around)))
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    return np.tensordot(windows, weight, axes=((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)


def by_numpy(x, weights):
    def layer(x, name, stride=1):
        weight = standardized(weights[f"{name}.weight"]) * weights[f"{name}.gain"].reshape(-1, 1, 1, 1)
        return convolve(x, weight, stride) + weights[f"{name}.bias"].reshape(-1, 1, 1)

    x = np.maximum(layer(x, "stages.0"), 0)
    for stage in (2, 5, 8):
        x = np.maximum(layer(x, f"stages.{stage}", 2), 0)
        block = f"stages.{stage + 2}"
        inner = layer(np.maximum(layer(x, f"{block}.first"), 0), f"{block}.second")
        x = np.maximum(x + inner, 0)
    return x.mean((2, 3)) @ weights["head.weight"].T + weights["head.bias"]
