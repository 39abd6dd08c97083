"""Where does a run write, and would it replace the files of another run?"""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..saving.files import check_inside
from ..saving.model_file import DEFAULT, copy_model, keep_previous, previous_of, sidecar
from .main import DISK, USAGE, Failure, exit_code
from .settings import AUTO, METRICS, RUNS, Settings, best_of, ema_of

LOG = "mindspore.log"
"""str, the name of MindSpore's log in a run's folder."""
_NUMBERED = re.compile("[0-9]+")


def placed(settings: Settings) -> Settings:
    """Return the settings with the folder of the run to resume; a new run without a folder gets one when it begins.

    Raises:
        Failure: If the run would replace files of another run, or what links in its folder lead to.
    """
    if settings.overwrite and settings.resume:
        raise Failure("argument --overwrite: can't be combined with --resume, which continues a run", USAGE)
    try:
        if settings.output_dir is None and settings.resume is not None:
            settings = settings.in_folder(folder_to_resume(settings.resume))
        _check_links(settings)
        if not (settings.overwrite or _continues(settings)):
            _check_free(settings)
    except OSError as error:  # such as a path that is too long
        raise Failure(f"argument --output_dir: can't be used: {error.strerror}", USAGE) from error
    return settings


def new_run() -> int:
    """Create the folder of a new run, `runs/001` and so on, and return its number.

    Raises:
        Failure: If it can't be created.
    """
    try:
        os.makedirs(RUNS, exist_ok=True)
        number = max(_runs(), default=0) + 1
        while not _made(run_of(number)):  # another run may start at the same time
            number += 1
    except OSError as error:
        what = f"a folder in '{RUNS}' can't be made: {error.strerror}; give another one"
        raise Failure(f"argument --output_dir: {what}", DISK) from error
    return number


def run_of(number: int) -> str:
    """Return the path of a run's folder."""
    return os.path.join(RUNS, f"{number:03}")


@contextmanager
def no_empty_folder(settings: Settings) -> Iterator[None]:
    """Remove the folder of a new run if the block fails before anything was written to it.

    For the rank that writes there: another one may end its block while that one is saving.
    """
    try:
        yield
    except BaseException:
        folder = Path(settings.output_dir or "")
        if settings.is_latest and not _states_in(str(folder)):  # else another run may hold the lock
            _remove_if_empty(folder / METRICS, folder / "states" / ".lock", folder / "states", folder)
        raise


def _remove_if_empty(*paths: Path) -> None:
    """Remove files and folders in order, up to the first that is not empty."""
    with contextlib.suppress(OSError):
        for path in paths:
            if path.is_dir():
                path.rmdir()
            elif path.exists():
                if path.stat().st_size:
                    return
                path.unlink()


def keep_unsaved_best(settings: Settings) -> Iterator[str]:
    """Keep the best model of a run that ended before its first state, which begins again; yield a line about it.

    The best model is written before the state, so that a state never names a model that is lost.
    """
    best = best_of(settings.model_path)
    if settings.resume == AUTO and os.path.isfile(best) and not _states_in(settings.output_dir or ""):
        yield f"'{best}' is of a run without a state, which begins again; it is kept as '{keep_previous(best)}'"


def remove_drawn(settings: Settings) -> None:
    """Remove what shows the metrics of the run that is replaced: pictures, the table, and TensorBoard's events."""
    drawn = [Path(settings.metrics).with_suffix(kind) for kind in (".png", ".svg", ".csv")]
    for path in (*drawn, *Path(settings.events).glob("events.out.tfevents.*")):
        path.unlink(missing_ok=True)


class Latest:
    """The file `./gradient_accumulation.ckpt`, a copy of the newest run's model.

    Create this object before the run begins, because a resumed run replaces the model of which the file may be a copy.

    Args:
        name (str): the name of the file, and of the model in a run's folder. Default: the default name of models.
    """

    def __init__(self, name: str = DEFAULT):
        self._name = name
        self._copy = _written_at(name) if _is_of_a_run(name) else None
        self.kept: str | None = None
        """Optional[str], the path at which an earlier file was kept, if it was not the model of a run."""

    def becomes(self, model: str) -> None:
        """Replace it by a copy of the model."""
        with exit_code(DISK, OSError):
            is_copy = self._copy is not None and _written_at(self._name) == self._copy
            replaceable = _is_of_a_run(self._name) or is_copy
            self.kept = (None if replaceable else keep_previous(self._name)) or self.kept
            copy_model(model, self._name)


