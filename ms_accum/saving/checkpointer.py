"""When a training state is saved, in which folder, which ones are kept, and from which one a run resumes."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple

from filelock import FileLock, Timeout

from .. import _check
from ..ranks.agreement import agree
from ..ranks.group import Group
from .files import absolute, as_given, remove_leftovers, write_whole
from .model_file import CheckpointError
from .training_state import TrainingState, read, state_digest, write

_OWNER = "Checkpointer"
_NOTES = "notes"
_AUTO = "auto"
_DIGITS = 8
NO_REQUESTS = (0.0, 0.0)
"""No request to stop, and no request to save because `minutes` have passed."""


class Stopped(Exception):
    """Raised when a run has stopped on request; its training state is saved."""


class FolderInUse(RuntimeError):
    """Raised when another run is using the folder."""


class FoundState(NamedTuple):
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
    def position(self) -> str:
        """str, the position of the state in its run."""
        done = self.epochs_done
        if done is None:
            at = self.state.facts["at"]
            return f"epoch {at['epoch']}, {_check.quantity(at['batches'], 'batch')} of it"
        return f"{_check.quantity(done, 'epoch')} done"


class StateFolder:
    """A folder of training states, used by one run at a time.

    Args:
        owner (str): the name used in error messages.
        path (str): the path of the folder.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str]):
        self._owner = owner
        self._user_path = os.fspath(path)
        self._path = Path(absolute(path))
        self._lock = FileLock(str(self._path / ".lock"))
        self._run_states: list[Path] = []  # oldest first; states of other runs are never removed

    def open(self) -> None:
        """Create the folder and lock it.

        Raises:
            RuntimeError: If another run is using it, or the file of the lock is another file, which would be emptied.
        """
        self._make_and_lock()
        remove_leftovers(self._path)
        self._run_states = []

    def make_again(self) -> None:
        """Create the folder and lock it once more, if it was removed while the run was using it.

        Raises:
            RuntimeError: If another run is using it by now.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        if self._lock.is_locked and not os.path.exists(self._lock.lock_file):
            self._lock.release(force=True)
            self._make_and_lock()

    def _make_and_lock(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
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

    def clear(self) -> None:
        """Remove all states.

        Raises:
            RuntimeError: If another run is using the folder.
        """
        if self._path.is_dir():
            self.open()
            try:
                for path in self._states():
                    path.unlink()
            finally:
                self.close()

    def named(self, name: str = "") -> str:
        """Return the path of a file in the folder, or of the folder itself, as the user gave it."""
        folder = as_given(str(self._path), self._user_path)
        return os.path.join(folder, name) if name else folder

    def holds(self, path: str) -> bool:
        """Return whether a state is in this folder."""
        return Path(path).resolve().parent == self._path.resolve()

    def newest(self) -> FoundState | None:
        """Return the newest undamaged state in the folder; None if it has no states.

        Raises:
            CheckpointError: If it has states, but none that can be read.
        """
        faults: list[str] = []
        for path in self._states():
            name = self.named(path.name)
            try:
                return FoundState(read(name), name, faults)
            except CheckpointError as error:
                faults.append(str(error))
        if faults:
            raise CheckpointError(faults[0])
        return None

    @property
    def own(self) -> list[str]:
        """list[str], the names of the run's own states, oldest first."""
        return [path.name for path in self._run_states]

    def adopt(self, found_state: FoundState, *, continues: bool) -> None:
        """Treat the resumed state and the best one before it as this run's own.

        If the run `continues` the newest state, those that the earlier run kept are this run's own, too. A run that
        resumes from another state, which the user has named, leaves them unchanged.
        """
        if self.holds(found_state.path):
            facts = found_state.state.facts
            resumed = Path(found_state.path).name
            names = {resumed, facts["best"][1], *(facts["kept"] if continues else ())}
            self._run_states = [
                path for path in reversed(self._states()) if path.name in names and path.name <= resumed
            ]

    def next_path(self) -> Path:
        """Return the path of the next state."""
        newest = next(iter(self._states()), None)
        number = 1 if newest is None else int(newest.stem[-_DIGITS:]) + 1
        return self._path / f"state-{number:0{_DIGITS}}.safetensors"

    def add(self, path: Path, keep: int, best: str | None) -> None:
        """Add a state to the run's own states, and remove those of them that are neither the newest nor the best."""
        self._run_states.append(path)
        remaining = self._run_states[-keep:]
        for old in self._run_states[:-keep]:
            if old.name == best:
                remaining.insert(0, old)
            else:
                with suppress(OSError):  # already removed, or not removable: this must not end the run
                    old.unlink()
        self._run_states = remaining

    def _states(self) -> list[Path]:
        """Return the paths of the states, newest first."""
        return sorted(self._path.glob(f"state-{'[0-9]' * _DIGITS}.safetensors"), reverse=True)


