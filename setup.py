"""The text of the package's page: README.md with complete addresses, because a package index has no files beside it.

Everything else about the package is in pyproject.toml, also the project's address.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent
_RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def source() -> str:
    """Return the project's address."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^Source = "(\S+?)/?"', project, re.MULTILINE)[1]  # type: ignore[index]


def with_addresses(text: str, address: str) -> str:
    """Return Markdown whose links to files of the project are complete: of pictures to the file, else to its page."""

    def complete(match: re.Match) -> str:
        picture, words, path = match.groups()
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/main/{path})"

    return _RELATIVE.sub(complete, text)


if __name__ == "__main__":
    from setuptools import setup  # only here: tests import this file, also where setuptools is missing

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=with_addresses(readme, source()),
        long_description_content_type="text/markdown",
    )
