"""Does each search find its page first, and does each link lead somewhere? python docs/site_check.py FOLDER"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import sys
import urllib.parse
from collections import Counter
from pathlib import Path

SEARCHES = {
    "": """
        accelerate migration/
        accumulator reference/Accumulator/
        bf16 recipes/
        batchnorm how-to/batch_norm/
        changelog project/changelog/
        distributed training how-to/processes/
        does it work on gpu limits/
        early stopping how-to/evaluation/
        export onnx recipes/
        gradientaccumulation reference/GradientAccumulation/
        how do i install /
        infonce how-to/contrastive/
        lora recipes/
        loss is nan recipes/
        mixed precision how-to/amp/
        multi-gpu how-to/processes/
        notebook project/notebook/
        oom how-to/split/
        out of memory how-to/split/
        save checkpoint how-to/resume/
        two optimizers recipes/
        """,
    "zh": """
        accumulator reference/Accumulator/
        gradientaccumulation reference/GradientAccumulation/
        内存不足 how-to/split/
        分布式训练 how-to/processes/
        多卡 how-to/processes/
        安装 /
        恢复训练 how-to/resume/
        断点续训 how-to/resume/
        早停 how-to/evaluation/
        显存 how-to/split/
        显存不足 how-to/split/
        混合精度 how-to/amp/
        """,
}
"""dict[str, str], what users type, and the page that must come first, in each language."""


def words_of(text: str, separator: re.Pattern[str]) -> Counter[str]:
    """Count the words of a title or a text, as the search splits them."""
    text = html.unescape(re.sub(r"<[^>]+>", " ", text))
    return Counter(word.lower() for word in separator.split(text) if word)


class Search:
    """The theme's search, roughly: BM25, where a title counts as 1000 texts, and pages and all words count more."""

    def __init__(self, index: dict) -> None:
        """Count the words of each section."""
        separator = re.compile(index["config"]["separator"])
        self.entries = index["docs"]
        self.fields = {
            field: [words_of(entry[field], separator) for entry in self.entries]
            for field in ("title", "text")
        }
        both = zip(self.fields["title"], self.fields["text"])
        self.sections = Counter(word for title, text in both for word in {*title, *text})

    def first(self, query: str) -> str | None:
        """Return the page that is shown first, or None if nothing is found."""
        query = re.sub(
            r"\b(how|does|do|i|it|is|of|on)\s+", "", query
        )  # as docs/hooks.py has it done
        words = query.replace("-", " ").split()
        scores = [0.0] * len(self.entries)
        found: list[set[str]] = [set() for _ in self.entries]
        for field, counts in self.fields.items():
            mean = sum(map(len, counts)) / len(counts)
            for word, known in itertools.product(words, self.sections):
                if not known.startswith(word):
                    continue
                number = self.sections[known]
                rare = math.log(1 + (len(counts) - number + 0.5) / (number + 0.5))
                for place, count in enumerate(counts):
                    if known in count:
                        length = 1.2 * (0.25 + 0.75 * len(count) / mean)
                        part = rare * 2.2 * count[known] / (count[known] + length)
                        scores[place] += part * (1000 if field == "title" else 1)
                        found[place].add(word)
        for place, entry in enumerate(self.entries):
            is_page, has_all = "#" not in entry["location"], len(found[place]) == len(set(words))
            scores[place] *= (1 + (is_page + has_all) ** 2) * entry.get("boost", 1)
        best = max(range(len(scores)), key=scores.__getitem__)
        return self.entries[best]["location"].partition("#")[0] if scores[best] else None


def wrong_searches(search: Search, searches: str) -> list[str]:
    """Return the searches that do not show their page first, with the page that they show."""
    wrong = []
    for line in searches.strip().splitlines():
        query, _, page = line.strip().rpartition(" ")
        first = search.first(query)
        if first != page.lstrip("/"):
            wrong.append(f"the search for {query!r} shows {first} before {page}")
    return wrong


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
    """Return what is wrong with the searches and the links of a site, or None."""
    site = Path(folder).resolve()
    terms = Path(__file__).with_name("search_words.txt").read_text(encoding="utf-8").split()
    found = []
    for language, searches in SEARCHES.items():  # each has an index of its own
        path = site / language / "search" / "search_index.json"
        index = json.loads(path.read_text(encoding="utf-8"))
        search = Search(index)
        found += wrong_searches(search, searches)
        found += [
            f"{term} is not found" for term in terms if language and term not in search.sections
        ]
    found += [f"a dead link in {link}" for link in dead_links(site)]
    return "\n".join(found) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
