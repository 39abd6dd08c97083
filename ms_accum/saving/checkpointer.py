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
from types import MappingProxyType
from typing import Any, Callable, NamedTuple

from .. import _check
from ..ranks.agreement import agree
from ..ranks.group import Group
from .files import absolute, number_of, remove_leftovers, states_in, write_whole
from .lock import Lock
from .training_state import CheckpointError, TrainingState, digest_of, most_bytes, read, write

_OWNER = "Checkpointer"
_AUTO = "auto"
NO_REQUESTS = (0.0, 0.0)
"""No request to stop, and no request to save because `minutes` have passed."""


class Stopped(Exception):
    """Raised when a run has stopped on request; its training state is saved."""


class FolderInUse(RuntimeError):
    """Raised when another run is using the folder, also one that has begun after the folder was removed."""


class FoundState(NamedTuple):
    """A state from which a run can resume."""

    state: TrainingState
    path: str
    passed_over: Sequence[str] = ()
    """Why newer states could not be read."""
    changed: Mapping[str, str] = MappingProxyType({})
    """The settings that differ from those of the state: a text by name."""

    @property
    def updates(self) -> int:
        """int, the number of updates that its run has made."""
        return self.state.metadata["updates"]

    def __str__(self) -> str:
        at, updates = self.state.metadata["at"], _check.quantity(self.updates, "update")
        if self.state.metadata.get("micro_batches") or at["batches"] not in (0, at["total"]):
            return f"{self.path}: {updates}, epoch {at['epoch']}, {_check.quantity(at['batches'], 'batch')} of it"
        return f"{self.path}: {updates}, {_check.quantity(at['epoch'] - (at['batches'] == 0), 'epoch')} done"


class StateFolder:
    """A folder of training states, used by one run at a time.

    Args:
        path (str): the path of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.shown = os.fspath(path)
        """str, the path as the user gave it."""
        self._path = Path(absolute(path))
        self._lock = Lock(self._path / ".lock")

    def open(self) -> None:
        """Create the folder, and lock it.

        Raises:
            FolderInUse: If another run is using it.
            OSError: If its lock is a link.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        if not self._lock.take():
            raise FolderInUse(f"For '{_OWNER}', another run is using the folder '{self.shown}'.")
        self._highest = max(map(number_of, self.states()), default=0)
        remove_leftovers(self._path)

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def states(self) -> list[Path]:
        """Return the paths of the states, newest first."""
        return states_in(self._path)

    def shown_path(self, path: Path) -> str:
        """Return the path of a state as the user gave that of the folder."""
        return os.path.join(self.shown, path.name)

    def holds(self, path: str) -> bool:
        """Return whether a state is in this folder."""
        return Path(path).resolve().parent == self._path.resolve()

    def newest(self, most: float) -> FoundState | None:
        """Return the newest undamaged state in the folder, of at most so many bytes; None if it has no states.

        Raises:
            CheckpointError: If it has states, but none that can be read.
        """
        faults: list[str] = []
        for path in self.states():
            try:
                return FoundState(read(str(path), most), self.shown_path(path), faults)
            except CheckpointError as error:
                faults.append(str(error))
        if faults:
            raise CheckpointError(faults[0])
        return None

    def next_path(self) -> Path:
        """Return the path of the next state, whose number is above all others, also above those of removed ones.

        Raises:
            FolderInUse: If the folder is no longer the one that the run has locked.
        """
        self._check_locked()
        for path in self.states()[:1]:
            if number_of(path) > self._highest:
                _check.warn(f"'{self.shown_path(path)}' is not of this run; 'keep' counts it as one of its states.")
                self._highest = number_of(path)
        self._highest += 1
        return self._path / f"state-{self._highest:08}.safetensors"

    def _check_locked(self) -> None:
        if self._lock.is_in_place():
            return
        fault = f"the folder '{self.shown}' was removed while the run was using it; no state is saved"
        raise FolderInUse(f"For '{_OWNER}', {fault}. Another run may be using it now.")

    def prune(self, newest: Path, keep: int, best: str | None) -> None:
        """Remove the states below `newest`; with it, `keep` of them and the best remain."""
        older = [path for path in self.states() if number_of(path) < number_of(newest)]
        for path in older[keep - 1 :]:
            if path.name != best:
                with suppress(OSError):  # one that can't be removed must not end the run
                    path.unlink()


