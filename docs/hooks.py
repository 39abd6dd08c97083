"""What MkDocs does in addition to its plugins; mkdocs.yml names this file.

The theme's search is mended in three ways: the reference's source code is not searched, each language has an index of
its own, which has the English pages where there is no translation, and words with digits are found. Pages show the
version and the notebook.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[1]
OTHER = "zh"  # the language that is not at the root of the site
MENDED = {
    # lunr, which the theme contains, compares nodes of its index by a text that joins letters and numbers of nodes
    # without a separator: where words have digits, different nodes are taken for equal, and a search for "1" fails.
    "e=e+s+o.id": 'e=e+","+s+o.id',
    # Each word finds all that begin with it. Of numbers these are too many: "2 servers" would find pages with figures.
    "(^[+-]|[~^]\\d+$)": "(^[+-]|[~^]\\d+$|^\\d+$)",
    # A word with a hyphen is two words, as in the index, and so are Chinese and Latin letters; and those of a question
    # are left out: "on" would find "one".
    't.trim().split(/"([^"]+)"/g)': r't.trim().replace(/(\w)-(?=\w)/g,"$1 ")'
    r'.replace(/([\u4e00-\u9fff])(?=\w)|(\w)(?=[\u4e00-\u9fff])/g,"$1$2 ")'
    r'.replace(/\b(?:how|what|why|do|does|can|i|it|is|a|the|my|of|on|in|for|to|with)\s+/gi,"").split(/"([^"]+)"/g)',
}
"""dict[str, str], what is replaced in the script of the search."""


@event_priority(-200)  # after the plugin that sets the copyright of each language
def on_config(config: Any) -> Any:
    """Link to the project in the header of each page, and show the version in its footer."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^Source = "(\S+)"', project, re.MULTILINE)
    config.repo_url, config.repo_name = match[1], "Source"  # type: ignore[index]
    package = (ROOT / "ms_accum" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(\S+)"', package, re.MULTILINE)
    config.copyright = config.copyright.replace("{version}", version[1])  # type: ignore[index]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show the cells of a notebook and their stored texts."""
    return re.sub(
        r"<!-- notebook: (\S+) -->",
        lambda match: "\n".join(_cells(ROOT / match[1])),
        markdown,
    )


def _cells(notebook: Path) -> Iterator[str]:
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = re.sub("^#", "##", source, flags=re.MULTILINE)
            yield source.replace("(../docs/", "(../").replace("(../README.md)", "(../index.md)")
            yield ""
            continue
        yield f"```python\n{source}\n```\n"
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/svg+xml" in data:
                yield "![The picture of the home page](../images/window.svg)\n"
            elif "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                yield f"![What the cell draws](data:image/png;base64,{png})\n"
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                yield f"```text\n{text}\n```\n"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Keep the reference's source code and tables of figures out of the search index: they would fill the results."""
    begins = ['<details class="mkdocstrings-source"']
    if "<!-- table: " in page.markdown:
        begins.append("<table")
    for begin in begins:
        name, _, rest = begin.partition(" ")
        html = html.replace(begin, f"{name} data-search-exclude {rest}".rstrip())
    if page.url.startswith(f"{OTHER}/") and not page.file.src_uri.endswith(f".{OTHER}.md"):
        html = html.replace("</h1>", "</h1><p data-search-exclude><em>本页为英文。</em></p>", 1)
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
    translated = {entry["location"].partition("#")[0] for entry in parts[OTHER]}
    parts[OTHER] += [
        entry for entry in parts[""] if entry["location"].partition("#")[0] not in translated
    ]
    for language, entries in parts.items():
        folder = site / language / "search"
        folder.mkdir(exist_ok=True)
        lang = ["en", OTHER] if language else ["en"]
        made = {**index, "config": {**index["config"], "lang": lang}, "docs": entries}
        (folder / path.name).write_text(
            json.dumps(made, ensure_ascii=False, separators=(",", ":")), encoding="utf-8"
        )
