"""Ours: the network and optimizer of configs/shakespeare_gpt.yaml, with the windows and rates of a batch schedule."""

from __future__ import annotations

import itertools
from typing import Any, Callable

import mindspore as ms
from gpt_ours import CONFIG
from ours import VERSIONS
from protocol import flags_of, serve, timed

import train
from benchmarks.schedules import schedule_of
from model_zoo.optimizers import make_optimizer
from ms_accum import GradientAccumulation, tune_cpu
from ms_accum.app.rates import rate_by_update


def build(text: str, way: str, seed: int, micro_batches: int) -> tuple[dict, Callable]:
    """Build a run; micro-batches are all of the same size."""
    settings = train.flags().parse([f"--config={CONFIG}", f"--data_path={text}", f"--seed={seed}"])
    schedule, task = schedule_of(way, micro_batches), train.task_of(settings)
    data, test = train.datasets(settings, task, None)
    ms.set_seed(seed)
    network = task.network(data)
    tune_cpu(network)
    rule = {"momentum": settings.momentum, "weight_decay": settings.weight_decay, "beta2": settings.beta2}
    rate = rate_by_update(schedule.learning_rates)
    optimizer = make_optimizer(settings.optimizer, network.trainable_params(), lr=rate, **rule)
    # Windows continue from one request to the next.
    options = {"weight": task.weight, "clip_norm": settings.clip_norm, "tail": "carry"}
    model = GradientAccumulation(network, task.loss(), optimizer, **options)
    epochs = (batch for _ in itertools.count() for batch in data.create_tuple_iterator(num_epochs=1))
    full = (batch for batch in epochs if len(batch[0]) == settings.batch_size)

    def answer(micro_batches: int) -> dict[str, Any]:
        """Train on so many micro-batches, and evaluate on all tokens of the test split."""
        batches = list(itertools.islice(full, micro_batches))
        options = {"report": (), "ckpt_path": None}
        seconds, _ = timed(model.train_process, 1, batches, schedule.mini_steps, **options)
        return {"seconds": seconds, "updates": model.updates, "loss": task.evaluate(network, test, None).loss}

    return {"versions": VERSIONS}, answer


if __name__ == "__main__":
    serve(build, **flags_of(build))
