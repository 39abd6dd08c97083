"""Random programs of training, in all ways, compared with a simulator.

Sizes, tails, weights, terms, policies, scales, averages, optimizers, NaN in random micro-batches; between the runs
stops, flushes, clears, and changes of the weights. Hypothesis prints the smallest program that fails; the header of the
test run has its seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import data

from random_programs import WAYS, programs
from systems import check_program

SEED = int(os.environ["MS_ACCUM_SEED"])
PROGRAMS, MORE_PROGRAMS = 35, 150  # of each way, operator by operator
COMPILED, MORE_COMPILED = 1, 8
ON_RANKS, MORE_ON_RANKS = 6, 60

pytestmark = pytest.mark.filterwarnings(
    "ignore:For 'AccumulatedTrainStep', .* skipped in epoch:RuntimeWarning",
    "ignore:For 'SaveStates', the resumed run stopped before the end of epoch:RuntimeWarning",
)


def run_programs(way, count, folder, compiled=False):
    """Run this number of random programs; what fails is shrunk unless each try would be compiled."""
    phases = [Phase.generate] if compiled else [Phase.generate, Phase.shrink]
    options = {"max_examples": count, "phases": phases, "deadline": None, "database": None, "print_blob": False}

    @seed(SEED)
    @settings(**options, suppress_health_check=list(HealthCheck))
    @given(data())
    def run(drawn):
        program = drawn.draw(programs(way, compiled))
        check_program(program, Path(tempfile.mkdtemp(dir=folder)))

    run()


@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_random_programs_match_the_simulator(way, tmp_path):
    run_programs(way, PROGRAMS, tmp_path)


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_more_random_programs_match_the_simulator(way, tmp_path):
    run_programs(way, MORE_PROGRAMS, tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_random_programs_match_the_simulator(way, tmp_path):
    run_programs(way, COMPILED, tmp_path, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_more_compiled_random_programs_match_the_simulator(way, tmp_path):
    run_programs(way, MORE_COMPILED, tmp_path, compiled=True)


@pytest.mark.slow
@pytest.mark.graph
@pytest.mark.parametrize("way", WAYS)
def test_random_programs_match_the_simulator_in_graph_mode(way, tmp_path):
    run_programs(way, MORE_COMPILED, tmp_path, compiled=True)


def run_on_ranks(ranks, count, folder):
    """Run random programs on several ranks, in one job; see ranks_any_window.py."""
    job = Path(__file__).with_name("ranks_any_window.py")
    command = [sys.executable, "-m", "ms_accum.launch", f"--nproc={ranks}", "--log_dir=logs", str(job), str(count)]
    environment = {**os.environ, "PYTHONPATH": str(job.parents[1]), "MS_JIT": "0"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert json.loads((folder / "ran.json").read_text()) == count


@pytest.mark.several
def test_random_programs_on_two_ranks_match_the_simulator(tmp_path):
    run_on_ranks(2, ON_RANKS, tmp_path)


@pytest.mark.slow
@pytest.mark.several
@pytest.mark.parametrize("ranks", [3])
def test_more_random_programs_on_ranks_match_the_simulator(ranks, tmp_path):
    run_on_ranks(ranks, MORE_ON_RANKS, tmp_path)
