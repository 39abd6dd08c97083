"""Has the project the shape that it says it has?

Each rule is a function from a source text to what is wrong with it; each is fed a text that breaks it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted((ROOT / "ms_accum").glob("*.py"))
ZOO = sorted((ROOT / "model_zoo").glob("*.py"))
BENCHMARKS = [path for folder in ("", "programs") for path in sorted((ROOT / "benchmarks" / folder).glob("*.py"))]
PROGRAMS = [*sorted(ROOT.glob("*.py")), *sorted((ROOT / "examples").glob("*.py")), *BENCHMARKS]

# A module imports modules of earlier layers only; `_check`, which all may import, imports none.
LAYERS = (
    (
        "_check",
        "_as_found",
        "_bytes",
        "_checkpoint_file",
        "_end_with",
        "_files",
        "_first_update",
        "_heartbeat",
        "_learning_rate",
        "_random",
        "_relay",
        "_state",
        "_streams",
        "_tree",
        "averages",
        "batch_norm",
        "out_of_memory",
        "runtime",
        "signals",
        "windows",
    ),
    (
        "_batches",
        "_member",
        "_parts",
        "additivity",
        "boundary",
        "checkpoint",
        "memory",
        "parallel",
        "trials",
    ),
    (
        "_facts",
        "batch_size",
        "launch",
        "metrics",
        "reduction",
        "trained",
        "weights",
        "zero",
    ),
    (
        "accumulator",
        "cells",
        "report",
        "training_state",
    ),
    (
        "driver_cells",
        "plan",
        "program",
        "state_folder",
    ),
    (
        "objective",
        "running",
    ),
    ("open_window",),
    ("checkpointer",),
    ("driver",),
    ("__init__",),
)
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
OUTSIDE = ("model_zoo", "train", "eval", "examples", "benchmarks", "tests")

BASES = {
    "nn.Cell": "what MindSpore compiles",
    "nn.WithLossCell": "what a network says of its compilation goes over",
    "ops.constexpr(_has_in_place, get_instance=False)": "it has one answer inside a graph and one outside",
    "Callback": "what MindSpore's Model calls",
    "LearningRateSchedule": "optimizers take a schedule only if it is one",
    "Protocol": "an interface, nothing is inherited",
    "NamedTuple": "a record, nothing is inherited",
    "argparse.ArgumentParser": "its errors can be changed by overriding `error` only",
    "Exception": "what is raised must be one",
    "ValueError": "callers may catch the kind of error that it is",
}
MODULO_CALLS = ("divmod", "mod", "fmod", "remainder", "floor_divide", "floor_div", "floor_mod", "floordiv")
FORBIDDEN_CALLS = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load")
FORBIDDEN_IMPORTS = ("pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib")
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, *DEFINITIONS)
MAX_LINES, MAX_FUNCTION_LINES, MAX_NESTING = 300, 40, 3


def imported(tree):
    """Yield every imported module as an absolute name, those of `ms_accum` as "ms_accum.<module>"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "ms_accum" if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            if module != "ms_accum":
                yield module
            else:
                # A name that is no module is taken from __init__.
                yield from (f"ms_accum.{a.name if a.name in LAYER else '__init__'}" for a in node.names)


def wrong_imports(source, module):
    """Say which imports of a module of `ms_accum` point against the order of LAYERS."""
    wrong = []
    for name in imported(ast.parse(source)):
        package, _, target = name.partition(".")
        if package in OUTSIDE:
            wrong.append(f"{module} imports {name}")
        if package != "ms_accum":
            continue
        target = target or "__init__"
        allowed = module != "_check" if target == "_check" else LAYER.get(target, 99) < LAYER[module]
        if not allowed:
            wrong.append(f"{module} imports {target}")
    return wrong


def library_imports(source):
    return [name for name in imported(ast.parse(source)) if name.split(".")[0] == "ms_accum"]


def no_question(source):
    first = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
    return [] if first.endswith("?") else [f"the first line is {first!r}"]


