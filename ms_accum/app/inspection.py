"""Shows what is in a checkpoint or a training state.

    python -m ms_accum.inspect gradient_accumulation.ckpt

Prints a table: the kind of file, its record, and each parameter. The file is checked first. Safetensors are read
without MindSpore, whose import takes seconds.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import _check
from ..saving.model_file import CheckpointError, read_record, tensors_of
from ..saving.training_state import is_state, open_state
from .flags import Parser, path
from .process import CHECKPOINT, exit_code

_SHOWN = 40
Tensors = Sequence[tuple[str, tuple[int, ...], str]]


def flags() -> Parser:
    """Return the flags."""
    parser = Parser("Show what is in a checkpoint or a training state.", prog="python -m ms_accum.inspect")
    parser.add_argument("file", type=path, metavar="FILE", help="a .ckpt or .safetensors file")
    parser.add_argument("--all", action="store_true", help=f"list all parameters instead of the first {_SHOWN}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print the table."""
    with exit_code(CHECKPOINT, CheckpointError, OSError, MemoryError):
        for line in lines(args.file, args.all):
            print(line)


def lines(path: str, all_parameters: bool) -> Iterator[str]:
    """Yield the lines of the table."""
    kind, facts, tensors = contents(path)
    elements = sum(math.prod(shape) for _, shape, _ in tensors)
    yield f"{'file':20} {_check.one_line(path, _check.LINE)}"
    yield f"{'kind':20} {kind}"
    yield f"{'size':20} {os.path.getsize(path):,} bytes"
    for name, value in facts.items():
        yield f"{_plain(name):20} {_plain(value)}"
    yield f"{'parameters':20} {len(tensors):,} with {_check.quantity(elements, 'element')}"
    shown = tensors if all_parameters else tensors[:_SHOWN]
    width = max((len(_plain(name)) for name, *_ in shown), default=0)
    for name, shape, dtype in shown:
        yield f"  {_plain(name):{width}}  {dtype:8} {shape}"
    if len(tensors) > len(shown):
        yield f"  ... and {len(tensors) - len(shown):,} more (--all shows them)"


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
        return "training state", _shown_facts(facts), tensors
    tensors = tensors_of(path)
    return "model", read_record(path) or {"record": "none"}, tensors


def _shown_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts to show: all but the states of random number generators."""
    shown = {name: facts.get(name) for name in ("updates", "skipped")}
    for label, name in (("position", "at"), ("window", "window")):
        for key, value in _dict_of(facts, name).items():
            if key != "random" and value is not None:
                shown[f"{label}.{key}"] = value
    shown["best"] = facts.get("best")
    config = dict(_dict_of(facts, "config"))
    notes = _dict_of(config, "notes")
    config.pop("notes", None)
    return {**shown, **notes, **config}


def _dict_of(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of the facts; an empty one if a damaged or crafted file has something else there."""
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _plain(value: Any) -> str:
    """Return a value as one line of printable text, whatever the file contains."""
    return _check.one_line(value if isinstance(value, str) else repr(value))
