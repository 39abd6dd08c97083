"""Train an LSTM on the embedded digits with mindspore.train.Model: fit, callbacks, early stopping."""

import argparse

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import EarlyStopping, LossMonitor, Model
from sklearn.datasets import load_digits

from ms_accum import AccumulatedTrainStep, FlushTail


class Reader(nn.Cell):
    """Embed the gray level of each pixel, process the image as a sequence of rows, and classify it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 4)
        self.lstm = nn.LSTM(8 * 4, 64, batch_first=True)
        self.classify = nn.Dense(64, 10)

    def construct(self, pixels):
        rows = self.embedding(pixels).reshape(-1, 8, 8 * 4)
        return self.classify(self.lstm(rows)[0][:, 7])


def dataset(rows, shuffle):
    """Return micro-batches of 32 images of some rows."""
    digits = load_digits()
    images, labels = digits.data[rows].astype(np.int32), digits.target[rows].astype(np.int32)
    return NumpySlicesDataset((images, labels), ["pixels", "label"], shuffle=shuffle).batch(32)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=30)
epochs = parser.parse_args().epochs

ms.set_seed(1)
network, loss_fn = Reader(), nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.AdamWeightDecay(network.trainable_params(), 0.01)

step = AccumulatedTrainStep((network, loss_fn), optimizer, gradient_accumulation_steps=4, clip_norm=1.0)
model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"accuracy"})
train, test = dataset(slice(0, 1437), shuffle=True), dataset(slice(1437, None), shuffle=False)
callbacks = [FlushTail(), LossMonitor(23), EarlyStopping("accuracy", patience=5, verbose=True)]
model.fit(epochs, train, test, callbacks=callbacks)
print(f"{step.updates} updates, {step.skipped} skipped")
