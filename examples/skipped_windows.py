"""Write the micro-batches of a skipped window to files, with a callback of MindSpore's Model."""

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

from model_zoo import LeNet5, create_dataset
from ms_accum import AccumulatedTrainStep, FlushTail


class SaveSkippedWindows(Callback):
    """Keep the micro-batches of the open window, and write them if it ends without an update."""

    def __init__(self, step, folder):
        self.step, self.folder = step, Path(folder)
        self.window, self.skipped = [], step.skipped

    def on_train_step_end(self, run_context):
        args = run_context.original_args()
        self.window.append([column.asnumpy() for column in args.train_dataset_element])
        if self.step.micro_batches:  # the window goes on
            return
        if self.step.skipped > self.skipped:
            self.folder.mkdir(parents=True, exist_ok=True)
            for number, columns in enumerate(self.window, 1):
                np.savez(self.folder / f"step-{args.cur_step_num}-micro-batch-{number}.npz", *columns)
        self.window, self.skipped = [], self.step.skipped


ms.set_seed(1)
batches = [*create_dataset(usage="train").create_tuple_iterator(num_epochs=1, output_numpy=True)]
images = batches[5][0].copy()
images[0] = np.nan  # in the second window
batches[5] = (images, batches[5][1])
train = GeneratorDataset(batches, ["image", "label"], shuffle=False)

network = LeNet5()
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.04, 0.9)
step = AccumulatedTrainStep((network, loss_fn), optimizer, gradient_accumulation_steps=4)
Model(step).train(1, train, callbacks=[FlushTail(), SaveSkippedWindows(step, "skipped")])
print(f"{step.updates} updates, {step.skipped} skipped")
