"""Which flags does a resumed run take from the run that it continues?

A state holds the flags of its run as texts. `--resume` alone takes them, so that it continues the run whatever flags it
had. A state may be a stranger's: its texts are parsed like flags, and none of them says where to write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..saving.model_file import CheckpointError
from . import outputs
from .flags import AUTO, Before, place
from .main import CHECKPOINT, USAGE, Failure

NAME = "flags"
"""str, the name of the flags among the notes of a state."""
# Flags of one start, not of the run.
_OF_A_START = ("config", "debug", "resume", "allow_config_change", "overwrite", "verify", "download", "output_dir")
# Where to write: said by who starts the program, unless it is inside the folder that is resumed.
_WRITTEN = ("ckpt_path", "save_bad_batches")
# What a flag replaces besides itself if it differs: flags that would contradict it, or belong to the former value.
_REPLACES = {
    "mini_steps": ("effective_batch", "memory_budget"),
    "effective_batch": ("mini_steps",),
    "dataset": ("model", "data_path"),
    "optimizer": ("lr", "momentum", "weight_decay"),
    "lr_scaling": ("base_batch",),
    "download": ("data_path",),
}
_MOST, _LONGEST = 99, 4096


def to_save(given: Mapping[str, Any], **found: str) -> dict[str, str]:
    """Return the flags to save in a state.

    Args:
        given (Mapping): the flags of this start and of the run that it continues, as texts.
        **found (str): flags that others follow from, as they were resolved.
    """
    return {**{name: text for name, text in given.items() if name not in _OF_A_START}, **found}


def again(given: Mapping[str, Any]) -> str:
    """Return the flags that resume the run of this start; all others are in its state."""
    places = ("output_dir", *_WRITTEN)
    return " ".join(["--resume", *(f"--{name}={given[name]}" for name in places if name in given)])


def flags_before(given: Mapping[str, Any]) -> Before | None:
    """Return the flags of the run that `given`, the flags of this start as texts, resume; None if there is none.

    Raises:
        Failure: If they can't be used.
    """
    if given.get("resume") is None:
        return None
    resume = place(given["resume"])
    folder = place(given["output_dir"]) if "output_dir" in given else outputs.folder_to_resume(resume)
    states = _newest_first(folder) if resume == AUTO else iter([resume])
    nothing: tuple[str, Any] = ("", {})
    source, saved = next(_readable(states), nothing)
    _check(source, saved)
    for name in [name for name in _WRITTEN if name in saved and name not in given]:
        if folder is None or not _is_inside(place(saved[name]), folder):
            what = f"the run that is resumed has '{saved[name]}'; a state does not say where to write"
            raise Failure(f"argument --{name}: {what}, so give it again, or another path", USAGE)
    replaced = {other for name in given for other in _REPLACES.get(name, ()) if given[name] != saved.get(name)}
    if "mini_steps" in given and saved.get("batch_size") == AUTO:
        replaced.add("batch_size")
    taken = {name: text for name, text in saved.items() if not {name} & (replaced | given.keys())}
    return Before(source, taken)


def _newest_first(folder: str | None) -> Iterator[str]:
    states = Path(folder, "states").glob("state-*.safetensors") if folder is not None else ()
    yield from map(str, sorted(states, reverse=True))


def _readable(paths: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Yield the paths and the flags of undamaged states; why others can't be read is said when they are resumed."""
    from ..saving.training_state import open_state  # imports NumPy, before which signals must be blocked

    for path in paths:
        try:
            config = open_state(path)[1].get("config")
        except CheckpointError:
            continue
        notes = config.get("notes") if isinstance(config, dict) else None
        yield path, notes.get(NAME, {}) if isinstance(notes, dict) else {}


def _check(source: str, saved: Any) -> None:
    """Reject what no run has saved; the flags' own types check the values."""
    if not isinstance(saved, dict) or len(saved) > _MOST or not all(map(_is_plain, (*saved, *saved.values()))):
        raise Failure(f"'{source}' has flags that can't be used", CHECKPOINT)
    for name in saved:
        if name in _OF_A_START:
            raise Failure(f"'{source}' has a flag that no state may have: --{name}", CHECKPOINT)


def _is_plain(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= _LONGEST and text.encode("utf-8", "replace").decode().isprintable()


def _is_inside(path: str, folder: str) -> bool:
    folder = os.path.realpath(folder)
    return os.path.commonpath([os.path.realpath(path), folder]) == folder
