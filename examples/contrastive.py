"""Train two towers, for the even and the odd columns of digits, to find the matching halves within a window."""

import argparse

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from sklearn.datasets import load_digits

from ms_accum import CoupledLoss, GradientAccumulation


class Towers(nn.Cell):
    """Map the even and the odd columns of digits to unit vectors."""

    def __init__(self):
        super().__init__()
        self.even, self.odd = (nn.SequentialCell(nn.Dense(32, 128), nn.ReLU(), nn.Dense(128, 32)) for _ in range(2))

    def construct(self, even, odd):
        even, odd = self.even(even), self.odd(odd)
        return even / ops.norm(even, dim=1, keepdim=True), odd / ops.norm(odd, dim=1, keepdim=True)


def info_nce(even, odd):
    """Return the mean cross entropy of finding the matching half of a digit, in both directions."""
    scores, own = ops.matmul(even, odd.T) / 0.1, ops.arange(even.shape[0])
    return (ops.cross_entropy(scores, own) + ops.cross_entropy(scores.T, own)) / 2


class WithLoss(nn.Cell):
    """Return the loss of a batch. If it is accumulated, digits are compared only within their micro-batch."""

    def __init__(self, towers):
        super().__init__(auto_prefix=False)
        self.towers = towers

    def construct(self, even, odd):
        return info_nce(*self.towers(even, odd))


def gradient(network, loss_fn, micro_batches, **options):
    """Return the gradient of one window: plain SGD with a learning rate of 1 subtracts it."""
    parameters = network.trainable_params()
    before = [parameter.asnumpy().copy() for parameter in parameters]
    model = GradientAccumulation(network, loss_fn, nn.SGD(parameters, 1.0), check="off", **options)
    model.train_process(1, micro_batches, mini_steps=len(micro_batches), report=(), ckpt_path=None)
    result = np.concatenate([(old - new.asnumpy()).ravel() for old, new in zip(before, parameters)])
    for parameter, old in zip(parameters, before):
        ops.assign(parameter, Tensor(old))
    return result


def show_accuracy(when):
    """Print how often the nearest odd half among all test digits belongs to the same digit."""
    even, odd = towers(*map(Tensor, test))
    correct = ops.matmul(even, odd.T).argmax(1).asnumpy() == np.arange(360)
    print(f"{when}: {correct.mean():.1%} of 360 test digits are put together")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
epochs = parser.parse_args().epochs
ms.set_seed(1)
images, towers, coupled = load_digits().images.astype(np.float32) / 8 - 1, Towers(), CoupledLoss(info_nce)
train, test = ([images[rows, :, n::2].reshape(-1, 32) for n in (0, 1)] for rows in (slice(1437), slice(1437, None)))
window = [tuple(Tensor(half[row : row + 32]) for half in train) for row in range(0, 256, 32)]
expected = gradient(WithLoss(towers), None, [tuple(Tensor(half[:256]) for half in train)])
print(f"one big batch: norm of the gradient {np.linalg.norm(expected):.6f}")
for name, network, loss_fn, inputs in (("plain", WithLoss(towers), None, None), ("CoupledLoss", towers, coupled, 2)):
    difference = np.linalg.norm(gradient(network, loss_fn, window, inputs=inputs) - expected)
    print(f"{name}, 8 micro-batches: norm of the gradient's difference {difference:.1e}")

show_accuracy("before")
optimizer = nn.AdamWeightDecay(towers.trainable_params(), 2e-3)
model = GradientAccumulation(towers, coupled, optimizer, tail="drop", inputs=2)
dataset = NumpySlicesDataset(tuple(train)).batch(32)
model.train_process(epochs, dataset, mini_steps=8, report=(), ckpt_path=None)
show_accuracy(f"after {model.updates} updates")
