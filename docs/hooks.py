"""What MkDocs does in addition to its plugins; mkdocs.yml names this file.

The theme's search is mended in three ways: the reference's source code is not searched, each language has an index of
its own, and words with digits are found.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
OTHER = "zh"  # the language that is not at the root of the site
MENDED = {
    # lunr, which the theme contains, compares nodes of its index by a text that joins letters and numbers of nodes
    # without a separator: where words have digits, different nodes are taken for equal, and a search for "1" fails.
    "e=e+s+o.id": 'e=e+","+s+o.id',
    # Each word finds all that begin with it. Of numbers these are too many: "2 servers" would find pages with figures.
    "(^[+-]|[~^]\\d+$)": "(^[+-]|[~^]\\d+$|^\\d+$)",
    # And a word with a hyphen is two words, as in the index.
    't.trim().split(/"([^"]+)"/g)': r't.trim().replace(/(\w)-(?=\w)/g,"$1 ").split(/"([^"]+)"/g)',
}
"""dict[str, str], what is replaced in the script of the search."""


def on_config(config: Any) -> Any:
    """Link to the project in the header of each page; its address is a line of pyproject.toml."""
    match = re.search(r'^Source = "(\S+)"', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    config.repo_url, config.repo_name = match[1], "Source"  # type: ignore[index]
    return config


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Keep the reference's source code and tables of figures out of the search index: they would fill the results."""
    begins = ['<details class="mkdocstrings-source"']
    if "<!-- table: " in page.markdown:
        begins.append("<table")
    for begin in begins:
        name, _, rest = begin.partition(" ")
        html = html.replace(begin, f"{name} data-search-exclude {rest}".rstrip())
    return html


@event_priority(-200)  # after the plugins, which write the index
def on_post_build(config: Any) -> None:
    """Mend the search of the built site; it is called when each language has been built, and the last call counts."""
    site = Path(config.site_dir)
    for worker in site.glob("assets/javascripts/workers/search.*.js"):
        script = worker.read_text(encoding="utf-8")
        for old, new in MENDED.items():
            if script.count(old) + script.count(new) != 1:
                raise ValueError(
                    f"{worker} is another version of the search: is docs/hooks.py still needed?"
                )
            script = script.replace(old, new)
        worker.write_text(script, encoding="utf-8")
    _split_index(site)
    for page in (site / OTHER).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(
            re.sub(rf'("base": ?"[./]*?)(/{OTHER}/)?"', rf'\1/{OTHER}/"', text, count=1),
            encoding="utf-8",
        )


def _split_index(site: Path) -> None:
    """Write an index for each language: the theme looks for it beside the root of the pages, their `base`."""
    path = site / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    parts: dict[str, list] = {"": [], OTHER: []}
    for entry in index["docs"]:
        is_other = entry["location"].startswith(f"{OTHER}/")
        location = entry["location"][len(OTHER) + 1 :] if is_other else entry["location"]
        parts[OTHER if is_other else ""].append({**entry, "location": location})
    for language, entries in parts.items():
        folder = site / language / "search"
        folder.mkdir(exist_ok=True)
        lang = ["en", OTHER] if language else ["en"]
        made = {**index, "config": {**index["config"], "lang": lang}, "docs": entries}
        (folder / path.name).write_text(
            json.dumps(made, ensure_ascii=False, separators=(",", ":")), encoding="utf-8"
        )
