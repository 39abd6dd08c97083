"""The benchmarks run and write valid rows. No test measures speed."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from benchmarks import speed
from benchmarks.contenders import ENTRIES, OURS, check_same_size
from benchmarks.cost import COMPARED_WITH
from benchmarks.environments import python
from benchmarks.process import Contender, ContenderError
from helpers import gone
from running import ROOT, run_python

PROTOCOL = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks' / 'programs')!r})\nfrom protocol import serve\n"
RECORD = {"benchmark", "date", "machine", "code", "versions", "settings", "rows"}


@pytest.mark.slow
def test_cost_benchmark_runs(tmp_path):
    done = run_python("-m", "benchmarks", "cost", "--short", "--rounds", "1", "--output", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "cost.json").read_text(encoding="utf-8"))
    ratios = {row["piece"]: row.get("ratio") for row in record["rows"]}
    assert {piece for piece, ratio in ratios.items() if ratio} == set(COMPARED_WITH)
    assert set(record) == RECORD and set(COMPARED_WITH.values()) <= set(ratios)


@pytest.mark.slow
def test_lengths_benchmark_runs(tmp_path):
    done = run_python("-m", "benchmarks", "lengths", "--short", "--output", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "lengths.json").read_text(encoding="utf-8"))
    assert set(record) == RECORD
    assert [(row["shapes"], row["graphs"]) for row in record["rows"]] == [(1, 1), (2, 2)]
    assert record["rows"][0]["ratio"] == 1 and record["rows"][1]["padding"] < record["rows"][0]["padding"]


@pytest.mark.slow
def test_speed_benchmark_runs_with_all_available_contenders(tmp_path):
    done = run_python("-m", "benchmarks", "speed", "--short", "--output", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    names = [entry.name for entry in ENTRIES if python(entry.environment)]
    assert set(record) == RECORD and {"ms_accum", "mindspore"} <= set(record["versions"])
    cases = [(row["network"], row["window"], row["contender"]) for row in record["rows"]]
    assert cases == [("mlp", window, name) for window in (1, 2) for name in names]
    for row in record["rows"]:
        (ours,) = (own for own in record["rows"] if own["contender"] == OURS and own["window"] == row["window"])
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"] < float("inf") and [row["ms"]] == row["starts"]
        assert row["ratio"] == row["ms"] / ours["ms"]
    assert ("benchmarks setup" in done.stdout) == (len(names) < len(ENTRIES))


def test_unknown_name_exits_with_code_2_and_one_line():
    done = run_python("-m", "benchmarks", "speed", "--contenders", "pytorch", cwd=ROOT)
    assert done.returncode == 2 and "pytorch" in done.stderr and done.stderr.count("\n") == 1


def test_speed_is_the_median_start_and_ratios_are_those_of_the_medians():
    rows = speed._figures({OURS: [1.0, 2.0, 1.0], "a": [20.0, 2.0, 3.0]})
    assert [(row["ms"], row["ms_min"], row["ms_max"]) for row in rows] == [(1.0, 1.0, 2.0), (3.0, 2.0, 20.0)]
    assert [row["ratio"] for row in rows] == [1.0, 3.0]
    assert speed._figures({"a": [2.0]})[0]["ratio"] is None


@pytest.fixture
def contender(tmp_path):
    """Return a function that makes a contender of a program's text."""

    def make(source, limit=30.0):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return Contender("it", sys.executable, path, limit=limit)

    return make


def echo(build="{'size': 3}", answer="request"):
    return PROTOCOL + f"def answer(**request): return {answer}\nserve(lambda: ({build}, answer))\n"


def test_contender_answers_and_exits(contender):
    with contender(echo()) as running:
        pid = running._process.pid
        assert running.about == {"ready": True, "size": 3}
        assert running.ask(window=2) == {"window": 2}
        assert running.ask(peak=True)["peak_mib"] > 1
    assert gone(pid)


@pytest.mark.parametrize(
    ("source", "limit", "words"),
    [
        ("raise ImportError('torch')", 30, "(?s)'it' died.*ImportError: torch"),
        ("import time; time.sleep(60)", 0.3, "no answer within 0.3 s"),
        ("print('hello')", 30, "said what is no answer: b'hello'"),
    ],
)
def test_program_that_fails_to_start_raises_error(contender, source, limit, words):
    running = contender(source, limit)
    with pytest.raises(ContenderError, match="(?s)" + words.replace("(?s)", "")), running:
        pass
    assert gone(running._process.pid)


def test_contender_ends_when_parent_is_killed(contender, tmp_path):
    (tmp_path / "program.py").write_text(echo(), encoding="utf-8")
    source = f"""
    import os, signal, sys
    from benchmarks.process import Contender
    with Contender("it", sys.executable, {str(tmp_path / "program.py")!r}) as it:
        print(it._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_python("-c", textwrap.dedent(source), cwd=ROOT)
    assert gone(int(done.stdout))


def test_contenders_of_different_sizes_are_rejected():
    check_same_size({"it": 3, "other": 3})
    with pytest.raises(ContenderError, match="'it': 3, 'other': 4"):
        check_same_size({"it": 3, "other": 4})
