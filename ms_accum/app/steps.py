"""The steps of a training program: the device, the processes, the micro-batch, the folders, the models, the run."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable

import mindspore as ms
from mindspore import nn

from model_zoo.data.text import CHARACTERS

from .._check import quantity
from ..engine.ema import averaged
from ..engine.ends import planned as planned_windows
from ..ranks.group import AUTO, Group, group_of, is_first, is_launched, total
from ..saving.checkpointer import Checkpointer, FolderInUse, StateFolder, Stopped
from ..saving.files import remove_leftovers
from ..saving.model_file import (
    DEFAULT,
    CheckpointError,
    check_folder,
    check_name,
    copy_model,
    remove_model,
    save_model,
    write_record,
)
from . import outputs
from .evaluations import Evaluations
from .metrics import MetricsFile
from .plan import print_line, reporters, search_lines
from .process import CHECKPOINT, DISK, MINDSPORE_LOG, SIGNALS, USAGE, Failure, exit_code, quiet, without_native_log
from .search import SearchCache, find_micro_batch_size
from .settings import Settings, best_of, ema_of
from .tasks import Result, Task
from .tensorboard import TensorBoardLog

_SEARCH_SETTINGS = (
    "model",
    "dataset",
    "window_rows",
    "memory_budget",
    "optimizer",
    "clip_norm",
    "amp",
    "nonfinite",
    "ema",
    "vocabulary",
    "context",
    "layers",
    "width",
    "heads",
    "untied_head",
)
"""Settings that decide which micro-batch is the fastest that fits."""


# Before the training


def choose_device(target: str) -> str:
    """Set MindSpore's device, and return it; "auto" uses MindSpore's default."""
    default = ms.get_context("device_target")
    if target not in ("auto", default):
        try:
            with quiet(), without_native_log():
                ms.set_device(target)
        except Exception as error:
            message = f"argument --device_target: {target} is not available here, {default} is"
            raise Failure(message, USAGE) from error
    return ms.get_context("device_target")


def join(settings: Settings) -> tuple[Settings, Group | None]:
    """Join the process group if a launcher started this process, and take its share of the effective batch."""
    if is_launched():
        _with_ranks(settings, int(os.environ.get("MS_WORKER_NUM", "1")))  # joining takes seconds
    with exit_code(USAGE, RuntimeError) if not is_launched() else nullcontext():
        group = group_of("train.py", AUTO)
    if not is_first(group):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # rank 0 prints for all
    return _with_ranks(settings, group.size if group else 1), group


def _with_ranks(settings: Settings, ranks: int) -> Settings:
    """Return the settings of each of several processes; raise a `Failure` if they can't have these."""
    if ranks > 1 and settings.auto:
        raise Failure("argument --batch_size: auto tries one process; give several the number it finds", USAGE)
    if ranks > 1 and settings.tail == "carry":
        raise Failure("argument --tail: several processes save and stop between windows; take flush or drop", USAGE)
    return settings.for_ranks(ranks)


def _settings_of_resumed_run(settings: Settings) -> Mapping[str, Any]:
    with exit_code(CHECKPOINT, CheckpointError):
        return Checkpointer(settings.states, resume=settings.resume).settings()


def characters_of_resumed_run(settings: Settings) -> str | None:
    """Return the characters of the run that is resumed, because its network has a vector for each; None without one."""
    if settings.vocabulary != CHARACTERS or settings.resume is None:
        return None
    notes = _settings_of_resumed_run(settings).get("notes")
    characters = notes.get("vocabulary") if isinstance(notes, dict) else None
    return characters if isinstance(characters, str) and characters else None


def with_planned_updates(settings: Settings, train: Any) -> Settings:
    """Return the settings with the updates of the run; raise a `Failure` if there is none, or a path is invalid."""
    with exit_code(USAGE, ValueError):
        check_name("train.py", *settings.models, *settings.copies)
        batches = train.get_dataset_size()
        plan = partial(planned_windows, "train_process", batches, settings.mini_steps, settings.tail)
        epochs = settings.epochs or _epochs_for(settings.max_updates or 1, plan)
        updates = plan(epochs)
    if not updates:
        raise Failure(f"argument --mini_steps: no window of {settings.mini_steps} would fill in the whole run", USAGE)
    return settings.with_updates(epochs, min(updates, settings.max_updates or updates))


def _epochs_for(updates: int, plan: Callable[[int], int | None]) -> int:
    """Return the epochs of a run of so many updates, with one to spare: a skipped window is no update."""
    few, enough = 0, 1
    while (plan(enough) or 0) < updates:
        few, enough = enough, 2 * enough
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if (plan(middle) or 0) >= updates else (middle, enough)
    return enough + 1


