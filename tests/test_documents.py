"""The tables of docs/ equal the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import documents, forms, performance_tables
from benchmarks import results as results_of
from benchmarks.performance_tables import Goal

ROOT = Path(__file__).resolve().parents[1]


def test_document_tables_equal_results():
    made, used = documents.tables(), set()
    for path in documents.marked():
        text = path.read_text(encoding="utf-8")
        assert documents.filled(text, made) == text, f"{path.name}: python -m benchmarks tables"
        used |= {match[2] for match in documents.MARKED.finditer(text)}
    measured = {name for name, table in made.items() if table != performance_tables.NOTHING}
    assert measured <= used, "every table has its place in a document"


def test_changed_result_changes_table():
    """The check can fail."""
    rows = results_of.rows("avx2-amd", "speed")
    other = [{**row, "ms": row["ms"] + 1} for row in rows]
    _, table = performance_tables.TABLES["speed"]
    assert table(rows) != table(other)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results in which one kind of machine has one record."""
    monkeypatch.setattr(results_of, "RESULTS", tmp_path)
    (tmp_path / "avx512-amd").mkdir()
    key = {"network": "mlp", "window": 16, "batch": 32}
    times = {"ms_accum": 3.0, "ms_accum-untuned": 1.0, "torch": 2.5, "jax-scan": 2.0}
    rows = [{**key, "contender": name, "ms": ms, "ms_worst": 9.0} for name, ms in times.items()]
    record = {"rows": rows, "benchmark": "speed", "date": "2026-11-23T00:00", "versions": {"torch": "2"}}
    machine = {"cores": 2, "cpu": "x"}
    (tmp_path / "avx512-amd" / "speed.json").write_text(json.dumps({**record, "machine": machine}), encoding="utf-8")
    return tmp_path


def test_goal_table_shows_figure_of_each_machine(results):
    lines = performance_tables.tables()["goals"].splitlines()
    (mlp,) = [line for line in lines if line.startswith("| mlp, N=16")]
    assert mlp == "| mlp, N=16: time / best peer's | ≤ 1.50 | 1.50 | not measured | not measured |"


def test_missed_goal_is_marked(monkeypatch):
    goal = Goal("x", 1.0, lambda find_rows: find_rows("speed")[0]["ms"])
    monkeypatch.setattr(performance_tables, "GOALS", (goal,))
    (line,) = performance_tables._goals({"avx2-amd": lambda name: [{"ms": 1.01}]}).splitlines()[2:]
    assert line == "| x | ≤ 1.00 | **1.01**, missed |"


def speed_line(first, second):
    """The first table's line about a network, as from these times on two machines, each for windows of 4 and 16."""

    def find_rows_of(times):
        rows = [
            {"network": "mlp", "window": window, "contender": name, "ms": ms}
            for window in (4, 16)
            for name, ms in times.items()
        ]
        return lambda benchmark: rows if benchmark == "speed" else []

    words = performance_tables.WORDS[""]
    table = performance_tables._speed_of_all(((find_rows_of(first), find_rows_of(second)), words))
    return table.splitlines()[2]


FIRST = {"ms_accum": 1.0, "ms_accum-untuned": 8.0, "tutorial-functional": 16.0, "boost": 4.0, "torch": 2.0}
SECOND = {"ms_accum": 3.0, "ms_accum-untuned": 6.0, "tutorial-functional": 4.0, "boost": 6.0, "torch-compile": 1.5}


def test_speed_compares_with_best_peer_and_shows_worst_machine():
    """Ours is compared with MindSpore's own under MindSpore's settings, and each machine's times with its own."""
    assert speed_line(FIRST, SECOND) == "| mlp " + 2 * "| 1.0–3.0 | 1.50–2.00 | 0.50–2.00 " + "|"


