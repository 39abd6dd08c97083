"""MindSpore's 2.x tutorial, a compiled train step around `Accumulator`, on the embedded digits."""

import argparse

import mindspore as ms
from mindspore import nn, ops

from ms_accum import Accumulator, evaluate
from ms_accum.zoo import MLP, create_dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
train_dataset = create_dataset(image_size=28, usage="train")

model = MLP()
loss_fn = nn.CrossEntropyLoss()
optimizer = nn.SGD(model.trainable_params(), 1e-1)
accumulate_step = 2
accumulator = Accumulator(optimizer, accumulate_step)


def forward_fn(data, label):
    """Return the micro-batch's loss, divided by the size of the window."""
    return loss_fn(model(data), label) / accumulate_step


grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)


@ms.jit
def train_step(data, label):
    """Run one micro-batch; after every `accumulate_step` micro-batches the accumulator updates."""
    loss, grads = grad_fn(data, label)
    return ops.depend(loss, accumulator(grads))


for _epoch in range(epochs):
    for data, label in train_dataset.create_tuple_iterator(num_epochs=1):
        train_step(data, label)
    accumulator.flush()

correct, total = evaluate(model, create_dataset(image_size=28, usage="test"))
print(f"{accumulator.updates} updates, accuracy {correct / total:.1%}")
