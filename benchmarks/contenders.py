"""The contenders: the programs that are compared, and how one is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .environments import PEERS, python
from .options import known
from .process import Contender, ContenderError

OURS = "ms_accum"
UNTUNED = "ms_accum-untuned"


class Entry(NamedTuple):
    """A program of `programs/`, and the environment that it runs in."""

    name: str
    environment: str
    program: str
    flags: tuple[str, ...] = ()


ENTRIES = (
    Entry(OURS, "mindspore", "accum.py"),
    Entry("tutorial-functional", "mindspore", "tutorial_functional.py"),
    Entry("tutorial-cells", "mindspore", "tutorial_cells.py"),
    Entry("boost", "mindspore", "boost.py"),
    Entry("torch", "torch", "torch_loop.py"),
    Entry("torch-compile", "torch", "torch_loop.py", ("--compile",)),
    Entry("jax-multisteps", "jax", "jax_loop.py"),
    Entry("jax-scan", "jax", "jax_loop.py", ("--scan",)),
)
# To see that `tune_cpu` slows no network.
WITH_UNTUNED = (ENTRIES[0], Entry(UNTUNED, "mindspore", "accum.py", ("--untuned",)), *ENTRIES[1:])


def available(entries: Sequence[Entry], names: Sequence[str] | None) -> list[Entry]:
    """Return the entries of these names (None: all) whose environments were set up, and print which were not."""
    known("--contenders", names, [entry.name for entry in entries])
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


def check_same_size(contenders: Sequence[Contender]) -> None:
    """Raise unless all train equally many parameters: else they would not do the same work."""
    sizes = {contender.name: contender.about["parameters"] for contender in contenders}
    if len(set(sizes.values())) > 1:
        raise ContenderError(f"The contenders must train equally many parameters, but got {sizes}.")
