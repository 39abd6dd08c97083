"""When is a training state saved, and may a run resume from it?"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable

from .. import _check
from ..ranks.agreement import agree
from ..ranks.group import Group
from ..window.open_window import OpenWindow
from .checkpoint_file import state_digest
from .files import as_given, fixed, write_whole
from .model_record import CheckpointError
from .state_folder import AUTO, Found, StateFolder
from .training_state import TrainingState, write

_OWNER, _NOTES = "Checkpointer", "notes"
_STATE = "state to resume from"
NO_WISHES = (0.0, 0.0)
"""No request to stop, and no request to save because `minutes` have passed."""


class Stopped(Exception):
    """Raised when a run has stopped on request; its training state is saved."""


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
        resume (Optional[str]): the path of the state to resume from, or ``"auto"`` for the newest undamaged state in
            `folder`, if there is one. Default: ``None``, a new run.
        config (Optional[Mapping]): settings that must be equal in a resumed run. Default: ``None``.
        allow_config_change (bool): whether these settings may differ. Default: ``False``.
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
        >>> from ms_accum import Checkpointer, GradientAccumulation
        >>> from ms_accum.zoo import MLP, create_dataset
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
        if resume is not None:
            _check.instance(_OWNER, "resume", resume, (str, os.PathLike), "a path, 'auto' or None")
        self._given = None if resume is None else os.fspath(resume)
        self._resume = self._given if self._given in (None, AUTO) else fixed(self._given)
        self._config = dict(config or {})
        self._allow_config_change = allow_config_change
        self._stop = stop
        self._notes, self._at_end = dict(notes or {}), at_end
        self._writes = True
        self.resumed: list[str] = []
        """list[str], lines about the state from which the run resumed."""
        self.best: float | None = None
        """Optional[float], the best score so far, including that of the resumed run."""
        self.rescued: Path | None = None
        """Optional[Path], the last state of a run whose `at_end` failed; None if that did not fail."""

    def __repr__(self) -> str:
        minutes = None if self._seconds is None else self._seconds / 60
        shown = {"every": self._every, "minutes": minutes, "keep": self._keep, "resume": self._given}
        return f"Checkpointer({self._states.named()!r}, {', '.join(f'{name}={shown[name]!r}' for name in shown)})"

    def share(self, group: Group | None) -> Checkpointer:
        """Let only rank 0 write. The other ranks read, and take part in computing the score."""
        self._writes = group is None or group.rank == 0
        return self

    def __enter__(self) -> Checkpointer:
        if self._writes:
            self._states.open()
        self._at = time.monotonic()
        self._updates = 0
        self._can_save = True
        self._is_saved = False  # whether the current state is saved, and scored if there is a score
        self._stopping = False  # whether a stop was requested
        self.best = None
        self._best_file: str | None = None
        return self

    def __exit__(self, *error: object) -> None:
        self._states.close()

    def find(self, config: Mapping[str, Any]) -> Found | None:
        """Return the state to resume from.

        Args:
            config (Mapping): settings that the driver adds.

        Raises:
            CheckpointError: If it can't be read, or belongs to a run with other settings.
        """
        self._config = json.loads(json.dumps({**self._config, **config}))  # in the form that is read from a file
        found = self._found()
        if found is None:
            self.resumed = [f"nothing: no state in '{self._states.named()}'"] if self._resume else []
            return None
        before = {name: value for name, value in found.state.facts["config"].items() if name != _NOTES}
        changed = changes(before, self._config)
        if changed and not self._allow_config_change:
            raise CheckpointError(
                f"For '{_OWNER}', '{found.path}' belongs to a run with other settings: {', '.join(changed)}. "
                "Give 'allow_config_change' to resume anyway."
            )
        facts = found.state.facts
        self._updates = facts["planned"]
        self._states.adopt(found, continues=self._resume == AUTO)
        self.best, self._best_file = facts["best"]
        is_scored = self._score is None or facts.get("scored", True)
        self._is_saved = not changed and is_scored and self._states.holds(found.path)
        self.resumed = [*found.passed_over, f"{found.path}: {facts['updates']:,} updates, {found.place}", *changed]
        return found._replace(changed=changed)

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the run to resume; empty if there is none.

        Raises:
            CheckpointError: If they can't be read.
        """
        found = self._found()
        return found.state.facts["config"] if found else {}

    def epochs_done(self) -> int | None:
        """Return the number of epochs of the run to resume; None if it stopped inside one, or there is no run.

        Raises:
            CheckpointError: If it can't be read.
        """
        found = self._found()
        return found.epochs_done if found else None

    def _found(self) -> Found | None:
        resume = self._resume
        return self._states.find(resume if resume in (None, AUTO) else as_given(resume, self._given or resume))

    @property
    def facts(self) -> dict[str, Any]:
        """dict, what must be equal on all ranks, in the words of `ranks.agreement.agree`: when they save together."""
        score = "none" if self._score is None else "given"
        return {"'every' of the checkpointer": self._every, "'score' of the checkpointer": score}

    def wishes(self) -> list[float]:
        """Return the requests to stop, and to save because `minutes` have passed, as numbers that ranks can sum."""
        self._stopping = self._stopping or (self._stop is not None and bool(self._stop()))
        late = self._seconds is not None and time.monotonic() - self._at >= self._seconds
        return [float(self._stopping), float(late)]

    def after_micro_batch(
        self, updates: int, in_window: bool, take: Callable[[], TrainingState], wishes: Sequence[float]
    ) -> None:
        """Save a state if it is due.

        Args:
            updates (int): updates so far.
            in_window (bool): whether a window is open.
            take (Callable): returns the state.
            wishes (Sequence[float]): the requests of this process, or their sum over the ranks, which stop together.

        Raises:
            Stopped: If a stop was requested; the state is saved.
        """
        stop, late = wishes
        self._is_saved = False
        path = None
        passed = updates - self._updates
        by_count = self._every is not None and passed >= self._every
        if not in_window and (by_count or late):  # before a stop, which would shift this moment and all later ones
            # After an error at a planned update this is a later one, and those that follow stay where they were.
            planned = updates - passed % self._every if self._every is not None and by_count else updates
            path = self._save_scored(take, planned)
        if stop:
            raise Stopped(f"the training state is in '{path or self.save(take())}'")

    def _save_scored(self, take: Callable[[], TrainingState], planned: int | None = None) -> Path:
        """Compute the score, then save: the score may draw random numbers. Return the path of the state."""
        score = math.nan if self._score is None else float(self._score())
        self._updates = self._updates if planned is None else planned
        better = not math.isnan(score) and (self.best is None or score > self.best)
        self.best = score if better else self.best
        path = self.save(take(), better, scored=self._score is not None)
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
            self._at = time.monotonic()
            return Path(self._states.named())
        self._states.make_again()
        path = self._states.next_path()
        self._best_file = path.name if best else self._best_file
        config = {**self._config, **({_NOTES: self._notes} if self._notes else {})}
        own = {"config": config, "planned": self._updates, "best": [self.best, self._best_file], "scored": scored}
        own["kept"] = self._states.own  # a resumed run removes these, too
        state = TrainingState(state.arrays, {**state.facts, **own})
        size = sum(array.nbytes for array in state.arrays.values())
        self._can_save = False  # unless it succeeds
        write_whole(path, size, partial(write, state))
        self._can_save = True
        self._at = time.monotonic()
        self._states.add(path, self._keep, self._best_file)
        return Path(self._states.named(path.name))

    @contextmanager
    def saving_at_the_end(self, take: Callable[[], TrainingState], window: OpenWindow) -> Iterator[None]:
        """Save at the end of the block, also after an error, unless saving has failed or the window was lost."""
        try:
            yield
        except Stopped:
            raise
        except Exception:
            if self._can_save and not window.lost and window.is_whole:
                self._save_after_error(take)
            raise
        try:
            if self._at_end is not None:
                self._at_end()
        except Exception:
            if window.is_whole:
                with suppress(Exception):  # the smaller files failed; the state may be on another disk
                    self.rescued = self.save(take())
            raise
        self.save_at_the_end(take)

    def changed(self) -> None:
        """Save again at the end: a callback may have changed Parameters since the last state."""
        self._is_saved = False

    def save_at_the_end(self, take: Callable[[], TrainingState]) -> None:
        """Save the state at the end of a run, unless it is already saved."""
        if not self._is_saved:
            self._save_scored(take)

    def _save_after_error(self, take: Callable[[], TrainingState]) -> None:
        """Save if possible; otherwise warn, so that the run's own error is not hidden."""
        try:
            self.save(take())
        except Exception as error:
            _check.warn(f"the state of the failing run is not saved: {error}")


def find_together(owner: str, states: Checkpointer, config: Mapping[str, Any], group: Group | None) -> Found | None:
    """Return the state from which all ranks resume; None if there is none.

    Raises:
        CheckpointError: If this rank can't read it, or it belongs to a run with other settings.
        RuntimeError: If another rank has another state, or can't read it.
    """
    remedy = {_STATE: "Give all ranks access to the files of rank 0."}
    try:
        found = states.find(config)
    except CheckpointError as error:
        with suppress(RuntimeError):  # that this rank is not like the others is its own error, which says more
            agree(owner, group, {_STATE: f"an error ({error})"}, remedy)
        raise
    agree(owner, group, {_STATE: None if found is None else _words_of(found)} if group else {}, remedy)
    return found


def _words_of(found: Found) -> str:
    digest = state_digest(found.state.arrays, json.dumps(found.state.facts, sort_keys=True))
    return f"one after {found.state.facts['updates']:,} updates with the digest {digest[:12]}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one text for each setting that differs."""
    return [
        f"{_check.one_line(name)} was {_check.one_line(before.get(name))} and is {_check.one_line(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
