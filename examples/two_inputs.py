"""A network with two inputs, words and a mask, with accuracy, early stopping, resuming and a check of its gradients."""

import argparse

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import EarlyStopping

from ms_accum import Checkpointer, GradientAccumulation, verify


class Classifier(nn.Cell):
    """The scores of two classes, from the mean of the words that the mask keeps."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Dense(16, 2)

    def construct(self, words, mask):
        kept = self.table(words) * ops.expand_dims(mask, -1)
        return self.head(ops.sum(kept, 1) / ops.sum(mask, 1, keepdim=True))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
epochs = parser.parse_args().epochs
ms.set_seed(1)
words = np.random.RandomState(1).randint(0, 20, (600, 8)).astype(np.int32)
mask = (np.arange(8) < np.random.RandomState(2).randint(1, 9, (600, 1))).astype(np.float32)
label = ((words * mask).sum(1) / mask.sum(1) > 9.5).astype(np.int32)  # is their mean large?
train, test = (
    NumpySlicesDataset((words[rows], mask[rows], label[rows]), shuffle=False).batch(20)
    for rows in (slice(480), slice(480, None))
)

network, loss_fn = Classifier(), nn.CrossEntropyLoss()
print(verify(network, loss_fn, (words[:80], mask[:80], label[:80]), 4, inputs=2).diagnosis)
optimizer = nn.AdamWeightDecay(network.trainable_params(), 0.01)
model = GradientAccumulation(network, loss_fn, optimizer, inputs=2)  # the rest goes to the loss
states = Checkpointer("two_inputs_states", resume="auto")
options = {"valid_dataset": test, "metrics": {"accuracy"}, "checkpointer": states}
stopping = EarlyStopping("accuracy", patience=3, mode="max")
model.train_process(epochs, train, mini_steps=4, callbacks=stopping, **options)
