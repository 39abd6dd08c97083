"""Which states of a run are on the disk, whatever happens to their folder, and are damaged ones rejected?"""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import stat
import time

import numpy as np
import pytest
from mindspore.train import Callback
from safetensors.numpy import save_file

from ms_accum import Checkpointer, CheckpointError
from ms_accum.saving import checkpointer, training_state
from ms_accum.saving import training_state as arrays
from ms_accum.saving.checkpointer import FolderInUse
from ms_accum.saving.training_state import TrainingState
from runs import Run, even, names
from save_runs import FACTS

pytestmark = pytest.mark.usefixtures("eager")


def state_of(updates):
    return TrainingState({"network.w": np.full((2, 3), updates, np.float32)}, {**FACTS, "updates": updates})


def save(states, updates):
    """Do what a run does after each of these updates."""
    for number in updates:
        states.after_micro_batch(number, False, lambda number=number: state_of(number), states.requests())


def updates_in(folder):
    """Return the updates of the states in a folder, which have to be whole, in the order of their numbers."""
    paths = sorted(folder.glob("state-*"), key=lambda path: (len(path.name), path.name))
    return [training_state.read(str(path)).metadata["updates"] for path in paths]


# Which are kept


@pytest.mark.parametrize(
    ("values", "kept", "best"),
    [
        ((1, 5, 3, 4, 2), [2, 4, 5], 5),
        ((1, 2, 3, 4, 5), [4, 5], 5),
        ((5, 5, 5, 5, 5), [1, 4, 5], 5),
        ((math.nan, 1, math.nan, 0, math.nan), [2, 4, 5], 1),
        ((math.nan,) * 5, [4, 5], None),
    ],
)
def test_best_state_is_kept_in_addition_to_the_newest(tmp_path, values, kept, best):
    scores = iter(values)
    with Checkpointer(tmp_path, every=1, keep=2, score=lambda: next(scores)) as states:
        save(states, range(1, 6))
        states.after_micro_batch(6, True, lambda: state_of(6), states.requests())  # inside a window none is due
        assert states.best == best
    assert updates_in(tmp_path) == kept
    facts = training_state.read(str(max(tmp_path.glob("state-*")))).metadata
    assert facts["best"] == [best, None if best is None else f"state-{kept[0] if len(kept) > 2 else 5:08}.safetensors"]


def test_windows_that_are_skipped_after_a_state_save_no_other(tmp_path):
    """They leave the number of updates as it is, also if the run is resumed between them."""
    for updates in ([1, 2, 2, 2], [2, 2, 3, 3, 4, 4, 5]):
        with Checkpointer(tmp_path, every=2, keep=99, resume="auto") as states:
            states.find({})
            save(states, updates)
    assert updates_in(tmp_path) == [2, 4]


def test_state_is_due_when_minutes_have_passed_since_the_last_one(tmp_path, monkeypatch):
    now = [1000]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Checkpointer(tmp_path, minutes=1.5, keep=99) as states:
        for number, now[0] in enumerate([1089, 1090, 1090, 1179, 1200, 1289, 1290], 1):
            save(states, [number])
    assert updates_in(tmp_path) == [2, 5, 7]


def test_resumed_run_keeps_as_many_as_one_that_was_not_stopped(tmp_path):
    scores = iter([1, 9, 2, 3, 4, 5])
    for begin in (1, 4):
        with Checkpointer(tmp_path, every=1, keep=2, score=lambda: next(scores), resume="auto") as states:
            states.find({})
            save(states, range(begin, begin + 3))
    assert updates_in(tmp_path) == [2, 5, 6] and states.best == 9


def test_best_of_another_folder_is_not_the_best_of_this_one(tmp_path):
    with Checkpointer(tmp_path / "a", every=1, score=lambda: 9.0) as states:
        save(states, [1])
    scores = iter([3, 5, 4])
    state = tmp_path / "a" / "state-00000001.safetensors"
    with Checkpointer(tmp_path / "b", every=1, score=lambda: next(scores), resume=state) as states:
        states.find({})
        save(states, [2, 3, 4])
    assert updates_in(tmp_path / "b") == [3, 4] and states.best == 5


def emptied(folder):
    for path in folder.glob("state-*"):
        path.unlink()


