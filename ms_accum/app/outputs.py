"""Decides where a run writes, which run it continues and with which flags, and that it replaces no other run's files.

A state has the flags of its run as texts. `--resume` alone takes them, so that it continues the run whatever flags it
had. A state may be crafted: its texts are parsed like flags, and none of them decides where to write.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..saving.files import check_inside
from ..saving.model_file import CheckpointError, keep_previous, previous_of, sidecar
from .flags import AUTO, FlagsOfRun
from .process import CHECKPOINT, DISK, USAGE, Failure, exit_code
from .settings import METRICS, RUNS, Settings, best_of, ema_of

LOG = "mindspore.log"
"""str, the name of MindSpore's log in a run's folder."""
FLAGS = "flags"
"""str, the name of the flags among the notes of a state."""
# Flags that apply to one start only.
_ONE_START_ONLY = {"help", "version", "config", "debug", "resume", "allow_config_change", "overwrite", "verify"}
_ONE_START_ONLY |= {"download", "output_dir"}
# Flags of paths to write to: a state's are used only if they are inside the folder that is resumed.
_WRITE_PATHS = ("ckpt_path",)
# What a flag replaces besides itself if it differs: flags that would contradict it, or belong to the former value.
_REPLACES = {
    "mini_steps": ("effective_batch", "memory_budget"),
    "effective_batch": ("mini_steps",),
    "max_updates": ("epochs",),
    "epochs": ("max_updates",),
    "dataset": ("model", "data_path"),
    "optimizer": ("lr", "momentum", "weight_decay"),
    "lr_scaling": ("base_batch",),
    "download": ("data_path",),
}


# The folder of a run


def with_output_dir(settings: Settings) -> Settings:
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


def folder_to_resume(resume: str) -> str | None:
    """Return the folder of the newest run with a state, or that of the given state; None for a new run.

    Raises:
        Failure: If the newest run ended before it saved a state. An older run is not what the user means.
    """
    if resume != AUTO:
        folder, states = os.path.split(os.path.dirname(resume))
        return (folder or os.curdir) if states == "states" else None
    for folder in map(run_of, sorted(_runs(), reverse=True)):
        if _states_in(folder):
            return folder
        metrics = os.path.join(folder, METRICS)
        if os.path.isfile(metrics) and os.path.getsize(metrics):
            remedy = "start it again, with --save_every N to save more often, or give a state of an older run"
            fault = f"the newest run, '{folder}', ended before it saved a state"
            raise Failure(f"argument --resume: {fault}; {remedy}", USAGE)
    return None


def new_run() -> int:
    """Create the folder of a new run, `runs/001` and so on, and return its number.

    Raises:
        Failure: If it can't be created.
    """
    try:
        os.makedirs(RUNS, exist_ok=True)
        number = max(_runs(), default=0) + 1
        while True:
            try:
                os.mkdir(run_of(number))
                return number
            except FileExistsError:  # another run has started at the same time
                number += 1
    except OSError as error:
        fault = f"a folder in '{RUNS}' can't be made: {error.strerror}; give another one"
        raise Failure(f"argument --output_dir: {fault}", DISK) from error


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
        if settings.is_latest and not any(path.is_file() and path.stat().st_size for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _states_in(folder: str | Path) -> list[Path]:
    return list(Path(folder, "states").glob("state-*.safetensors"))


def _runs() -> list[int]:
    """Return the numbers of the runs."""
    names = os.listdir(RUNS) if os.path.isdir(RUNS) else []
    return [int(name) for name in names if name.isascii() and name.isdigit()]


# The files of another run


def _continues(settings: Settings) -> bool:
    """Return whether the run continues the one that wrote the files in its folder, or can't begin at all."""
    if settings.resume is None:
        return False
    if settings.resume == AUTO:
        return settings.output_dir is not None and bool(_states_in(settings.output_dir))
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
        for path in models_of(settings):
            names += [path, sidecar(path), previous_of(path), sidecar(previous_of(path))]
    with exit_code(DISK, OSError):
        check_inside(folder, *names)


def models_of(settings: Settings) -> list[str]:
    """Return the paths of all models that a run with this path may have written, whatever its other flags."""
    return [settings.model_path, best_of(settings.model_path), ema_of(settings.model_path)]


def _check_free(settings: Settings) -> None:
    """Raise an error if another run has written files where this one writes."""
    models = [path for path in models_of(settings) if os.path.isfile(path)]
    if settings.resume == AUTO:  # a run that ended before its first state may have left one; it will be kept
        models = [path for path in models if path != best_of(settings.model_path)]
    if settings.resume is None:
        remedy = "give --resume to continue that run, another {}, or --overwrite to replace it"
    else:
        remedy = "there is no state to resume from: give another {}, or --overwrite instead of --resume"
    if models and settings.ckpt_path is not None:
        raise Failure(f"argument --ckpt_path: '{models[0]}' exists; {remedy.format('name')}", USAGE)
    if settings.output_dir is None or (settings.resume == AUTO and not models):
        return  # there is no model and no state to lose
    states = len(_states_in(settings.output_dir))
    files = [os.path.basename(path) for path in models]
    files += [METRICS] if os.path.isfile(settings.metrics) else []
    files += [f"{states} training state{'s' * (states > 1)}"] if states else []
    if files:
        fault = f"'{settings.output_dir}' holds another run ({', '.join(files)})"
        raise Failure(f"argument --output_dir: {fault}; {remedy.format('folder')}", USAGE)


