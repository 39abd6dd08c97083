"""Which steps does a training program take before and after building its network?"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Callable

import mindspore as ms
from mindspore import nn

from .. import _check
from ..app.metrics import MetricsFile, logged
from ..app.search import FoundBefore, find_micro_batch_size
from ..app.tensorboard import TensorBoardLog
from ..numerics.ema import averaged
from ..ranks.parallel import AUTO, Group, group_of, is_first, is_launched, total
from ..saving.checkpoint import CheckpointError, check_folder, check_name, save_model
from ..saving.checkpointer import Checkpointer, Stopped
from ..saving.files import remove_leftovers
from ..saving.model_record import remove_model, write_record
from ..saving.state_folder import FolderInUse, StateFolder
from ..window.ends import planned as planned_windows
from . import outputs
from .main import CHECKPOINT, DISK, USAGE, Failure, exit_code, quiet
from .plan import in_percent, reporters, words_of
from .report import say
from .resumed import NAME as FLAGS
from .resumed import again, to_save
from .settings import Settings, best_of, ema_of
from .signals import SIGNALS, TERMINATED, WORDS
from .streams import MINDSPORE_LOG

_DECIDE = ("model", "dataset", "window_rows", "memory_budget", "optimizer", "clip_norm", "amp", "nonfinite", "ema")
"""Settings that decide which micro-batch is the fastest that fits."""


def choose_device(target: str) -> str:
    """Set MindSpore to graph mode on the device, and return the device; "auto" uses MindSpore's default."""
    ms.set_context(mode=ms.GRAPH_MODE)
    here = ms.get_context("device_target")
    if target not in ("auto", here):
        try:
            with quiet():
                ms.set_device(target)
        except Exception as error:
            raise Failure(f"argument --device_target: {target} is not available here, {here} is", USAGE) from error
    return ms.get_context("device_target")


def join(settings: Settings) -> tuple[Settings, Group | None]:
    """Join the process group if a launcher started this process, and take its share of the effective batch."""
    if is_launched():
        _shared(settings, int(os.environ.get("MS_WORKER_NUM", "1")))  # joining takes seconds
    with exit_code(USAGE, RuntimeError) if not is_launched() else nullcontext():
        group = group_of("train.py", AUTO)
    if not is_first(group):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # rank 0 prints for all
    return _shared(settings, group.size if group else 1), group


def _shared(settings: Settings, ranks: int) -> Settings:
    """Return the settings of each of several processes; raise a `Failure` if they can't have these."""
    if ranks > 1 and settings.auto:
        raise Failure("argument --batch_size: auto tries one process; give several the number it finds", USAGE)
    if ranks > 1 and settings.tail == "carry":
        raise Failure("argument --tail: several processes save and stop between windows; take flush or drop", USAGE)
    return settings.on(ranks)


def planned(settings: Settings, train: Any) -> Settings:
    """Return the settings with the updates of the run; raise a `Failure` if there is none, or a path is invalid."""
    with exit_code(USAGE, ValueError):
        check_name("train.py", *settings.models, *settings.copies)
        batches = train.get_dataset_size()
        updates = planned_windows("train_process", batches, settings.mini_steps, settings.tail, settings.epochs)
    if not updates:
        raise Failure(f"argument --mini_steps: no window of {settings.mini_steps} would fill in the whole run", USAGE)
    return settings.with_updates(updates)


def fit(settings: Settings, trial: Callable[[int], Any], version: str) -> tuple[Settings, list[str]]:
    """Replace "auto" by the fastest micro-batch that fits; also return lines about it, none if it is not "auto".

    Args:
        settings (Settings): the settings of the run.
        trial (Callable): trains one window in micro-batches of the given number of rows, evaluates a batch, and returns
            a function that trains the window once more.
        version (str): of this package.
    """
    if not settings.auto:
        return settings, []
    with exit_code(CHECKPOINT, CheckpointError):
        before = Checkpointer(settings.states, resume=settings.resume).settings().get("batch_size")
        if before is not None and not (type(before) is int and before > 0):
            raise CheckpointError(f"the state to resume from has the batch_size {_check.one_line(repr(before))}")
    if before and not settings.allow_config_change:
        return settings.with_micro_batches_of(before), [f"{before} rows, as in the run that is resumed"]
    known = FoundBefore(settings.findings, ms_accum=version, **{name: getattr(settings, name) for name in _DECIDE})
    found = known.get()
    lines = [] if found is None else [f"found before: delete {settings.findings} to search again"]
    if found is None:
        if settings.memory_budget is not None:
            say(f"{'micro-batch':16} looking for the fastest that fits; each trial starts a process ...")
        with exit_code(USAGE, ValueError):
            found = find_micro_batch_size(trial, settings.window_rows, memory_budget=settings.memory_budget)
        known.keep(found)
    return settings.with_micro_batches_of(found.micro_batch_size), [*words_of(found, settings.memory_budget), *lines]