def is_text(node):
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def modulo(source):
    """Say where a source takes remainders of numbers or divides to whole ones."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            formats = isinstance(node, ast.BinOp) and is_text(node.left)
            found = isinstance(node.op, ast.FloorDiv) or (isinstance(node.op, ast.Mod) and not formats)
        else:
            found = isinstance(node, ast.Call) and name_of(node.func).split(".")[-1] in MODULO_CALLS
        if found:
            wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
    return wrong


def name_of(node):
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def docstring_lines(function):
    if ast.get_docstring(function) is None:
        return 0
    return function.body[0].end_lineno - function.body[0].lineno + 1


def long_functions(source):
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lines = [(f.name, f.end_lineno - f.lineno + 1 - docstring_lines(f)) for f in functions]
    return [f"{name} has {count} lines" for name, count in lines if count > MAX_FUNCTION_LINES]


def too_long(source):
    count = len(source.splitlines())
    return [f"{count} lines"] if count > MAX_LINES else []


def depth(node):
    """Return how deep blocks stand in each other; `elif` is no block of its own, nor is the outermost def."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                chained = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
                deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not chained))
    return deepest


def deep_nesting(source):
    tree = ast.parse(source)
    depths = [(node.lineno, depth(node)) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    # Statements of the module itself are blocks where those of a function are in one.
    depths += [(n.lineno, depth(n) + isinstance(n, BLOCKS)) for n in tree.body if not isinstance(n, DEFINITIONS)]
    return [f"line {line} begins {blocks} nested blocks" for line, blocks in depths if blocks > MAX_NESTING]


def strange_bases(source):
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [f"{c.name}({ast.unparse(b)})" for c in classes for b in c.bases if ast.unparse(b) not in BASES]


def dangerous(source):
    """Say where a source runs texts, starts a shell or unpickles."""
    tree, wrong = ast.parse(source), []
    wrong += [name for name in imported(tree) if name.split(".")[0] in FORBIDDEN_IMPORTS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe = flags.get("shell", "False") != "False" or flags.get("allow_pickle", "False") != "False"
            if unsafe or name_of(node.func) in FORBIDDEN_CALLS:
                wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
    return wrong


def asserts(source):
    return [f"line {node.lineno}" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def nested(blocks):
    """Return a function with so many blocks in each other."""
    lines = ["def f():"] + ["    " * (n + 1) + "if x:" for n in range(blocks)]
    return "\n".join([*lines, "    " * (blocks + 1) + "pass"])


def of(length):
    """Return a function of so many lines, and a docstring that does not count."""
    return "\n".join(["def f():", '    """Do\n    it.\n    """'] + ["    x = 1"] * (length - 1))


ELIFS = "def f():\n    if a:\n        x\n" + "    elif b:\n        x\n" * MAX_NESTING


RULES = {
    "imports ms_accum": (library_imports, ZOO),
    "asks no question": (no_question, [path for path in LIBRARY + ZOO if path.stem != "__init__"]),
    "takes remainders": (modulo, [path for path in LIBRARY if path.stem != "windows"]),
    "has long functions": (long_functions, LIBRARY + ZOO + PROGRAMS),
    "is long": (too_long, LIBRARY + ZOO + PROGRAMS),
    "nests deeply": (deep_nesting, LIBRARY + ZOO + PROGRAMS),
    "inherits": (strange_bases, LIBRARY),
    "is dangerous": (dangerous, LIBRARY + ZOO + PROGRAMS),
    "asserts": (asserts, LIBRARY + ZOO),
}
PLANTED = {
    "imports ms_accum": ["import ms_accum", "def f():\n    from ms_accum.windows import is_full"],
    "asks no question": ["x = 1", '"""What is it."""', '"""It is.\n\nIs it?"""'],
    "takes remainders": ["a % b", "a // 2", "a %= 2", "a //= 2", "'%d' % (a % 2)", "divmod(a, b)", "ops.mod(a, b)"],
    "has long functions": [of(MAX_FUNCTION_LINES + 1), of(MAX_FUNCTION_LINES + 1) + "\ndef f():\n    pass"],
    "is long": ["x = 1\n" * (MAX_LINES + 1)],
    "nests deeply": [
        nested(MAX_NESTING + 1),
        nested(MAX_NESTING + 1).replace("def f()", "if x"),
        "def f():\n for x in y:\n  with x:\n   try:\n    pass\n   except E:\n    if x:\n     pass",
    ],
    "inherits": ["class A(B): pass", "class A(nn.Cell, nn.Dense): pass", "class A(ops.Cell): pass"],
    "is dangerous": [
        "eval(x)",
        "exec(x)",
        "import os\nos.system(x)",
        "run(x, shell=True)",
        "yaml.load(f, SafeLoader)",
        "import pickle",
        "from pickle import loads",
        "np.load(f, allow_pickle=True)",
    ],
    "asserts": ["def f(x):\n    assert x"],
}
FINE = {
    "imports ms_accum": ["import ms_accumulator", "from model_zoo.idx import read_images"],
    "asks no question": ['"""What is it?\n\nThis."""'],
    "takes remainders": ["'%s' % a", "f'{a}%' % b", "a / b", "a & b"],
    "has long functions": [of(MAX_FUNCTION_LINES)],
    "is long": ["x = 1\n" * MAX_LINES],
    "nests deeply": [nested(MAX_NESTING), ELIFS],
    "inherits": ["class A: pass", "class A(nn.Cell): pass"],
    "is dangerous": ["yaml.safe_load(f)", "run(x, shell=False)", "evaluate(x)", "net.eval(x)", "np.load(f)"],
    "asserts": ["raise ValueError"],
}


def each_rule_and_file():
    for rule, (check, paths) in RULES.items():
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            yield pytest.param(check, path, id=f"{name}-{rule}")


@pytest.mark.parametrize(("check", "path"), list(each_rule_and_file()))
def test_nothing_in(check, path):
    assert check(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in RULES for source in PLANTED[rule]])
def test_a_planted_fault_is_found(rule, source):
    assert RULES[rule][0](source)


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in RULES for source in FINE[rule]])
def test_what_is_fine_is_left_alone(rule, source):
    assert RULES[rule][0](source) == []


