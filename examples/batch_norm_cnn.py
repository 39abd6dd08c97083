"""Train a CNN with BatchNorm on the embedded digits; evaluate it after each epoch, and keep the best weights."""

import argparse

import mindspore as ms
from mindspore import nn
from mindspore.train import EarlyStopping

from model_zoo import create_dataset
from ms_accum import GradientAccumulation, evaluate


def block(channels_in, channels):
    """Return a convolution that halves the sides of the image."""
    return nn.SequentialCell(
        nn.Conv2d(channels_in, channels, 3, 2, has_bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    )


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network = nn.SequentialCell(block(1, 8), block(8, 16), nn.Flatten(), nn.Dense(16 * 4 * 4, 10))
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)

# BatchNorm normalizes each micro-batch with its own statistics, so a window does not exactly equal the large batch; a
# warning is printed. With GroupNorm there is no difference.
model = GradientAccumulation(network, loss_fn, optimizer)
train, test = (create_dataset(image_size=16, usage=usage) for usage in ("train", "test"))
model.train_process(
    epochs,
    train,
    mini_steps=4,
    valid_dataset=test,
    metrics={"accuracy"},
    callbacks=EarlyStopping("accuracy", patience=3, restore_best_weights=True),
    ckpt_path=None,
)
correct, total = evaluate(network, test)
print(f"{model.updates} updates, accuracy {correct / total:.1%}")