class Own:
    """The models of a run: another run with the same --ckpt_path may have written one since this run began.

    Args:
        paths (Iterable[str]): the paths of the models, when the run begins.
    """

    def __init__(self, paths: Iterable[str]):
        self._written = {path: _written_at(path) for path in paths}

    def keeping_others(self, path: str) -> Iterator[str]:
        """Keep a model that another run has written there, and yield a line about it."""
        if _written_at(path) not in (None, self._written.get(path)):
            yield f"'{path}' was written by another run; its model is kept as '{keep_previous(path)}'"

    def wrote(self, path: str) -> None:
        """Remember a model that this run has written."""
        self._written[path] = _written_at(path)


def _written_at(path: str) -> int | None:
    """Return the time at which a file was written, in nanoseconds."""
    return os.stat(path).st_mtime_ns if os.path.isfile(path) else None


def _is_of_a_run(path: str) -> bool:
    """Return whether a file is equal to the model of one of the runs."""
    models = (os.path.join(run_of(number), path) for number in _runs())
    return os.path.isfile(path) and any(
        os.path.isfile(model) and filecmp.cmp(path, model, shallow=False) for model in models
    )


def folder_to_resume(resume: str) -> str | None:
    """Return the folder of the newest run with a state, or that of the given state; None for a new run."""
    if resume == AUTO:
        return _newest_run()
    folder, states = os.path.split(os.path.dirname(resume))
    return (folder or os.curdir) if states == "states" else None


def _newest_run() -> str | None:
    """Return the folder of the newest run, or None if no run has trained.

    Raises:
        Failure: If it ended before it saved a state. An older run is not what the user means.
    """
    for folder in map(run_of, sorted(_runs(), reverse=True)):
        if _states_in(folder):
            return folder
        if _has_trained(folder):
            ways = "start it again, with --save_every N to save more often, or give a state of an older run"
            what = f"the newest run, '{folder}', ended before it saved a state"
            raise Failure(f"argument --resume: {what}; {ways}", USAGE)
    return None


def _has_trained(folder: str) -> bool:
    metrics = os.path.join(folder, METRICS)
    return os.path.isfile(metrics) and os.path.getsize(metrics) > 0


def _continues(settings: Settings) -> bool:
    """Return whether the run continues the one that wrote the files in its folder, or can't begin at all."""
    if settings.resume is None:
        return False
    if settings.resume == AUTO:
        return settings.output_dir is not None and _states_in(settings.output_dir) > 0
    if not (settings.resume.endswith(".safetensors") and os.path.isfile(settings.resume)):
        return True  # rejected later, when it is read
    return os.path.realpath(os.path.dirname(settings.resume)) == os.path.realpath(settings.states)


def _check_links(settings: Settings) -> None:
    """Reject links out of the run's folder under the names that the run writes, except the path that a flag names."""
    folder = settings.output_dir
    if folder is None or not os.path.isdir(folder):
        return
    names = [settings.metrics, settings.events, settings.findings, os.path.join(folder, LOG)]
    names += [settings.states, os.path.join(settings.states, ".lock")]
    if settings.ckpt_path is None:
        last = settings.model_path
        for path in (last, best_of(last), ema_of(last)):
            names += [path, sidecar(path), previous_of(path), sidecar(previous_of(path))]
    with exit_code(DISK, OSError):
        check_inside(folder, *names)


def _check_free(settings: Settings) -> None:
    last = settings.model_path
    models = [path for path in (last, best_of(last), ema_of(last)) if os.path.isfile(path)]
    if settings.resume == AUTO:  # a run that ended before its first state may have left one; it will be kept
        models = [path for path in models if path != best_of(last)]
    if models and settings.ckpt_path is not None:
        raise Failure(f"argument --ckpt_path: '{models[0]}' exists; {_ways_out(settings, 'name')}", USAGE)
    if settings.output_dir is None or (settings.resume == AUTO and not models):
        return  # there is no model and no state to lose
    states = _states_in(settings.output_dir)
    found = [os.path.basename(path) for path in models]
    found += [METRICS] if os.path.isfile(settings.metrics) else []
    found += [f"{states} training state{'s' * (states > 1)}"] if states else []
    if found:
        where = f"'{settings.output_dir}' holds another run ({', '.join(found)})"
        raise Failure(f"argument --output_dir: {where}; {_ways_out(settings, 'folder')}", USAGE)


def _ways_out(settings: Settings, other: str) -> str:
    if settings.resume is not None:
        return f"there is no state to resume from: give another {other}, or --overwrite instead of --resume"
    return f"give --resume to continue that run, another {other}, or --overwrite to replace it"


def _states_in(folder: str) -> int:
    return len(list(Path(folder, "states").glob("state-*.safetensors")))


def _runs() -> Iterator[int]:
    """Yield the numbers of the runs."""
    for name in os.listdir(RUNS) if os.path.isdir(RUNS) else ():
        if _NUMBERED.fullmatch(name):
            yield int(name)


def _made(folder: str) -> bool:
    try:
        os.mkdir(folder)
    except FileExistsError:
        return False
    return True
