"""A job on two machines trains to the same bytes as on one, and ends on one if the other one is gone.

The machines are network namespaces: own addresses and ports, one kernel and one file system.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import two_hosts, why_no_hosts

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.several]
JOB = ROOT / "tests" / "ranks_machines.py"


@pytest.fixture(scope="module")
def hosts():
    """Two machines, on which nothing runs after the tests."""
    reason = why_no_hosts()
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")
    with two_hosts() as both:
        yield both


def environment():
    """With this interpreter for msrun, which runs the `python` on PATH, and short intervals between attempts."""
    retries = dict.fromkeys(("MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER"), "1")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **retries, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def by_msrun(hosts, number):
    sizes = ("--worker_num=2", "--local_worker_num=1", "--join=True")
    return ["msrun", *sizes, f"--master_addr={hosts[0].address}", f"--node_rank={number}"]


@pytest.fixture
def start(hosts, tmp_path):
    """Start a launcher on each host, in one shared folder, and return their processes."""
    jobs = []

    def start(launch, *program):
        pair = []
        for number, host in enumerate(hosts):
            command = [*launch(hosts, number), f"--log_dir=log{number}", *program]
            with open(tmp_path / f"out{number}", "w", encoding="utf-8") as out:
                pair.append(host.start(*command, cwd=tmp_path, env=environment(), stdout=out, stderr=subprocess.STDOUT))
        jobs.extend(pair)
        return pair

    yield start
    for host in hosts:
        host.kill()
    for job in jobs:
        job.wait()


def output(folder, number):
    return (folder / f"out{number}").read_text(encoding="utf-8")


def results(folder):
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def run_on_one_host(folder):
    command = [sys.executable, "-m", "ms_accum.launch", "--nproc=2", "--log_dir=logs", str(JOB), "."]
    options = {"cwd": folder, "env": environment(), "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, **options, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_machines_train_to_the_same_bytes_as_one(start, once, tmp_path):
    """With the driver, an `Accumulator`, and ZeRO-1 stopped and resumed. Other data on one rank are noticed."""
    jobs = start(by_msrun, str(JOB), ".", "other-data")
    assert [job.wait(timeout=300) for job in jobs] == [0, 0], output(tmp_path, 0)[-2000:]
    seen, expected = results(tmp_path), results(once("one-machine", run_on_one_host))
    assert [rank["rank"] for rank in seen] == [[0, 2], [1, 2]]
    others = [rank.pop("other data") for rank in seen]
    assert seen == expected
    for rank, other in zip(seen, others):
        assert rank["resumed"]["updates"] == [2, 6]
        assert rank["resumed"]["digests"][0] == rank["resumed"]["digests"][1]
        assert other != rank["driver"]
    assert seen[0]["driver"] == seen[1]["driver"] and seen[0]["accumulator"] == seen[1]["accumulator"]
