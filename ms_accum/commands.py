"""Which programs are installed, and how does a console script run one?"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

# The programs of a wheel; in a clone they are next to the package.
_INSTALLED = Path(__file__).resolve().parent / "scripts"
_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1]
PROGRAMS = {"ms-accum-train": str(_FOLDER / "train.py"), "ms-accum-eval": str(_FOLDER / "eval.py")}
"""dict[str, str], the path of each console script's program."""


def train() -> None:
    """Run `train.py` with this process's arguments."""
    _run(PROGRAMS["ms-accum-train"])


def evaluate() -> None:
    """Run `eval.py` with this process's arguments."""
    _run(PROGRAMS["ms-accum-eval"])


def _run(path: str) -> None:
    """Run a file as `python FILE` does, but keep the name under which it was started for its --help.

    It becomes the main module: processes that it starts import that one, from its file.
    """
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    SourceFileLoader("__main__", path).exec_module(main)
