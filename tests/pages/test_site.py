"""The site has every public name and one name for each page, in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import model_zoo
import ms_accum

pytestmark = pytest.mark.usefixtures("eager")
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAV = re.findall(r"^ +- (?:(.+): )?(\S+\.md)$", CONFIG[CONFIG.index("\nnav:") :], re.MULTILINE)
CHINESE = dict(re.findall(r"^ {12}(.+): (.+)$", CONFIG, re.MULTILINE))
OTHERWISE = ("index.md", "reference/index.md")  # short names in the menu


def heading(page):
    """Return the title of a page, or None."""
    match = re.search(r"^# (.+?)(?: \{.*\})?$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return match and match[1]


def test_every_public_name_has_a_page_and_is_in_the_index():
    pages = {path for _, path in NAV}
    for index in ("index.md", "index.zh.md"):
        text = (DOCS / "reference" / index).read_text(encoding="utf-8")
        assert set(re.findall(r"^\| \[`(\w+)`\]\(\1\.md\)", text, re.MULTILINE)) == {*ms_accum.__all__, "native"}
        named = set(re.findall(r"^\| \[`(\w+)`\]\(zoo\.md#model_zoo\.\1\)", text, re.MULTILINE))
        assert named == {name for name in model_zoo.__all__ if callable(getattr(model_zoo, name))}
        zoo = (DOCS / "reference" / "zoo.md").read_text(encoding="utf-8")
        assert named == set(re.findall(r"^::: model_zoo\.(\w+)", zoo, re.MULTILINE))
    for name in ms_accum.__all__:
        assert f"reference/{name}.md" in pages
        text = (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
        assert text.startswith(f"::: ms_accum.{name}\n")


@pytest.mark.parametrize(("title", "path"), [entry for entry in NAV if entry[1] not in OTHERWISE])
def test_page_has_one_name(title, path):
    page = DOCS / path
    assert heading(page) in (title, None)  # of a page of the reference the name is its heading
    other = page.with_suffix(".zh.md")
    assert not other.exists() or heading(other) == CHINESE[title]
