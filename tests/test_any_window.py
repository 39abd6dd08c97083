"""Random programs of training, in all ways, compared with a simulator.

Sizes, tails, weights, terms, policies, scales, averages, optimizers, parameter groups, float16, NaN in random
micro-batches; between the runs stops, flushes, clears, and changes of the weights and sizes. The fast part runs the
programs of fixed seeds, with which each fault of faults.py that they can find is found; the long part others each time.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from any_window import check_seeds
from random_programs import WAYS
from running import run_python

FIXED = {way: [*range(35)] for way in WAYS}
FIXED["driver"].append(804449557)  # a lone micro-batch with terms is left out
FIXED["step"].append(6000251)  # a window of one whose loss is infinite is left out
COMPILED = {**dict.fromkeys(WAYS, [0]), "driver": [5], "accumulator": [0, 27]}  # 27 has terms
ON_RANKS = 0, 12
MORE, MORE_COMPILED, MORE_ON_RANKS = 150, 8, 60

pytestmark = pytest.mark.filterwarnings(
    "ignore:For 'AccumulatedTrainStep', .* skipped in epoch:RuntimeWarning",
    "ignore:For 'SaveStates', the resumed run stopped before the end of epoch:RuntimeWarning",
)


def fresh(count):
    """Return this number of seeds that have not been tried."""
    first = random.SystemRandom().randrange(10**6, 10**9)  # `set_seed` of each test seeds the others
    return range(first, first + count)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
def test_random_programs_match_the_simulator(way, tmp_path):
    check_seeds(way, FIXED[way], tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
def test_more_random_programs_match_the_simulator(way, tmp_path):
    check_seeds(way, fresh(MORE), tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_random_programs_match_the_simulator(way, tmp_path):
    check_seeds(way, COMPILED[way], tmp_path, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_more_compiled_random_programs_match_the_simulator(way, tmp_path):
    check_seeds(way, fresh(MORE_COMPILED), tmp_path, compiled=True)


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("way", WAYS)
def test_random_programs_match_the_simulator_in_graph_mode(way, tmp_path):
    check_seeds(way, fresh(MORE_COMPILED), tmp_path, compiled=True)


def run_on_ranks(ranks, first, count, folder, groups=1):
    """Run the programs of these seeds on several ranks, in one job; see ranks_any_window.py."""
    job = Path(__file__).with_name("ranks_any_window.py")
    launcher = ["-m", "ms_accum.launch", f"--nproc={ranks}", "--log_dir=logs"]
    done = run_python(*launcher, job, first, count, groups, cwd=folder, MS_JIT="0")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert [json.loads((folder / f"ran{number}.json").read_text()) for number in range(groups)] == [count] * groups


@pytest.mark.ranks
def test_random_programs_on_two_ranks_match_the_simulator(tmp_path):
    run_on_ranks(2, *ON_RANKS, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_random_programs_in_two_groups_match_the_simulator(tmp_path):
    run_on_ranks(4, *ON_RANKS, tmp_path, groups=2)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [3])
def test_more_random_programs_on_ranks_match_the_simulator(ranks, tmp_path):
    run_on_ranks(ranks, fresh(1)[0], MORE_ON_RANKS, tmp_path)