def keep_unsaved_best(settings: Settings) -> str | None:
    """Keep the best model of a run that ended before its first state, which begins again; return a line about it.

    The best model is written before the state, so that a state never names a model that is lost.
    """
    best = best_of(settings.model_path)
    if settings.resume != AUTO or not os.path.isfile(best) or _states_in(settings.output_dir or ""):
        return None
    return f"'{best}' is of a run without a state, which begins again; it is kept as '{keep_previous(best)}'"


def remove_plots(settings: Settings) -> None:
    """Remove the plots of the run that is replaced: pictures, the table, and TensorBoard's events."""
    plots = [Path(settings.metrics).with_suffix(suffix) for suffix in (".png", ".svg", ".csv")]
    for path in (*plots, *Path(settings.events).glob("events.out.tfevents.*")):
        path.unlink(missing_ok=True)


class OwnFiles:
    """The files that a run may replace: its own, and copies of models of runs. Others are kept under another name.

    Create this object before the run begins, because a resumed run replaces the model of which a file may be a copy.

    Args:
        models (Iterable[str]): the paths of the run's models, which another run may replace meanwhile.
        copies (Iterable[str]): the paths of the copies of models in the current folder.
    """

    def __init__(self, models: Iterable[str], copies: Iterable[str]):
        self._copies = list(copies)
        replaceable = [*models, *filter(_is_copy_of_run, self._copies)]
        self._written = {path: _modification_time(path) for path in replaceable}

    def keep_foreign(self, path: str) -> str | None:
        """Keep a file that the run may not replace, and return its new path; None if there is none."""
        is_own = _modification_time(path) in (None, self._written.get(path))
        is_copy = path in self._copies and _is_copy_of_run(path)
        return None if is_own or is_copy else keep_previous(path)

    def wrote(self, path: str) -> None:
        """Remember a file that this run has written."""
        self._written[path] = _modification_time(path)


def _modification_time(path: str) -> int | None:
    """Return the time at which a file was written, in nanoseconds."""
    return os.stat(path).st_mtime_ns if os.path.isfile(path) else None


def _is_copy_of_run(path: str) -> bool:
    """Return whether a file is equal to the model of this name of one of the runs."""
    models = [os.path.join(run_of(number), path) for number in _runs()] if os.path.isfile(path) else []
    return any(os.path.isfile(model) and filecmp.cmp(path, model, shallow=False) for model in models)


# The flags of a run that is resumed


def flags_to_save(flag_texts: Mapping[str, Any], **chosen: str) -> dict[str, str]:
    """Return the flags to save in a state.

    Args:
        flag_texts (Mapping): the flags of this start and of the run that it continues, as texts.
        **resolved (str): flags that others follow from, with the values that were chosen.
    """
    return {**{name: text for name, text in flag_texts.items() if name not in _ONE_START_ONLY}, **chosen}


def resume_flags(flag_texts: Mapping[str, Any]) -> str:
    """Return the flags that resume the run of this start; all others are in its state."""
    names = ("output_dir", *_WRITE_PATHS)
    return " ".join(["--resume", *(f"--{name}={flag_texts[name]}" for name in names if name in flag_texts)])


def flags_of_resumed_run(flag_texts: Mapping[str, Any]) -> FlagsOfRun | None:
    """Return the flags of the run that the flags of this start, as texts, resume; None if there is none.

    Raises:
        Failure: If they can't be used.
    """
    if flag_texts.get("resume") is None:
        return None
    resume = os.path.expanduser(flag_texts["resume"])
    folder = os.path.expanduser(flag_texts["output_dir"]) if "output_dir" in flag_texts else folder_to_resume(resume)
    states = [resume]
    if resume == AUTO:
        states = sorted(map(str, _states_in(folder)), reverse=True) if folder is not None else []
    source, saved = next(_readable(states), ("", {}))
    if not isinstance(saved, dict) or not all(isinstance(text, str) for text in (*saved, *saved.values())):
        raise Failure(f"'{source}' has flags that can't be used", CHECKPOINT)
    for name in saved:
        if name in _ONE_START_ONLY:
            raise Failure(f"'{source}' has a flag that no state may have: --{name}", CHECKPOINT)
        if name in _WRITE_PATHS and name not in flag_texts and (folder is None or not _is_inside(saved[name], folder)):
            fault = f"the run that is resumed has '{saved[name]}'; a state does not say where to write"
            raise Failure(f"argument --{name}: {fault}, so give it again, or another path", USAGE)
    changed = [name for name in flag_texts if flag_texts[name] != saved.get(name)]
    replaced = {contradicting for name in changed for contradicting in _REPLACES.get(name, ())}
    if "mini_steps" in flag_texts and saved.get("batch_size") == AUTO:
        replaced.add("batch_size")
    return FlagsOfRun(source, {name: saved[name] for name in saved if name not in replaced and name not in flag_texts})


def _readable(paths: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the paths and the flags of undamaged states; damaged ones are reported when they are resumed."""
    from ..saving.training_state import open_state  # imports NumPy, before which signals must be blocked

    for path in paths:
        try:
            config = open_state(path)[1].get("config")
        except CheckpointError:
            continue
        notes = config.get("notes") if isinstance(config, dict) else None
        yield path, notes.get(FLAGS, {}) if isinstance(notes, dict) else {}


def _is_inside(path: str, folder: str) -> bool:
    root = os.path.realpath(folder)
    return os.path.commonpath([os.path.realpath(os.path.expanduser(path)), root]) == root