def make_folders(settings: Settings, group: Group | None) -> Settings:
    """Create the folders of the output files and return the settings with them; remove what --overwrite replaces.

    Raises:
        Failure: If they can't be written to: now, instead of at the end of the run.
    """
    if settings.output_dir is not None:
        _make(settings.output_dir)
    if settings.output_dir is not None or settings.ckpt_path is not None:
        with exit_code(DISK, OSError, ValueError):
            for path in settings.models:
                _make_folder_of(path)
                if is_first(group):  # one rank cleans up
                    remove_leftovers(os.path.dirname(os.path.abspath(path)), age=3600)
    if settings.overwrite and is_first(group):
        with exit_code(DISK, OSError), exit_code(USAGE, RuntimeError):
            if settings.output_dir is not None:
                StateFolder("train.py", settings.states).clear()
                outputs.remove_drawn(settings)
            last = settings.model_path
            for path in (last, best_of(last), ema_of(last)):
                remove_model(path)
    if is_first(group):
        with exit_code(DISK, OSError):
            for line in outputs.keep_unsaved_best(settings):
                say(line)
    settings = settings if settings.output_dir is not None else settings.in_folder(_new_run(group))
    MINDSPORE_LOG.path = os.path.join(settings.output_dir or "", outputs.LOG)
    return settings


def _make_folder_of(path: str) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    _make(folder, "ckpt_path")
    check_folder("train.py", path)


def _new_run(group: Group | None) -> str:
    """Let rank 0 create the folder of a new run, and return its path on all ranks."""
    failure, number = None, 0
    if is_first(group):
        try:
            number = outputs.new_run()
        except Failure as error:
            failure = error
    (number,) = total([number], group)  # also after a failure: the other ranks wait for it
    if failure or not number:
        raise failure or Failure("rank 0 can't make the folder of the run", DISK)
    return outputs.run_of(number)


def _make(folder: str, name: str = "output_dir") -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Failure(f"argument --{name}: '{folder}' can't be made: {error.strerror}", DISK) from error
    if not os.access(folder, os.W_OK):
        raise Failure(f"argument --{name}: must be writable, but got '{folder}'", DISK)


class Written:
    """The models of a run, each with its record; with several processes only rank 0 writes.

    Args:
        network (Cell): the network to save.
        model (GradientAccumulation): the driver, which counts updates.
        settings (Settings): the settings of the run.
        facts (Mapping): what the records say of the data and the versions.
        group (Optional[Group]): the processes that train together.
    """

    def __init__(self, network: nn.Cell, model: Any, settings: Settings, facts: Mapping[str, Any], group: Group | None):
        self._network, self._model, self._settings = network, model, settings
        self.writes = is_first(group)
        """bool, whether this process writes."""
        self._own = outputs.Own(settings.models)
        self.facts = {**settings.record, **facts}
        """dict, what the records of the run have in common."""
        publishes = self.writes and settings.is_latest
        self.latest = outputs.Latest() if publishes else None
        """Optional[Latest], the copy of the model; None if a flag says where to write."""
        self._latest_average = outputs.Latest(ema_of(outputs.DEFAULT)) if publishes and settings.ema else None

    def write(self, path: str, counts: Sequence[int] | None = None) -> None:
        """Write a model; `counts` are those of its evaluation."""
        if self.writes:
            with exit_code(DISK, OSError), quiet():
                for line in self._own.keeping_others(path):
                    say(line)
                save_model(self._network, path, self._record(counts))
                self._own.wrote(path)

    def write_last(self) -> None:
        """Write the last model, and the averaged one."""
        self.write(self._settings.model_path)
        if self._is_averaged:
            with self._model.ema.applied():
                self.write(ema_of(self._settings.model_path))

    @property
    def _is_averaged(self) -> bool:
        return self._model.ema is not None and self._model.ema.updates > 0

    def publish(self) -> None:
        """Make `./gradient_accumulation.ckpt` a copy of the model, if no flag says where to write."""
        if self.latest is not None:
            self.latest.becomes(self._settings.model_path)
        if self._latest_average is not None and self._is_averaged:
            self._latest_average.becomes(ema_of(self._settings.model_path))

    def evaluated(self, counts: Sequence[int]) -> None:
        """Write the counts of its evaluation into the record of the last model, or of the average."""
        if self.writes:
            last = self._settings.model_path
            with exit_code(DISK, OSError):
                write_record(ema_of(last) if self._is_averaged else last, self._record(counts))
        self.publish()

    def _record(self, counts: Sequence[int] | None) -> dict[str, Any]:
        correct, rows = counts or (None, None)
        so_far = {"updates": self._model.updates, "skipped": self._model.skipped}
        return {**self.facts, **so_far, "correct": correct, "total": rows}


