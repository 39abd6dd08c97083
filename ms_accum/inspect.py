"""What is in a checkpoint or a training state?

    python -m ms_accum.inspect gradient_accumulation.ckpt

Prints a table: the kind of file, its record, and each parameter. The file is checked first. Safetensors are read
without MindSpore, whose import takes seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from . import _check
from .program.main import CHECKPOINT, USAGE, Failure, exit_code, run
from .saving.model_file import CheckpointError, read_record, tensors_of
from .saving.training_state import is_state, open_state

_SHOWN = 40
Tensors = Sequence[tuple[str, tuple[int, ...], str]]


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        """Raise a one-line `Failure` for wrong flags."""
        raise Failure(message, USAGE)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the flags."""
        return self.parse_args(argv)

    def in_flags(self, message: str) -> str:
        """Return the message unchanged: no flag sets an argument of the library."""
        return message


def flags() -> Parser:
    """Return the flags."""
    parser = Parser("python -m ms_accum.inspect", description="Show what is in a checkpoint or a training state.")
    parser.add_argument("file", type=os.path.expanduser, metavar="FILE", help="a .ckpt or .safetensors file")
    parser.add_argument("--all", action="store_true", help=f"list all parameters instead of the first {_SHOWN}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def contents(path: str) -> tuple[str, dict[str, Any], Tensors]:
    """Return the kind of a file, its record, and its tensors.

    Raises:
        CheckpointError: If it is damaged, or neither a checkpoint nor a training state.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is not a file. Give the path of a checkpoint or of a training state.")
    if os.path.splitext(path)[1] not in (".ckpt", ".safetensors"):
        raise CheckpointError(f"'{path}' is not a checkpoint: its name must end with '.ckpt' or '.safetensors'.")
    if is_state(path):
        arrays, facts = open_state(path)
        tensors = [(name, array.shape, str(array.dtype)) for name, array in arrays.items()]
        return "training state", _of_state(facts), tensors
    tensors = tensors_of(path)
    return "model", read_record(path) or {"record": "none"}, tensors


def _of_state(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts to show: all but the states of random number generators."""
    config = facts.get("config")
    config = dict(config) if isinstance(config, dict) else {}
    notes = config.pop("notes", {})
    shown = {name: facts.get(name) for name in ("updates", "skipped")}
    for name, part in (("position", "at"), ("window", "window")):
        held = facts.get(part)
        for key, value in held.items() if isinstance(held, dict) else ():
            shown.update({} if key == "random" or value is None else {f"{name}.{key}": value})
    shown["best"] = facts.get("best")
    return {**shown, **(notes if isinstance(notes, dict) else {}), **config}


def lines(path: str, every: bool) -> Iterator[str]:
    """Yield the lines of the table."""
    kind, facts, tensors = contents(path)
    elements = sum(_product(shape) for _, shape, _ in tensors)
    yield _line("file", _check.one_line(path, _check.LINE))
    yield _line("kind", kind)
    yield _line("size", f"{os.path.getsize(path):,} bytes")
    for name, value in facts.items():
        yield _line(_plain(name), _plain(value))
    yield _line("parameters", f"{len(tensors):,} with {elements:,} elements")
    shown = tensors if every else tensors[:_SHOWN]
    width = max((len(_plain(name)) for name, *_ in shown), default=0)
    for name, shape, dtype in shown:
        yield f"  {_plain(name):{width}}  {dtype:8} {shape}"
    if len(tensors) > len(shown):
        yield f"  ... and {len(tensors) - len(shown):,} more (--all shows them)"


def _line(name: str, value: str) -> str:
    return f"{name:20} {value}"


def _plain(value: Any) -> str:
    """Return a value as one line of printable text, whatever the file contains."""
    return _check.one_line(value if isinstance(value, str) else repr(value))


def _product(shape: Sequence[int]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def main(args: argparse.Namespace) -> None:
    """Print the table."""
    with exit_code(CHECKPOINT, CheckpointError, OSError, MemoryError):
        for line in lines(args.file, args.all):
            print(line)


if __name__ == "__main__":
    sys.exit(run(main, flags()))