def test_every_module_has_its_layer():
    assert sorted(path.stem for path in LIBRARY) == sorted(LAYER)


def test_architecture_shows_the_layers():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    shown = {module: int(number) - 1 for number, names in rows for module in re.findall(r"\w+", names)}
    assert shown == {module: number for module, number in LAYER.items() if module != "__init__"}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_imports_point_one_way(path):
    assert wrong_imports(path.read_text(encoding="utf-8"), path.stem) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("_check", "from . import windows"),
        ("_check", "from . import _check"),
        ("_tree", "from .windows import is_full"),
        ("windows", "from . import _check, _tree"),
        ("weights", "from .metrics import evaluate"),
        ("accumulator", "def f():\n    from .driver import GradientAccumulation"),
        ("accumulator", "import ms_accum.cells"),
        ("cells", "from ms_accum.report import Bar"),
        ("cells", "from ms_accum import Accumulator"),
        ("driver", "from . import GradientAccumulation"),
        ("driver", "import ms_accum"),
        ("program", "from model_zoo import MLP"),
        ("program", "import train"),
        ("report", "from .unheard_of import x"),
    ],
)
def test_an_import_the_wrong_way_is_found(module, source):
    assert len(wrong_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("windows", "from . import _check"),
        ("cells", "from . import _check, _tree\nfrom .boundary import Boundary"),
        ("__init__", "from .driver import GradientAccumulation"),
        ("report", "import ms_accumulator, training, os.path"),
    ],
)
def test_an_import_the_right_way_is_left_alone(module, source):
    assert wrong_imports(source, module) == []
