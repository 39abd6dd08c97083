"""Several processes of train.py give the same result as one, and end together."""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_accum import Group
from ms_accum.app import steps
from ms_accum.app.process import USAGE, Failure
from ms_accum.saving import training_state
from programs import ROOT, settings_of, train_in

pytestmark = pytest.mark.several
FLAGS = ("--model=mlp", "--epochs=3", "--batch_size=32", "--output_dir=out")
STATE = Path("out", "states", "state-00000001.safetensors")


def command(*flags, nproc=2):
    launch = (sys.executable, "-u", "-m", "ms_accum.launch", f"--nproc={nproc}", "--log_dir=logs")
    return [*launch, str(ROOT / "train.py"), *FLAGS, *flags]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def finished(folder, *flags, **options):
    """Run to the end and return its output."""
    folder.mkdir(exist_ok=True)
    arguments = {"cwd": folder, "env": environment(), "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command(*flags), **arguments, check=False, **options)


def started(folder, *flags, line):
    """Start, wait for a line of rank 0, and return the job."""
    folder.mkdir()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command(*flags), cwd=folder, env=environment(), **pipes)
    while not job.stdout.readline().startswith(line):
        assert job.poll() is None, job.stderr.read()
    return job


def metrics(folder):
    """Return the lines of the updates; those of the evaluations are there once although two processes run."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "update" in line]
    evaluated = [line["updates"] for line in lines if "update" not in line]
    assert sorted(set(evaluated)) == evaluated and evaluated[-1] == updates[-1]["update"]
    return updates


def accuracy_in(out):
    """Return the accuracy in the last line that a program printed."""
    return re.search(r"\{'Accuracy': ([\d.]+)\} =+\n$", out)[1]


def model_of(folder):
    return (folder / "out" / "gradient_accumulation.ckpt").read_bytes()


def run_uninterrupted(folder):
    done = finished(folder)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "stdout").write_text(done.stdout)


@pytest.fixture(scope="module")
def uninterrupted_run(once):
    """An uninterrupted run of two ranks, and its output."""
    folder = once("whole", run_uninterrupted)
    return folder, (folder / "stdout").read_text()


@pytest.mark.slow
def test_two_ranks_equal_one_process(uninterrupted_run, tmp_path, capfd):
    folder, out = uninterrupted_run
    assert train_in(tmp_path, *FLAGS, "--mini_steps=8") == 0
    assert "effective batch  256 = 32 rows x 4 micro-batches x 2 ranks\n" in out
    lines, expected = metrics(folder), metrics(tmp_path)
    for name in ("epoch", "update", "samples"):
        assert [line[name] for line in lines] == [line[name] for line in expected]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in expected], rel=1e-4)
    assert accuracy_in(out) == accuracy_in(capfd.readouterr().out)
    model = "gradient_accumulation.ckpt"
    assert sorted(os.listdir(folder / "out")) == [model, f"{model}.json", "metrics.jsonl", "states"]
    assert "ccuracy" not in (folder / "logs" / "worker_1.log").read_text()


@pytest.mark.slow
def test_sharded_accumulators_make_no_difference(uninterrupted_run, tmp_path):
    done = finished(tmp_path, "--zero=2")
    assert (done.returncode, done.stderr) == (0, "") and "MiB on each rank" in done.stdout
    lines, expected = metrics(tmp_path), metrics(uninterrupted_run[0])
    for name in ("update", "samples", "loss", "grad_norm"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in expected], rel=1e-4)
    assert accuracy_in(done.stdout) == accuracy_in(uninterrupted_run[1])


@pytest.mark.slow
def test_ranks_stop_together_and_resume(uninterrupted_run, tmp_path, capfd):
    folder = tmp_path / "parts"
    job = started(folder, line="epoch: 2 step: 2")
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=120)
    assert (job.returncode, err) == (143, "")
    assert out.endswith(f"the training state is in '{STATE}'; --resume --output_dir=out continues from there\n")
    assert train_in(folder, *FLAGS, "--resume") == 4 and "ranks was 2 and is 1" in capfd.readouterr().err
    assert finished(folder, "--resume").returncode == 0
    assert model_of(folder) == model_of(uninterrupted_run[0])
    assert len(metrics(folder)) == len(metrics(uninterrupted_run[0]))


@pytest.mark.slow
def test_killed_rank_ends_job_and_leaves_state(uninterrupted_run, tmp_path):
    """With ZeRO-1, which changes no byte of the model."""
    folder = tmp_path / "killed"
    job = started(folder, "--zero=1", "--save_every=4", line="epoch: 2 step: 1")
    os.kill(rank_of(job, 1), signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGKILL
    assert "error: rank 1 ended with exit code 137; its log is logs/worker_1.log" in err
    newest = max((folder / "out" / "states").glob("*.safetensors"))
    assert training_state.read(str(newest)).facts["updates"] >= 4
    done = finished(folder, "--zero=1", "--resume")
    assert (done.returncode, done.stderr) == (0, "") and "MiB on each rank" not in done.stdout
    assert model_of(folder) == model_of(uninterrupted_run[0])


def rank_of(job, rank):
    """Return the process of a rank: the launcher's child with this environment."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and f"\nPPid:\t{job.pid}\n" in (process / "status").read_text():
            variables = (process / "environ").read_bytes().split(b"\0")
            if {b"MS_ROLE=MS_WORKER", f"RANK_ID={rank}".encode()} <= set(variables):
                return int(process.name)
    raise LookupError(rank)


