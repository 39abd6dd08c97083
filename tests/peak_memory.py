"""Print the peak memory, in MB, of a run on a large MLP: python tests/peak_memory.py sum|mean|zeros"""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import ms_accum.network.tree as tree
from memory_runs import peak
from ms_accum import GradientAccumulation

kind = sys.argv[1]


def with_zeros(total, finite=False):
    return tuple([ops.assign(each, ops.zeros_like(each)) for each in total])


if kind == "zeros":  # a mutant: the accumulators are emptied with zeros of their size
    tree.clear = with_zeros

ms.set_context(mode=ms.GRAPH_MODE)
network = nn.SequentialCell(nn.Dense(1024, 4096), nn.ReLU(), nn.Dense(4096, 4096), nn.ReLU(), nn.Dense(4096, 10))
optimizer = nn.SGD(network.trainable_params(), 0.001)
reduction = "sum" if kind == "sum" else "mean"
model = GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, reduction=reduction)
batch = (np.ones((8, 1024), np.float32), np.zeros(8, np.int32))
model.train_process(1, [batch] * 6, mini_steps=2, report=(), ckpt_path=None)
print(int(peak()))
