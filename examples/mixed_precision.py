"""Like basic.py, but in float16 with a dynamic loss scale, which changes only between windows."""

import argparse

import mindspore as ms
from mindspore import nn
from mindspore.amp import DynamicLossScaler, auto_mixed_precision

from model_zoo import LeNet5, create_dataset
from ms_accum import GradientAccumulation

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network = auto_mixed_precision(LeNet5(), "O3")  # MindSpore's mixed precision: all of the network in float16
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.04, 0.9)

scaler = DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=50)
model = GradientAccumulation(network, loss_fn, optimizer, loss_scale=scaler)
train, test = create_dataset(usage="train"), create_dataset(usage="test")
model.train_process(epochs, train, mini_steps=4, valid_dataset=test, metrics={"accuracy"})
