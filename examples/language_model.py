"""Train a small GPT in float16 to count, with growing windows, weights by tokens, and averaged parameters (EMA)."""

import argparse

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops
from mindspore.train import Callback

from model_zoo import GPT
from ms_accum import Ema, GradientAccumulation, TrainClear, TrainForwardBackward, ramp_up

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
WORDS = [*NUMBERS, "from", "to", ":", "."]
LONGEST, TASK, IGNORED = 26, 5, -100  # the task is "from two to four :"


def sentence(first, last):
    """Return the tokens of "from two to four : two three four ."; it counts up or down."""
    step = 1 if last >= first else -1
    counted = [NUMBERS[number] for number in range(first, last + step, step)]
    return [WORDS.index(word) for word in ["from", NUMBERS[first], "to", NUMBERS[last], ":", *counted, "."]]


def padded(sentences):
    """Return a micro-batch: tokens, and the token after each, which the loss ignores in padding and in the task."""
    tokens, following = np.zeros((len(sentences), LONGEST), np.int32), np.full((len(sentences), LONGEST), IGNORED)
    for row, words in enumerate(sentences):
        tokens[row, : len(words) - 1] = words[:-1]
        following[row, TASK - 1 : len(words) - 1] = words[TASK:]
    return Tensor(tokens), Tensor(following, ms.int32)


def in_micro_batches(sentences):
    """Return micro-batches of 8 sentences."""
    return [padded(sentences[row : row + 8]) for row in range(0, len(sentences), 8)]


def loss_fn(logits, following):
    """Return the mean over the tokens that are not ignored."""
    return ops.cross_entropy(logits.reshape(-1, len(WORDS)), following.reshape(-1), ignore_index=IGNORED)


def valid_tokens(tokens, following):
    """Return the number of valid tokens of a micro-batch, by which its mean loss is divided."""
    return int((following.asnumpy() != IGNORED).sum())


class PrintLoss(Callback):
    """Print the loss of the last window of every fifth epoch."""

    def on_train_epoch_end(self, run_context):
        now = run_context.original_args()
        if now.cur_epoch_num in (1, now.epoch_num) or now.cur_epoch_num % 5 == 0:
            print(f"epoch {now.cur_epoch_num}: loss {now.record.loss:.4f}", flush=True)


def compare(network, micro_batches):
    """Print the loss of a window, and the difference of its gradient from that of one large batch, for two weights."""
    optimizer = nn.SGD(network.trainable_params(), 0.1)  # only defines the parameters; nothing is updated here
    grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
    weight_sum = ms.Parameter(Tensor(0.0, ms.float32), name="weight_sum", requires_grad=False)
    with_loss = nn.WithLossCell(network, loss_fn)
    forward_backward = TrainForwardBackward(with_loss, optimizer, grad_sum, weight_sum=weight_sum).set_train()
    clear = TrainClear(grad_sum, weight_sum=weight_sum)

    def mean_of(window, weigh):
        clear()
        weights = [float(weigh(*columns)) for columns in window]
        weighted = zip(window, weights)
        losses = [forward_backward(*columns, weight=Tensor(w, ms.float32)).asnumpy() for columns, w in weighted]
        gradient = np.concatenate([total.asnumpy().ravel() for total in grad_sum]) / weight_sum.asnumpy()
        return np.average(losses, weights=weights), gradient

    big_batch = tuple(Tensor(np.concatenate([part.asnumpy() for part in column])) for column in zip(*micro_batches))
    loss, expected = mean_of([big_batch], valid_tokens)
    print(f"tokens in the micro-batches: {', '.join(str(valid_tokens(*columns)) for columns in micro_batches)}")
    print(f"one big batch: loss {loss:.6f}, norm of the gradient {np.linalg.norm(expected):.6f}")
    for name, weigh in (("weighted by tokens", valid_tokens), ("mean of means", lambda *columns: 1)):
        loss, gradient = mean_of(micro_batches, weigh)
        print(f"{name}: loss {loss:.6f}, norm of the gradient's difference {np.linalg.norm(gradient - expected):.1e}")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=15)
epochs = parser.parse_args().epochs

ms.set_seed(1)
pairs = np.random.RandomState(0).permutation([(first, last) for first in range(20) for last in range(20)])
sentences = [sentence(*pair) for pair in pairs]
training, test = sentences[:320], padded(sentences[320:])
network = GPT(len(WORDS), context=LONGEST, width=32)
compare(network, in_micro_batches(sorted(training[:32], key=len)))  # sorted, as in loaders that avoid padding

network = amp.auto_mixed_precision(network, "O2")  # computes in float16; the weights stay float32
optimizer = nn.AdamWeightDecay(network.trainable_params(), 4e-3)
scale = amp.DynamicLossScaler(2.0**20, 2, 50)  # too large at first: halved until nothing overflows
ema = Ema(0.95)
together = {"loss_scale": scale, "ema": ema}
model = GradientAccumulation(network, loss_fn, optimizer, weight=valid_tokens, clip_norm=1.0, **together)
sizes = ramp_up(1, 4, 640, micro_batch_size=8)  # from 1 to 4 micro-batches in a window, in the first two epochs
model.train_process(epochs, in_micro_batches(training), mini_steps=sizes, report=PrintLoss(), ckpt_path=None)
print(f"{model.updates} updates; micro-batches in a window, by its first update: {sizes}")
print(f"{model.overflows} windows overflowed and were skipped; loss scale at the end: {model.loss_scale:g}")
print(f"new sentences, weights: loss {loss_fn(network(test[0]), test[1]).asnumpy():.4f}")
with ema.applied():
    print(f"new sentences, averaged weights: loss {loss_fn(network(test[0]), test[1]).asnumpy():.4f}")
