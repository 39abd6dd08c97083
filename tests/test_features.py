"""docs/features.md: each named test exists, runs in the way of its column, and no cell is missing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import features
from benchmarks.conformance.cases import cases
from benchmarks.conformance.libraries import LIBRARIES, OURS
from benchmarks.features import CONFORMANCE, FEATURES, RANDOM, WAYS, WORDS, No, NotTested, shown_by
from conftest import MODES

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parents[1]
COMPARED = "tests/test_conformance.py"
CELLS = {f"{feature}, {way}": (way, row[way]) for feature, row in FEATURES.items() for way in row}


def strings_of(tree):
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def imports_ways(tree):
    modules = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "ways"]
    return "WAYS" in {alias.name for node in modules for alias in node.names}


def mode_of(function, tree):
    """Return the nearest mark that names a mode, as in conftest.py; without one a test is compiled."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    of_module = [node.value for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    for marks in (function.decorator_list, of_module):
        for node in (inner for mark in marks for inner in ast.walk(mark)):
            if isinstance(node, ast.Attribute) and node.attr in MODES and ast.unparse(node.value) == "pytest.mark":
                return node.attr
    return "default"


def values_of(function, tree):
    """Return the values that parameters of a test may have: those of its decorators, and of what these name."""
    nodes = [node for decorator in function.decorator_list for node in ast.walk(decorator)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and node.id.isupper()}
    values = {text for decorator in function.decorator_list for text in strings_of(decorator)}
    if imports_ways(tree) and "WAYS" in names:
        names.remove("WAYS")
        values |= {*WAYS.values()}
    return values | (strings_of(tree) if names else set())


def faults(way, test):
    """Return what is wrong with a test of a cell."""
    path, _, rest = test.partition("::")
    name, _, values = rest.rstrip("]").partition("[")
    if not (ROOT / path).is_file():
        return [f"no file {path}"]
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found or not name.startswith("test_"):
        return [f"no test {name} in {path}"]
    values = values.split(", ") if values else []
    known = values_of(found[0], tree)
    by_way = "way" in {argument.arg for argument in found[0].args.args}
    columns = {word: column for column, word in WAYS.items()} if by_way else {}
    if path == COMPARED:
        known = {*cases(), *(library.way for library in LIBRARIES if library.name == OURS)}
        columns = {word: column for column, word in CONFORMANCE.items()}
    if test == RANDOM:  # the way is drawn
        known, columns = strings_of(tree), {"accumulator": "loop"}
    wrong = [f"no value {value} of {name}" for value in values if value not in known]
    wrong += [f"{value} is not {way}" for value in values if columns.get(value, way) != way]
    if path == COMPARED and not set(values) & set(columns):
        wrong.append("no way in brackets")
    if way == "jit" and mode_of(found[0], tree) == "host":
        wrong.append(f"{name} compiles nothing")
    return wrong


@pytest.mark.parametrize(("way", "cell"), CELLS.values(), ids=CELLS)
def test_named_tests_exist_and_run_in_their_way(way, cell):
    assert [fault for test in shown_by(cell) for fault in faults(way, test)] == []
    assert isinstance(cell, (No, NotTested)) or shown_by(cell)


def test_each_feature_has_all_ways_and_words_in_both_languages():
    for feature, row in FEATURES.items():
        assert list(row) == list(WAYS), feature
    for words in WORDS.values():
        assert list(words.features) == list(FEATURES) and list(words.ways) == list(WAYS)


def test_reasons_are_in_both_languages():
    reasons = [cell for _, cell in CELLS.values() if isinstance(cell, (No, NotTested))]
    assert reasons and all(bool(cell.english) == bool(cell.chinese) for cell in reasons)
    assert all(cell.english for cell in reasons if isinstance(cell, No))


def test_ways_are_those_of_the_tests():
    tree = ast.parse((ROOT / "tests/ways.py").read_text(encoding="utf-8"))
    (ways,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "WAYS"]
    assert strings_of(ways) == {*WAYS.values()}


EMA = "tests/engine/test_ema.py::test_average_follows_its_definition"
PLANTED = {
    "no file": ("driver", "tests/engine/test_emma.py::test_average_follows_its_definition"),
    "no test": ("driver", "tests/engine/test_ema.py::test_average_follows_nothing"),
    "no value": ("driver", f"{EMA}[chauffeur]"),
    "not in this way": (
        "loop",
        "tests/engine/test_nonfinite.py::test_weight_of_left_out_micro_batch_is_detected[loop]",
    ),
    "another way": ("model", f"{EMA}[loop]"),
    "no case": ("cells", f"{COMPARED}::test_ours_is_right[Cells, clap]"),
    "another way of conformance": ("loop", f"{COMPARED}::test_ours_is_right[Cells, clip]"),
    "no way": ("cells", f"{COMPARED}::test_ours_is_right[clip]"),
    "not compiled": ("jit", "tests/engine/test_noise_scale.py::test_estimate_in_custom_loop"),
    "not compiled, by its file": ("jit", "tests/loss/test_terms.py::test_counts"),
}


@pytest.mark.parametrize(("way", "test"), PLANTED.values(), ids=PLANTED)
def test_wrong_test_of_a_cell_is_detected(way, test):
    assert len(faults(way, test)) == 1


def test_right_test_of_a_cell_is_not():
    assert faults("model", f"{EMA}[step]") == []


@pytest.mark.parametrize("language", WORDS)
def test_table_has_an_answer_for_each_cell_with_an_anchor(language):
    made, words = features.tables(), WORDS[language]
    table, tests = made[f"features{language}"], made[f"features/tests{language}"]
    assert len(table.splitlines()) == 2 + len(FEATURES)
    for line, (feature, row) in zip(table.splitlines()[2:], FEATURES.items()):
        answers = {No: words.no, NotTested: words.not_tested}
        expected = [f"[{answers.get(type(row[way]), words.yes)}](#{feature})" for way in WAYS]
        assert line == f"| {' | '.join([words.features[feature], *expected])} |"
        assert f"**{words.features[feature]}**{{ #{feature} }}\n" in tests
