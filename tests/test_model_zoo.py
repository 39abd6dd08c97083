"""Are the networks those of the tutorials, and is the package light?"""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

import model_zoo
from model_zoo import MLP, LeNet5

ROOT = Path(model_zoo.__file__).parents[1]
MODULES = sorted(module.name for module in pkgutil.iter_modules(model_zoo.__path__))

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


@pytest.mark.parametrize(("network", "expected"), [(LeNet5, LENET5), (MLP, MLP_)])
def test_parameters_are_those_of_the_tutorials(network, expected):
    found = {parameter.name: parameter.shape for parameter in network().get_parameters()}
    assert found == expected


def test_classes_and_channels_change_the_ends_only():
    network = LeNet5(num_class=3, num_channel=2)
    found = {parameter.name: parameter.shape for parameter in network.get_parameters()}
    changed = {"conv1.weight": (6, 2, 5, 5), "fc3.weight": (3, 84), "fc3.bias": (3,)}
    assert found == {**LENET5, **changed}
    assert MLP(num_class=3)(ms.ops.zeros((2, 1, 28, 28))).shape == (2, 3)


@pytest.mark.parametrize(("network", "side"), [(LeNet5, 32), (MLP, 28)])
def test_a_graph_computes_what_pynative_does(network, side):
    net = network()
    images = ms.Tensor(np.random.RandomState(0).randn(4, 1, side, side).astype(np.float32))
    logits = net(images).asnumpy()
    assert logits.shape == (4, 10)
    assert np.isfinite(logits).all() and logits.std() > 0

    @ms.jit
    def forward(images):
        return net(images)

    np.testing.assert_allclose(forward(images).asnumpy(), logits, rtol=1e-5, atol=1e-6)


def test_lenet5_is_the_textbook_computation():
    net = LeNet5()
    image = np.random.RandomState(1).randn(1, 1, 32, 32).astype(np.float32)
    weights = {name: parameter.asnumpy() for name, parameter in net.parameters_dict().items()}
    found = net(ms.Tensor(image)).asnumpy()
    np.testing.assert_allclose(found, _lenet5(image, weights), rtol=1e-4, atol=1e-5)
    # The planted fault: without the second pooling's maximum, far more than the tolerance.
    wrong = _lenet5(image, weights, pool=np.mean)
    assert np.abs(found - wrong).max() > 100 * 1e-5


def _lenet5(image, weights, *, pool=np.max):
    """Compute LeNet-5 in NumPy: windows, products, and nothing else."""
    x = image.astype(np.float64)
    for layer in ("conv1", "conv2"):
        windows = np.lib.stride_tricks.sliding_window_view(x, (5, 5), axis=(2, 3))
        x = np.maximum(np.einsum("nchwij,ocij->nohw", windows, weights[f"{layer}.weight"]), 0)
        n, c, h, w = x.shape
        x = pool(x.reshape(n, c, h // 2, 2, w // 2, 2), axis=(3, 5))
    x = x.reshape(len(x), -1)
    for layer in ("fc1", "fc2", "fc3"):
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = np.maximum(x, 0) if layer != "fc3" else x
    return x


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LeNet5(0), ValueError, "'num_class' must be an int >= 1, but got 0"),
        (lambda: LeNet5(num_channel=-1), ValueError, "For 'LeNet5', 'num_channel' must be"),
        (lambda: LeNet5("10"), TypeError, "'num_class' must be an int >= 1, but got type str"),
        (lambda: MLP(True), TypeError, "For 'MLP', 'num_class' must be"),
        (lambda: MLP(2.0), TypeError, "but got type float"),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_public_names():
    networks, data = {"LeNet5", "MLP", "MODELS"}, {"create_dataset", "download_mnist", "DEFAULT_URL"}
    assert set(model_zoo.__all__) == networks | data | {"DataError", "OPTIMIZERS", "make_optimizer"}
    assert all(hasattr(model_zoo, name) for name in model_zoo.__all__)
    for model in model_zoo.MODELS.values():
        assert model.make()(ms.ops.zeros((2, 1, model.image_size, model.image_size))).shape == (2, 10)


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module):
    loaded = importlib.import_module(f"model_zoo.{module}")
    assert doctest.testmod(loaded).failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_ms_accum(module):
    tree = ast.parse((ROOT / "model_zoo" / f"{module}.py").read_text(encoding="utf-8"))
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    assert not [name for name in names if name.startswith("ms_accum")]


def test_import_is_light():
    program = (
        "import sys, mindspore; before = set(sys.modules); import model_zoo; "
        "print(*[name for name in ('sklearn', 'download', 'ms_accum') "
        "if name in set(sys.modules) - before])"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
