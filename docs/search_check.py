"""Is each term found in the built site? python docs/search_check.py FOLDER"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ENGLISH = ("early", "stopping", "resume", "learning", "precision", "ascend", "accumulator", "micro", "zero")


def words_of(entry: dict[str, str], separator: re.Pattern[str]) -> set[str]:
    """Return the words of a section, as the search splits them."""
    text = html.unescape(re.sub(r"<[^>]+>", " ", f"{entry['title']} {entry['text']}"))
    return {word.lower() for word in separator.split(text) if word}


def not_found(index: dict, terms: Iterable[str]) -> list[str]:
    """Return the terms that are no word of any section."""
    separator = re.compile(index["config"]["separator"])
    words = set().union(*(words_of(entry, separator) for entry in index["docs"]))
    return [term for term in terms if term not in words]


def main(site: str) -> str | None:
    """Return an error about the terms that are not found, or None."""
    index = json.loads(Path(site, "search", "search_index.json").read_text(encoding="utf-8"))
    chinese = Path(__file__).with_name("search_words.txt").read_text(encoding="utf-8").split()
    missing = not_found(index, [*ENGLISH, *chinese])
    return f"the search of {site} does not find {', '.join(missing)}" if missing else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
