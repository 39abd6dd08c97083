"""Does a process remove the temporary folders of killed processes, and no others?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ms_accum.ranks import lifetime
from ms_accum.ranks.lifetime import PREFIX, scratch, scratch_folder

ROOT = Path(__file__).resolve().parents[2]
# Makes a folder, says so, and does what it reads: to end, or to wait to be killed.
PROCESS = """
import sys
from ms_accum.ranks.lifetime import scratch_folder
print(scratch_folder(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files, for this and other processes."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    lifetime._remove_abandoned.cache_clear()
    yield folder
    lifetime._remove_abandoned.cache_clear()


def start():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", PROCESS], env=environment, **pipes)
    return process, Path(process.stdout.readline().strip())


def end(process):
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


def test_process_removes_its_own_folder():
    process, folder = start()
    assert folder.is_dir() and folder.name.startswith(PREFIX)
    end(process)
    assert not folder.exists()


def test_only_folders_of_killed_processes_are_removed(temporary):
    (temporary / "ms_accum-mine").mkdir()  # not made by this package: it has no lock
    (temporary / "ms_accum-file").touch()
    (temporary / "other").mkdir()
    elsewhere = temporary / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    os.symlink(elsewhere, temporary / "ms_accum-link")
    running, folder_of_running = start()
    killed, folder_of_killed = start()
    (elsewhere / ".in-use").touch()  # behind a link
    killed.kill()
    killed.communicate(timeout=60)
    assert folder_of_killed.is_dir() and os.listdir(folder_of_killed) == [".in-use"]
    another, folder_of_another = start()
    assert folder_of_running.is_dir() and folder_of_another.is_dir() and not folder_of_killed.exists()
    end(running)
    end(another)
    kept = {"ms_accum-mine", "ms_accum-file", "other", "elsewhere", "ms_accum-link"}
    assert {path.name for path in temporary.iterdir()} == kept and (elsewhere / "kept").is_dir()


def test_without_the_lock_a_folder_in_use_would_be_removed(monkeypatch):
    """A planted fault for the test above."""
    running, folder = start()
    monkeypatch.setattr(lifetime.fcntl, "flock", lambda *arguments: None)
    scratch_folder()
    assert not folder.exists()
    end(running)


def test_folders_of_other_users_are_kept(temporary, monkeypatch):
    killed, folder = start()
    killed.kill()
    killed.communicate(timeout=60)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    scratch_folder()
    assert folder.is_dir()


def test_scratch_folder_is_removed_after_its_block(temporary):
    with scratch() as folder:
        (folder / "x").touch()
        assert folder.parent == temporary
    assert os.listdir(temporary) == []


def test_without_file_locks_nothing_is_removed(temporary, monkeypatch):
    """As on Windows."""
    monkeypatch.setattr(lifetime, "fcntl", None)
    (temporary / "ms_accum-a").mkdir()
    (temporary / "ms_accum-a" / ".in-use").touch()
    assert os.path.isdir(scratch_folder()) and (temporary / "ms_accum-a").is_dir()
