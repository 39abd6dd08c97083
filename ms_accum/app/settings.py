"""The settings of a run: its flags with all defaults, and the values that follow from them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any

from ..engine.ends import rows_per_rank
from ..saving.model_file import DEFAULT
from .flags import AUTO as AUTO
from .flags import MINI_STEPS, FlagsOfRun
from .process import USAGE, Failure

RUNS = "runs"
"""str, the folder of runs for which no --output_dir is given."""
METRICS = "metrics.jsonl"
"""str, the name of the metrics in a run's folder."""
# Settings that must equal those of a resumed run, in addition to the driver's.
_DATA_AND_MODEL = ("model", "dataset", "batch_size", "effective_batch", "lr", "momentum", "weight_decay", "seed")
_CONFIG = (*_DATA_AND_MODEL, "amp", "lr_scaling", "base_batch", "warmup_updates", "lr_decay")
# The same, but only if they are given: states of earlier versions do not have them.
_CONFIG_IF_GIVEN = ("vocabulary", "context", "layers", "width", "heads", "untied_head", "beta2", "min_lr")
# Settings that are recorded with a model.
_RECORD_OF_TEXT = ("context", "layers", "width", "heads", "untied_head")
_RECORD = (*_DATA_AND_MODEL, "optimizer", "reduction", "tail", "clip_norm", "ranks", "zero", "epochs")


