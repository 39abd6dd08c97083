"""Is each term found in the built site, and leads each link somewhere? python docs/site_check.py FOLDER"""

from __future__ import annotations

import html
import json
import re
import sys
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

ENGLISH = (
    "early",
    "stopping",
    "resume",
    "learning",
    "precision",
    "ascend",
    "accumulator",
    "micro",
    "zero",
)


def words_of(entry: dict[str, str], separator: re.Pattern[str]) -> set[str]:
    """Return the words of a section, as the search splits them."""
    text = html.unescape(re.sub(r"<[^>]+>", " ", f"{entry['title']} {entry['text']}"))
    return {word.lower() for word in separator.split(text) if word}


def not_found(index: dict, terms: Iterable[str]) -> list[str]:
    """Return the terms that are no word of any section."""
    separator = re.compile(index["config"]["separator"])
    words = set().union(*(words_of(entry, separator) for entry in index["docs"]))
    return [term for term in terms if term not in words]


def dead_links(site: Path) -> list[str]:
    """Return the links between pages of a site whose page or place does not exist, with their pages."""
    pages = {
        path: path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }
    places = {
        path: set(re.findall(r'\b(?:id|name)="?([^" >]+)', text)) for path, text in pages.items()
    }
    dead = []
    for path, text in pages.items():
        for link in re.findall(r'<a\b[^>]*?\bhref="?([^" >]+)', text):
            target, _, place = urllib.parse.unquote(html.unescape(link)).partition("#")
            if re.match(r"[a-z]+:|//", target):
                continue
            folder = site if target.startswith("/") else path.parent
            linked = (folder / target.lstrip("/")).resolve() if target else path
            linked = linked / "index.html" if linked.is_dir() else linked
            if not linked.exists() or (
                place and linked in places and place not in places[linked]
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def main(folder: str) -> str | None:
    """Return an error about the terms that are not found and the links that lead nowhere, or None."""
    site = Path(folder).resolve()
    chinese = Path(__file__).with_name("search_words.txt").read_text(encoding="utf-8").split()
    missing = []
    for language, terms in (("", ENGLISH), ("zh", chinese)):  # each has an index of its own
        index = json.loads(
            (site / language / "search" / "search_index.json").read_text(encoding="utf-8")
        )
        missing += not_found(index, terms)
    found = [f"the search of {site} does not find {', '.join(missing)}"] if missing else []
    found += [f"a dead link in {link}" for link in dead_links(site)]
    return "\n".join(found) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
