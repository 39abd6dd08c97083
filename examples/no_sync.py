"""Print a parameter and its accumulator: the parameter changes only at the end of a window, equally on all ranks.

python -m ms_accum.launch --nproc 2 examples/no_sync.py     (alone: python examples/no_sync.py)
"""

import mindspore as ms
from mindspore import nn

from model_zoo import LeNet5, create_dataset
from ms_accum import TrainClear, TrainForwardBackward, TrainOptim, own_group

ms.set_seed(1)
group = own_group()
network, mini_steps = LeNet5(10), 2
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")

train_forward_backward = TrainForwardBackward(nn.WithLossCell(network, loss_fn), optimizer, grad_sum).set_train()
train_optim, train_clear = TrainOptim(optimizer, grad_sum), TrainClear(grad_sum)


def show(moment):
    """Print the first elements of a parameter, and of its accumulator, which differs between ranks."""
    parameter, total = (tensors[0].asnumpy().flat[:3] for tensors in (optimizer.parameters, grad_sum))
    print(f"rank {group.rank}, {moment}: parameter {parameter.round(6)}, accumulator {total.round(6)}", flush=True)


show("before")
part = create_dataset(usage="train", seed=1, num_shards=group.size, shard_id=group.rank)
batches = part.create_tuple_iterator(num_epochs=1)
for number in range(1, 2 * mini_steps + 1):
    train_forward_backward(*next(batches))  # nothing is sent
    if number % mini_steps == 0:
        train_optim()  # the gradients of all ranks are summed here
        show(f"micro-batch {number}, update")
        train_clear()
    else:
        show(f"micro-batch {number}")