@dataclass(frozen=True)
class Settings:
    """The flags with all defaults, one field each. Values derived from several flags are properties."""

    model: str
    dataset: str
    data_path: str | None
    """Optional[str], the folder of the data set; None: the embedded digits."""
    download: bool | str | None
    vocabulary: str | None
    """Optional[str], what the tokens of a text are; None for images, as the five after it."""
    context: int | None
    layers: int | None
    width: int | None
    heads: int | None
    untied_head: bool
    epochs: int
    """int, the number of epochs; None until it follows from `max_updates` and the data."""
    max_updates: int | None
    batch_size: int | str
    """Union[int, str], rows of a micro-batch; "auto" until it has been found."""
    mini_steps: int | Mapping[int, int] | None
    """Union[None, int, dict], micro-batches in a window, by update; None if `effective_batch` sets the window."""
    effective_batch: int | None
    memory_budget: int | None
    reduction: str
    tail: str
    clip_norm: float | None
    optimizer: str
    lr: float
    momentum: float
    weight_decay: float
    beta2: float | None
    zero: int | None
    seed: int
    amp: str
    loss_scale: float | str | None
    nonfinite: str
    ema: float | None
    verify: bool
    lr_scaling: str
    base_batch: int | None
    warmup_updates: int
    lr_decay: str
    min_lr: float | None
    output_dir: str | None
    """Optional[str], the folder of the output files; None: a new one in `runs/` that has not been created yet."""
    ckpt_path: str | None
    """Optional[str], the model's path as given by its flag; `model_path` is the path that is used."""
    overwrite: bool
    log_every: int | None
    tensorboard: bool
    device_target: str
    runtime: str
    resume: str | None
    eval_every: int | str
    """Union[int, str], the updates between evaluations; or "epoch", at the end of each, or "end", only of the run."""
    save_every: Mapping[str, Any]
    keep: int
    keep_best: bool
    allow_config_change: bool
    debug: bool
    flag_texts: Mapping[str, Any] = field(default_factory=dict)
    """Mapping, the texts of the flags that were given, and of those of the run that is resumed, by name."""
    resumed_flags: FlagsOfRun | None = None
    """Optional[FlagsOfRun], the flags of the run that is resumed."""
    ranks: int = 1
    """int, the number of processes that train together; set by the launcher, not by a flag."""
    updates: int = 0
    """int, the updates of the run; 0 until they are known, because they follow from the data."""
    is_latest: bool = False
    """bool, whether `./gradient_accumulation.ckpt` becomes a copy of the model: no flag gives another path."""

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Settings:
        """Return the settings of flags; the data set's defaults have been filled in.

        Raises:
            Failure: If flags contradict each other.
        """
        values = {field.name: flags[field.name] for field in fields(cls) if field.name in flags}
        if values["verify"] and values["batch_size"] == AUTO:
            raise Failure("argument --verify: needs the rows of a micro-batch; give --batch_size", USAGE)
        _check_window(values)
        if values["effective_batch"] is None:
            values["mini_steps"] = values["mini_steps"] or MINI_STEPS
        if values["lr_scaling"] == "none" and values["base_batch"] is not None:
            raise Failure("argument --base_batch: needs --lr_scaling", USAGE)
        if values["lr_scaling"] != "none" and values["base_batch"] is None:
            raise Failure("argument --lr_scaling: needs --base_batch", USAGE)
        if values["min_lr"] is not None:
            if values["lr_decay"] == "none":
                raise Failure("argument --min_lr: needs --lr_decay", USAGE)
            if values["min_lr"] > values["lr"]:
                raise Failure(f"argument --min_lr: must be <= {values['lr']:g}, the --lr", USAGE)
        if values["loss_scale"] is None and values["amp"] in ("O1", "O2", "O3"):
            values["loss_scale"] = "dynamic"
        if values["tensorboard"] and find_spec("tensorboardX") is None:
            raise Failure("argument --tensorboard: needs tensorboardX. Run: pip install tensorboardX", USAGE)
        if values["keep_best"] and not values["save_every"]:
            raise Failure("argument --keep_best: needs --save_every, the moments to choose from", USAGE)
        return cls(**values, is_latest=values["output_dir"] is None and values["ckpt_path"] is None)

    def in_folder(self, folder: str | None) -> Settings:
        """Return the same settings with a folder for the output files."""
        return replace(self, output_dir=folder)

    def for_ranks(self, ranks: int) -> Settings:
        """Return the settings of each of several processes, which divide the rows of a window among them.

        Raises:
            Failure: If they can't divide them evenly.
        """
        if rows_per_rank(self.effective_batch or 0, ranks) is None:
            raise Failure(f"argument --effective_batch: must be a multiple of {ranks}, the number of processes", USAGE)
        settings = replace(self, ranks=ranks)
        if settings.auto or not settings.window_rows:
            return settings
        return settings.with_micro_batches_of(min(settings.window_rows, int(settings.batch_size)))

    def with_updates(self, epochs: int, updates: int) -> Settings:
        """Return the same settings for a run of so many epochs and updates."""
        return replace(self, epochs=epochs, updates=updates)

    def with_micro_batches_of(self, rows: int) -> Settings:
        """Return the same settings with micro-batches of `rows` rows."""
        return replace(self, batch_size=rows)

    @property
    def auto(self) -> bool:
        """bool, whether the largest micro-batch that fits must still be found."""
        return self.batch_size == AUTO

    @property
    def may_split_otherwise(self) -> bool:
        """bool, whether windows have several micro-batches, whose size was not looked for, on one process."""
        return self.ranks == 1 and self.memory_budget is None and self.window != {"mini_steps": 1}

    @property
    def window_rows(self) -> int:
        """int, the rows of a window on each rank; 0 if windows are counted in micro-batches."""
        return rows_per_rank(self.effective_batch or 0, self.ranks) or 0

    @property
    def loaded_rows(self) -> int:
        """int, the rows of a batch of the data set."""
        return self.window_rows or int(self.batch_size)

    @property
    def window(self) -> dict[str, Any]:
        """The arguments of the driver's `train_process` for the window."""
        if self.effective_batch is None:
            return {"mini_steps": self.mini_steps}
        is_one_micro_batch = self.batch_size == self.window_rows  # without accumulators
        return {"mini_steps": 1} if is_one_micro_batch else {"micro_batch_size": self.batch_size}

    @property
    def window_sizes(self) -> Mapping[int, int | None]:
        """Mapping, the micro-batches in a window by their first update; None if `effective_batch` sets the window."""
        return self.mini_steps if isinstance(self.mini_steps, Mapping) else {0: self.mini_steps}

    @property
    def micro_batches(self) -> int:
        """int, the micro-batches of a full window, in the end if that changes."""
        window = self.window_sizes[max(self.window_sizes)]
        return window or math.ceil(self.window_rows / int(self.batch_size))

    @property
    def rates(self) -> list[float]:
        """list[float], the learning rates of the first updates; the last one is that of all others."""
        count = self.updates
        if self.lr_decay == "none":
            count = max(*self.window_sizes, self.warmup_updates) + 1
        rates, window = [], self.window_sizes[0]
        for update in range(count):
            window = self.window_sizes.get(update, window)
            lowest = (self.min_lr or 0.0) / self.lr
            fraction = part_of_rate(update, self.updates, self.warmup_updates, self.lr_decay, lowest)
            rates.append(self.lr * self._factor(window) * fraction)
        return rates[:1] if len(set(rates)) == 1 else rates

    def _factor(self, micro_batches: int | None) -> float:
        """Return what the learning rate is multiplied by for windows of this number of micro-batches."""
        rows = self.effective_batch or int(self.batch_size) * (micro_batches or 1) * self.ranks
        ratio = rows / (self.base_batch or rows)
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]

    @property
    def model_path(self) -> str:
        """str, the path of the model."""
        return self.ckpt_path or self._in_folder(DEFAULT)

    @property
    def models(self) -> list[str]:
        """list[str], the paths of the models: the last one, the best one with --keep_best, the average with --ema."""
        best = [best_of(self.model_path)] if self.keep_best else []
        average = [ema_of(self.model_path)] if self.ema is not None else []
        return [self.model_path, *best, *average]

    @property
    def copies(self) -> list[str]:
        """list[str], the paths of the copies of the last model and its average in the current folder."""
        if not self.is_latest:
            return []
        return [DEFAULT] if self.ema is None else [DEFAULT, ema_of(DEFAULT)]

    @property
    def states(self) -> str:
        """str, the folder of the training states."""
        return self._in_folder("states")

    @property
    def findings(self) -> str:
        """str, the path of the file with the micro-batches that were found."""
        return self._in_folder("micro_batches.json")

    @property
    def metrics(self) -> str:
        """str, the path of the metrics."""
        return self._in_folder(METRICS)

    @property
    def events(self) -> str:
        """str, the folder of the files for TensorBoard."""
        return self._in_folder("tensorboard")

    def _in_folder(self, name: str) -> str:
        return os.path.join(self.output_dir or RUNS, name)

    @property
    def config(self) -> dict[str, Any]:
        """The settings that must equal those of a resumed run."""
        config = {name: getattr(self, name) for name in _CONFIG}
        config.update({name: getattr(self, name) for name in _CONFIG_IF_GIVEN if getattr(self, name)})
        return config if self.lr_decay == "none" else {**config, "updates": self.updates}

    @property
    def record(self) -> dict[str, Any]:
        """The settings that are recorded with a model."""
        last = self.window_sizes[max(self.window_sizes)]
        names = _RECORD if self.vocabulary is None else (*_RECORD, *_RECORD_OF_TEXT)
        return {**{name: getattr(self, name) for name in names}, "mini_steps": last}