class Checkpointer:
    """Save the training states of a run in a folder, and resume from them.

    A state is saved as `every` and `minutes` define, and always at the end, on a request to stop, and by the driver
    after an error; with several processes, after one outside of a window. The driver's states are those of a window's
    end: a window that was not finished is read again by the resumed run.

    A folder belongs to one run, which only one process at a time can continue. A new state gets a number above all
    others in it. After it is written and verified, those below it are removed: `keep` of them and the best remain.

    Args:
        folder (str): the folder of the states; it is created. A new run needs one without states.
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
        stop (Optional[Callable]): returns whether to stop. It is called after each micro-batch; the driver calls it
            more often, also in evaluations, and with several processes once per window. Default: ``None``.

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
    ):
        self._folder = StateFolder(folder)
        self._every = None if every is None else _check.positive_int(_OWNER, "every", every)
        self._seconds = None if minutes is None else 60 * _check.positive_number(_OWNER, "minutes", minutes)
        self._keep = _check.positive_int(_OWNER, "keep", keep)
        self._score = score
        if resume is not None:
            _check.instance(_OWNER, "resume", resume, (str, os.PathLike), "a path, 'auto' or None")
        self._resume = None if resume is None else os.fspath(resume)
        self._resume_path = "" if resume is None else absolute(resume)
        self._config = dict(config or {})
        self._allow_config_change = allow_config_change
        self._stop = stop
        self._writes = True
        self.resumed: list[str] = []
        """list[str], lines about the state from which the run resumed."""
        self.best: float | None = None
        """Optional[float], the best score so far, including that of the resumed run."""

    def __repr__(self) -> str:
        minutes = None if self._seconds is None else self._seconds / 60
        shown = {"every": self._every, "minutes": minutes, "keep": self._keep, "resume": self._resume}
        return f"Checkpointer({self._folder.shown!r}, {', '.join(f'{name}={shown[name]!r}' for name in shown)})"

    def for_group(self, group: Group | None) -> Checkpointer:
        """Let only rank 0 write. The other ranks read, and take part in computing the score."""
        self._writes = group is None or group.rank == 0
        return self

    def __enter__(self) -> Checkpointer:
        if self._writes:
            self._folder.open()
        self._saved_at = time.monotonic()
        self._updates = 0  # at the last window's end, or in the state that is resumed
        self._has_failed = False  # whether the last attempt to write a state has failed
        self._is_saved = False  # whether the current state is saved and scored
        self._stopping = False  # whether a stop was requested
        self.best = None
        self._best_name: str | None = None
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.close()

    # The state to resume from

    def find(self, config: Mapping[str, Any], most: float = math.inf) -> FoundState | None:
        """Return the state to resume from.

        Args:
            config (Mapping): settings that the driver adds.
            most (float): the most bytes that it can have. Default: no limit.

        Raises:
            CheckpointError: If it can't be read, or belongs to a run with other settings, or the folder has the states
                of another run.
        """
        self._config = json.loads(json.dumps({**self._config, **config}))  # in the form that is read from a file
        continues = self._resume == _AUTO or (self._resume is not None and self._folder.holds(self._resume_path))
        if not continues and self._folder.states():
            rule = "'folder' must have no training states when a run begins"
            remedy = "Give resume='auto' to continue the run that has saved them, or another folder."
            raise CheckpointError(f"For '{_OWNER}', {rule}, but '{self._folder.shown}' has some. {remedy}")
        found_state = self._find_state(most)
        if found_state is None:
            self.resumed = [f"nothing: no state in '{self._folder.shown}'"] if self._resume else []
            return None
        metadata = found_state.state.metadata
        self._updates = found_state.updates
        self._is_saved = continues and self._score is None  # as long as nothing is trained
        if continues:
            self.best, self._best_name = metadata["best"]
        self.resumed = [*found_state.passed_over, str(found_state)]
        return self.accepted(found_state, changes(metadata["config"], self._config))

    def accepted(self, found_state: FoundState, changed: Mapping[str, str]) -> FoundState:
        """Return the state, with what is otherwise in this run; raise a `CheckpointError` if that is not allowed."""
        if changed and not self._allow_config_change:
            differences = ", ".join(changed.values())
            raise CheckpointError(
                f"For '{_OWNER}', '{found_state.path}' belongs to a run with other settings: {differences}. "
                "Give them as they were, or begin a new run. In Python, 'allow_config_change' resumes anyway."
            )
        self._is_saved = self._is_saved and not changed
        self.resumed += changed.values()
        return found_state._replace(changed={**found_state.changed, **changed})

    def _find_state(self, most: float) -> FoundState | None:
        if self._resume is None:
            return None
        if self._resume == _AUTO:
            return self._folder.newest(most)
        return FoundState(read(self._resume_path, most), self._resume)

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
        if not in_window:  # before a stop, so that a stop does not change which updates are saved and scored
            is_due = self._every is not None and updates // self._every > self._updates // self._every
            self._updates = updates
            if is_due or time_passed:
                path = self._save_scored(capture)
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
        self.save_at_the_end(capture)

    def save_at_the_end(self, capture: Callable[[], TrainingState]) -> None:
        """Save the state at the end of a run, unless it is already saved."""
        if not self._is_saved:
            self._save_scored(capture)

    def changed(self) -> None:
        """Save again at the end: a callback may have changed Parameters since the last state."""
        self._is_saved = False

    # How to save

    def _save_scored(self, capture: Callable[[], TrainingState]) -> str:
        """Compute the score, then save: the score may draw random numbers. Return the path of the state."""
        score = math.nan if self._score is None else float(self._score())
        is_best = not math.isnan(score) and (self.best is None or score > self.best)
        if is_best:
            self.best = score
        path = self.save(capture(), best=is_best)
        self._is_saved = True
        return path

    def save(self, state: TrainingState, *, best: bool = False) -> str:
        """Write a state, then remove the old ones that are not kept; return its path.

        Args:
            state (TrainingState): the state to write.
            best (bool): whether its model is the best so far. Default: ``False``.

        Raises:
            OSError: If it can't be written; existing files are unchanged.
            FolderInUse: If the folder was removed; what is there now is unchanged.
        """
        self._saved_at = time.monotonic()
        if not self._writes:
            return self._folder.shown
        self._has_failed = True  # unless it succeeds
        path = self._folder.next_path()
        if best:
            self._best_name = path.name
        added = {"config": self._config, "best": [self.best, self._best_name]}
        size = sum(array.nbytes for array in state.arrays.values())
        write_whole(path, size, partial(write, TrainingState(state.arrays, {**state.metadata, **added})))
        self._folder.prune(path, self._keep, self._best_name)
        self._has_failed = False
        return self._folder.shown_path(path)


def find_together(
    owner: str, states: Checkpointer, config: Mapping[str, Any], parameters: Mapping[str, Any], group: Group | None
) -> FoundState | None:
    """Return the state from which all ranks resume; None if there is none.

    A file that is larger than one with these Parameters can be is not read.

    Raises:
        CheckpointError: If this rank can't read it, or it belongs to a run with other settings.
        RuntimeError: If another rank has another state, or can't read it.
    """
    name, remedy = "state to resume from", "Give all ranks access to the files of rank 0."
    try:
        found_state = states.find(config, most_bytes(parameters))
    except CheckpointError as error:
        with suppress(RuntimeError):  # that the ranks differ: this rank's own error is more specific
            agree(owner, group, {name: f"an error ({error})"}, remedy)
        raise
    if group is not None:
        agree(owner, group, {name: None if found_state is None else _description(found_state)}, remedy)
    return found_state


def _description(found_state: FoundState) -> str:
    state = found_state.state
    digest = digest_of(state.arrays, json.dumps(state.metadata, sort_keys=True))
    return f"one after {_check.quantity(found_state.updates, 'update')} with the digest {digest[:12]}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return a text for each setting that differs, by its name."""
    return {
        name: f"{_check.one_line(name)} was {_check.one_line(before.get(name))} and is {_check.one_line(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    }
