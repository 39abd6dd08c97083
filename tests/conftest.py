"""Settings and fixtures of all tests."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

# Before MindSpore is imported. On CPU the wheel's oneDNN takes a reference kernel for convolutions where
# AVX-512 is there, and its host thread spins while kernels want the cores: both together make LeNet5, and
# these tests, ten times slower. The settings change speed, not what is tested.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
os.environ.setdefault("MS_DEV_HOST_BLOCKING_RUN", "1")
os.environ.setdefault("GLOG_v", "3")  # errors only: warnings on missing accelerators would drown the rest


# A shell starts what is in its background with SIGINT ignored, and nohup with SIGHUP, which the programs respect.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Each xdist worker runs on its own share of the cores: MindSpore's threads pass work to each other at every operator,
# which costs more CPU time between cores than on one. Tests that start several processes may use all cores.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
WORKER, WORKERS = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
SHARE = CORES[int(WORKER[2:]) :: WORKERS] if WORKER else CORES
if SHARE:
    os.sched_setaffinity(0, SHARE)

sys.path.insert(0, str(Path(__file__).parents[1]))  # plain `pytest` in a clone, without an installation

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from filelock import FileLock  # noqa: E402

from running import run_python  # noqa: E402

try:
    from mindspore.graph import api as graph_api
except ImportError:  # before MindSpore 2.9
    from mindspore.common import api as graph_api


def pytest_collection_finish():
    """Leave what is here now out of all garbage collections: MindSpore makes a full one at each compilation."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if SHARE:
        several = item.get_closest_marker("ranks") or "job" in item.fixturenames
        os.sched_setaffinity(0, CORES if several else SHARE)


# How networks run. "default": in MindSpore's default mode, in which ours are compiled, as users run them. "eager": the
# same mode, with nothing compiled (MS_JIT=0 is MindSpore's own switch), which is faster for small tests.
MODES = {  # of the fixtures below; the first that a test has, its own or its file's, counts
    "each_mode": ["eager", "default", pytest.param(ms.GRAPH_MODE, marks=pytest.mark.slow)],
    "graph_mode": [ms.GRAPH_MODE],
    "default_mode": ["default"],
    "eager": ["eager"],
}


def pytest_generate_tests(metafunc):
    """Let a test run in the modes of its fixture; without one as users run networks, compiled in the default mode."""
    modes = next((modes for name, modes in MODES.items() if name in metafunc.fixturenames), None)
    if modes not in (None, ["default"]):
        metafunc.parametrize("mode", modes, indirect=True, scope="module", ids=lambda mode: MODE_NAMES[mode])


@pytest.fixture
def each_mode():
    """Compile nothing, and compile, and in the slow part in graph mode."""


@pytest.fixture
def graph_mode():
    """Run in graph mode."""


@pytest.fixture
def default_mode():
    """Compile, in a file whose other tests do not."""


@pytest.fixture
def eager():
    """Compile nothing."""


MODE_NAMES = {"default": "default", "eager": "eager", ms.GRAPH_MODE: "graph", ms.PYNATIVE_MODE: "pynative"}


@pytest.fixture(scope="module")
def mode(request):
    """How networks run: a key of `MODE_NAMES`."""
    return getattr(request, "param", "default")


@contextmanager
def running_in(mode):
    """Run networks in this way inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        if mode == "eager":
            patch.setenv("MS_JIT", "0")
        ms.set_context(mode=ms.PYNATIVE_MODE if mode in ("default", "eager") else mode)
        yield


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch, mode):
    """Start each test in its mode, from one seed, in a folder of its own.

    A compilation that fails leaves a folder `rank_0` behind, wherever the process is. And a forward
    pass that raises in PyNative mode leaves MindSpore recording gradients: the next test's jit function
    would be differentiated once more.
    """
    graph_api._pynative_executor.clear_res()
    monkeypatch.chdir(tmp_path)
    with running_in(mode):
        ms.set_seed(1)
        yield


@pytest.fixture
def rng():
    return np.random.RandomState(1)


@pytest.fixture
def compiles(monkeypatch):
    """Return a list to which the name of each compiled graph is appended.

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


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    """Mark what needs the job of two ranks, which takes a minute; random programs try two ranks in the fast part."""
    for item in items:
        if "job" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


RANKS = 2


def run_job(folder):
    """Run tests/ranks_job.py, which writes its results to files."""
    launcher = ["-m", "ms_accum.launch", f"--nproc={RANKS}", "--log_dir=logs"]
    done = run_python(*launcher, Path(__file__).with_name("ranks_job.py"), ".", cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    (folder / "done").touch()


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """The results of each rank of a job, which is run once for all test processes, and the job's folder."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if WORKER else root) / "ranks"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            run_job(folder)
    assert (folder / "done").exists(), "the job failed in another process"
    results = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    assert [rank["rank"] for rank in results] == [[number, RANKS] for number in range(RANKS)]
    return results, folder


@pytest.fixture(scope="session")
def at_end(job):
    """The results of each rank that sums gradients at the end of a window, and the job's folder."""
    return [rank["at the end"] for rank in job[0]], job[1]


@pytest.fixture(scope="session")
def in_step(job):
    """The results of each rank that sums gradients in every micro-batch."""
    return [rank["in step"] for rank in job[0]]
