"""The folder of a run: a new one for each run, its flags for `--resume`, and a lock, so that no two runs write there.

| file | content |
|---|---|
| config.json | the flags of the run |
| metrics.jsonl | a line for each window, and one for each evaluation |
| states/ | the training states |
| gradient_accumulation.ckpt | the model, unless --ckpt_path names another file; beside it its record, a .json file |
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .command import FlagError

if TYPE_CHECKING:
    from filelock import FileLock

    from ms_accum.ranks.group import Group

RUNS, CONFIG, METRICS, STATES, MODEL = "runs", "config.json", "metrics.jsonl", "states", "gradient_accumulation.ckpt"


class Folder(NamedTuple):
    """The paths of a run's files."""

    path: str
    model: str
    metrics: str
    states: str
    lock: FileLock | None
    """Optional[FileLock], of the process that writes there."""

    @property
    def writes(self) -> bool:
        """bool, whether this process writes there."""
        return self.lock is not None


def open_folder(args: argparse.Namespace, group: Group) -> Folder:
    """Return the folder of the run that these flags begin or resume. Rank 0 creates it, and all ranks get its path.

    Raises:
        FlagError: If it has the files of another run, or the model's path names an existing file.
        RuntimeError: If another run is using it.
    """
    from ms_accum.ranks.group import total

    number, lock, error = 0, None, None
    if group.rank == 0:
        try:
            number = 1 if args.output_dir else _new_run()
            lock = _claim(args, args.output_dir or _path_of(number))
        except (FlagError, OSError, RuntimeError) as raised:
            number, error = 0, raised
    (number,) = total([number], group if group.size > 1 else None)  # also after an error: the other ranks wait for it
    if error is not None:
        raise error
    if not number:
        raise RuntimeError("rank 0 can't use the folder of the run")
    path = args.output_dir or _path_of(number)
    model = args.ckpt_path or os.path.join(path, MODEL)
    return Folder(path, model, os.path.join(path, METRICS), os.path.join(path, STATES), lock)


def resumed_folder(output_dir: str | None) -> str:
    """Return the folder of the run to resume: the given one, or the newest in runs/.

    Raises:
        FlagError: If it has no training state.
    """
    folder = output_dir or newest_run()
    if folder is None:
        raise FlagError("argument --resume: there is no run in 'runs'; give --output_dir")
    if not list(Path(folder, STATES).glob("state-*.safetensors")):
        fault = (
            "does not exist" if not os.path.isdir(folder) else "has no training state: its run ended before the first"
        )
        raise FlagError(f"argument --resume: '{folder}' {fault}")
    return folder


def newest_run() -> str | None:
    """Return the path of the newest run in runs/."""
    numbers = _runs()
    return _path_of(max(numbers)) if numbers else None


def model_to_evaluate(ckpt_path: str | None) -> str:
    """Return the path of the model: the given one, or that of the newest run in runs/.

    The tutorials save ./gradient_accumulation.ckpt, train.py in the folder of the run. So if that file is named but
    does not exist, the newest run's model is meant, too.
    """
    named = ckpt_path if ckpt_path is None or os.path.exists(ckpt_path) or os.path.relpath(ckpt_path) != MODEL else None
    if named is not None:
        return named
    run = newest_run()
    if run is None:
        raise FlagError("argument --ckpt_path: there is no run in 'runs'; give the path of a model")
    return os.path.join(run, MODEL)


def read_config(folder: str) -> Mapping[str, Any]:
    """Return the flags of the run in a folder."""
    path = os.path.join(folder, CONFIG)
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FlagError(f"argument --resume: the flags of the run, '{path}', can't be read: {error}") from error
    if not isinstance(config, dict):
        raise FlagError(f"argument --resume: '{path}' does not hold the flags of a run")
    return config


def write_config(folder: str, flags: Mapping[str, Any]) -> None:
    """Write the flags of a run into its folder."""
    from ms_accum.saving.files import write_bytes

    write_bytes(os.path.join(folder, CONFIG), json.dumps(flags, indent=1).encode() + b"\n")


def _new_run() -> int:
    """Create the folder of a new run, and return its number."""
    os.makedirs(RUNS, exist_ok=True)
    number = max(_runs(), default=0) + 1
    while True:
        try:
            os.mkdir(_path_of(number))
            return number
        except FileExistsError:  # another run has started at the same time
            number += 1


def _path_of(number: int) -> str:
    return os.path.join(RUNS, f"{number:03}")


def _runs() -> list[int]:
    names = os.listdir(RUNS) if os.path.isdir(RUNS) else []
    return [int(name) for name in names if name.isascii() and name.isdigit()]


def _claim(args: argparse.Namespace, folder: str) -> FileLock:
    """Lock a folder until the process ends, however it ends, and remove what --overwrite replaces."""
    from filelock import FileLock, Timeout

    from ms_accum.saving.files import remove_leftovers

    if args.ckpt_path is not None and os.path.exists(args.ckpt_path) and not (args.resume or args.overwrite):
        remedy = "give another name, or --overwrite to replace it"
        raise FlagError(f"argument --ckpt_path: '{args.ckpt_path}' exists; {remedy}")
    os.makedirs(folder, exist_ok=True)
    lock = FileLock(os.path.join(folder, ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RuntimeError(f"another run is using the folder '{folder}'; give another --output_dir") from error
    remove_leftovers(folder)
    if not args.resume:
        files = _files(folder)
        if files and not args.overwrite:
            remedy = "give --resume to continue it, another folder, or --overwrite to replace it"
            raise FlagError(f"argument --output_dir: '{folder}' holds another run; {remedy}")
        for path in files:
            path.unlink()
    return lock


def _files(folder: str) -> list[Path]:
    """Return the files of a run in a folder."""
    names = [Path(folder, name) for name in (CONFIG, METRICS, MODEL, f"{MODEL}.json")]
    return [*filter(Path.is_file, names), *Path(folder, STATES).glob("state-*.safetensors")]
