"""What MkDocs does beside its plugins; mkdocs.yml names this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def on_config(config: Any) -> Any:
    """Link to the project in the header of each page; its address is a line of pyproject.toml."""
    match = re.search(r'^Source = "(\S+)"', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    config.repo_url, config.repo_name = match[1], "Source"  # type: ignore[index]
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Keep the source code of the reference out of the search index: it would fill the results."""
    begin = '<details class="mkdocstrings-source"'
    return html.replace(begin, begin.replace(" ", " data-search-exclude ", 1))
