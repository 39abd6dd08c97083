"""ms_accum's three Cells, composed by hand as in MindSpore's r1.0 tutorial."""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore_parts import Network, optimizer_of, tensors, weights
from ours_parts import PACKAGES, across_ranks, divisor, loss_and_weight
from serving import serve_cases

from benchmarks.conformance.case import Case, Result
from ms_accum import Ema, TrainClear, TrainForwardBackward, TrainOptim, own_group

CAN = ["clip", "schedule", "ema", "nan", "own optimizer", "class weights", "N that changes", "float16", "BatchNorm"]


def train(case: Case) -> Result:
    """Run a micro-batch; after the last one of a window, and of an epoch, update and clear."""
    network, average = Network(case), Ema(case.average) if case.average else None
    loss_fn, _ = loss_and_weight(case)
    optimizer = optimizer_of(case, network)
    kinds = [Parameter(Tensor(parameter.asnumpy() * 0, ms.float32)) for parameter in optimizer.parameters]
    sums = ms.ParameterTuple(kinds).clone("sums", "zeros")
    weight_sum = Parameter(Tensor(0.0, ms.float32), name="weight_sum") if case.reduction == "mean" else None
    forward_backward = TrainForwardBackward(nn.WithLossCell(network, loss_fn), optimizer, sums, weight_sum=weight_sum)
    update = TrainOptim(optimizer, sums, weight_sum=weight_sum, clip_norm=case.clip, ema=average)
    clear = TrainClear(sums, weight_sum=weight_sum)
    updates, evaluated = 0, None
    for size in case.windows:
        pieces = tensors(case.micro_batches(own_group().rank))
        for number, columns in enumerate(pieces, 1):
            if weight_sum is None:
                forward_backward(*columns)
            else:
                forward_backward(*columns, weight=divisor(case, *columns))
            if number % size == 0 or number == len(pieces):
                updated, _ = update()
                clear()
                updates += bool(updated)
        evaluated = weights(network) if evaluated is None else evaluated
    result = Result(weights(network), updates, evaluated=evaluated)
    if average is not None:
        with average.applied():
            result.average = weights(network)
    return result


if __name__ == "__main__":
    cannot = {"two terms": "one weight for each micro-batch: see the driver", "resume": "states are the driver's"}
    serve_cases(across_ranks(train, __file__), PACKAGES, [*CAN, "evaluation", "two ranks"], cannot)
