"""Which steps does a training program take before and after building its network?"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import mindspore as ms
from mindspore import nn

from ..fitting.batch_size import find_micro_batch_size
from ..ranks.parallel import AUTO, Group, group_of, is_first
from ..saving.checkpoint import CheckpointError, check_folder, check_name, save_model
from ..saving.checkpointer import Checkpointer, Stopped
from ..saving.files import remove_leftovers
from .main import CHECKPOINT, DISK, USAGE, Failure, exit_code, quiet
from .plan import words_of
from .report import MetricsFile, Opening, progress, say
from .settings import Settings
from .signals import SIGNALS, TERMINATED


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
    group = group_of("train.py", AUTO)
    if group is not None:
        if settings.auto:
            raise Failure("argument --batch_size: auto tries one process; give several the number it finds", USAGE)
        if settings.tail == "carry":
            raise Failure("argument --tail: several processes save and stop between windows; take flush or drop", USAGE)
        if not is_first(group):
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # rank 0 prints for all
    return settings.on(group.size if group else 1), group


def planned_updates(settings: Settings, model: Any, train: Any) -> int:
    """Return the number of updates of the run; raise a `Failure` if it is 0 or the model's path is invalid."""
    with exit_code(USAGE, ValueError):
        updates = model.planned_updates(settings.epochs, train, settings.mini_steps)
        check_name("train.py", *settings.models)
    if updates == 0:
        what = f"no window of {settings.mini_steps} would fill in the whole run"
        raise Failure(f"argument --mini_steps: {what}", USAGE)
    return updates


def fit(settings: Settings, trial: Callable[[int], None]) -> tuple[Settings, str]:
    """Replace "auto" by the largest micro-batch that fits; also return a text about it, empty if it is not "auto".

    Args:
        settings (Settings): the settings of the run.
        trial (Callable): trains one window in micro-batches of the given number of rows, and evaluates a batch.
    """
    if not settings.auto:
        return settings, ""
    with exit_code(CHECKPOINT, CheckpointError):
        before = Checkpointer(settings.states, resume=settings.resume).settings().get("batch_size")
        if before is not None and not (type(before) is int and before > 0):
            raise CheckpointError(f"the state to go on from has the batch_size {before!r}")
    if before and not settings.allow_config_change:
        return settings.with_micro_batches_of(before), f"{before} rows, as in the run that is resumed"
    window, budget = settings.window_rows, settings.memory_budget
    with exit_code(USAGE, ValueError):
        found = find_micro_batch_size(trial, window, memory_budget=budget)
    return settings.with_micro_batches_of(found.micro_batch_size), words_of(found, window, budget)


def make_folders(settings: Settings) -> None:
    """Create the folders of the output files; raise a `Failure` now instead of at the end of the run."""
    try:
        os.makedirs(settings.output_dir, exist_ok=True)
    except OSError as error:
        what = f"'{settings.output_dir}' can't be made: {error.strerror}"
        raise Failure(f"argument --output_dir: {what}", DISK) from error
    with exit_code(DISK, OSError, ValueError):
        for path in settings.models:
            folder = os.path.dirname(os.path.abspath(path))
            os.makedirs(folder, exist_ok=True)
            check_folder("train.py", path)
            remove_leftovers(folder, age=3600)


def write_model(network: nn.Cell, path: str, group: Group | None) -> None:
    """Write a network's parameters; with several processes only rank 0 writes."""
    if is_first(group):
        with exit_code(DISK, OSError), quiet():
            save_model(network, path)


def train(
    model: Any,
    network: nn.Cell,
    settings: Settings,
    data: Any,
    *,
    group: Group | None,
    evaluate: Callable[[], Sequence[int]],
) -> None:
    """Train, with states, metrics and progress; after a signal the state is saved and the run stops.

    Args:
        model (GradientAccumulation): the driver.
        network (Cell): the network to train.
        settings (Settings): the settings of the run.
        data (Dataset): the training data; its `source` has the number of rows and a fingerprint.
        group (Optional[Group]): the processes that train together.
        evaluate (Callable): returns the number of right answers and the number of rows.
    """

    def score() -> float:
        """Evaluate, and save the model if it is the best so far."""
        correct, rows = evaluate()
        found = correct / rows
        better = states.best is None or found > states.best
        if better:
            write_model(network, settings.models[1], group)
        say(f"accuracy: {found:.4f} after {model.updates:,} updates{', the best so far' if better else ''}")
        return found

    source = {"rows": data.source.rows, "data": data.source.fingerprint}
    states = _states_of(settings, {**settings.config, **source}, score if settings.keep_best else None)
    metrics = MetricsFile(os.path.join(settings.output_dir, "metrics.jsonl"), lambda: model.updates + model.skipped)
    how: dict[str, Any] = {"report": (Opening("resumed", lambda: states.resumed), progress(), metrics)}
    try:
        with SIGNALS.deferred(), exit_code(CHECKPOINT, CheckpointError), exit_code(DISK, OSError):
            model.train_process(settings.epochs, data, **settings.window, **how, ckpt_path=None, checkpointer=states)
    except Stopped as stopped:
        code = SIGNALS.code or TERMINATED  # no signal of its own: another rank received it
        raise Failure(f"{SIGNALS.words}, {stopped}; --resume goes on from there", code) from stopped


def _states_of(settings: Settings, config: Mapping[str, Any], score: Callable[[], float] | None) -> Checkpointer:
    """Return the `Checkpointer` that saves the run's states and resumes from one."""
    asked = {name: getattr(settings, name) for name in ("keep", "resume", "allow_config_change")}
    return Checkpointer(
        settings.states, **settings.save_every, **asked, score=score, config=config, stop=SIGNALS.pending
    )
