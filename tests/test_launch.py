"""The launcher starts the ranks of a program, forwards signals, leaves no process, and its exit code is true."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import gone

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[1]
BEGIN = "import json, os, signal, subprocess, sys, time\nrank = int(os.environ['RANK_ID'])\n"
# Each rank saves when a signal comes: rank 0 for seconds after rank 1 has ended.
SAVES = """
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
json.dump(os.getpid(), open(f"ready{rank}", "w"))
while not got:
    time.sleep(0.05)
time.sleep(3 * (1 - rank))
json.dump(got, open(f"saved{rank}", "w"))
sys.exit(143)
"""
SUM = """
import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import init

class Sum(nn.Cell):
    def construct(self, x):
        return ops.AllReduce()(x)

init()
while True:
    total = Sum()(ms.Tensor(np.array([1.0 + rank], np.float32)))
    if not os.path.exists(f"ready{rank}"):
        print(total, flush=True)
        json.dump(os.getpid(), open(f"ready{rank}", "w"))
"""


def start(folder, source, *flags, program=("program.py",), **variables):
    (folder / "program.py").write_text(BEGIN + source)
    command = [sys.executable, "-m", "ms_accum.launch", "--log_dir=log", *(flags or ["--nproc=2"]), *program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)


def end(job):
    out, err = job.communicate(timeout=100)
    return job.returncode, out.splitlines(), err.splitlines()


def ready(job, folder, ranks=(0, 1)):
    """Wait until the ranks run, and return their process numbers."""
    files = [folder / f"ready{rank}" for rank in ranks]
    while not all(file.exists() and file.read_text() for file in files):
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]


def test_ranks_run_by_this_interpreter_with_their_flags_and_leave_nothing(tmp_path):
    """Another `python` is first on PATH. Both ranks start a process that would outlive them."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / "bin" / name).chmod(0o755)
    source = """
child = subprocess.Popen(["sleep", "1000"])
names = ("MS_ROLE", "MS_WORKER_NUM", "RANK_ID", "DEVICE_ID")
found = [sys.executable, sys.argv, child.pid, *map(os.environ.get, names)]
json.dump(found, open(f"found{rank}", "w"))
print("of", rank)
print("[WARNING] ME(7:9,MainProcess):of MindSpore", file=sys.stderr)
print("[INFO] of", rank)
sys.stdout.write("no end of line")
"""
    flags = ["--nproc", "5", "-m", "--", "a b", "", "-h"]
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    job = start(tmp_path, source, program=("program.py", *flags), PATH=path)
    assert end(job) == (0, ["2 ranks, logs in log", "of 0", "[INFO] of 0", "no end of line"], [])
    for rank in range(2):
        interpreter, argv, child, *variables = json.loads((tmp_path / f"found{rank}").read_text())
        assert (interpreter, argv) == (sys.executable, ["program.py", *flags])
        assert variables == ["MS_WORKER", "2", str(rank), str(rank)] and gone(child)
        log = (tmp_path / "log" / f"worker_{rank}.log").read_text()
        assert all(text in log for text in (f"of {rank}\n", "of MindSpore", "no end of line"))


def test_failed_rank_is_named_and_ends_the_others(tmp_path):
    source = "if rank == 1: time.sleep(1); sys.exit('error: no data\\nat a line')\n"
    job = start(tmp_path, source + "json.dump(os.getpid(), open('ready0', 'w'))\ntime.sleep(1000)")
    (pid,) = ready(job, tmp_path, [0])
    error = "error: rank 1 ended with exit code 1: error: no data; its log is log/worker_1.log"
    assert end(job) == (1, ["2 ranks, logs in log"], [error])
    assert gone(pid)


@pytest.mark.parametrize(
    ("end_of_rank_1", "state", "how"),
    [("sys.exit(0)", "Z", "had ended with exit code 0"), ("time.sleep(1000)", "S", "still runs")],
)
def test_rank_that_the_others_wait_for_is_named(tmp_path, end_of_rank_1, state, how):
    """It ends well or hangs after its error, and another fails. Nothing is said of rank 2, which only runs."""
    source = f"""
if rank == 1:
    print("ValueError: no data", file=sys.stderr, flush=True)
    json.dump(os.getpid(), open("ready1", "w"))
    {end_of_rank_1}
if rank == 2:
    time.sleep(1000)
while not (os.path.exists("ready1") and open("ready1").read()):
    time.sleep(0.05)
while open("/proc/" + open("ready1").read() + "/stat").read().split()[2] != "{state}":
    time.sleep(0.05)
sys.exit(1)
"""
    job = start(tmp_path, source, "--nproc=3")
    blamed = "error: rank 0 ended with exit code 1; its log is log/worker_0.log"
    cause = f"error: rank 1 {how}: ValueError: no data; its log is log/worker_1.log"
    assert end(job) == (1, ["3 ranks, logs in log"], [blamed, cause])


