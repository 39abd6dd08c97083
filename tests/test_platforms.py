"""The platforms that MindSpore documents for the APIs that we call.

No Ascend and no GPU is at hand: all that can be had is the "Supported Platforms" line of each API: of what is imported
from MindSpore, and of the methods of Tensors.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from mindspore import Tensor

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "ms_accum").rglob("*.py"), *(ROOT / "model_zoo").rglob("*.py")])
SOURCES.remove(ROOT / "ms_accum/app/checks.py")  # the self-test, which tries what a device may not have

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
    "mindspore.hal.get_device_name": f"{HOST}, and an error is ignored",
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

OTHER = "is no Tensor's:"
NEUTRAL = "documented for Ascend alone, measured on CPU; elsewhere `ops.assign` (`has_in_place`)"
# The same of methods, by module: what a name stands for can't be read off a source, so other objects' are listed, too.
METHODS = {
    (
        "network/tree.py",
        "copy_",
    ): NEUTRAL,
    (
        "network/tree.py",
        "mul_",
    ): NEUTRAL,
    ("app/memory.py", "untyped_storage"): f"{HOST}: asks where a Tensor is",
    ("app/memory.py", "data_ptr"): f"{HOST}: asks where a Tensor is",
    ("network/constants.py", "hooks"): f"{HOST}: the functions that are registered",
    ("network/tree.py", "register"): f"{OTHER} of a MultitypeFuncGraph",
    ("app/trials.py", "split"): f"{OTHER} of a text",
    ("app/self_test.py", "index"): f"{OTHER} of a tuple",
    ("loss/first_micro_batch.py", "split"): f"{OTHER} of a text",
    ("ranks/group.py", "view"): f"{OTHER} NumPy's",
    ("network/generators.py", "view"): f"{OTHER} NumPy's",
}
TO_THE_HOST = "asnumpy"


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
    """Yield what is called: directly, as an argument, as a decorator, or as the base of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from [node.func, *(argument for argument in node.args if is_operator(argument))]
        elif isinstance(node, ast.FunctionDef):
            yield from node.decorator_list
        elif isinstance(node, ast.ClassDef):
            yield from node.decorator_list + node.bases


def is_operator(node):
    return re.match(r"(ops|mint)\.\w+$", ast.unparse(node)) is not None


def methods(source):
    """Return the methods that a source which imports MindSpore calls, and that Tensors have."""
    tree = ast.parse(source)
    if not mindspore_names(tree):
        return set()
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    others = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names} | {"self"}
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [function for function in called if isinstance(function, ast.Attribute)]
    return {
        function.attr
        for function in called
        if not re.match(rf"({'|'.join(others)})(\.\w+)?$", ast.unparse(function.value))
        and callable(getattr(Tensor, function.attr, None))
        and not function.attr.startswith("__")
    }


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
            resolved = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            resolved = getattr(resolved, part)
        return resolved
    raise ImportError(path)


def platforms(docstring):
    """Return the platforms that a docstring names, empty if it has no such section."""
    section = re.search(r"Supported Platforms:\s*\n(.*)", docstring or "")
    return set(re.findall(r"``(\w+)``", section[1])) if section else set()


def lacks_a_device(path):
    docstring = resolve(path).__doc__ or ""
    # Newer primitives, and methods, have no section of their own.
    refers = r"(?:is equivalent to(?s:.*)R|For (?:more )?details, please r)efer to :func:`(mindspore\.ops\.\w+)`"
    function = re.search(refers, docstring)
    return not {"Ascend", "GPU"} <= platforms(resolve(function[1]).__doc__ if function else docstring)


USED = sorted(set().union(*(apis(path.read_text(encoding="utf-8")) for path in SOURCES)))


@pytest.mark.parametrize("path", USED)
def test_api_supports_ascend_and_gpu_or_is_listed(path):
    assert not lacks_a_device(path) or path in EXCEPTIONS


@pytest.mark.parametrize("path", EXCEPTIONS)
def test_listed_exceptions_are_current(path):
    assert path in USED and lacks_a_device(path)


METHODS_USED = {
    (str(path.relative_to(ROOT / path.relative_to(ROOT).parts[0])), method)
    for path in SOURCES
    for method in methods(path.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize(("module", "method"), sorted(METHODS_USED), ids=str)
def test_tensor_method_supports_ascend_and_gpu_or_is_listed(module, method):
    excepted = method == TO_THE_HOST or (module, method) in METHODS
    assert excepted or not lacks_a_device(f"mindspore.Tensor.{method}")


@pytest.mark.parametrize(("module", "method"), METHODS, ids=str)
def test_listed_method_exceptions_are_current(module, method):
    assert (module, method) in METHODS_USED and lacks_a_device(f"mindspore.Tensor.{method}")


@pytest.mark.parametrize("page", ["limits.md", "limits.zh.md", "faq.md", "faq.zh.md"])
def test_use_outside_documented_platforms_is_documented(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    beyond = {method for (_, method), why in METHODS.items() if why == NEUTRAL}
    assert beyond and all(f"`Tensor.{method}`" in text for method in beyond)


def test_check_sees_apis_of_library():
    assert {("network/tree.py", "mul_"), ("network/tree.py", "copy_")} <= METHODS_USED
    assert {"mindspore.jit_class", "mindspore.nn.Cell", "mindspore.ops.assign_add", "mindspore.nn.Dense"} <= set(USED)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import mindspore as ms\nms.ops.matmul(a, b)", {"mindspore.ops.matmul"}),
        ("import mindspore\nmindspore.mint.add(a, b)", {"mindspore.mint.add"}),
        ("from mindspore import nn as layers\nclass A(layers.Cell): pass", {"mindspore.nn.Cell"}),
        ("import mindspore as ms\n@ms.jit\ndef f(): pass", {"mindspore.jit"}),
        ("from mindspore.nn import Dense\nf(Dense(2, 3))", {"mindspore.nn.Dense"}),
        ("from mindspore import ops\nf(ops.assign_sub, ops)", {"mindspore.ops.assign_sub"}),
        ("import numpy as np\nfrom mindspore import ops\nnp.add(1, 2)\nops = 1", set()),
    ],
)
def test_calls_are_found(source, expected):
    assert apis(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from mindspore import ops\ndef f(a): return a.mul_(2).sum()", {"mul_", "sum"}),
        ("import numpy as np\nfrom mindspore import ops\nnp.linalg.norm(np.sum(1)), ops.add(1, 2), self.add(1)", set()),
        ("import numpy as np\ndef f(a): return a.sum()", set()),
        ("import mindspore as ms\n'a'.join(b), c.no_such_method()", set()),
    ],
)
def test_methods_are_found(source, expected):
    assert methods(source) == expected


def test_apis_without_gpu_or_platform_line_are_detected():
    assert lacks_a_device("mindspore.mint.optim.AdamW")
    assert lacks_a_device("mindspore.Tensor")
    assert lacks_a_device("mindspore.Tensor.mul_") and lacks_a_device("mindspore.Tensor.copy_")
    assert not lacks_a_device("mindspore.Tensor.sqrt")  # its docstring refers to `ops.sqrt`
    assert not lacks_a_device("mindspore.ops.Erf")  # its docstring refers to `ops.erf`
    assert platforms("Supported Platforms:\n    ``Ascend`` ``CPU``\n\nExamples: ``GPU``") == {"Ascend", "CPU"}
    assert platforms("Deprecated.") == set()