def choose_micro_batch(settings: Settings, trial: Callable[[int], Any], version: str) -> tuple[Settings, list[str]]:
    """Replace "auto" by the fastest micro-batch that fits; also return lines about it, none if it is not "auto".

    Args:
        settings (Settings): the settings of the run.
        trial (Callable): trains one window in micro-batches of the given number of rows, evaluates a batch, and returns
            a function that trains the window once more.
        version (str): of this package.
    """
    if not settings.auto:
        return settings, []
    rows = _settings_of_resumed_run(settings).get("batch_size")
    if type(rows) is int and rows > 0 and not settings.allow_config_change:
        return settings.with_micro_batches_of(rows), [f"{quantity(rows, 'row')}, as in the run that is resumed"]
    keys = {name: getattr(settings, name) for name in _SEARCH_SETTINGS}
    cache = SearchCache(settings.findings, ms_accum=version, **keys)
    micro_batch = cache.get()
    lines = [] if micro_batch is None else [f"found before: delete {settings.findings} to search again"]
    if micro_batch is None:
        if settings.memory_budget is not None:
            print_line(f"{'micro-batch':16} looking for the fastest that fits; each trial starts a process ...")
        with exit_code(USAGE, ValueError):
            micro_batch = find_micro_batch_size(trial, settings.window_rows, memory_budget=settings.memory_budget)
        cache.store(micro_batch)
    lines = [*search_lines(micro_batch, settings.memory_budget), *lines]
    return settings.with_micro_batches_of(micro_batch.micro_batch_size), lines


def make_folders(settings: Settings, group: Group | None) -> Settings:
    """Create the folders of the output files and return the settings with them; remove what --overwrite replaces.

    Raises:
        Failure: If they can't be written to: now, instead of at the end of the run.
    """
    if settings.output_dir is not None:
        _make_folder(settings.output_dir, "output_dir")
    if settings.output_dir is not None or settings.ckpt_path is not None:
        folder = os.path.dirname(os.path.abspath(settings.model_path))
        _make_folder(folder, "ckpt_path")
        with exit_code(DISK, OSError, ValueError):
            for path in settings.models:
                check_folder("train.py", path)
            if is_first(group):
                remove_leftovers(folder, age=3600)
    if is_first(group):
        with exit_code(DISK, OSError), exit_code(USAGE, RuntimeError):
            if settings.overwrite:
                _remove_replaced(settings)
            line = outputs.keep_unsaved_best(settings)
        if line is not None:
            print_line(line)
    if settings.output_dir is None:
        settings = settings.in_folder(_new_run(group))
    MINDSPORE_LOG.path = os.path.join(settings.output_dir or "", outputs.LOG)
    return settings


