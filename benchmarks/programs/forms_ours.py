"""Ways to write a block of a network that compute the same."""

from __future__ import annotations

import math
from typing import Any, Callable

import mindspore as ms
import networks_ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from ours import VERSIONS, tuned
from protocol import flags_of, serve, timed
from workload import HEADS, TOKENS, WIDTH

from model_zoo.fast import GELU, LayerNorm


class Attention(nn.Cell):
    """Attention as in PyTorch: the projection is cut in three by an index."""

    def __init__(self, weight: np.ndarray):
        super().__init__()
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH, weight_init=Tensor(weight), bias_init="zeros")

    def construct(self, x: Any) -> Any:
        """Return for each token a mean of values."""
        qkv = ops.transpose(ops.reshape(self.qkv(x), (-1, TOKENS, 3, HEADS, WIDTH // HEADS)), (2, 0, 3, 1, 4))
        query, key, value = qkv[0], qkv[1], qkv[2]
        scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) / math.sqrt(WIDTH // HEADS)
        return _together(ops.matmul(ops.softmax(scores, -1), value))


class Split(nn.Cell):
    """The projection is split, the query is scaled, and the product transposes the key."""

    def __init__(self, weight: np.ndarray):
        super().__init__()
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH, weight_init=Tensor(weight), bias_init="zeros")
        self.product = ops.BatchMatMul(transpose_b=True)

    def construct(self, x: Any) -> Any:
        """Return for each token a mean of values."""
        query, key, value = ops.split(self.qkv(x), WIDTH, 1)
        scores = self.product(_heads(query) * (1 / math.sqrt(WIDTH // HEADS)), _heads(key))
        return _together(ops.matmul(ops.softmax(scores, -1), _heads(value)))


class Three(nn.Cell):
    """The same with three projections."""

    def __init__(self, weight: np.ndarray):
        super().__init__()
        parts = [nn.Dense(WIDTH, WIDTH, weight_init=Tensor(part), bias_init="zeros") for part in np.split(weight, 3)]
        self.query, self.key, self.value = parts
        self.product = ops.BatchMatMul(transpose_b=True)

    def construct(self, x: Any) -> Any:
        """Return for each token a mean of values."""
        scores = self.product(_heads(self.query(x)) * (1 / math.sqrt(WIDTH // HEADS)), _heads(self.key(x)))
        return _together(ops.matmul(ops.softmax(scores, -1), _heads(self.value(x))))


def _heads(x: Any) -> Any:
    return ops.transpose(ops.reshape(x, (-1, TOKENS, HEADS, WIDTH // HEADS)), (0, 2, 1, 3))


def _together(x: Any) -> Any:
    return ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, WIDTH))


class Product(nn.Cell):
    """A matrix product with a weight that is kept as it is, or transposed."""

    def __init__(self, width: int, out: int, *, turned: bool):
        super().__init__()
        weight = np.random.RandomState(1).randn(out, width).astype(np.float32) / math.sqrt(width)
        self.weight = Parameter(Tensor(np.ascontiguousarray(weight.T) if turned else weight), name="weight")
        self.product = ops.MatMul(transpose_b=not turned)

    def construct(self, x: Any) -> Any:
        """Return the product."""
        return self.product(x, self.weight)


class Pooled(nn.Cell):
    """LeNet5's first convolution, and after it pooling and ReLU in one order or the other."""

    def __init__(self, first: nn.Cell, second: nn.Cell):
        super().__init__()
        weight = Tensor(np.random.RandomState(1).randn(6, 1, 5, 5).astype(np.float32) / 5)
        self.convolution = nn.Conv2d(1, 6, 5, pad_mode="valid", weight_init=weight)
        self.first, self.second = first, second

    def construct(self, x: Any) -> Any:
        """Return the pooled image."""
        return self.second(self.first(self.convolution(x)))


class Scaled(nn.Cell):
    """A division by a constant, or the multiplication by its reciprocal."""

    def __init__(self, *, by_reciprocal: bool):
        super().__init__()
        self.by_reciprocal = by_reciprocal

    def construct(self, x: Any) -> Any:
        """Return a third."""
        return x * (1 / 3.0) if self.by_reciprocal else x / 3.0


class Standardized(nn.Cell):
    """A matrix whose rows have mean 0 and length 1, by means or by products with columns and rows of ones."""

    def __init__(self, width: int, *, by_products: bool):
        super().__init__()
        self.by_products = by_products
        self.sum, self.copy = ops.ones((width, 1), ms.float32), ops.ones((1, width), ms.float32)
        self.mean = self.sum / width

    def construct(self, x: Any) -> Any:
        """Return the standardized matrix."""
        if self.by_products:
            centred = x - ops.matmul(ops.matmul(x, self.mean), self.copy)
            return centred * ops.matmul(ops.rsqrt(ops.matmul(ops.square(centred), self.sum) + 1e-4), self.copy)
        centred = x - ops.mean(x, 1, True)
        return centred * ops.rsqrt(ops.mean(ops.square(centred), 1, True) * x.shape[1] + 1e-4)


def forms_of(block: str, rows: int) -> tuple[dict[str, nn.Cell], list[Tensor]]:
    """Return the forms of a block by name, and its inputs; the first form is the usual one."""
    random = np.random.RandomState(0)

    def numbers(*shape: int) -> Tensor:
        return Tensor(random.randn(*shape).astype(np.float32))

    def product(width: int, out: int) -> tuple[dict[str, nn.Cell], list[Tensor]]:
        turned = {"weight (out, in)": False, "weight (in, out)": True}
        return {name: Product(width, out, turned=is_turned) for name, is_turned in turned.items()}, [numbers(32, width)]

    if block == "attention":
        qkv = random.randn(3 * WIDTH, WIDTH).astype(np.float32) / np.float32(math.sqrt(WIDTH))
        return {"indexed": Attention(qkv), "split": Split(qkv), "three projections": Three(qkv)}, [numbers(rows, WIDTH)]
    if block == "norm":
        usual = nn.LayerNorm((WIDTH,), epsilon=1e-5)
        return {"nn.LayerNorm": usual, "of primitives": LayerNorm(WIDTH)}, [numbers(rows, WIDTH)]
    if block == "feed-forward":  # where a GELU stands in a network: alone, its forms take the same time
        usual = nn.GELU(approximate=False)
        gelus = {"nn.GELU(False)": usual, "GELU of Erf": GELU(), "nn.GELU(), by tanh": nn.GELU()}
        first, last = nn.Dense(WIDTH, 4 * WIDTH), nn.Dense(4 * WIDTH, WIDTH)
        return {name: nn.SequentialCell(first, gelu, last) for name, gelu in gelus.items()}, [numbers(rows, WIDTH)]
    if block == "cross-entropy":
        columns = [numbers(32, 10), Tensor(random.randint(0, 10, 32).astype(np.int32))]
        return {
            "nn.CrossEntropyLoss": nn.CrossEntropyLoss(),
            "SoftmaxCrossEntropyWithLogits": networks_ms.loss(),
        }, columns
    if block == "division":
        usual, other = Scaled(by_reciprocal=False), Scaled(by_reciprocal=True)
        return {"by 3": usual, "times 1/3": other}, [numbers(rows, 4 * WIDTH)]
    if block == "standardized":
        usual, other = Standardized(1152, by_products=False), Standardized(1152, by_products=True)
        return {"by means": usual, "by products with ones": other}, [numbers(128, 1152)]
    if block == "pooling":
        relu, pool = nn.ReLU(), nn.MaxPool2d(2, 2)
        return {"pool(relu(x))": Pooled(relu, pool), "relu(pool(x))": Pooled(pool, relu)}, [numbers(32, 1, 32, 32)]
    return product(*{"product": (784, 512), "narrow-product": (512, 10)}[block])


class Step(nn.Cell):
    """The forward and the gradients of a form by its input and its Parameters."""

    def __init__(self, form: nn.Cell):
        super().__init__(auto_prefix=False)
        self.form = form
        self.weights = tuple(form.trainable_params())
        self.differentiate = ms.value_and_grad(self.total, 0, self.weights or None)

    def total(self, *inputs: Any) -> Any:
        """Return one number that depends on all outputs."""
        return mint.sum(ops.square(self.form(*inputs)))

    def construct(self, *inputs: Any) -> Any:
        """Return it, once the gradients are computed."""
        value, gradients = self.differentiate(*inputs)
        return ops.depend(value, gradients)


def build(block: str, rows: int) -> tuple[dict, Callable[..., dict]]:
    """Make the forms of a block, in graph mode; one is run `count` times, or compared with the first."""
    ms.set_context(mode=ms.GRAPH_MODE)  # some MindSpore versions start in the other one
    forms, inputs = forms_of(block, rows)
    steps = {name: Step(tuned(form)) for name, form in forms.items()}

    def answer(form: str, count: int = 0) -> dict[str, float]:
        if count:
            step = steps[form]
            return {"seconds": timed(lambda: [step(*inputs).asnumpy() for _ in range(count)])[0]}
        first, other = (forms[name](*inputs).asnumpy() for name in (next(iter(forms)), form))
        return {"difference": float(np.abs(first - other).max() / np.abs(first).max())}

    return {"versions": VERSIONS, "forms": list(forms)}, answer


if __name__ == "__main__":
    serve(build, **flags_of(build))
