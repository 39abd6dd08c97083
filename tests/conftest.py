"""What does every test start from?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Before MindSpore is imported. On CPU the wheel's oneDNN takes a reference kernel for convolutions where
# AVX-512 is there, and its host thread spins while kernels want the cores: both together make LeNet5, and
# these tests, ten times slower. The settings change speed, not what is tested.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
os.environ.setdefault("MS_DEV_HOST_BLOCKING_RUN", "1")
os.environ.setdefault("GLOG_v", "3")  # errors only: warnings on missing accelerators would drown the rest

sys.path.insert(0, str(Path(__file__).parents[1]))  # plain `pytest` in a clone, without an installation

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from filelock import FileLock  # noqa: E402

try:
    from mindspore.graph import api as graph_api
except ImportError:  # before MindSpore 2.9
    from mindspore.common import api as graph_api


@pytest.fixture(autouse=True)
def graph_mode(tmp_path, monkeypatch):
    """Start each test in graph mode, from one seed, in a folder of its own.

    A compilation that is refused leaves a folder `rank_0` behind, wherever the process is. And a forward
    pass that raises in PyNative mode leaves MindSpore recording gradients: the next test's jit function
    would be differentiated once more.
    """
    graph_api._pynative_executor.clear_res()
    monkeypatch.chdir(tmp_path)
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)


@pytest.fixture
def rng():
    return np.random.RandomState(1)


@pytest.fixture
def compiles(monkeypatch):
    """Return a list that grows by the name of each graph that is really compiled.

    MindSpore has no public counter. It asks whether a graph is compiled again and again just before
    each compilation, of Cells and of jit functions alike, and never when it takes one from its cache.
    """
    seen = []
    asked = graph_api._check_recompile

    def count(obj, args, kwargs, full_name, create_time, name):
        seen.append(name)
        return asked(obj, args, kwargs, full_name, create_time, name)

    monkeypatch.setattr(graph_api, "_check_recompile", count)
    return seen


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Return what runs a job in a folder, once for all processes in which tests run, and returns the folder."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def run(name, job):
        folder = root / name
        with FileLock(str(root / f"{name}.lock")):
            if not folder.exists():
                folder.mkdir()
                job(folder)
                (folder / "done").touch()
        assert (folder / "done").exists(), f"{name} failed in another process"
        return folder

    return run


SIZES = (pytest.param(2, marks=pytest.mark.slow), 3)


def run_job(folder, ranks, program="ranks.py"):
    """Run a program of tests/, which writes down what it sees."""
    command = [sys.executable, "-m", "ms_accum.launch", f"--nproc={ranks}", "--log_dir=logs"]
    done = subprocess.run(
        [*command, str(Path(__file__).parent / program), "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="session", params=SIZES, ids="{} ranks".format)
def seen(request, once):
    """What each rank of a job has seen, and the job's folder."""
    folder = once(f"ranks-{request.param}", lambda folder: run_job(folder, request.param))
    each = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(request.param)]
    assert [rank["rank"] for rank in each] == [[number, request.param] for number in range(request.param)]
    return each, folder