def without_the_newest(folder):
    max(folder.glob("state-*")).unlink()


def with_a_higher_number(folder):
    shutil.copy(max(folder.glob("state-*")), folder / "state-99999999.safetensors")


def with_a_foreign_file(folder):
    (folder / "state-99999999.safetensors").write_bytes(b"of somebody else")


def with_a_folder(folder):
    (folder / "state-00000001.safetensors" / "full").mkdir(parents=True)


MEDDLING = [emptied, without_the_newest, with_a_higher_number, with_a_foreign_file]


@pytest.mark.filterwarnings("ignore:.*state-99999999.safetensors' is not of this run; 'keep' counts it")
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("meddle", MEDDLING)
def test_what_was_just_saved_is_never_removed(tmp_path, meddle, keep):
    """A state gets a number above all others, and only those below it are removed."""
    with Checkpointer(tmp_path, every=1, keep=keep) as states:
        save(states, range(1, 4))
        meddle(tmp_path)
        for number in range(4, 7):
            save(states, [number])
            newest = max(tmp_path.glob("state-*"), key=lambda path: (len(path.name), path.name))
            assert training_state.read(str(newest)).metadata["updates"] == number
    assert updates_in(tmp_path) == [5, 6][2 - keep :]
    with Checkpointer(tmp_path, every=1, resume="auto") as states:
        assert states.find({}).updates == 6