def part_of_rate(update: int, updates: int, warm_up: int, decay: str, lowest: float = 0.0) -> float:
    """Return the part of the learning rate that one of `updates` updates has: it grows first, and may fall then.

    Args:
        update (int): the number of updates before it.
        updates (int): the updates of the run.
        warm_up (int): the updates during which it grows.
        decay (str): ``"none"``, ``"linear"`` or ``"cosine"``.
        lowest (float): the part at the end of the decay. Default: ``0.0``.
    """
    if update < warm_up:
        return (update + 1) / warm_up
    progress = (update - warm_up) / max(1, updates - warm_up)
    part = {"none": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[decay]
    return lowest + (1 - lowest) * part


def best_of(model: str) -> str:
    """Return the path of the best model beside the last one."""
    return "{}.best{}".format(*os.path.splitext(model))


def ema_of(model: str) -> str:
    """Return the path of the averaged model beside the last one."""
    return "{}.ema{}".format(*os.path.splitext(model))


def _check_window(values: Mapping[str, Any]) -> None:
    """Reject flags that define the window twice: by micro-batches and their number, and by its rows."""
    window_rows = values["effective_batch"]
    if values["batch_size"] == AUTO and window_rows is None:
        raise Failure("argument --batch_size: auto needs --effective_batch, the rows to split", USAGE)
    if values["memory_budget"] is not None and values["batch_size"] != AUTO:
        raise Failure("argument --memory_budget: is for --batch_size auto", USAGE)
    if window_rows is None:
        return
    tail = values["tail"]
    if values["mini_steps"] is not None:
        raise Failure("argument --mini_steps: follows from --effective_batch and --batch_size; leave it out", USAGE)
    if values["zero"] == 2:
        rule = "2 needs --mini_steps, so that all processes have the same number of micro-batches"
        raise Failure(f"argument --zero: {rule}", USAGE)
    if tail != "flush":
        raise Failure(f"argument --tail: each effective batch is a window, so there is nothing to {tail}", USAGE)
    if values["batch_size"] != AUTO and values["batch_size"] > window_rows:
        raise Failure(f"argument --batch_size: must be <= {window_rows}, the --effective_batch", USAGE)
