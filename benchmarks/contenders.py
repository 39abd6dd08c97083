"""The contenders: the programs that are compared, and how one is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .environments import PEERS, python
from .options import check_names
from .process import Contender, ContenderError

OURS = "ms_accum"


class Entry(NamedTuple):
    """A program of `programs/`, and the environment that it runs in."""

    name: str
    environment: str
    program: str
    flags: tuple[str, ...] = ()


TUTORIALS = ("tutorial-2.x-tuned", "tutorial-r1.0-tuned")
"""tuple[str, ...], MindSpore's tutorials under the environment variables that ours sets."""
ENTRIES = (
    Entry(OURS, "mindspore", "accum.py"),
    Entry("tutorial-2.x", "mindspore", "tutorial_functional.py"),
    Entry(TUTORIALS[0], "mindspore", "tutorial_functional.py", ("--tuned",)),
    Entry(TUTORIALS[1], "mindspore", "tutorial_cells.py", ("--tuned",)),
    Entry("torch", "torch", "torch_loop.py"),
    Entry("torch-compile", "torch", "torch_loop.py", ("--compile",)),
    Entry("jax-multisteps", "jax", "jax_loop.py"),
    Entry("jax-scan", "jax", "jax_loop.py", ("--scan",)),
)


def available(entries: Sequence[Entry], names: Sequence[str] | None) -> list[Entry]:
    """Return the entries of these names (None: all) whose environments were set up, and print which were not."""
    check_names("--contenders", names, [entry.name for entry in entries])
    wanted = [entry for entry in entries if names is None or entry.name in names]
    missing = [kind for kind in PEERS if not python(kind) and kind in {entry.environment for entry in wanted}]
    if missing:
        print(f"without {' and '.join(missing)}, not set up here: run 'python -m benchmarks setup'")
    return [entry for entry in wanted if python(entry.environment)]


def start(entry: Entry, *flags: str) -> Contender:
    """Return the contender with these flags, to be entered."""
    interpreter = python(entry.environment)
    if interpreter is None:
        raise ContenderError(f"For '{entry.name}', the environment is missing. Run 'python -m benchmarks setup'.")
    return Contender(entry.name, interpreter, entry.program, (*flags, *entry.flags))


def check_same_size(sizes: Mapping[str, int]) -> None:
    """Raise unless all contenders, by name, train equally many parameters: else they would not do the same work."""
    if len(set(sizes.values())) > 1:
        raise ContenderError(f"The contenders must train equally many parameters, but got {sizes}.")
