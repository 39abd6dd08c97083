"""What does a program print about a run: before it begins, during it, and at its end?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspore import nn

from ..app.amounts import short
from ..app.metrics import ends_with_evaluation
from ..app.search import MicroBatch
from ..app.trials import on_host
from ..numerics.noise_scale import NoiseScale
from ..ranks.parts import Part
from ..saving.checkpointer import Checkpointer
from ..saving.model_record import DEFAULT
from ..window.ends import updates_per_epoch
from .report import Hint, Opening, progress, show
from .settings import Settings

_TAILS = {"flush": "a shorter last window", "carry": "a window that continues", "drop": "no window"}


def show_before(settings: Settings) -> None:
    """Print the flags that are taken from the run that is resumed, before any of them is used."""
    if settings.before is not None and settings.before.flags:
        show("flags", f"{settings.before.shown}, as in {settings.before.source}")


def show_plan(settings: Settings, device: str, network: nn.Cell, batches: int, found: list[str]) -> None:
    """Print, before training, what the settings mean for this run, and how the micro-batch size was found."""
    for number, line in enumerate(found):
        show("" if number else "micro-batch", line)
    effective_batch, epoch, window = _windows_of(settings, batches)
    parameters = sum(parameter.size for parameter in network.trainable_params())
    momentum = f", momentum {settings.momentum:g}" if settings.optimizer in ("momentum", "sgd") else ""
    decay = f", weight decay {settings.weight_decay:g}" if settings.weight_decay else ""
    clip = f", clip_norm {settings.clip_norm:g}" if settings.clip_norm else ""
    lines = [
        ("model", f"{settings.model}, {parameters:,} parameters, on {device}"),
        ("data", f"{settings.data_path or 'embedded digits'}, seed {settings.seed}"),
        ("effective batch", effective_batch),
        ("an epoch", epoch),
        ("the run", f"{_count(settings.epochs, 'epoch')}, {_count(settings.updates, 'update')}"),
        ("optimizer", f"{settings.optimizer}, lr {_rate(settings)}{momentum}{decay}"),
        ("gradient", f"{settings.reduction} over a window{clip}"),
        ("accumulators", _accumulators(settings, network, window)),
    ]
    if settings.amp != "off" or settings.loss_scale is not None:
        lines.append(("precision", f"amp {settings.amp}, loss scale {settings.loss_scale or 1}"))
    if settings.ema is not None:
        lines.append(("average", f"of the weights, decay {settings.ema:g}"))
    if settings.output_dir:
        lines.append(("output", settings.output_dir))
    if settings.zero and settings.ranks == 1:
        lines.append(("zero", "no effect: a single process has nothing to shard"))
    for name, value in lines:
        show(name, value)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _rate(settings: Settings) -> str:
    rates = settings.rates
    if settings.lr_decay != "none":
        return f"{max(rates):g}, {settings.lr_decay} to 0"
    return f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g} at update {len(rates) - 1:,}"


def _accumulators(settings: Settings, network: nn.Cell, window: int) -> str:
    """Return the memory of the accumulators as text; windows of 1 in a single process need none."""
    if window == 1 and settings.ranks == 1:
        return "0.00 MiB"
    ranks = settings.ranks if settings.zero == 2 else 1
    elements = sum(Part(parameter, 0, ranks).size for parameter in network.trainable_params())
    return f"{elements * 4 / 2**20:.2f} MiB{' on each rank' if ranks > 1 else ''}"


def words_of(found: MicroBatch, budget: int | None) -> list[str]:
    """Return the lines about the micro-batch that was found, the trials, and whether accumulation is needed."""
    of_budget = f" of {short(budget)}" if budget else ""
    split = f"of {found.effective_batch}, {found.mini_steps} in a window"
    first = f"{found.micro_batch_size} rows ({split})"
    why = f"the fastest of those that fit, {short(found.peak)}{of_budget}"
    return [first, why, *found.table.splitlines(), *([found.advice] if found.advice else [])]


def _windows_of(settings: Settings, batches: int) -> tuple[str, str, int]:
    """Return the descriptions of a window and of an epoch, and the number of micro-batches in a window."""
    ranks, rows = settings.ranks, int(settings.batch_size)
    times = f" x {ranks} ranks" if ranks > 1 else ""
    if isinstance(settings.mini_steps, Mapping):
        steps = [f"{size} from update {first:,}" for first, size in settings.mini_steps.items()]
        sizes = [size * rows * ranks for size in settings.mini_steps.values()]
        even = f"{min(sizes)} to {max(sizes)} = {rows} rows x {', '.join(steps)}{times}"
        return even, f"{batches:,} micro-batches", max(settings.mini_steps.values())
    if settings.mini_steps is not None:
        window = settings.mini_steps
        tail = batches - window * updates_per_epoch(batches, window, "drop")
        short_window = f", {tail} of them in {_TAILS[settings.tail]}" if tail else ""
        if window > batches:
            short_window = ", fewer than a window has (see --mini_steps)"
        even = f"{rows * window * ranks} = {rows} rows x {window} micro-batches{times}"
        return even, f"{batches:,} micro-batches{short_window}", window
    size = settings.window_rows
    window = updates_per_epoch(size, rows)
    full = updates_per_epoch(size, rows, "drop") if rows <= size else 0
    rest = f" + {size - full * rows} rows" if full < window else ""
    split = f"{rows} rows x {full} micro-batches{rest}"
    split = f"({split}){times}" if rest and times else f"{split}{times}"
    return f"{settings.effective_batch} = {split}", f"{batches:,} windows", window


def show_runtime(settings: dict[str, str]) -> None:
    """Print the environment variables that were set for the CPU runtime."""
    if settings:
        shown = " ".join(f"{name}={value}" for name, value in settings.items())
        show("runtime", shown)


def in_percent(correct: int, total: int) -> str:
    """Return an accuracy as text."""
    return f"{correct / total:.2%} ({correct:,}/{total:,})".replace("%", " %")


def reporters(settings: Settings, states: Checkpointer, logs: Sequence[Any]) -> tuple[Any, ...]:
    """Return what reports the run; of one that is complete already, only that, and an evaluation if it has none."""
    done = states.epochs_done()
    if done == settings.epochs:
        complete = f"nothing left to train: {done} of {settings.epochs} epochs are done (see --epochs)"
        missing = () if ends_with_evaluation(settings.metrics) else logs
        return (Opening("resumed", lambda: [*states.resumed, complete]), *missing)
    opening = Opening("resumed", lambda: [*states.resumed, *_shortened(settings, states)])
    shown = (opening, progress(settings.log_every), *logs)
    return (*shown, Hint(int(settings.batch_size))) if settings.may_split_otherwise and on_host() else shown


def _shortened(settings: Settings, states: Checkpointer) -> list[str]:
    """Return a line if the run that is resumed was to have more epochs: its --epochs may have been forgotten."""
    before = states.settings().get("notes", {}).get("epochs")
    if type(before) is not int or before <= settings.epochs:
        return []
    return [f"with {settings.epochs} epochs, not {before} as it began (see --epochs)"]


def show_end(settings: Settings, seconds: float, kept: str | None, noise: NoiseScale | None = None) -> None:
    """Print how long the run took and which files it wrote; `kept` is the path of the previous default model."""
    show("time", _duration(seconds))
    if noise is not None:
        show("noise scale", noise.advice)
    for path in settings.models:
        show("model file", path)
    if settings.is_latest:
        show("copied to", DEFAULT + (f" (previous file: {kept})" if kept else ""))
    show("states", settings.states)
    show("metrics", settings.metrics)
    if settings.tensorboard:
        show("tensorboard", settings.events)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def show_accuracy(correct: int, total: int) -> None:
    """Print the accuracy, then the tutorial's last line and the two counts, which programs parse."""
    show("accuracy", in_percent(correct, total))
    print(f"============== {{'Accuracy': {correct / total}}} ==============")
    print(f"correct/total: {correct}/{total}")