def test_selective_figures_are_detected(monkeypatch):
    right = speed_line(FIRST, SECOND)
    assert speed_line(FIRST, FIRST) != right
    monkeypatch.setattr(performance_tables, "OWN", ("tutorial-functional",))
    assert speed_line(FIRST, SECOND) != right
    monkeypatch.undo()
    monkeypatch.setattr(performance_tables, "UNTUNED", "ms_accum")
    assert speed_line(FIRST, SECOND) != right


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("docs/performance.md", r"on AVX-512 these make LeNet5 (\d+) to (\d+) times as fast"),
        ("docs/performance.zh.md", r"在 AVX-512 上，这两个变量使 LeNet5 快 (\d+) 到 (\d+) 倍"),
    ],
)
def test_speedup_of_variables_equals_measurement(page, sentence):
    factors = []
    for machine in ("avx512-amd", "avx512-intel"):
        rows = [row for row in results_of.rows(machine, "speed") if row["network"] == "lenet5" and row["window"] > 2]
        times = {(row["contender"], row["window"]): row["ms"] for row in rows}
        factors += [times["ms_accum-untuned", window] / times["ms_accum", window] for window in (4, 16)]
    least, most = map(int, re.search(sentence, (ROOT / page).read_text(encoding="utf-8")).groups())
    assert (round(min(factors)), round(max(factors))) == (least, most)


def ranges(name, column, networks):
    """Return the least and the most in a column of a table that has ranges."""
    lines = [line.split("|") for line in performance_tables.tables()[name].splitlines()[2:]]
    cells = [cells[column] for cells in lines if cells[1].strip() in networks]
    found = [float(number) for cell in cells for number in re.findall(r"[\d.]+", cell)]
    return min(found), max(found)


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/performance.zh.md"])
def test_answer_of_the_page_equals_its_tables(page):
    answer = (ROOT / page).read_text(encoding="utf-8").partition("<!-- table")[0]
    lines = [re.sub(r"\(.*?\)|（.*?）", "", line) for line in answer.splitlines() if line.startswith("- ")]
    numbers = [[float(number) for number in re.findall(r"\d\.\d", line)] for line in lines[:4]]
    small, all_networks = ("lenet5", "mlp", "transformer, forms for CPU"), ("lenet5", "mlp", "transformer", "mlp50m")
    cost = [ranges("readme/cost", column, all_networks) for column in (2, 3)]
    with_operators = max(
        ranges("avx512-amd/cost", column, ("update / plain with optimizer",))[1] for column in range(2, 6)
    )
    speed = {column: ranges("speed", column, (*small, "mlp50m")) for column in (3, 6)}
    torch = {names: [ranges("speed", column, names) for column in (4, 7)] for names in (small, ("mlp50m",))}
    ratios = [(1 / max(most for _, most in both), 1 / min(least for least, _ in both)) for both in torch.values()]
    expected = [
        cost[0],
        (*cost[1], with_operators),
        (min(least for least, _ in speed.values()), max(most for _, most in speed.values())),
        (*ratios[0], *ratios[1]),
    ]
    assert numbers == [[round(number, 1) for number in row] for row in expected]


def test_unmeasured_tables_are_marked(results):
    made = performance_tables.tables()
    assert made["avx2-amd/speed"] == made["avx512-amd/cost"] == "Not measured on this machine.\n"
    assert "| ms_accum | 3.0 (9.0) |" in made["avx512-amd/speed"]


@pytest.mark.parametrize(
    ("maker", "flags", "folder"),
    [
        ("AuthenticAMD", "sse2 avx2 avx512f", "avx512-amd"),
        ("GenuineIntel", "sse2 avx2", "avx2-intel"),
        ("Someone", "avx2", "avx2"),
    ],
)
def test_machine_kind_names_results_folder(monkeypatch, maker, flags, folder):
    monkeypatch.setattr(results_of, "_first", lambda path, key: {"vendor_id": maker, "flags": flags}[key])
    assert results_of.kind() == folder


def test_each_form_has_a_chinese_name():
    """Code is the same in both languages."""
    rows = results_of.rows("avx512-amd", "forms")
    kept = {row[key] for row in rows for key in ("block", "form")} - set(forms.WORDS[".zh"].names)
    code = {"nn.LayerNorm", "nn.GELU(False)", "nn.CrossEntropyLoss", "SoftmaxCrossEntropyWithLogits"}
    assert kept == code | {"pool(relu(x))", "relu(pool(x))"}
