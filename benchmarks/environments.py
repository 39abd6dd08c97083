"""The environments of the peers: made by `setup`, found by their interpreters."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).parent
PEERS = ("torch", "jax")


def python(kind: str) -> Path | None:
    """Return the interpreter for "mindspore" (this one), "torch" or "jax"; None where it was not set up."""
    if kind == "mindspore":
        return Path(sys.executable)
    path = HERE / ".envs" / kind / "bin" / "python"
    return path if _marker(kind).exists() else None


def requirements_of(kind: str) -> tuple[str, ...]:
    """Return what pip installs for "torch" or "jax"."""
    return tuple((HERE / f"requirements-{kind}.txt").read_text(encoding="utf-8").split())


def run(arguments: Namespace) -> None:
    """Make the peers' environments, one for each: their requirements contradict each other."""
    del arguments
    for kind in PEERS:
        requirements = requirements_of(kind)
        folder = HERE / ".envs" / kind
        print(f"{folder}: {', '.join(requirements)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *requirements], check=True)
        _marker(kind).touch()


def _marker(kind: str) -> Path:
    """Return the file that marks an environment as complete: an interrupted `setup` leaves an incomplete one."""
    return HERE / ".envs" / kind / "complete"
