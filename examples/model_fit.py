"""Like basic.py, but with MindSpore's Model: a step is a micro-batch, and FlushTail ends an epoch's last window."""

import argparse

import mindspore as ms
from mindspore import nn
from mindspore.train import Model

from model_zoo import LeNet5, create_dataset
from ms_accum import AccumulatedTrainStep, FlushTail

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network = LeNet5()
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.04, 0.9)

step = AccumulatedTrainStep((network, loss_fn), optimizer, gradient_accumulation_steps=4)
model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"accuracy"})
train, test = create_dataset(usage="train"), create_dataset(usage="test")
model.fit(epochs, train, test, valid_frequency=epochs, callbacks=[FlushTail()])
print(model.eval(test))
