"""The three Cells of MindSpore's r1.0 tutorial, composed by hand, on the embedded digits."""

import argparse

import mindspore as ms
from mindspore import nn

from model_zoo import LeNet5, create_dataset
from ms_accum import TrainClear, TrainForwardBackward, TrainOptim, evaluate

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=25)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network, mini_steps, updates = LeNet5(10), 4, 0
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)  # for the sum of 4 gradients, as in the tutorial
grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")

train_forward_backward = TrainForwardBackward(nn.WithLossCell(network, loss_fn), optimizer, grad_sum).set_train()
train_optim, train_clear = TrainOptim(optimizer, grad_sum), TrainClear(grad_sum)

for epoch in range(epochs):
    for number, batch in enumerate(create_dataset(usage="train", seed=epoch).create_tuple_iterator(num_epochs=1), 1):
        train_forward_backward(*batch)
        if number % mini_steps == 0:
            train_optim()
            train_clear()
            updates += 1
    train_clear()

correct, total = evaluate(network, create_dataset(usage="test"))
print(f"{updates} updates, accuracy {correct / total:.1%}")
