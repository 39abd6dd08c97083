"""Like basic.py, with gradient clipping and a decaying learning rate, both once per update."""

import argparse

import mindspore as ms
from mindspore import nn

from model_zoo import LeNet5, create_dataset
from ms_accum import GradientAccumulation, updates_per_epoch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network = LeNet5()
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
train, test = create_dataset(usage="train"), create_dataset(usage="test")
updates = updates_per_epoch(train.get_dataset_size(), 4)
rates = nn.cosine_decay_lr(0.0, 0.04, epochs * updates, updates, epochs)  # one rate for each update
optimizer = nn.Momentum(network.trainable_params(), rates, 0.9)

model = GradientAccumulation(network, loss_fn, optimizer, clip_norm=1.0)
model.train_process(epochs, train, mini_steps=4, valid_dataset=test, metrics={"accuracy"})
