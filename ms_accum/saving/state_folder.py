"""Which training states are in a folder, and which are kept?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from .files import as_given, fixed, remove_leftovers
from .model_record import CheckpointError
from .training_state import TrainingState, read

AUTO = "auto"
_DIGITS = 8


class Found(NamedTuple):
    """A state from which a run can resume."""

    state: TrainingState
    path: str
    passed_over: Sequence[str] = ()
    """Why newer states could not be read."""
    changed: Sequence[str] = ()
    """The settings that differ from those of the state."""

    @property
    def epochs_done(self) -> int | None:
        """Optional[int], the number of epochs that the state has finished; None inside an epoch or a window."""
        at = self.state.facts["at"]
        if self.state.facts["window"]["micro_batches"] or at["batches"] not in (0, at["total"]):
            return None
        return at["epoch"] - (at["batches"] == 0)

    @property
    def place(self) -> str:
        """str, the position of the state in its run."""
        done, at = self.epochs_done, self.state.facts["at"]
        if done is None:
            return f"epoch {at['epoch']}, {at['batches']:,} batches of it"
        return f"{done} epoch{'s' * (done != 1)} done"


class FolderInUse(RuntimeError):
    """Raised when another run is using the folder."""


class StateFolder:
    """A folder of training states, used by one run at a time.

    Args:
        owner (str): the name used in error messages.
        path (str): the path of the folder.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str]):
        self._owner, self._given = owner, os.fspath(path)
        self.path = Path(fixed(path))
        self._lock = FileLock(str(self.path / ".lock"))
        self._own: list[Path] = []

    def open(self) -> None:
        """Create the folder and lock it.

        Raises:
            RuntimeError: If another run is using it, or the file of the lock is another file, which would be emptied.
        """
        self._make_and_lock()
        remove_leftovers(self.path)
        self._own = []  # states of other runs are not removed

    def make_again(self) -> None:
        """Create the folder and lock it once more, if it was removed while the run was using it.

        Raises:
            RuntimeError: If another run is using it by now.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock.is_locked and not os.path.exists(self._lock.lock_file):
            self._lock.release(force=True)
            self._make_and_lock()

    def _make_and_lock(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = Path(self._lock.lock_file)
        if lock.is_file() and lock.stat().st_size:
            rule = f"'{lock}' must be the empty file of a lock"
            raise RuntimeError(f"For '{self._owner}', {rule}, but got {lock.stat().st_size} bytes. Remove it.")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise FolderInUse(f"For '{self._owner}', another run is using the folder '{self.named()}'.") from error

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def find(self, resume: str | None) -> Found | None:
        """Return the state in a file, or for "auto" the newest undamaged one in the folder.

        Raises:
            CheckpointError: If it can't be read.
        """
        if resume == AUTO:
            return self._newest()
        if resume is None:
            return None
        if not os.path.isfile(resume):
            raise CheckpointError(f"'{resume}' is not a file. Give a training state, or 'auto'.")
        return Found(read(resume), resume)

    def named(self, name: str = "") -> str:
        """Return the path of a file in the folder, or of the folder itself, as the user gave it."""
        folder = as_given(str(self.path), self._given)
        return os.path.join(folder, name) if name else folder

    def _newest(self) -> Found | None:
        wrong: list[str] = []
        for path in map(self.named, (path.name for path in self._states())):
            try:
                return Found(read(path), path, wrong)
            except CheckpointError as error:
                wrong.append(str(error))
        if wrong:
            raise CheckpointError(wrong[0])
        return None

    @property
    def own(self) -> list[str]:
        """list[str], the names of the run's own states, oldest first; others are never removed."""
        return [path.name for path in self._own]

    def adopt(self, found: Found, *, continues: bool) -> None:
        """Treat the resumed state and the best one before it as this run's own.

        If the run `continues` the newest state, all that its run kept before it are: who names a state begins a branch.
        """
        if self.holds(found.path):
            facts, resumed = found.state.facts, Path(found.path).name
            own = {resumed, facts["best"][1], *(facts.get("kept", ()) if continues else ())}
            self._own = [path for path in reversed(self._states()) if path.name in own and path.name <= resumed]

    def holds(self, path: str) -> bool:
        """Return whether a state is in this folder."""
        return Path(path).resolve().parent == self.path.resolve()

    def clear(self) -> None:
        """Remove all states.

        Raises:
            RuntimeError: If another run is using the folder.
        """
        if self.path.is_dir():
            self.open()
            try:
                for path in self._states():
                    path.unlink()
            finally:
                self.close()

    def next_path(self) -> Path:
        """Return the path of the next state."""
        newest = next(iter(self._states()), None)
        number = 1 if newest is None else int(newest.stem[-_DIGITS:]) + 1
        return self.path / f"state-{number:0{_DIGITS}}.safetensors"

    def add(self, path: Path, keep: int, best: str | None) -> None:
        """Add a state to the run's own states, and remove those of them that are neither the newest nor the best."""
        self._own.append(path)
        kept = self._own[-keep:]
        for old in self._own[:-keep]:
            if old.name == best:
                kept.insert(0, old)
            else:
                with contextlib.suppress(OSError):  # already removed, or not removable: this must not end the run
                    old.unlink()
        self._own = kept

    def _states(self) -> list[Path]:
        """Return the paths of the states, newest first."""
        return sorted(self.path.glob(f"state-{'[0-9]' * _DIGITS}.safetensors"), reverse=True)
