"""Write the curves of a run for TensorBoard: pip install tensorboardX, then tensorboard --logdir events"""

from mindspore import nn
from mindspore.train import Callback
from tensorboardX import SummaryWriter

from model_zoo import MLP, create_dataset
from ms_accum import GradientAccumulation


class TensorBoardLog(Callback):
    """Write loss, learning rate and gradient norm by update, and the results of evaluations."""

    def __init__(self, folder):
        self.writer, self.updates = SummaryWriter(folder), 0

    def on_train_step_end(self, run_context):
        record = run_context.original_args().record
        self.updates = record.update
        for name in ("loss", "lr", "grad_norm"):
            self.writer.add_scalar(name, getattr(record, name), record.update)

    def on_eval_end(self, run_context):
        for name, value in run_context.original_args().eval_results.items():
            self.writer.add_scalar(name, value, self.updates)

    def on_train_end(self, run_context):
        self.writer.close()


network = MLP()
model = GradientAccumulation(network, nn.CrossEntropyLoss(), nn.Momentum(network.trainable_params(), 0.05, 0.9))
train, test = (create_dataset(image_size=28, usage=usage, seed=1) for usage in ("train", "test"))
log = TensorBoardLog("events")
model.train_process(2, train, 4, valid_dataset=test, metrics={"acc"}, callbacks=log, report=(), ckpt_path=None)
print(f"{model.updates} updates in 'events'")
