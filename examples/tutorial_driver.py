"""MindSpore's r1.0 tutorial, LeNet5 and `GradientAccumulation`, on the embedded digits."""

import argparse

import mindspore as ms
from mindspore import nn

from model_zoo import LeNet5, create_dataset
from ms_accum import GradientAccumulation, evaluate

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network = LeNet5()
optimizer = nn.Momentum(network.trainable_params(), 0.04, 0.9)
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
model = GradientAccumulation(network, loss_fn, optimizer)
model.train_process(epochs, create_dataset(usage="train"), mini_steps=4)

correct, total = evaluate(network, create_dataset(usage="test"))
print(f"{model.updates} updates, accuracy {correct / total:.1%}")