@pytest.mark.slow
def test_port_that_another_program_has_taken_is_named(tmp_path):
    """Between the choice of the launcher and the start of its scheduler."""
    (tmp_path / "program.py").write_text("from mindspore.communication import init\ninit()\n")
    launch = """
import socket, sys
from ms_accum import launch
taken = socket.create_server(("127.0.0.1", 0))
launch._free_port = lambda: taken.getsockname()[1]
print(launch._free_port())
sys.exit(launch.main(["--nproc=2", "--log_dir=log", "program.py"]))
"""
    command, environment = [sys.executable, "-c", launch], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    port = done.stdout.splitlines()[0]
    error = f"error: the scheduler ended with exit code 1: another program has taken port {port}; start the job again"
    assert done.returncode == 1 and done.stderr.startswith(error)


def test_what_a_killed_rank_has_printed_is_not_its_cause(tmp_path):
    job = start(tmp_path, "print('epoch', rank, flush=True)\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(1000)")
    assert end(job)[::2] == (137, ["error: rank 1 ended with exit code 137; its log is log/worker_1.log"])


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_signal_stops_all_ranks_once_and_they_may_save(tmp_path, number, code):
    """Sent twice to the whole group, as `timeout` does. Rank 0 saves when rank 1 has ended."""
    job = start(tmp_path, SAVES)
    pids = ready(job, tmp_path)
    for _ in range(2):
        os.killpg(job.pid, number)
        time.sleep(0.3)
    assert end(job)[::2] == (code, [])
    assert [json.loads((tmp_path / f"saved{rank}").read_text()) for rank in range(2)] == [[15], [15]]
    assert all(map(gone, pids))


@pytest.mark.slow
def test_second_signal_ends_ranks_at_once(tmp_path):
    job = start(tmp_path, SAVES.replace("3 * (1 - rank)", "1000"))
    pids = ready(job, tmp_path)
    job.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    job.send_signal(signal.SIGINT)
    assert end(job)[::2] == (143, [])
    assert all(map(gone, pids))


def test_ranks_end_with_a_killed_launcher(tmp_path):
    job = start(tmp_path, SAVES)
    pids = ready(job, tmp_path)
    job.kill()
    end(job)
    assert all(map(gone, pids))


@pytest.mark.slow
def test_closed_output_does_not_end_the_job(tmp_path):
    job = start(tmp_path, "for line in range(9999): print(line)")
    job.stdout.close()
    assert job.stderr.read() == "" and job.wait(timeout=100) == 0
    job.stderr.close()
    assert (tmp_path / "log" / "worker_0.log").read_text().endswith("9998\n")


@pytest.mark.slow
def test_plain_program_is_interrupted_in_a_sum_over_ranks(tmp_path):
    job = start(tmp_path, SUM)
    pids = ready(job, tmp_path)
    job.send_signal(signal.SIGINT)
    code, out, err = end(job)
    assert (code, out[1], err) == (130, "[3.]", [])
    assert all(map(gone, pids))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda mine, log: log.symlink_to(mine), "a link"),
        (lambda mine, log: os.link(mine, log), "has other names (hard links)"),
        (lambda mine, log: os.mkfifo(log), "not a file"),
    ],
    ids=["link", "hard-link", "pipe"],
)
def test_logs_are_files_of_their_own(tmp_path, make, fault):
    (tmp_path / "log").mkdir()
    (tmp_path / "mine").write_text("precious")
    make(tmp_path / "mine", tmp_path / "log" / "worker_0.log")
    code, out, err = end(start(tmp_path, ""))
    message = f"{fault}, to which nothing is written. Remove it: 'log/worker_0.log'"
    assert (code, out) == (1, []) and err[0].endswith(message) and len(err) == 1, err
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc=0", "program.py"], "argument --nproc: must be an int >= 1, but got 0"),
        (["--np=2", "program.py"], "unrecognized arguments: --np=2"),
        (["nowhere.py"], "argument script.py: 'nowhere.py' is not a file"),
    ],
)
def test_wrong_flags_are_one_line_and_nothing_starts(tmp_path, flags, message):
    (tmp_path / "program.py").touch()
    command = [sys.executable, "-X", "importtime", "-m", "ms_accum.launch", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith(f"\nerror: {message}\n")
    assert "mindspore" not in done.stderr and os.listdir(tmp_path) == ["program.py"]
