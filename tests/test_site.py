"""The documents: both languages alike, all pages in the site, short, and in plain English."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import model_zoo
import ms_accum
from benchmarks import documents

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ENGLISH = sorted(path for path in DOCS.glob("**/*.md") if not path.name.endswith(".zh.md"))
PAIRS = [(ROOT / "README.md", ROOT / "README_CN.md")]
PAIRS += [(path, path.with_suffix(".zh.md")) for path in ENGLISH if path.parent.name != "reference"]

# Words to avoid: what a stranger has to read twice, or code that acts like a person.
AVOIDED = {
    r"deal(s|t)? out|dealt-out": "shard",
    r"\bspeaks?\b|\btells?\b|\bis told\b": "communicate, print",
    r"\bgo(es)? on\b": "resume, continue",
    r"\bat hand\b": "available",
    r"\brefus(e|es|ed|al)\b": "reject, raise an error",
    r"\bas many\b": "the same number of",
    r"\bwithout a word\b": "silently",
    r"\bnobody\b|\bwhoever\b|\bwho wants\b": "name the person or the thing",
    r"\bset(s)? of parameters\b|\bparameter sets?\b": "model size",
    r"\bknows\b": "code knows nothing",
}


def read(path):
    return path.read_text(encoding="utf-8")


def fences(text):
    return re.findall(r"^```[^\n]*\n.*?^```", text, re.MULTILINE | re.DOTALL)


def skeleton(text):
    """Return what the two languages of a page have in common: headings' levels, code, rows of tables, tables' marks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)]
    rows = len(re.findall(r"^\|", prose, re.MULTILINE))
    return levels, fences(text), rows, re.findall(r"<!-- .* -->", text.replace(".zh -->", " -->"))


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda path: str(path.relative_to(ROOT)))
def test_both_languages_have_same_structure(english, chinese):
    mine, theirs = skeleton(read(english)), skeleton(read(chinese))
    for part, first, second in zip(("headings", "code", "rows of tables", "marks"), mine, theirs):
        assert first == second, part


@pytest.mark.parametrize("chinese", [chinese for _, chinese in PAIRS], ids=lambda path: str(path.relative_to(ROOT)))
def test_chinese_page_is_mostly_chinese(chinese):
    code = r"^```(?s:.*?)^```|^\|[^\n]*$|^\[[^\n]*$|`[^`\n]*`|\]\([^)]*\)|<!--[^\n]*-->"
    prose = re.sub(code, "", read(chinese), flags=re.MULTILINE)
    assert len(re.findall(r"[\u4e00-\u9fff]", prose)) > len(re.findall(r"[A-Za-z]+", prose))


# Heads of tables that are names or units in both languages.
NAMES = re.compile(r"[\w`.-]*|[\w`-]+, N=\d+|N=\d+, (ms|MiB)|N=\d+: ms|/ [\w'-]+|import \w+|\W*")


def english_heads(page):
    """Return the heads of a Chinese page's generated tables that are words, but not Chinese."""
    tables = re.findall(r"<!-- table: \S+ -->\n\n(\|.*)", page)
    heads = [head.strip() for table in tables for head in table.strip("|").split("|")]
    return [head for head in heads if not re.search(r"[\u4e00-\u9fff]", head) and not NAMES.fullmatch(head)]