class Checkpointer:
    """Save the training states of a run in a folder, and resume from them.

    A state is saved as `every` and `minutes` define, and always at the end, on a request to stop, and after an error.

    Args:
        folder (str): the folder of the states; it is created. Only one run at a time can use it.
        every (Optional[int]): the number of updates between two states. Default: ``None``.
        minutes (Optional[float]): the minutes between two states. Default: ``None``.
        keep (int): the number of newest states to keep. Default: 1.
        score (Optional[Callable]): returns the quality of the model; higher is better. It is called before each planned
            state (`every`, `minutes`, the end). The best state is kept in addition to the newest. Default: ``None``.

    Args: Resuming
        resume (Optional[str]): the path of the state to resume from, or ``"auto"`` for the newest undamaged state in
            `folder`, if there is one. Default: ``None``, a new run.
        config (Optional[Mapping]): settings that must be equal in a resumed run. Default: ``None``.
        allow_config_change (bool): whether these settings may differ. Default: ``False``.

    Args: Other
        stop (Optional[Callable]): called after each micro-batch; returns whether to stop. Default: ``None``.
        notes (Optional[Mapping]): additional facts to save in `config`; they may differ in a resumed run.
            Default: ``None``.
        at_end (Optional[Callable]): called before the last state is saved, for smaller files that must not be lost if
            the disk is full. Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import tempfile
        >>> from mindspore import nn
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import Checkpointer, GradientAccumulation
        >>> def train(epochs, folder):
        ...     net = MLP()
        ...     model = GradientAccumulation(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1))
        ...     states, digits = Checkpointer(folder, every=10, resume="auto"), create_dataset(image_size=28)
        ...     model.train_process(epochs, digits, 4, report=(), ckpt_path=None, checkpointer=states)
        ...     return model.updates
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(train(1, folder), train(2, folder))
        12 24
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep: int = 1,
        score: Callable[[], float] | None = None,
        resume: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
        allow_config_change: bool = False,
        stop: Callable[[], bool] | None = None,
        notes: Mapping[str, Any] | None = None,
        at_end: Callable[[], None] | None = None,
    ):
        self._states = StateFolder(_OWNER, folder)
        self._every = None if every is None else _check.positive_int(_OWNER, "every", every)
        self._seconds = None if minutes is None else 60 * _check.positive_number(_OWNER, "minutes", minutes)
        self._keep = _check.positive_int(_OWNER, "keep", keep)
        self._score = score
        self._resume: str | None = None
        self._resume_path = ""
        if resume is not None:
            _check.instance(_OWNER, "resume", resume, (str, os.PathLike), "a path, 'auto' or None")
            self._resume = os.fspath(resume)
            self._resume_path = absolute(resume)
        self._config = dict(config or {})
        self._allow_config_change = allow_config_change
        self._stop = stop
        self._notes = dict(notes or {})
        self._at_end = at_end
        self._writes = True
        self.resumed: list[str] = []
        """list[str], lines about the state from which the run resumed."""
        self.best: float | None = None
        """Optional[float], the best score so far, including that of the resumed run."""
        self.rescued: Path | None = None
        """Optional[Path], the last state of a run whose `at_end` failed; None if that did not fail."""

    def __repr__(self) -> str:
        minutes = None if self._seconds is None else self._seconds / 60
        shown = {"every": self._every, "minutes": minutes, "keep": self._keep, "resume": self._resume}
        return f"Checkpointer({self._states.named()!r}, {', '.join(f'{name}={shown[name]!r}' for name in shown)})"

    def for_group(self, group: Group | None) -> Checkpointer:
        """Let only rank 0 write. The other ranks read, and take part in computing the score."""
        self._writes = group is None or group.rank == 0
        return self

    def __enter__(self) -> Checkpointer:
        if self._writes:
            self._states.open()
        self._saved_at = time.monotonic()
        self._planned_updates = 0  # the updates of the last state that `every` or `minutes` planned
        self._has_failed = False  # whether the last attempt to write a state has failed
        self._is_saved = False  # whether the current state is saved, and scored if there is a score
        self._stopping = False  # whether a stop was requested
        self.best = None
        self._best_name: str | None = None
        return self

    def __exit__(self, *error: object) -> None:
        self._states.close()

    # The state to resume from

    def find(self, config: Mapping[str, Any]) -> FoundState | None:
        """Return the state to resume from.

        Args:
            config (Mapping): settings that the driver adds.

        Raises:
            CheckpointError: If it can't be read, or belongs to a run with other settings.
        """
        self._config = json.loads(json.dumps({**self._config, **config}))  # in the form that is read from a file
        found_state = self._find_state()
        if found_state is None:
            self.resumed = [f"nothing: no state in '{self._states.named()}'"] if self._resume else []
            return None
        facts = found_state.state.facts
        saved_config = {name: value for name, value in facts["config"].items() if name != _NOTES}
        changed = changes(saved_config, self._config)
        if changed and not self._allow_config_change:
            raise CheckpointError(
                f"For '{_OWNER}', '{found_state.path}' belongs to a run with other settings: {', '.join(changed)}. "
                "Give 'allow_config_change' to resume anyway."
            )
        self._states.adopt(found_state, continues=self._resume == _AUTO)
        self._planned_updates = facts["planned"]
        self.best, self._best_name = facts["best"]
        is_scored = self._score is None or facts["scored"]
        self._is_saved = not changed and is_scored and self._states.holds(found_state.path)
        self.resumed = [
            *found_state.passed_over,
            f"{found_state.path}: {_check.quantity(facts['updates'], 'update')}, {found_state.position}",
            *changed,
        ]
        return found_state._replace(changed=changed)

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the run to resume; empty if there is none.

        Raises:
            CheckpointError: If they can't be read.
        """
        found_state = self._find_state()
        return found_state.state.facts["config"] if found_state else {}

    def epochs_done(self) -> int | None:
        """Return the number of epochs of the run to resume; None if it stopped inside one, or there is no run.

        Raises:
            CheckpointError: If it can't be read.
        """
        found_state = self._find_state()
        return found_state.epochs_done if found_state else None

    def updates_done(self) -> int:
        """Return the number of updates of the run to resume; 0 if there is none.

        Raises:
            CheckpointError: If it can't be read.
        """
        found_state = self._find_state()
        return found_state.state.facts["updates"] if found_state else 0

    def _find_state(self) -> FoundState | None:
        if self._resume is None:
            return None
        if self._resume == _AUTO:
            return self._states.newest()
        path = as_given(self._resume_path, self._resume)
        if not os.path.isfile(path):
            raise CheckpointError(f"'{path}' is not a file. Give a training state, or 'auto'.")
        return FoundState(read(path), path)

    # When to save

    @property
    def facts(self) -> dict[str, Any]:
        """dict, what must be equal on all ranks, in the words of `ranks.agreement.agree`: when they save together."""
        score = "none" if self._score is None else "given"
        return {"'every' of the checkpointer": self._every, "'score' of the checkpointer": score}

    def requests(self) -> list[float]:
        """Return the requests to stop, and to save because `minutes` have passed, as numbers that ranks can sum."""
        self._stopping = self._stopping or (self._stop is not None and bool(self._stop()))
        is_due = self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds
        return [float(self._stopping), float(is_due)]

    def after_micro_batch(
        self, updates: int, in_window: bool, capture: Callable[[], TrainingState], requests: Sequence[float]
    ) -> None:
        """Save a state if it is due.

        Args:
            updates (int): updates so far.
            in_window (bool): whether a window is open.
            capture (Callable): returns the state.
            requests (Sequence[float]): the requests of this process, or their sum over the ranks, which stop together.

        Raises:
            Stopped: If a stop was requested; the state is saved.
        """
        stop, time_passed = requests
        self._is_saved = False
        path = None
        if not in_window:  # before a stop, so that a stop does not shift this save and the later ones
            passed = updates - self._planned_updates
            if self._every is not None and passed >= self._every:
                # After an error at a planned update, this one may be later; the updates planned after it are the same.
                path = self._save_scored(capture, planned=updates - passed % self._every)
            elif time_passed:
                path = self._save_scored(capture, planned=updates)
        if stop:
            raise Stopped(f"the training state is in '{path or self.save(capture())}'")

    @contextmanager
    def saving_at_the_end(
        self, capture: Callable[[], TrainingState], *, can_save: Callable[[], bool]
    ) -> Iterator[None]:
        """Save at the end of the block, also after an error.

        Args:
            capture (Callable): returns the state.
            can_save (Callable): returns whether this process has a state that it can save after an error.
        """
        try:
            yield
        except Stopped:
            raise
        except Exception:
            if not self._has_failed and can_save():
                try:
                    self.save(capture())
                except Exception as error:  # a warning, so that the run's own error is not hidden
                    _check.warn(f"the state of the failing run is not saved: {error}")
            raise
        try:
            if self._at_end is not None:
                self._at_end()
        except Exception:
            if can_save():
                with suppress(Exception):  # the smaller files failed; the state may be on another disk
                    self.rescued = self.save(capture())
            raise
        self.save_at_the_end(capture)

    def save_at_the_end(self, capture: Callable[[], TrainingState]) -> None:
        """Save the state at the end of a run, unless it is already saved."""
        if not self._is_saved:
            self._save_scored(capture)

    def changed(self) -> None:
        """Save again at the end: a callback may have changed Parameters since the last state."""
        self._is_saved = False

    # How to save

    def _save_scored(self, capture: Callable[[], TrainingState], planned: int | None = None) -> Path:
        """Compute the score, then save: the score may draw random numbers. Return the path of the state."""
        score = math.nan if self._score is None else float(self._score())
        if planned is not None:
            self._planned_updates = planned
        is_best = not math.isnan(score) and (self.best is None or score > self.best)
        if is_best:
            self.best = score
        path = self.save(capture(), is_best, scored=self._score is not None)
        self._is_saved = True
        return path

    def save(self, state: TrainingState, best: bool = False, *, scored: bool = False) -> Path:
        """Write a state, then remove the old ones that are not kept; return its path.

        Args:
            state (TrainingState): the state to write.
            best (bool): whether its model is the best so far. Default: ``False``.
            scored (bool): whether its model has been scored. Default: ``False``.

        Raises:
            OSError: If it can't be written; existing files are unchanged.
        """
        if not self._writes:
            self._saved_at = time.monotonic()
            return Path(self._states.named())
        self._states.make_again()
        path = self._states.next_path()
        if best:
            self._best_name = path.name
        facts = {
            **state.facts,
            "config": {**self._config, **({_NOTES: self._notes} if self._notes else {})},
            "planned": self._planned_updates,
            "best": [self.best, self._best_name],
            "scored": scored,
            "kept": self._states.own,  # a resumed run removes these, too
        }
        size = sum(array.nbytes for array in state.arrays.values())
        self._has_failed = True  # unless it succeeds
        write_whole(path, size, partial(write, TrainingState(state.arrays, facts)))
        self._has_failed = False
        self._saved_at = time.monotonic()
        self._states.add(path, self._keep, self._best_name)
        return Path(self._states.named(path.name))


def find_together(
    owner: str, states: Checkpointer, config: Mapping[str, Any], group: Group | None
) -> FoundState | None:
    """Return the state from which all ranks resume; None if there is none.

    Raises:
        CheckpointError: If this rank can't read it, or it belongs to a run with other settings.
        RuntimeError: If another rank has another state, or can't read it.
    """
    name = "state to resume from"
    remedy = {name: "Give all ranks access to the files of rank 0."}
    try:
        found_state = states.find(config)
    except CheckpointError as error:
        with suppress(RuntimeError):  # that the ranks differ: this rank's own error is more specific
            agree(owner, group, {name: f"an error ({error})"}, remedy)
        raise
    if group is not None:
        agree(owner, group, {name: None if found_state is None else _description(found_state.state)}, remedy)
    return found_state


def _description(state: TrainingState) -> str:
    digest = state_digest(state.arrays, json.dumps(state.facts, sort_keys=True))
    return f"one after {_check.quantity(state.facts['updates'], 'update')} with the digest {digest[:12]}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one text for each setting that differs."""
    return [
        f"{_check.one_line(name)} was {_check.one_line(before.get(name))} and is {_check.one_line(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
