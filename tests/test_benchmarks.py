"""The benchmarks run and write valid rows. No test measures speed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import ranks, speed
from benchmarks.contenders import ENTRIES, OURS, available, check_same_size, start
from benchmarks.cost import COMPARED_WITH
from benchmarks.environments import python
from benchmarks.process import Contender, ContenderError
from benchmarks.results import code, machine, save

ROOT = Path(__file__).resolve().parents[1]
PROTOCOL = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks' / 'programs')!r})\nfrom protocol import serve\n"
RECORD = {"benchmark", "date", "machine", "code", "versions", "settings", "rows"}


def benchmark(name, output, *options):
    """Run a benchmark as a user does, and return its record and what it printed."""
    command = [sys.executable, "-m", "benchmarks", name, "--short", "--output", str(output), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((output / f"{name}.json").read_text(encoding="utf-8")), done.stdout


def check_speed(record, contenders):
    assert set(record) == RECORD
    assert record["settings"]["windows"] == [1, 2]
    cases = [(row["network"], row["window"], row["contender"]) for row in record["rows"]]
    assert cases == [("mlp", window, name) for window in (1, 2) for name in contenders]
    for row in record["rows"]:
        ours = next(o for o in record["rows"] if o["contender"] == OURS and o["window"] == row["window"])
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"] < float("inf") and [row["ms"]] == row["starts"]
        assert row["ratio"] == row["ms"] / ours["ms"]


@pytest.mark.slow
def test_memory_benchmark_runs(tmp_path):
    record, _ = benchmark("memory", tmp_path, "--contenders", OURS)
    assert set(record) == RECORD
    cases = [(row["window"], row["batch"], row["micro_batches"]) for row in record["rows"]]
    assert cases == [(1, 32, 3), (2, 32, 6), (1, 64, 3), (4, 32, 100), (4, 32, 200)]
    first, second = record["rows"][:2]
    assert all(100 < row["peak_mib"] < 10_000 for row in record["rows"])
    assert first["set_mib"] == pytest.approx(669_706 * 4 / 2**20)
    assert second["more_sets"] == pytest.approx((second["peak_mib"] - first["peak_mib"]) / first["set_mib"])
    assert first["more_sets"] == 0


@pytest.mark.slow
def test_cost_benchmark_runs(tmp_path):
    record, _ = benchmark("cost", tmp_path, "--rounds", "1")
    assert set(record) == RECORD
    ratios = {row["piece"]: row.get("ratio") for row in record["rows"]}
    assert {piece for piece, ratio in ratios.items() if ratio} == set(COMPARED_WITH)
    assert set(COMPARED_WITH.values()) <= set(ratios)


@pytest.mark.slow
def test_lengths_benchmark_runs(tmp_path):
    record, _ = benchmark("lengths", tmp_path)
    assert set(record) == RECORD
    assert [(row["shapes"], row["graphs"]) for row in record["rows"]] == [(1, 1), (2, 2)]
    assert record["rows"][0]["ratio"] == 1 and record["rows"][1]["padding"] < record["rows"][0]["padding"]


@pytest.mark.slow
def test_speed_benchmark_runs_with_all_available_contenders(tmp_path):
    record, printed = benchmark("speed", tmp_path)
    names = [entry.name for entry in ENTRIES if python(entry.environment)]
    check_speed(record, names)
    assert {"ms_accum", "mindspore"} <= set(record["versions"])
    assert all(row["ratio"] == 1 for row in record["rows"] if row["contender"] == OURS)
    assert ("benchmarks setup" in printed) == (len(names) < len(ENTRIES))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["speed", "--contenders", "pytorch"], "pytorch"), (["memory", "--networks", "resnet"], "resnet")],
)
def test_unknown_name_exits_with_code_2_and_one_line(arguments, word):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value"), [("contenders", ["torch"]), ("networks", ["resnet"]), ("windows", [1, 4])]
)
def test_options_that_ranks_has_not_are_rejected(option, value):
    options = dict.fromkeys(("networks", "windows", "contenders", "rounds", "short"))
    with pytest.raises(ValueError, match=f"--{option}"):
        ranks.run(Namespace(**{**options, option: value}))


@pytest.mark.parametrize("arguments", [["--help"], ["speed", "--help"]])
def test_help_is_printed(arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "milliseconds per micro-batch" in done.stdout


def test_missing_environment_is_reported_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.contenders.python", lambda kind: "python" if kind == "mindspore" else None)
    assert {entry.environment for entry in available(ENTRIES, None)} == {"mindspore"}
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["without torch and jax, not set up here: run 'python -m benchmarks setup'"]
    with pytest.raises(ContenderError, match="benchmarks setup"):
        start(ENTRIES[-1])


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


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_contender_answers_and_exits(contender):
    with contender(echo()) as running:
        pid = running._process.pid
        assert running.about == {"ready": True, "size": 3}
        assert running.ask(window=2) == {"window": 2}
        assert running.ask(peak=True)["peak_mib"] > 1
    assert is_gone(pid)


@pytest.mark.parametrize(
    ("source", "limit", "words"),
    [
        ("import sys; sys.exit('no such thing')", 30, "'it' died.*no such thing"),
        ("raise ImportError('torch')", 30, "(?s)'it' died.*ImportError: torch"),
        ("import time; time.sleep(60)", 0.3, "no answer within 0.3 s"),
        ("print('hello')", 30, "said what is no answer: b'hello'"),
        ("print('[1, 2]')", 30, "said what is no answer"),
        ("print('half a line', end='')", 30, "'it' died"),
    ],
)
def test_program_that_fails_to_start_raises_error(contender, source, limit, words):
    running = contender(source, limit)
    with pytest.raises(ContenderError, match="(?s)" + words.replace("(?s)", "")), running:
        pass
    assert is_gone(running._process.pid)


def test_contender_ends_when_parent_is_killed(contender, tmp_path):
    (tmp_path / "program.py").write_text(echo(), encoding="utf-8")
    source = f"""
    import os, signal, sys
    from benchmarks.process import Contender
    with Contender("it", sys.executable, {str(tmp_path / "program.py")!r}) as it:
        print(it._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    deadline = time.monotonic() + 10
    while not is_gone(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(int(done.stdout))


def test_contenders_of_different_sizes_are_rejected():
    check_same_size({"it": 3, "other": 3})
    with pytest.raises(ContenderError, match="'it': 3, 'other': 4"):
        check_same_size({"it": 3, "other": 4})


def test_saved_record_contains_machine(tmp_path):
    path = save("speed", tmp_path / "new", [{"ms": 1.5}], {"rounds": 2}, {"torch": "1"})
    record = json.loads(path.read_text(encoding="utf-8"))
    assert set(record) == RECORD
    assert record["rows"] == [{"ms": 1.5}]
    assert record["machine"] == machine() and record["code"] == code()
    assert record["machine"]["cores"] >= 1
