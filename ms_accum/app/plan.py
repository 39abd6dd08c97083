"""Prints the lines about a run: before it begins, during it, and at its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Callable

from mindspore import nn
from mindspore.train import Callback, RunContext
from tqdm import tqdm

from .. import _check
from .._check import quantity
from ..engine.ends import updates_per_epoch
from ..ranks.reduction import Part
from ..saving.checkpointer import Checkpointer
from ..saving.model_file import DEFAULT
from ..training.progress import Speed, progress
from .amounts import short
from .metrics import ends_with_evaluation
from .search import MicroBatch
from .settings import Settings
from .tasks import Result
from .trials import on_host

_TAIL_DESCRIPTIONS = {"flush": "a shorter last window", "carry": "a window that continues", "drop": "no window"}
# Milliseconds: on two CPU cores the MLP, whose micro-batches of 32 rows take 2.5, trains 3 times as fast with larger
# ones; LeNet5, with 5, not a third faster.
_SHORT_MILLISECONDS = 4.0


def show(name: str, value: object) -> None:
    """Print one fact about the run before it begins, as one line whatever it contains."""
    print(f"{name:16} {_check.one_line(value, _check.LINE)}")


def print_line(line: str) -> None:
    """Print a line during a run, without damaging a progress bar."""
    tqdm.write(_check.one_line(line, _check.LINE), file=sys.stdout)
    sys.stdout.flush()


# Before the run


def show_resumed_flags(settings: Settings) -> None:
    """Print the flags that are taken from the run that is resumed, before any of them is used."""
    if settings.resumed_flags is not None and settings.resumed_flags.flags:
        show("flags", f"{' '.join(settings.resumed_flags.arguments)}, as in {settings.resumed_flags.source}")


def show_runtime(variables: Mapping[str, str]) -> None:
    """Print the environment variables that were set for the CPU runtime."""
    if variables:
        show("runtime", " ".join(f"{name}={value}" for name, value in variables.items()))


def search_lines(micro_batch: MicroBatch, budget: int | None) -> list[str]:
    """Return the lines about the micro-batch that was found, the trials, and whether accumulation is needed."""
    split = f"of {micro_batch.effective_batch}, {micro_batch.mini_steps} in a window"
    of_budget = f" of {short(budget)}" if budget else ""
    lines = [f"{quantity(micro_batch.micro_batch_size, 'row')} ({split})"]
    lines += [f"the fastest of those that fit, {short(micro_batch.peak)}{of_budget}"]
    lines += micro_batch.table.splitlines()
    return [*lines, micro_batch.advice] if micro_batch.advice else lines


def show_plan(
    settings: Settings, device: str, network: nn.Cell, data: str, batches: int, search: Sequence[str]
) -> None:
    """Print, before training, what the settings mean for this run, and how the micro-batch size was found.

    Args:
        settings (Settings): the settings.
        device (str): MindSpore's name of the device.
        network (Cell): the network.
        data (str): a description of the data, may be empty.
        batches (int): the batches of an epoch.
        search (Sequence[str]): lines about the search for the micro-batch size.
    """
    for number, line in enumerate(search):
        show("" if number else "micro-batch", line)
    effective_batch, epoch, window = _windows_of(settings, batches)
    parameters = sum(parameter.size for parameter in network.trainable_params())
    momentum = f", momentum {settings.momentum:g}" if settings.optimizer in ("momentum", "sgd") else ""
    decay = f", weight decay {settings.weight_decay:g}" if settings.weight_decay else ""
    clip = f", clip_norm {settings.clip_norm:g}" if settings.clip_norm else ""
    show("model", f"{settings.model}, {quantity(parameters, 'parameter')}, on {device}")
    path = settings.data_path or f"embedded {settings.dataset}"
    show("data", ", ".join(filter(None, (path, data, f"seed {settings.seed}"))))
    show("effective batch", effective_batch)
    show("an epoch", epoch)
    show("the run", _length_of(settings))
    show("optimizer", f"{settings.optimizer}, lr {_rate(settings)}{momentum}{decay}")
    show("gradient", f"{settings.reduction} over a window{clip}")
    show("accumulators", _accumulators(settings, network, window))
    if settings.amp != "off" or settings.loss_scale is not None:
        show("precision", f"amp {settings.amp}, loss scale {settings.loss_scale or 1}")
    if settings.ema is not None:
        show("average", f"of the weights, decay {settings.ema:g}")
    if settings.output_dir:
        show("output", settings.output_dir)
    if settings.zero and settings.ranks == 1:
        show("zero", "no effect: a single process has nothing to shard")


def _length_of(settings: Settings) -> str:
    updates = quantity(settings.updates, "update")
    return updates if settings.max_updates else f"{quantity(settings.epochs, 'epoch')}, {updates}"


def _rate(settings: Settings) -> str:
    rates = settings.rates
    if settings.lr_decay != "none":
        return f"{max(rates):g}, {settings.lr_decay} to {settings.min_lr or 0:g}"
    return f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g} at update {len(rates) - 1:,}"


def _accumulators(settings: Settings, network: nn.Cell, window: int) -> str:
    """Return the memory of the accumulators as text; windows of 1 in a single process need none."""
    if window == 1 and settings.ranks == 1:
        return "0.00 MiB"
    ranks = settings.ranks if settings.zero == 2 else 1
    elements = sum(Part(parameter, 0, ranks).size for parameter in network.trainable_params())
    return f"{elements * 4 / 2**20:.2f} MiB{' on each rank' if ranks > 1 else ''}"


def _windows_of(settings: Settings, batches: int) -> tuple[str, str, int]:
    """Return the descriptions of a window and of an epoch, and the number of micro-batches in a window."""
    ranks, rows = settings.ranks, int(settings.batch_size)
    times = f" x {ranks} ranks" if ranks > 1 else ""
    if isinstance(settings.mini_steps, Mapping):
        steps = [f"{window} from update {update:,}" for update, window in settings.mini_steps.items()]
        sizes = [window * rows * ranks for window in settings.mini_steps.values()]
        effective_batch = f"{min(sizes):,} to {max(sizes):,} = {quantity(rows, 'row')} x {', '.join(steps)}{times}"
        return effective_batch, quantity(batches, "micro-batch"), max(settings.mini_steps.values())
    if settings.mini_steps is not None:
        window = settings.mini_steps
        epoch = quantity(batches, "micro-batch")
        if window > batches:
            epoch += ", fewer than a window has (see --mini_steps)"
        elif batches % window:
            epoch += f", {batches % window} of them in {_TAIL_DESCRIPTIONS[settings.tail]}"
        split = f"{quantity(rows, 'row')} x {quantity(window, 'micro-batch')}"
        return f"{rows * window * ranks:,} = {split}{times}", epoch, window
    window = updates_per_epoch(settings.window_rows, rows)
    full, rest = divmod(settings.window_rows, rows)
    split = f"{quantity(rows, 'row')} x {quantity(full, 'micro-batch')}"
    if rest:
        split += f" + {quantity(rest, 'row')}"
    if rest and times:
        split = f"({split})"
    return f"{settings.effective_batch:,} = {split}{times}", quantity(batches, "window"), window


# During the run


def reporters(settings: Settings, states: Checkpointer, logs: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that report the run; for a complete run, one line, and an evaluation if it has none."""
    done = _done(settings, states)
    if done:
        complete = f"nothing left to train: {done}"
        opening = Opening("resumed", lambda: [*states.resumed, complete])
        return [opening] if ends_with_evaluation(settings.metrics) else [opening, *logs]
    callbacks = [Opening("resumed", lambda: [*states.resumed, *_fewer_epochs(settings, states)])]
    callbacks += [progress(settings.log_every), *logs]
    if settings.may_split_otherwise and on_host():
        callbacks.append(Hint(int(settings.batch_size)))
    return callbacks