def _make_folder(folder: str, flag: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Failure(f"argument --{flag}: '{folder}' can't be made: {error.strerror}", DISK) from error
    if not os.access(folder, os.W_OK):
        raise Failure(f"argument --{flag}: must be writable, but got '{folder}'", DISK)


def _remove_replaced(settings: Settings) -> None:
    if settings.output_dir is not None:
        StateFolder("train.py", settings.states).clear()
        outputs.remove_plots(settings)
    for path in outputs.models_of(settings):
        remove_model(path)


def _new_run(group: Group | None) -> str:
    """Let rank 0 create the folder of a new run, and return its path on all ranks."""
    number = 0
    try:
        if is_first(group):
            number = outputs.new_run()
    finally:
        (number,) = total([number], group)  # also after a failure: the other ranks wait for it
    if not number:
        raise Failure("rank 0 can't make the folder of the run", DISK)
    return outputs.run_of(number)


# The models


class Models:
    """The models of a run, each with its record; with several processes only rank 0 writes.

    Args:
        network (Cell): the network to save.
        model (GradientAccumulation): the driver, which counts updates.
        settings (Settings): the settings of the run.
        task (Task): what is trained.
        facts (Mapping): what the records contain about the data and the versions.
        group (Optional[Group]): the processes that train together.
    """

    def __init__(
        self,
        network: nn.Cell,
        model: Any,
        settings: Settings,
        task: Task,
        facts: Mapping[str, Any],
        group: Group | None,
    ):
        self._network = network
        self._no_result = task.no_result
        self._model = model
        self._settings = settings
        self._own_files = outputs.OwnFiles(settings.models, settings.copies)
        self.writes = is_first(group)
        """bool, whether this process writes."""
        self.facts = {**settings.record, **facts}
        """dict, what the records of the run have in common."""
        self.previous: str | None = None
        """Optional[str], the new path of a file that was at the place of the copy, if it was not the model of a run."""

    def write(self, path: str, result: Result | None = None) -> None:
        """Write a model, with the result of its evaluation."""
        if self.writes:
            with exit_code(DISK, OSError), quiet():
                previous = self._own_files.keep_foreign(path)
                if previous is not None:
                    print_line(f"'{path}' was written by another run; its model is kept as '{previous}'")
                save_model(self._network, path, self._record(result))
                self._own_files.wrote(path)

    def write_last(self) -> None:
        """Write the last model, and the averaged one."""
        self.write(self._settings.model_path)
        if self._is_averaged:
            with self._model.ema.applied():
                self.write(ema_of(self._settings.model_path))

    def publish(self) -> None:
        """Copy the model, and its average, to the current folder, if no flag gives a path for the model."""
        if self.writes and self._settings.is_latest:
            with exit_code(DISK, OSError):
                self.previous = self._copy(self._settings.model_path, DEFAULT) or self.previous
                if self._is_averaged:
                    self._copy(ema_of(self._settings.model_path), ema_of(DEFAULT))

    def evaluated(self, result: Result) -> None:
        """Write the result of its evaluation into the record of the last model, or of the average."""
        if self.writes:
            last = self._settings.model_path
            with exit_code(DISK, OSError):
                write_record(ema_of(last) if self._is_averaged else last, self._record(result))
        self.publish()

    def _copy(self, model: str, path: str) -> str | None:
        previous = self._own_files.keep_foreign(path)
        copy_model(model, path)
        self._own_files.wrote(path)
        return previous

    @property
    def _is_averaged(self) -> bool:
        return self._model.ema is not None and self._model.ema.updates > 0

    def _record(self, result: Result | None) -> dict[str, Any]:
        so_far = {"updates": self._model.updates, "skipped": self._model.skipped}
        return {**self.facts, **so_far, **(self._no_result if result is None else result.record)}


def facts_of(version: str, train: Any, test: Any) -> dict[str, Any]:
    """Return what the records contain about the data and the versions."""
    return {**train.source.facts, "test_data": test.source.facts["data"], **versions_with(version)}


def versions_with(version: str) -> dict[str, str]:
    """Return the versions of this package, of MindSpore and of Python, by name."""
    return {"ms_accum": version, "mindspore": ms.__version__, "python": platform.python_version()}


# The training


def train(model: Any, settings: Settings, data: Any, *, models: Models, evaluate: Callable[..., Result]) -> Result:
    """Train, with states, metrics and progress, and evaluate; after a signal the state is saved and the run stops.

    Args:
        model (GradientAccumulation): the driver.
        settings (Settings): the settings of the run.
        data (Dataset): the training data; its `source` has the number of rows and a fingerprint.
        models (Models): writes the models.
        evaluate (Callable): evaluates on all ranks; it gets a function that returns whether to stop.

    Returns:
        Result, of the evaluation of the trained network.

    Raises:
        Failure: If a signal ended the run, also if it came when all was done.
    """
    logs: list[Any] = [MetricsFile(settings.metrics)]
    if settings.tensorboard:
        logs.append(TensorBoardLog(settings.events))
    evaluations = Evaluations(
        evaluate, model, logs, every=settings.eval_every, updates=settings.updates, stop=SIGNALS.pending
    )

    def score() -> float:
        """Evaluate, and save the model if it is the best so far."""
        result = evaluations.result()
        if result.score > (-math.inf if states.best is None else states.best):
            with averaged(model.ema):
                models.write(best_of(settings.model_path), result)
            print_line(f"the best so far: {result.name} {result.text} after {quantity(model.updates, 'update')}")
        return result.score

    flags = outputs.flags_to_save(settings.flag_texts, dataset=settings.dataset, model=settings.model)
    states = Checkpointer(
        settings.states,
        **settings.save_every,
        keep=settings.keep,
        resume=settings.resume,
        config={**settings.config, "rows": data.source.rows, "data": data.source.fingerprint},
        allow_config_change=settings.allow_config_change,
        notes={**models.facts, outputs.FLAGS: flags},
        score=score if settings.keep_best else None,
        stop=SIGNALS.pending,
        at_end=models.write_last,  # before the last state, which is larger: it may fit on a disk that is nearly full
    )
    trained = False
    try:
        with SIGNALS.deferred():
            with outputs.no_empty_folder(settings) if models.writes else nullcontext():
                with exit_code(CHECKPOINT, CheckpointError), exit_code(DISK, OSError), exit_code(USAGE, FolderInUse):
                    shown = reporters(settings, states, logs)
                    model.train_process(
                        settings.epochs,
                        data,
                        **settings.window,
                        max_updates=settings.max_updates,
                        report=shown,
                        callbacks=evaluations,
                        ckpt_path=None,
                        checkpointer=states,
                    )
            trained = True
            models.publish()
            result = evaluations.result(SIGNALS.pending)
            models.evaluated(result)
    except Stopped as stopped:
        resume = outputs.resume_flags(settings.flag_texts)
        if not trained:
            raise SIGNALS.failure(f", {stopped}; {resume} continues from there") from stopped
        path = f"--data_path={settings.data_path} " if settings.data_path else ""
        ema = " --use_ema" if settings.ema is not None else ""
        command = f"eval.py {path}--ckpt_path={settings.model_path}{ema}"
        remedies = f"not evaluated yet: {command} does that, or {resume}"
        raise SIGNALS.failure(f"; the model is '{settings.model_path}', {remedies}") from stopped
    except KeyboardInterrupt as interrupted:  # at the end of the deferred block
        raise SIGNALS.failure(f"; the run is complete: {result.name} {result.text}") from interrupted
    except Failure as failure:
        if states.rescued is None:
            raise
        message = f"{failure}; the training is not lost, its state is '{states.rescued}' (see --resume)"
        raise Failure(message, failure.code) from failure
    return result