@pytest.mark.parametrize("chinese", [chinese for _, chinese in PAIRS], ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_of_figures_are_in_chinese(chinese):
    assert english_heads(read(chinese)) == []


def test_english_head_in_a_chinese_page_is_found():
    assert english_heads("<!-- table: a -->\n\n| network | 网络 | ms per update | N=4, MiB |\n") == ["ms per update"]


# A break between two of them shows as a blank.
CHINESE = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
BREAK = re.compile(rf"{CHINESE}\*{{0,2}} *\n[ \t]*\*{{0,2}}(?!\d+\. |- |\|)\[?{CHINESE}")


@pytest.mark.parametrize("chinese", [chinese for _, chinese in PAIRS], ids=lambda path: str(path.relative_to(ROOT)))
def test_chinese_sentences_have_no_line_breaks(chinese):
    assert BREAK.findall(re.sub(r"^```(?s:.*?)^```", "", read(chinese), flags=re.MULTILINE)) == []


def test_line_break_in_chinese_is_detected():
    for text in ("窗口，\n梯度", "窗口\n  **梯度", "窗口\n[梯度](x)"):
        assert BREAK.search(text)
    for text in ("窗口\n\n梯度", "窗口\n- 梯度", "窗口\n1. 梯度", "N=1\n梯度"):
        assert not BREAK.search(text)


def test_site_check_names_what_is_not_found():
    spec = importlib.util.spec_from_file_location("site_check", DOCS / "site_check.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    sections = [{"title": "早停\u200b与\u200b学习率", "text": "<code>resume</code>, early"}]
    index = {"config": {"separator": r"[\s\u200b,]+"}, "docs": sections}
    assert check.not_found(index, ["早停", "学习率", "resume", "断点续训"]) == ["断点续训"]
    index["config"]["separator"] = r"[\s,]+"
    assert check.not_found(index, ["早停", "early"]) == ["早停"]


def test_different_page_structure_is_detected():
    page = "# A\n\n## B\n\n```python\nx = 1\n```\n\n| a |\n|---|\n<!-- table: t -->\n"
    for other in (
        page.replace("## B", "### B"),
        page.replace("x = 1", "x = 2"),
        page + "| b |\n",
        page.replace("table: t", "table: u"),
    ):
        assert skeleton(page) != skeleton(other)
    assert skeleton(page) == skeleton(page.replace("A", "甲"))


def words(text):
    return len(text.split())


def test_readme_is_short():
    assert words(read(ROOT / "README.md")) <= 900


# One wording: what is supported, what each commit is tested with, and when the rest was.
ENGLISH_VERSIONS = (
    r"(Commits|commits) are tested with (Python )?3\.11 and (MindSpore )?2\.10\.0"
    r".* were last run {} November 2026"
)
CHINESE_VERSIONS = (
    r"每次提交都用 Python 3\.11 与 MindSpore 2\.10\.0 测试.*(其他|2\.7\.2).*"
    r"最近一次测试是在 2026 年 11 月{}"
)
VERSIONS = {
    "README.md": ENGLISH_VERSIONS.format("in"),
    "docs/limits.md": ENGLISH_VERSIONS.format("on 26"),
    "README_CN.md": CHINESE_VERSIONS.format("。"),
    "docs/limits.zh.md": CHINESE_VERSIONS.format(" 26 日"),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_documented_versions_equal_package(name):
    project = read(ROOT / "pyproject.toml")
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    low, minor = re.search(r'"mindspore>=([\d.]+),<2\.(\d+)"', project).groups()
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", read(ROOT / name))
    prose = " ".join(text.split()).replace(" 到 ", " to ")
    assert f"Python {pythons[0]} to {pythons[-1]}" in prose and f"MindSpore {low} to 2.{int(minor) - 1}" in prose
    assert re.search(VERSIONS[name], prose)


def pages_of(entry):
    """Yield the files that an entry of the navigation names."""
    for item in entry.values() if isinstance(entry, dict) else entry:
        if isinstance(item, str):
            yield item
        else:
            yield from pages_of(item)


def test_every_page_is_in_navigation():
    settings = yaml.safe_load(read(ROOT / "mkdocs.yml"))
    assert sorted(pages_of(settings["nav"])) == sorted(str(path.relative_to(DOCS)) for path in ENGLISH)


def test_every_public_name_is_in_reference():
    pages = "\n".join(map(read, DOCS.glob("reference/*.md")))
    documented = re.findall(r"^::: (\S+)", pages, re.MULTILINE)
    public = [f"ms_accum.{name}" for name in ms_accum.__all__] + [f"model_zoo.{name}" for name in model_zoo.__all__]
    public.append("ms_accum.native.available")  # in a module of its own
    constants = {f"model_zoo.{name}" for name in model_zoo.__all__ if not callable(getattr(model_zoo, name))}
    assert sorted(documented) == sorted(set(public) - constants)


def test_dead_links_are_found(tmp_path):
    spec = importlib.util.spec_from_file_location("site_check", DOCS / "site_check.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<h2 id="here">', encoding="utf-8")
    links = ("b/", "b/#here", "#top", "https://x/y", "/b/", "b/#gone", "c/", "#gone")
    anchors = "".join(f'<a class="x" href="{link}">' for link in links)
    (tmp_path / "index.html").write_text(f'<p id="top">{anchors}', encoding="utf-8")
    assert check.dead_links(tmp_path) == [f"index.html: {link}" for link in ("b/#gone", "c/", "#gone")]


def test_pictures_equal_script_output():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    of_results = documents.pictures()
    drawn = {path.name: read(path) for path in draw.IMAGES.glob("*.svg") if path.name not in of_results}
    assert drawn == draw.pictures(), "python docs/draw.py"
    project = read(ROOT / "pyproject.toml")
    assert draw.badges(project) != draw.badges(project.replace("3.12", "3.13"))


def test_pictures_of_results_equal_results():
    for name, picture in documents.pictures().items():
        assert read(DOCS / "images" / name) == picture, "python -m benchmarks tables"


def test_package_page_has_complete_links():
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    text = setup.with_addresses("![a](b.svg) [c](d/e.md#f) [g](https://h) [i](#j)", "https://k")
    assert text == "![a](https://k/raw/main/b.svg) [c](https://k/blob/main/d/e.md#f) [g](https://h) [i](#j)"
    readme = setup.with_addresses(read(ROOT / "README.md"), setup.source())
    assert setup.source().startswith("https://")
    assert {link for link in re.findall(r"\]\(([^)]*)\)", readme) if not link.startswith(("https://", "#"))} == set()


# Plain English


def avoided(text):
    """Return the words of a text that are to be avoided, with better ones."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return [f"{match[0]!r}: {better}" for words, better in AVOIDED.items() for match in re.finditer(words, prose, re.I)]


@pytest.mark.parametrize(
    "path", [path for path in [*ROOT.glob("*.md"), *ENGLISH] if path.name != "README_CN.md"], ids=lambda path: path.name
)
def test_documents_use_plain_english(path):
    assert avoided(read(path)) == []


SOURCES = [*ROOT.glob("ms_accum/**/*.py"), *ROOT.glob("model_zoo/**/*.py"), *ROOT.glob("examples/*.py")]


@pytest.mark.parametrize("path", [*SOURCES, ROOT / "train.py", ROOT / "eval.py"], ids=lambda path: str(path.name))
def test_docstrings_and_messages_use_plain_english(path):
    texts = [node.value for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.Constant)]
    assert [finding for text in texts if isinstance(text, str) for finding in avoided(text)] == []


def test_avoided_words_are_detected():
    text = "It is refused, and `refused` is code.\n```\nrefused\n```\n"
    assert avoided(text) == ["'refused': reject, raise an error"]
    assert avoided("The run goes on.") and not avoided("The run continues.")
