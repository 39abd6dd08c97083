"""Which programs are installed, and how does a console script run one?"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

# The programs in an installed package; in a clone they are next to the package.
_INSTALLED = Path(__file__).resolve().parent / "scripts"
_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1]
PROGRAMS = {"ms-accum-train": str(_FOLDER / "train.py"), "ms-accum-eval": str(_FOLDER / "eval.py")}
"""dict[str, str], the path of the program that each console script runs."""


def train() -> None:
    """Run `train.py` with the arguments of this process."""
    _run(PROGRAMS["ms-accum-train"])


def evaluate() -> None:
    """Run `eval.py` with the arguments of this process."""
    _run(PROGRAMS["ms-accum-eval"])


def _run(path: str) -> None:
    """Run a file as `python FILE` does, but keep the name of the console script for its --help.

    The file becomes the main module, which processes that it starts import from its path.
    """
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    SourceFileLoader("__main__", path).exec_module(main)