def test_lock_that_is_a_link_is_refused(tmp_path):
    """Filelock before 3.20.1 empties the file to which it leads."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="a link, to which nothing is written"), Checkpointer(tmp_path / "states"):
        pass
    assert (tmp_path / "mine").read_text() == "precious"


def test_lock_with_other_names_is_refused(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "states").mkdir()
    os.link(tmp_path / "mine", tmp_path / "states" / ".lock")
    with pytest.raises(OSError, match=r"has other names \(hard links\)"), Checkpointer(tmp_path / "states"):
        pass
    assert (tmp_path / "mine").read_text() == "precious"


def test_state_with_a_higher_number_is_named(tmp_path):
    with Checkpointer(tmp_path, every=1) as states:
        save(states, [1])
        with_a_foreign_file(tmp_path)
        with pytest.warns(RuntimeWarning, match="state-99999999.safetensors' is not of this run"):
            save(states, [2])


def test_state_that_can_not_be_removed_does_not_end_the_run(tmp_path):
    with_a_folder(tmp_path)
    with Checkpointer(tmp_path, every=1) as states:
        save(states, [1, 2])
    assert names(tmp_path) == ["state-00000001.safetensors", "state-00000003.safetensors"]


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / ".saving-abc").mkdir()
    (tmp_path / ".saving-abc" / "state-00000001.safetensors").write_bytes(b"half")
    with Checkpointer(tmp_path, every=1) as states:
        save(states, [1])
    assert names(tmp_path) == ["state-00000001.safetensors"]


# The folder


class After(Callback):
    """Does something after a window."""

    def __init__(self, window, call):
        self.window, self.call = window, call

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == self.window:
            self.call()


def test_run_ends_if_its_folder_is_removed(tmp_path):
    folder, run = tmp_path / "states", Run()
    callbacks = After(3, lambda: shutil.rmtree(folder))
    with pytest.raises(FolderInUse, match="the folder '.*states' was removed while the run was using it"):
        run.train(even(), 1, states=Checkpointer(folder, every=1), callbacks=callbacks)
    assert run.model.updates == 3 and not folder.exists()


def test_run_does_not_go_on_in_the_folder_of_another_run(tmp_path):
    """The other one has begun after the folder of the first was removed."""
    folder, other, run = tmp_path / "states", Checkpointer(tmp_path / "states", every=1), Run()

    def replace():
        shutil.rmtree(folder)
        other.__enter__()
        save(other, [77])

    with pytest.raises(FolderInUse, match="Another run may be using it now"):
        run.train(even(), 1, states=Checkpointer(folder, every=1), callbacks=After(3, replace))
    assert run.model.updates == 3 and updates_in(folder) == [77]
    save(other, [78])
    with pytest.raises(FolderInUse, match="another run is using the folder"), Checkpointer(folder):
        pass
    other.__exit__()
    assert updates_in(folder) == [78]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_folder_that_can_not_be_flushed_does_not_end_the_run(tmp_path, number, monkeypatch):
    """A disk that fails does."""
    flush = os.fsync

    def flush_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flush_files)
    with Checkpointer(tmp_path, every=1) as states:
        if number == errno.EIO:
            with pytest.raises(OSError, match="Input/output error"):
                save(states, [1])
        else:
            save(states, [1, 2])
            assert updates_in(tmp_path) == [2]


def test_state_is_on_the_disk_before_it_gets_its_name_and_the_name_after(tmp_path, monkeypatch):
    flush, replace, done = os.fsync, os.replace, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.fstat(descriptor).st_ino) or flush(descriptor))
    monkeypatch.setattr(os, "replace", lambda old, new: done.append(os.path.basename(new)) or replace(old, new))
    with Checkpointer(tmp_path, every=1) as states:
        save(states, [1])
    (state,) = tmp_path.glob("state-*")
    assert done == [state.stat().st_ino, state.name, tmp_path.stat().st_ino]


def test_file_that_the_disk_writes_otherwise_is_an_error(tmp_path, monkeypatch):
    def failing(values, path, metadata):
        save_file({name: array + 1 for name, array in values.items()}, path, metadata=metadata)

    monkeypatch.setattr(arrays, "save_file", failing)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256 does not match"):
        arrays.write_arrays(str(tmp_path / "written.safetensors"), {"w": np.zeros(2, np.float32)}, {})


def test_older_state_survives_a_full_disk(tmp_path, monkeypatch):
    def fail(state, path):
        training_state.write(state, path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Checkpointer(tmp_path, every=1) as states:
        save(states, [1])
        monkeypatch.setattr(checkpointer, "write", fail)
        with pytest.raises(
            OSError, match=r"state-00000002.safetensors' \(24 bytes\) can't be written: .*No space left"
        ):
            save(states, [2])
    assert updates_in(tmp_path) == [1] and names(tmp_path) == ["state-00000001.safetensors"]


@pytest.mark.parametrize("resume", [True, 3])
def test_resume_must_be_a_path(resume, tmp_path):
    with pytest.raises(TypeError, match="'resume' must be a path, 'auto' or None, but got (bool|int)"):
        Checkpointer(tmp_path, resume=resume)


# The file


@pytest.fixture
def saved(tmp_path):
    with Checkpointer(tmp_path, every=1) as states:
        save(states, [1])
    return tmp_path / "state-00000001.safetensors"


def test_equal_states_are_equal_files(tmp_path):
    """The library writes several entries of metadata in an order of chance."""
    contents = set()
    for number in range(8):
        training_state.write(state_of(1), str(tmp_path / f"{number}.safetensors"))
        contents.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(contents) == 1


def check_rejected(path, data):
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="state-00000001") as error:
        training_state.read(str(path))
    assert "\n" not in str(error.value)


def test_400_flipped_bits_are_rejected(saved):
    content, rng = saved.read_bytes(), random.Random(1)
    for bit in rng.sample(range(8 * len(content)), 400):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        check_rejected(saved, bytes(changed))


def test_truncations_are_rejected(saved):
    content = saved.read_bytes()
    for length in range(0, len(content), 29):
        check_rejected(saved, content[:length])


def test_state_larger_than_the_network_is_not_read(tmp_path):
    """Its file may be sparse, and its header right."""
    Run().train(even(), 3, epochs=1, states=Checkpointer(tmp_path))
    (path,) = tmp_path.glob("state-*")
    os.truncate(path, 2**40)
    with pytest.raises(CheckpointError, match="can't be read"):  # the header says where it ends
        Run().train(even(), 3, states=Checkpointer(tmp_path, resume="auto"))
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % ((2**40 - 108,) * 2)
    path.write_bytes(len(header.ljust(100)).to_bytes(8, "little") + header.ljust(100))
    os.truncate(path, 2**40)
    with pytest.raises(CheckpointError, match="belongs to another network: it has 1,099,511,627,776 bytes, more than"):
        Run().train(even(), 3, states=Checkpointer(tmp_path, resume="auto"))
