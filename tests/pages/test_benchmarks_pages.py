"""The figures of the pages are those of the results."""

from __future__ import annotations

import re
import shutil

import pytest

from benchmarks import pages, results
from benchmarks.conformance import page

ROOT = pages.ROOT
TABLE = re.compile(r"<!-- table: (\S+) -->\n\n(.*?)\n<!-- end -->", re.DOTALL)
MADE = pages.tables()
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in pages.pages()}
WITH_FIGURES = [name for name in TEXTS if name != "docs/reference/commands.md"]


def uneven(text):
    """Return the tables whose lines do not have as many cells as their head."""
    tables = {name: table.replace("\\|", "").splitlines() for name, table in TABLE.findall(text)}
    return [name for name, lines in tables.items() if len({line.count("|") for line in lines}) > 1]


@pytest.mark.parametrize("name", WITH_FIGURES)
def test_figures_are_those_of_the_results(name):
    assert pages.filled(TEXTS[name], MADE) == TEXTS[name]
    assert uneven(TEXTS[name]) == []


def test_every_table_is_in_a_page_and_in_both_languages():
    found = {name: {table for table, _ in TABLE.findall(text)} for name, text in TEXTS.items()}
    assert set().union(*found.values()) == {*MADE, *(f"help/{name}" for name in pages.PROGRAMS)}
    chinese = [name for name in found if ".zh." in name or "_CN" in name]
    assert len(chinese) == 5
    assert all(found[name] == found[name.replace(".zh", "").replace("_CN", "")] for name in chinese)


def test_help_of_the_programs_is_as_printed():
    text = TEXTS["docs/reference/commands.md"]
    assert pages.filled(text, pages.helps()) == text


def test_code_that_was_measured_is_told_from_changed_code(monkeypatch, tmp_path):
    now = results.code()
    shutil.copytree(ROOT / "ms_accum", tmp_path / "ms_accum")
    monkeypatch.setattr(results, "__file__", str(tmp_path / "benchmarks" / "results.py"))
    assert results.code()["digest"] == now["digest"]
    with (tmp_path / "ms_accum" / "engine" / "window.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert results.code()["digest"] != now["digest"]
    record = {"benchmark": "x", "date": "2026-11-28T07", "machine": {"cores": 2, "cpu": "it", "instructions": "avx2"}}
    monkeypatch.setattr(pages, "records", lambda: [{**record, "code": now, "versions": {}}])
    monkeypatch.setattr(pages, "code", lambda: now)
    assert list(pages._runs()) == [["x", "2026-11-28", now["commit"], "✓", "it, 2, avx2", ""]]
    monkeypatch.setattr(pages, "code", results.code)
    assert list(pages._runs())[0][3] == "–"


def cell(library, way, verdict, error, **more):
    return {"case": "clip", "library": library, "way": way, "verdict": verdict, "error": error, **more}


def test_each_library_counts_by_its_best_way(monkeypatch):
    monkeypatch.setattr(page, "README", ("clip",))
    cells = {"case": "clip", "library": "ms_accum", "way": "Cells", "verdict": "cannot", "words": "no clip"}
    ours = [cell("ms_accum", "driver", "right", 1e-7), cells]
    others = [
        cell("Composer", "", "off", 0.5),
        cell("Composer", "with accumulate_train_batch_on_tokens", "right", 1e-6),
        cell("Lightning", "", "warns", 0.2),
        cell("fastai", "", "silent", 0.4),
        cell("Keras", "", "off", 9.0, by_design="documented"),
        cell("MindSpore", "2.x tutorial", "off", 9.0),
        cell("right loop", "", "right", 1e-8),
    ]
    assert list(page._readme({"clip": ours + others})) == [["clip", "2 / 3", "30%", "1e-07; Cells –"]]
    best, folded = (list(table) for table in page._best_first(others))
    assert folded == [["Composer", 0, 1, 0, 0, 0, 0]]
    assert ["Composer, with accumulate_train_batch_on_tokens", 1, 0, 0, 0, 0, 0] in best
    assert ["Lightning", 0, 0, 1, 0, 0, 0] in best and ["Keras", 0, 0, 0, 1, 0, 0] in best
