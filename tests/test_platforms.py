"""On which platforms does MindSpore say that what we call runs?

No Ascend and no GPU is at hand: all that can be had is the "Supported Platforms" line of each API.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "ms_accum").rglob("*.py"), *(ROOT / "model_zoo").rglob("*.py")])

HOST = "runs on the host, whatever the device"
# Every API that does not claim both Ascend and GPU, and why it may be called all the same.
EXCEPTIONS = {
    "mindspore.__version__.split": "a text",
    "mindspore.context._context": "a setting of the host; `set_context` prints a warning about it",
    "mindspore.amp.auto_mixed_precision": "changes the types of a network on the host; no such line",
    "mindspore.Parameter": "the container of all weights; its docstring has no such line",
    "mindspore.ParameterTuple": "a tuple of them; its docstring has no such line",
    "mindspore.Tensor": "the container of all data; its docstring has no such line",
    "mindspore.train.checkpoint_pb2.Checkpoint": "a file's format, no computation",
    "mindspore.Tensor.from_numpy": HOST,
    "mindspore.common.initializer.initializer": "makes the first value of a Parameter; no such line",
    "mindspore.common.initializer.Constant": "makes the first value of a Parameter; no such line",
    "mindspore.common.initializer.HeNormal": "makes the first value of a Parameter; no such line",
    "mindspore.common.initializer.Normal": "makes the first value of a Parameter; no such line",
    "mindspore.dataset.GeneratorDataset": HOST,
    "mindspore.get_auto_parallel_context": HOST,
    "mindspore.get_context": HOST,
    "mindspore.get_seed": HOST,
    "mindspore.load_checkpoint": HOST,
    "mindspore.load_param_into_net": HOST,
    "mindspore.nn.learning_rate_schedule.LearningRateSchedule": "an abstract Cell, nothing but a `construct` of ours",
    "mindspore.ops.constexpr": HOST,
    "mindspore.ops.primitive.jit_context": HOST,
    "mindspore.save_checkpoint": HOST,
    "mindspore.set_context": HOST,
    "mindspore.set_device": "is what chooses the device",
    "mindspore.train.Callback": HOST,
    "mindspore.train.RunContext": HOST,
    "mindspore.train.metrics.get_metrics": HOST,
}


def mindspore_names(tree):
    """Return what each name that was imported from MindSpore stands for, as a dotted path."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mindspore":
                    names[alias.asname or "mindspore"] = alias.name if alias.asname else "mindspore"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mindspore":
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def called(tree):
    """Yield whatever is called: plainly, as a decorator, or as the base of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.func
        elif isinstance(node, ast.FunctionDef):
            yield from node.decorator_list
        elif isinstance(node, ast.ClassDef):
            yield from node.decorator_list + node.bases


def apis(source):
    """Return the dotted paths of the MindSpore APIs that a source calls."""
    tree = ast.parse(source)
    names = mindspore_names(tree)
    chains = [
        ast.unparse(node).partition("(")[0] for node in called(tree) if isinstance(node, (ast.Name, ast.Attribute))
    ]
    roots = [chain.partition(".") for chain in chains]
    return {".".join(filter(None, (names[root], rest))) for root, _, rest in roots if root in names}


def resolve(path):
    """Return the object behind a dotted path: the longest module, then attributes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def platforms(docstring):
    """Return the platforms that a docstring names, empty if it has no such section."""
    section = re.search(r"Supported Platforms:\s*\n(.*)", docstring or "")
    return set(re.findall(r"``(\w+)``", section[1])) if section else set()


def lacks_a_device(path):
    docstring = resolve(path).__doc__ or ""
    # Newer primitives have no section of their own.
    function = re.search(r"is equivalent to(?s:.*)Refer to :func:`(mindspore\.ops\.\w+)` for more details", docstring)
    return not {"Ascend", "GPU"} <= platforms(resolve(function[1]).__doc__ if function else docstring)


USED = sorted(set().union(*(apis(path.read_text(encoding="utf-8")) for path in SOURCES)))


@pytest.mark.parametrize("path", USED)
def test_an_api_claims_ascend_and_gpu_or_has_a_reason(path):
    assert not lacks_a_device(path) or path in EXCEPTIONS


@pytest.mark.parametrize("path", EXCEPTIONS)
def test_no_exception_is_stale(path):
    assert path in USED and lacks_a_device(path)


def test_the_library_uses_what_the_check_can_see():
    assert {"mindspore.jit_class", "mindspore.nn.Cell", "mindspore.ops.assign_add", "mindspore.nn.Dense"} <= set(USED)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import mindspore as ms\nms.ops.matmul(a, b)", {"mindspore.ops.matmul"}),
        ("import mindspore\nmindspore.mint.add(a, b)", {"mindspore.mint.add"}),
        ("from mindspore import nn as layers\nclass A(layers.Cell): pass", {"mindspore.nn.Cell"}),
        ("import mindspore as ms\n@ms.jit\ndef f(): pass", {"mindspore.jit"}),
        ("from mindspore.nn import Dense\nf(Dense(2, 3))", {"mindspore.nn.Dense"}),
        ("import numpy as np\nfrom mindspore import ops\nnp.add(1, 2)\nops = 1", set()),
    ],
)
def test_calls_are_found(source, expected):
    assert apis(source) == expected


def test_an_api_without_gpu_and_one_without_a_line_are_found():
    assert lacks_a_device("mindspore.mint.optim.AdamW")
    assert lacks_a_device("mindspore.Tensor")
    assert not lacks_a_device("mindspore.ops.Erf")  # its docstring refers to `ops.erf`
    assert platforms("Supported Platforms:\n    ``Ascend`` ``CPU``\n\nExamples: ``GPU``") == {"Ascend", "CPU"}
    assert platforms("Deprecated.") == set()
