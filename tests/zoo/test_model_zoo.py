"""The networks equal those of the tutorials and of the papers."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

import model_zoo
from model_zoo import MLP, LeNet5, ResNet18

LENET5 = {
    "conv1.weight": (6, 1, 5, 5),
    "conv2.weight": (16, 6, 5, 5),
    "fc1.weight": (120, 400),
    "fc1.bias": (120,),
    "fc2.weight": (84, 120),
    "fc2.bias": (84,),
    "fc3.weight": (10, 84),
    "fc3.bias": (10,),
}
MLP_ = {
    "dense_relu_sequential.0.weight": (512, 784),
    "dense_relu_sequential.0.bias": (512,),
    "dense_relu_sequential.2.weight": (512, 512),
    "dense_relu_sequential.2.bias": (512,),
    "dense_relu_sequential.4.weight": (10, 512),
    "dense_relu_sequential.4.bias": (10,),
}


def _resnet18():
    """Return the parameters of ResNet-18, written down from the paper's table in torchvision's names."""
    shapes = {"conv1.weight": (64, 3, 3, 3), **_batch_norm("bn1", 64)}
    before = 64
    for stage, channels in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            for number, taken in ((1, before), (2, channels)):
                shapes[f"{name}.conv{number}.weight"] = (channels, taken, 3, 3)
                shapes.update(_batch_norm(f"{name}.bn{number}", channels))
            if before != channels:
                shapes[f"{name}.downsample.0.weight"] = (channels, before, 1, 1)
                shapes.update(_batch_norm(f"{name}.downsample.1", channels))
            before = channels
    return {**shapes, "fc.weight": (10, 512), "fc.bias": (10,)}


def _batch_norm(name, channels):
    return {f"{name}.{part}": (channels,) for part in ("moving_mean", "moving_variance", "gamma", "beta")}


@pytest.mark.parametrize(("network", "expected"), [(LeNet5, LENET5), (MLP, MLP_), (ResNet18, _resnet18())])
def test_parameters_equal_tutorials(network, expected):
    shapes = {parameter.name: parameter.shape for parameter in network().get_parameters()}
    assert shapes == expected


def test_classes_and_channels_change_first_and_last_layer_only():
    network = LeNet5(num_class=3, num_channel=2)
    shapes = {parameter.name: parameter.shape for parameter in network.get_parameters()}
    changed = {"conv1.weight": (6, 2, 5, 5), "fc3.weight": (3, 84), "fc3.bias": (3,)}
    assert shapes == {**LENET5, **changed}
    assert MLP(num_class=3)(ms.ops.zeros((2, 1, 28, 28))).shape == (2, 3)
    assert ResNet18(num_class=3).fc.weight.shape == (3, 512)


def test_lenet5_equals_numpy_reference():
    net = LeNet5()
    image = np.random.RandomState(1).randn(1, 1, 32, 32).astype(np.float32)
    weights = {name: parameter.asnumpy() for name, parameter in net.parameters_dict().items()}
    actual = net(ms.Tensor(image)).asnumpy()
    np.testing.assert_allclose(actual, _lenet5(image, weights), rtol=1e-4, atol=1e-5)


def _lenet5(image, weights):
    """Compute LeNet-5 in NumPy: windows, products, and nothing else."""
    x = image.astype(np.float64)
    for layer in ("conv1", "conv2"):
        windows = np.lib.stride_tricks.sliding_window_view(x, (5, 5), axis=(2, 3))
        x = np.maximum(np.einsum("nchwij,ocij->nohw", windows, weights[f"{layer}.weight"]), 0)
        n, c, h, w = x.shape
        x = np.max(x.reshape(n, c, h // 2, 2, w // 2, 2), axis=(3, 5))
    x = x.reshape(len(x), -1)
    for layer in ("fc1", "fc2", "fc3"):
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = np.maximum(x, 0) if layer != "fc3" else x
    return x


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LeNet5(0), ValueError, "'num_class' must be an int >= 1, but got 0"),
        (lambda: MLP(True), TypeError, "For 'MLP', 'num_class' must be"),
        (lambda: ResNet18(0), ValueError, "For 'ResNet18', 'num_class' must be an int >= 1, but got 0"),
    ],
)
def test_invalid_arguments_are_rejected(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_models_take_the_images_that_they_name():
    for model in (model for model in model_zoo.MODELS.values() if not model.takes_text):
        network, size = model.make().set_train(False), model.image_size
        assert network(ms.ops.zeros((2, model.channels, size, size))).shape == (2, 10)
