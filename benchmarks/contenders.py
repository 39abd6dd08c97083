"""Who competes?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .environments import PEERS, python
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


def say_what_is_missing(environments: Sequence[str]) -> None:
    """Print which of the environments were not set up, and how to do that."""
    missing = [kind for kind in PEERS if kind in environments and not python(kind)]
    if missing:
        print(f"without {' and '.join(missing)}, not set up here: run 'python -m benchmarks setup'")


def check_same_size(contenders: Sequence[Contender]) -> None:
    """Raise unless all train equally many parameters: else they would not do the same work."""
    sizes = {contender.name: contender.about["parameters"] for contender in contenders}
    if len(set(sizes.values())) > 1:
        raise ContenderError(f"The contenders must train equally many parameters, but got {sizes}.")
