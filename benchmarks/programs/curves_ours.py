"""A small GPT on speeches, an effective batch in several micro-batches: by our driver, or by the usual loop.

The usual loop is that of MindSpore's 2.x tutorial: each mean loss is divided by N before it is differentiated.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Literal

import mindspore as ms
from mindspore import nn
from ours import VERSIONS
from protocol import flags_of, serve
from tutorial_functional import step_of

from benchmarks.curves import ROWS
from ms_accum import GradientAccumulation, tune_cpu
from programs.flags import training_flags
from programs.tasks import task_of

FLAGS = "--dataset text --model gpt --optimizer adam --lr 0.002 --seed 1"


def build(speeches: str, split: int, way: Literal["ours", "loop"]) -> tuple[dict, Callable]:
    """Build a run whose effective batch is cut into `split` micro-batches."""
    args = training_flags([*FLAGS.split(), f"--data_path={speeches}"])
    args.layers, args.heads, args.width, args.context = 2, 2, 64, 128
    task = task_of(args)
    data, test = task.data("train", ROWS), task.data("test")
    ms.set_seed(args.seed)
    network = task.network()
    tune_cpu(network)
    optimizer = nn.Adam(network.trainable_params(), args.lr)
    epochs = (batch for _ in itertools.count() for batch in data.create_tuple_iterator(num_epochs=1))
    full = (batch for batch in epochs if len(batch[0]) == ROWS)
    ways = {"ours": _driver, "loop": _usual_loop}
    train_on = ways[way](network, task, optimizer, split)

    def answer(updates: int) -> dict[str, Any]:
        """Train, and evaluate on the test split."""
        train_on([*itertools.islice(full, updates)])
        return {"loss": task.evaluate(network, test)["Loss"]}

    return {"versions": VERSIONS}, answer


def _driver(network: nn.Cell, task: Any, optimizer: nn.Optimizer, split: int) -> Callable[[list], None]:
    model = GradientAccumulation(network, task.loss, optimizer, weight=task.weight)

    def train_on(batches: list) -> None:
        if batches:
            model.train_process(1, batches, micro_batch_size=ROWS // split, report=(), ckpt_path=None)

    return train_on


def _usual_loop(network: nn.Cell, task: Any, optimizer: nn.Optimizer, split: int) -> Callable[[list], None]:
    accumulate = step_of(network, task.loss, optimizer, split)

    def train_on(batches: list) -> None:
        network.set_train()
        for columns in batches:
            for start in range(0, ROWS, ROWS // split):
                accumulate(*(column[start : start + ROWS // split] for column in columns))

    return train_on


if __name__ == "__main__":
    serve(build, **flags_of(build))