def _done(settings: Settings, states: Checkpointer) -> str:
    """Return what is done of a run that is resumed, if it is complete; else an empty text."""
    if states.epochs_done() == settings.epochs:
        return f"{settings.epochs} of {quantity(settings.epochs, 'epoch')} done (see --epochs)"
    if settings.max_updates is not None and states.updates_done() >= settings.max_updates:
        return f"{quantity(states.updates_done(), 'update')} done (see --max_updates)"
    return ""


def _fewer_epochs(settings: Settings, states: Checkpointer) -> list[str]:
    """Return a line if the run that is resumed was to have more epochs: its --epochs may have been forgotten."""
    if settings.max_updates is not None:
        return []
    epochs_before = states.settings().get("notes", {}).get("epochs")
    if type(epochs_before) is not int or epochs_before <= settings.epochs:
        return []
    return [f"with {quantity(settings.epochs, 'epoch')}, not {epochs_before} as it began (see --epochs)"]


class Opening(Callback):
    """Print lines when the run begins.

    Args:
        name (str): the label of the lines.
        lines (Callable): returns the lines.
    """

    def __init__(self, name: str, lines: Callable[[], Sequence[str]]):
        self._name = name
        self._lines = lines

    def on_train_begin(self, run_context: RunContext) -> None:
        del run_context
        for line in self._lines():
            show(self._name, line)


class Hint(Callback):
    """Print a hint at the end if micro-batches were so short that the cost of a call dominated.

    Args:
        rows (int): of a micro-batch.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._speed = Speed()

    def on_train_step_end(self, run_context: RunContext) -> None:
        self._speed.add(run_context.original_args().record)

    def on_train_end(self, run_context: RunContext) -> None:
        del run_context
        milliseconds = 1000 * self._rows / self._speed.rows if self._speed.rows else _SHORT_MILLISECONDS
        if milliseconds < _SHORT_MILLISECONDS:
            show("hint", f"a micro-batch takes {milliseconds:.1f} ms, mostly the fixed cost of a call;")
            show("", "try --batch_size auto --effective_batch N --memory_budget SIZE")


# At its end


def show_end(settings: Settings, seconds: float, previous: str | None) -> None:
    """Print how long the run took and which files it wrote; `previous` is the new path of the former default model."""
    show("time", _duration(seconds))
    for path in settings.models:
        show("model file", path)
    if settings.is_latest:
        show("copied to", DEFAULT)
        if previous is not None:
            show("kept", f"{previous}, the former file")
    show("states", settings.states)
    show("metrics", settings.metrics)
    if settings.tensorboard:
        show("tensorboard", settings.events)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def show_result(result: Result) -> None:
    """Print the result of an evaluation, for people, and as the tutorial's last line, for programs."""
    show(result.name, result.text)
    if result.more:
        show("", result.more)
    print(f"============== {result.printed} ==============")
