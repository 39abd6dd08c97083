"""Like basic.py, but in several processes, each of which trains on its shard of the data.

python -m ms_accum.launch --nproc 2 examples/several_processes.py     (alone: python examples/several_processes.py)
"""

import argparse

import mindspore as ms
from mindspore import nn

from model_zoo import LeNet5, create_dataset
from ms_accum import GradientAccumulation, own_group

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network = LeNet5()
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.04, 0.9)

model = GradientAccumulation(network, loss_fn, optimizer)
group = own_group()
train = create_dataset(usage="train", seed=1, num_shards=group.size, shard_id=group.rank)
test = create_dataset(usage="test")
model.train_process(epochs, train, mini_steps=4, valid_dataset=test, metrics={"accuracy"})
