"""Is a common mistake in a call one line that says what to write instead?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from helpers import cross_entropy, forward_of, run
from ms_accum import AccumulatedTrainStep, Accumulator, FlushTail, GradientAccumulation

X, Y = Tensor(np.ones((8, 4)), ms.float32), Tensor(np.arange(8) % 3, ms.int32)


def parts():
    network = nn.Dense(4, 3)
    return network, nn.SGD(network.trainable_params(), 0.1)


def accumulate(result, *, compiled=True):
    """Hand to an Accumulator what `result` makes of a loss and its gradients."""
    network, optimizer = parts()
    accumulator = Accumulator(optimizer, 2)
    grad_fn = ms.value_and_grad(forward_of(network, cross_entropy()), None, optimizer.parameters)

    def step(x, y):
        return accumulator(result(grad_fn(x, y)))

    (ms.jit(step) if compiled else step)(X, Y)


def unchanged(loss_and_gradients):
    return loss_and_gradients


def drive(loss_fn="known", micro_batch=(X, Y), optimizer=None, **options):
    network, own = parts()
    loss_fn = cross_entropy() if loss_fn == "known" else loss_fn
    run(GradientAccumulation(network, loss_fn, optimizer or own, **options), [micro_batch] * 2, 2)


def step(loss_fn="known", labels=Y, optimizer=None, **options):
    network, own = parts()
    of = network if loss_fn is None else (network, cross_entropy() if loss_fn == "known" else loss_fn)
    train_step = AccumulatedTrainStep(of, optimizer or own, 2, **options)
    rows = GeneratorDataset([(X.asnumpy(), labels.asnumpy())] * 2, ["x", "y"])
    Model(train_step).train(1, rows, callbacks=FlushTail(), dataset_sink_mode=False)


def in_sink_mode():
    """Call what MindSpore calls there, without `__call__`, in which the host counts the weight."""
    network, optimizer = parts()
    AccumulatedTrainStep((network, cross_entropy()), optimizer, 2, compile=False).construct(X, Y)


def one_argument(x):
    return x.shape[0]


PAIR = "For 'Accumulator', 'grads' must be the gradients alone, but got a pair of a loss and gradients. Write loss, gra"
NO_LOSS = "must be one that yields 1 column, which the network takes, but got 2: Float32 [8, 4] and Int32 [8]. Give "
COLUMN = Tensor(Y.asnumpy()[:, None])
LABELS = (
    "must be one that yields labels of the shape (8,), class numbers, for the network's output (8, 3), but got "
    "Int32 (8, 1). Remove the last axis of the labels."
)
WEIGHT = "'weight' must be a function of the 2 columns of a micro-batch, but got one of "
CLASS = "'optimizer' must be a MindSpore optimizer, but got the class SGD. Write SGD(...)."
EMA = "'ema' must be an Ema, but got float. Write Ema(0.999)."


def arguments_of_a_step(*more):
    """Create a step with the loss function beside the network, as for the driver."""
    network, optimizer = parts()
    return AccumulatedTrainStep(network, cross_entropy(), optimizer, *more)


ONE_TUPLE = "'network' must be one tuple (network, loss_fn), but got two arguments."
MISTAKES = {
    "loss and gradients in a graph": (lambda: accumulate(unchanged), ValueError, PAIR),
    "loss and gradients in a loop": (lambda: accumulate(unchanged, compiled=False), ValueError, PAIR),
    "driver without a loss": (lambda: drive(None), ValueError, NO_LOSS + "a 'loss_fn', or a network that returns its"),
    "step without a loss": (lambda: step(None), ValueError, NO_LOSS + "(network, loss_fn), or a network that returns"),
    "labels in a column": (lambda: drive(micro_batch=(X, COLUMN)), ValueError, LABELS),
    "labels in a column, in a step": (lambda: step(labels=COLUMN), ValueError, LABELS),
    "weight of one argument": (lambda: drive(weight=one_argument), TypeError, WEIGHT + "1 argument."),
    "weight of a term": (
        lambda: drive(weight={"ce": one_argument}),
        TypeError,
        WEIGHT + "1 argument for 'ce'.",
    ),
    "class of an optimizer": (lambda: drive(optimizer=nn.SGD), TypeError, CLASS),
    "class of an optimizer in an Accumulator": (lambda: Accumulator(nn.SGD, 2), TypeError, CLASS),
    "step with the driver's arguments": (lambda: arguments_of_a_step(2), TypeError, ONE_TUPLE),
    "step with the driver's first arguments": (arguments_of_a_step, TypeError, ONE_TUPLE),
    "step with too many arguments": (
        lambda: AccumulatedTrainStep(*parts(), 2, "sum"),
        TypeError,
        "'gradient_accumulation_steps' must be the last argument without a name, but got 4 arguments. Name the others",
    ),
    "columns that the host has not seen": (in_sink_mode, ValueError, "'dataset_sink_mode' must be False."),
    "class of a loss": (
        lambda: drive(nn.CrossEntropyLoss),
        TypeError,
        "the class CrossEntropyLoss. Write CrossEntropyLo",
    ),
    "number as ema": (lambda: drive(ema=0.999), TypeError, EMA),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_one_line_with_the_way_out(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert message in text
    of_ours, _, of_mindspore = text.partition("\n")
    # In a graph of the user's MindSpore adds its call stack.
    assert not of_mindspore or of_ours.startswith("'For 'Accumulator'")
