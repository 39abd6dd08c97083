"""The folder of a run: a new one for each run, its flags for `--resume`, and a lock, so that no two runs write there.

| file | content |
|---|---|
| config.json | the flags of the run |
| metrics.jsonl | a line for each window, and one for each evaluation |
| states/ | the training states |
| gradient_accumulation.ckpt | the model, unless --ckpt_path names another file; beside it its record, a .json file |
| .lock | locked while the run uses the folder, as is .NAME.lock beside the model |
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ms_accum.saving.files import check_own, remove_leftovers, states_in, write_bytes

from .command import FlagError

if TYPE_CHECKING:
    from ms_accum import Group
    from ms_accum.saving.lock import Lock

RUNS, CONFIG, METRICS, STATES, MODEL = "runs", "config.json", "metrics.jsonl", "states", "gradient_accumulation.ckpt"
_NUMBER = re.compile("[0-9]{3}|[1-9][0-9]{3,4}")  # not 5 or 20261129, which a user has named by --output_dir
OWN = (CONFIG, METRICS, STATES, MODEL, f"{MODEL}.json")
"""tuple, what a run writes into its folder."""


class Folder(NamedTuple):
    """The paths of a run's files."""

    path: str
    model: str
    metrics: str
    states: str
    locks: Sequence[Lock] = ()
    """Sequence[Lock], those of the folder and the model, in the process that writes there."""

    def check(self) -> None:
        """Raise an error if the folder was moved or removed: another run may be at its path by now."""
        for lock in self.locks:
            if not lock.is_in_place():
                fault = "was moved or removed while the run was using it; nothing more is written"
                raise RuntimeError(f"the folder '{os.path.dirname(lock.path)}' {fault}")

    @property
    def writes(self) -> bool:
        """bool, whether this process writes there."""
        return bool(self.locks)


def open_folder(args: argparse.Namespace, group: Group) -> Folder:
    """Return the folder of the run that these flags begin or resume. Rank 0 creates it, and all ranks get its path.

    Raises:
        FlagError: If a file of another run is there.
        OSError: If a file that the run would write is a link.
        RuntimeError: If another run is using it.
    """
    from ms_accum import total

    number, locks = 0, []
    error: Exception | None = None
    if group.rank == 0:
        try:
            number = 1 if args.output_dir else _new_run()
            locks = _claim(args, _paths(args, number))
        except (FlagError, OSError, RuntimeError) as raised:
            number, error = 0, raised
    # Also after an error: the other ranks wait for it, and end with the same exit code.
    number, of_flags = total([number, isinstance(error, FlagError)], group)
    if error is not None:
        raise error
    if not number:
        raise (FlagError if of_flags else RuntimeError)("rank 0 can't use the folder of the run")
    return _paths(args, number)._replace(locks=locks)


def _paths(args: argparse.Namespace, number: int) -> Folder:
    path = args.output_dir or _path_of(number)
    model, metrics, states = (os.path.join(path, name) for name in (MODEL, METRICS, STATES))
    return Folder(path, args.ckpt_path or model, metrics, states)


def _claim(args: argparse.Namespace, folder: Folder) -> list[Lock]:
    """Lock a folder and the model until the process ends, however it ends."""
    os.makedirs(folder.path, exist_ok=True)
    check_own(*(os.path.join(folder.path, name) for name in OWN))
    check_own(folder.metrics, in_place=True)
    used = f"another run is using the folder '{folder.path}'; give another --output_dir"
    locks = [_locked(os.path.join(folder.path, ".lock"), used)]
    remove_leftovers(folder.path)
    place, name = os.path.split(os.path.realpath(folder.model))
    if os.access(place, os.W_OK):  # training says it if not; the folder's own may be another run's --ckpt_path
        used = f"another run is using '{folder.model}'; give another --ckpt_path"
        locks.append(_locked(os.path.join(place, f".{name}.lock"), used))
        for each in (name, f"{name}.json"):
            remove_leftovers(place, each)
    for path in (os.path.join(folder.path, CONFIG), folder.metrics, folder.model):
        if os.path.isfile(path) and not args.resume:
            remedy = "give --resume to continue it, or another --output_dir or --ckpt_path, or remove it"
            meant = "; or did you mean --init_from, to begin with its weights?" if path == args.ckpt_path else ""
            raise FlagError(f"'{path}' is of another run: {remedy}{meant}")
    own = os.path.join(folder.path, MODEL) if args.model_of_run is None else args.model_of_run
    if args.resume and os.path.exists(folder.model) and os.path.realpath(folder.model) != os.path.realpath(own):
        fault = f"'{folder.model}' is not the model of the run in '{folder.path}'; give another path, or remove it"
        raise FlagError(f"argument --ckpt_path: {fault}")
    return locks


def _locked(path: str, used: str) -> Lock:
    """Return a lock, or raise the error that another process holds it."""
    from ms_accum.saving.lock import Lock

    lock = Lock(path)
    if not lock.take():
        raise RuntimeError(used)
    return lock


def resumed_folder(output_dir: str | None) -> str:
    """Return the folder of the run to resume: the given one, or the newest in runs/.

    Raises:
        FlagError: If it has no training state.
    """
    folder = output_dir or newest_run("argument --resume", "give --output_dir")
    if not states_in(os.path.join(folder, STATES)):
        fault = "has no training state: its run ended before the first" if os.path.isdir(folder) else "does not exist"
        raise FlagError(f"argument --resume: '{folder}' {fault}; give the --output_dir of another run")
    return folder


def model_to_evaluate(ckpt_path: str | None) -> str:
    """Return the path of the model: the given one, or that of the newest run in runs/.

    The tutorials save ./gradient_accumulation.ckpt, train.py in the folder of the run. So if that file is named but
    does not exist, the newest run's model is meant, too.
    """
    if ckpt_path is not None and (os.path.exists(ckpt_path) or os.path.relpath(ckpt_path) != MODEL):
        return ckpt_path
    folder = newest_run("argument --ckpt_path", "give the path of a model")
    if not os.path.isfile(model := os.path.join(folder, MODEL)):
        remedy = "give the path of a model"
        if states_in(os.path.join(folder, STATES)):
            remedy += ", or finish the run: python train.py --resume"
        raise FlagError(f"argument --ckpt_path: the newest run, '{folder}', has no model in its folder; {remedy}")
    return model


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is below a folder, after links."""
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ""))


def newest_run(flag: str, remedy: str) -> str:
    """Return the folder of the newest run in runs/ that has begun to train, or raise an error about a flag."""
    begun = [number for number in _runs() if os.path.isfile(os.path.join(_path_of(number), CONFIG))]
    if not begun:
        raise FlagError(f"{flag}: there is no run in '{RUNS}'; {remedy}")
    return _path_of(max(begun))


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Write the flags of a run, or what `eval.py` needs beside a model."""
    write_bytes(path, json.dumps(content, indent=1).encode() + b"\n")


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
    return [int(name) for name in names if _NUMBER.fullmatch(name)]
