"""Like basic.py, but evaluated with an average of the weights over the updates (EMA)."""

import argparse

import mindspore as ms
from mindspore import nn

from model_zoo import LeNet5, create_dataset
from ms_accum import Ema, GradientAccumulation

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network = LeNet5()
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.04, 0.9)

model = GradientAccumulation(network, loss_fn, optimizer, ema=Ema(0.9))
train, test = create_dataset(usage="train"), create_dataset(usage="test")
model.train_process(epochs, train, mini_steps=4, valid_dataset=test, metrics={"accuracy"})
