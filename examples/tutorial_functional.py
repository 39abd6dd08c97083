"""MindSpore's 2.x tutorial, a compiled train step around `Accumulator`, on the embedded digits."""

import argparse

import mindspore as ms
from mindspore import nn, ops

from model_zoo import MLP, create_dataset
from ms_accum import Accumulator, evaluate

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_seed(1)
window, digits = 2, create_dataset(image_size=28, usage="train")
network, loss_fn = MLP(), nn.CrossEntropyLoss()
optimizer = nn.SGD(network.trainable_params(), 0.1)
accumulator = Accumulator(optimizer, window, reduction="sum")  # as the tutorial's does


def share_of_window(image, label):
    """Return the loss of a micro-batch, divided by the size of the window."""
    return loss_fn(network(image), label) / window


loss_and_gradients = ms.value_and_grad(share_of_window, None, optimizer.parameters)


@ms.jit
def micro_step(image, label):
    """Run one micro-batch; with every second one the accumulator updates."""
    loss, gradients = loss_and_gradients(image, label)
    return ops.depend(loss, accumulator(gradients))


network.set_train()
for _epoch in range(epochs):
    for image, label in digits.create_tuple_iterator(num_epochs=1):
        micro_step(image, label)
    accumulator.flush()

correct, total = evaluate(network, create_dataset(image_size=28, usage="test"))
print(f"{int(accumulator.updates)} updates, accuracy {correct / total:.1%}")
