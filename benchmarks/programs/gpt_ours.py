"""Ours: the driver that train.py builds for configs/shakespeare_gpt.yaml, on windows in memory.

With `--write` it only writes the files with which all programs of the benchmark begin.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable

import language_files
from mindspore import Tensor
from ours import VERSIONS
from protocol import flags_of, serve, timed

import train
from ms_accum import UpdateRecord
from ms_accum.app import steps

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "shakespeare_gpt.yaml"


class Losses:
    """A reporter that keeps the loss of each window."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def start(self, updates: int | None) -> None:
        """Nothing to print."""

    def update(self, record: UpdateRecord) -> None:
        """Keep the loss of the window."""
        self.losses.append(record.loss)

    def close(self) -> None:
        """Nothing to print."""


def build(folder: str, text: str, rows: int = 12, updates: int = 0, write: bool = False) -> tuple[dict, Callable]:
    """Build the run, as train.py does; `rows` are those of a micro-batch, and `updates` those to be written."""
    settings = train.flags().parse([f"--config={CONFIG}", f"--data_path={text}"])
    task = train.task_of(settings)
    data, test = train.datasets(settings, task, None)
    settings = steps.with_planned_updates(settings, data)
    model, network, _ = train.build(settings, task, data)
    if write:
        names = ("layers", "heads", "clip_norm", "beta2", "weight_decay")
        start = language_files.Start(
            [data.source[number] for number in range(updates)],
            test.source.data.columns(slice(None), 0),
            {parameter.name: parameter.asnumpy() for parameter in network.get_parameters()},
            settings.rates,
            {name: getattr(settings, name) for name in names},
        )
        language_files.write(folder, start)
    coming = iter(language_files.read(folder).windows)
    window = dataclasses.replace(settings, mini_steps=None, effective_batch=settings.batch_size, batch_size=rows).window

    def step(updates: int) -> dict[str, Any]:
        windows, report = [next(coming) for _ in range(updates)], Losses()
        tensors = [(Tensor(tokens), Tensor(targets)) for tokens, targets in windows]
        model.train_process(1, tensors, **window, report=(report,), ckpt_path=None)
        return {"losses": report.losses, "tokens": sum(language_files.predicted(targets) for _, targets in windows)}

    def answer(updates: int = 0) -> dict[str, Any]:
        """Train, or without updates evaluate."""
        if not updates:
            result = task.evaluate(network, test, None)
            return {"loss": result.loss, "tokens": result.tokens}
        seconds, trained = timed(step, updates)
        return {"seconds": seconds, **trained}

    parameters = sum(parameter.size for parameter in network.trainable_params())
    return {"versions": VERSIONS, "parameters": parameters}, answer


if __name__ == "__main__":
    serve(build, **flags_of(build))