REPEATS = int(os.environ.get("MS_ACCUM_REPEATS", "3"))
"""int, how often a job is stopped in the test below."""


def interrupted(folder, *flags, seconds):
    """Run a job without --output_dir, send SIGINT some seconds after its first update, and return its output."""
    launch = [sys.executable, "-u", "-m", "ms_accum.launch", "--nproc=2", str(ROOT / "train.py"), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job, lines = subprocess.Popen(launch, cwd=folder, env=environment(), **pipes), [""]
    while not lines[-1].startswith("epoch:"):
        lines.append(job.stdout.readline())
        assert job.poll() is None, job.stderr.read()
    time.sleep(seconds)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=120)
    assert err == ""
    return job.returncode, "".join(lines) + out


@pytest.mark.slow
def test_job_in_default_folder_is_saved_at_any_moment(tmp_path):
    """Rank 1 must not clean up what rank 0 is about to write. `--resume` alone continues it, on both ranks."""
    rng = random.Random(30)
    state = Path("runs", "001", "states", "state-00000001.safetensors")
    for repeat in range(REPEATS):
        folder = tmp_path / str(repeat)
        folder.mkdir()
        code, out = interrupted(folder, "--model=mlp", "--epochs=400", seconds=rng.uniform(0, 2))
        assert code == 130 and f"the training state is in '{state}'" in out, out
        assert training_state.read(str(folder / state)).facts["updates"] > 0
    code, out = interrupted(folder, "--resume", seconds=0)
    assert code == 130 and "the training state is in 'runs/001/states/state-00000002.safetensors'" in out
    assert f"flags            --dataset=digits --epochs=400 --model=mlp, as in {state}\n" in out
    assert f"resumed          {state}: " in out


@pytest.mark.slow
def test_full_disk_ends_job(tmp_path):
    def leave_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    done = finished(tmp_path, "--epochs=1", preexec_fn=leave_little_room)
    assert done.returncode == 5
    assert "error: rank 0 ended with exit code 5; its log" in done.stderr
    assert done.stdout.count("can't be written") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--effective_batch=255",), "argument --effective_batch: must be a multiple of 2, the number of processes"),
        (("--effective_batch=64", "--batch_size=auto"), "argument --batch_size: auto tries one process"),
    ],
)
def test_flags_for_single_process_exit_with_usage_code(tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr("ms_accum.ranks.group.own_group", lambda: Group(0, 2))
    settings = settings_of(*flags)
    with pytest.raises(Failure, match=message) as failure:
        steps.join(settings)
    assert failure.value.code == USAGE


def test_only_rank_0_prints(monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    settings = settings_of()
    for rank in (0, 1):
        monkeypatch.setattr("ms_accum.ranks.group.own_group", lambda rank=rank: Group(rank, 2))
        steps.join(settings)
        print(f"I am {rank}")
    sys.stdout.close()
    assert output.getvalue() == "I am 0\n"