def facts_of(version: str, train: Any, test: Any) -> dict[str, Any]:
    """Return what the records say of the data, and of the versions."""
    return {**train.source.facts, "test_data": test.source.facts["data"], **versions_with(version)}


def versions_with(version: str) -> dict[str, str]:
    """Return the versions of this package, of MindSpore and of Python, by name."""
    return {"ms_accum": version, "mindspore": ms.__version__, "python": platform.python_version()}


def train(
    model: Any, settings: Settings, data: Any, *, written: Written, evaluate: Callable[..., Sequence[int]]
) -> Sequence[int]:
    """Train, with states, metrics and progress, and evaluate; after a signal the state is saved and the run stops.

    Args:
        model (GradientAccumulation): the driver.
        settings (Settings): the settings of the run.
        data (Dataset): the training data; its `source` has the number of rows and a fingerprint.
        written (Written): writes the models.
        evaluate (Callable): returns the number of right answers and the number of rows; it gets a function that
            returns whether to stop, or nothing.

    Returns:
        Sequence[int], what the evaluation of the trained network returned.

    Raises:
        Failure: If a signal ended the run, also if it came when all was done.
    """
    counts: Sequence[int] = ()
    logs: list[Any] = [MetricsFile(settings.metrics)]
    logs += [TensorBoardLog(settings.events)] if settings.tensorboard else []
    evaluate = logged(evaluate, logs, lambda: model.updates)

    def score() -> float:
        """Evaluate, and save the model if it is the best so far."""
        nonlocal counts
        with averaged(model.ema):
            counts = evaluate()
            found = counts[0] / counts[1]
            better = states.best is None or found > states.best
            if better:
                written.write(best_of(settings.model_path), counts)
        say(f"accuracy: {found:.4f} after {model.updates:,} updates{', the best so far' if better else ''}")
        return found

    config = {**settings.config, "rows": data.source.rows, "data": data.source.fingerprint}
    # The model before the last state, which is larger: it may fit on a disk that is nearly full.
    notes = {**written.facts, FLAGS: to_save(settings.given, dataset=settings.dataset, model=settings.model)}
    how: dict[str, Any] = {"config": config, "notes": notes, "at_end": written.write_last}
    states = _states_of(settings, score=score if settings.keep_best else None, **how)
    try:
        with SIGNALS.deferred():
            with outputs.no_empty_folder(settings) if written.writes else nullcontext(), _ways_on(states, settings):
                how = {"report": reporters(settings, states, logs), "ckpt_path": None, "checkpointer": states}
                model.train_process(settings.epochs, data, **settings.window, **how)
            written.publish()
            with averaged(model.ema):
                counts = counts or evaluate(SIGNALS.pending)  # with --keep_best the last model has been evaluated
            written.evaluated(counts)
    except Stopped as interrupted:  # the last evaluation; `_ways_on` catches that of the training
        raise _stopped(f"the model is '{settings.model_path}', {_to_evaluate(settings)}") from interrupted
    except KeyboardInterrupt as interrupted:  # at the end of the deferred block
        raise _stopped(f"the run is complete, with an accuracy of {in_percent(*counts)}") from interrupted
    return counts


def _stopped(words: str) -> Failure:
    """Return the error of a run that a signal has ended."""
    code = SIGNALS.code or TERMINATED  # 0: another rank received it
    return Failure(f"{WORDS[code]}; {words}", code)


def _to_evaluate(settings: Settings) -> str:
    where = f" --data_path={settings.data_path}" if settings.data_path else ""
    ema = " --use_ema" if settings.ema is not None else ""
    command = f"eval.py{where} --ckpt_path={settings.model_path}{ema}"
    return f"not evaluated yet: {command} does that, or {again(settings.given)}"


@contextmanager
def _ways_on(states: Checkpointer, settings: Settings) -> Iterator[None]:
    """End the program with an error that shows how to continue the run, if a signal or a full disk ends the block."""
    try:
        with exit_code(CHECKPOINT, CheckpointError), exit_code(DISK, OSError), exit_code(USAGE, FolderInUse):
            yield
    except Stopped as stopped:
        code = SIGNALS.code or TERMINATED  # no signal of its own: another rank received it
        ways = f"{again(settings.given)} continues from there"
        raise Failure(f"{WORDS[code]}, {stopped}; {ways}", code) from stopped
    except Failure as failure:
        if states.rescued is None:
            raise
        kept = f"{failure}; the training is not lost, its state is '{states.rescued}' (see --resume)"
        raise Failure(kept, failure.code) from failure


def _states_of(settings: Settings, **how: Any) -> Checkpointer:
    """Return the `Checkpointer` that saves the run's states and resumes from one."""
    asked = {name: getattr(settings, name) for name in ("keep", "resume", "allow_config_change")}
    return Checkpointer(settings.states, **settings.save_every, **asked, **how, stop=SIGNALS.pending)
