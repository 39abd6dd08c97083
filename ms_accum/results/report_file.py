"""Where is the page about an evaluation written, and which file does it replace?"""

from __future__ import annotations

import os
import tempfile

from ..saving.files import check_inside, write_bytes

NAME = "report.html"
MARK = "<!-- ms_accum: report of an evaluation. The next report replaces a file that begins with this line. -->"
"""str, the first line of each page, by which it is recognized."""


def place_of(folder: str) -> str:
    """Return the path of the page in a folder, which is made if it is missing.

    Raises:
        OSError: If the folder can't be made, or written to, or the page would be a link out of it.
        ValueError: If there is a file of that name that is not such a page.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OSError(f"'{folder}' can't be made: {error.strerror}") from error
    path = os.path.join(folder, NAME)
    check_inside(folder, path)
    _check_ours(path)
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise OSError(f"'{folder}' can't be written to: {error.strerror}") from error
    return path


def write_page(path: str, text: str) -> None:
    """Write a page in one step: at every moment there is the complete earlier page, or the complete new one.

    Raises:
        OSError: If it can't be written; an earlier page is unchanged.
        ValueError: If there is a file of that name that is not such a page.
    """
    _check_ours(path)
    content = text.encode("utf-8", "backslashreplace")  # a path need not be UTF-8
    write_bytes(path, content)


def _check_ours(path: str) -> None:
    if not os.path.exists(path):
        return
    ours = False
    if os.path.isfile(path):
        with open(path, "rb") as file:
            ours = file.read(len(MARK)) == MARK.encode()
    if not ours:
        raise ValueError(f"'{path}' exists and is no report of eval.py; give another folder")
