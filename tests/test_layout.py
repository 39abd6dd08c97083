"""Has the project the shape that it says it has?

Each rule is a function from a source text to what is wrong with it; each is fed a text that breaks it.
"""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# In a clone ms_accum/zoo/ is what finds model_zoo; what is installed in its place is model_zoo itself.
SECOND_NAME = ROOT / "ms_accum" / "zoo" / "__init__.py"
LIBRARY = sorted(path for path in (ROOT / "ms_accum").rglob("*.py") if path != SECOND_NAME)
ZOO = sorted((ROOT / "model_zoo").rglob("*.py"))
BENCHMARKS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks/programs").glob("*.py")])  # no .envs
PROGRAMS = [SECOND_NAME, *sorted(ROOT.glob("*.py")), *sorted((ROOT / "examples").glob("*.py")), *BENCHMARKS]

FACES = [ROOT / package / "__init__.py" for package in ("ms_accum", "model_zoo")]

# The rooms by floors, from the ground; TOP are the modules that users import. A room imports rooms of lower floors.
TOP = "top"
FLOORS = (
    ("network",),
    ("ranks",),
    ("loss", "fitting", "layers"),
    ("numerics",),
    ("window",),
    ("saving",),
    ("results",),
    ("program",),
    (TOP,),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES_IN_A_ROOM = range(4, 10)
EVERYWHERE = "_check"  # may be imported by all, and imports none
OUTSIDE = ("model_zoo", "train", "eval", "examples", "benchmarks", "tests")

BASES = {
    "nn.Cell": "what MindSpore compiles",
    "nn.WithLossCell": "what a network says of its compilation goes over",
    "ops.constexpr(_has_in_place, get_instance=False)": "it has one answer inside a graph and one outside",
    "Callback": "what MindSpore's Model calls",
    "LearningRateSchedule": "optimizers take a schedule only if it is one",
    "dict": "MindSpore's RunContext takes nothing else",
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


def imported(tree, package="ms_accum"):
    """Yield every imported module as an absolute name; relative ones are seen from `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else ()
            module = ".".join(filter(None, (*above, node.module)))
            # A room lets its modules be imported, and nothing else; the package, what is public.
            rooms = ("ms_accum", *(f"ms_accum.{room}" for room in FLOOR))
            yield from (f"{module}.{alias.name}" for alias in node.names) if module in rooms else (module,)


def room_of(module):
    """Return the room of "ms_accum.<room>.<module>"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else TOP


def wrong_imports(source, room, module=""):
    """Say which imports of a module of `ms_accum` do not go down."""
    wrong = []
    for name in imported(ast.parse(source), "ms_accum" if room == TOP else f"ms_accum.{room}"):
        package, _, target = name.partition(".")
        if package in OUTSIDE:
            wrong.append(f"{name} is not a part of the package")
        if package != "ms_accum" or (target.split(".")[0] == EVERYWHERE and module != EVERYWHERE):
            continue
        other = room_of(name)
        if not (ROOT / f"{name.replace('.', '/')}.py").is_file():
            wrong.append(f"{name}, which is no module")
        elif module == EVERYWHERE or (other != room and FLOOR[other] >= FLOOR[room]):
            wrong.append(f"{name}, of {other}")
    return wrong


def library_imports(source):
    return [name for name in imported(ast.parse(source), "model_zoo") if name.split(".")[0] == "ms_accum"]


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


# What is looked for, where, and how to mend it.
RULES = {
    "imports ms_accum": (library_imports, ZOO, "hand in what it needs: model_zoo is of use without ms_accum"),
    "asks no question": (
        no_question,
        [path for path in LIBRARY + ZOO if path not in FACES],
        "let its docstring begin with the one question it answers",
    ),
    "takes remainders": (
        modulo,
        [path for path in LIBRARY if path.stem != "ends"],
        "ask window/ends.py, which alone decides where a window ends",
    ),
    "has long functions": (long_functions, LIBRARY + ZOO + PROGRAMS, "take a step with a name of its own out"),
    "is long": (too_long, LIBRARY + ZOO + PROGRAMS, "it answers two questions: make it two modules"),
    "nests deeply": (deep_nesting, LIBRARY + ZOO + PROGRAMS, "make the inner block a function"),
    "inherits": (strange_bases, LIBRARY, "hand the other one in, or list the base in BASES with the reason"),
    "is dangerous": (dangerous, LIBRARY + ZOO + PROGRAMS, "parse data, start programs with lists of arguments"),
    "asserts": (asserts, LIBRARY + ZOO, "raise an error that says the rule, what arrived and the way out"),
}
PLANTED = {
    "imports ms_accum": ["import ms_accum", "def f():\n    from ms_accum.window.ends import is_full"],
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
    "imports ms_accum": ["import ms_accumulator", "from .data.mnist import load_mnist\nfrom . import lenet"],
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
    for rule, (check, paths, remedy) in RULES.items():
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            yield pytest.param(check, path, remedy, id=f"{name}-{rule}")


@pytest.mark.parametrize(("check", "path", "remedy"), list(each_rule_and_file()))
def test_nothing_in(check, path, remedy):
    wrong = check(path.read_text(encoding="utf-8"))
    assert not wrong, f"{path.relative_to(ROOT)}: {'; '.join(wrong)}. To mend it: {remedy}."


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in RULES for source in PLANTED[rule]])
def test_a_planted_fault_is_found(rule, source):
    assert RULES[rule][0](source)


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in RULES for source in FINE[rule]])
def test_what_is_fine_is_left_alone(rule, source):
    assert RULES[rule][0](source) == []


# The rooms


def room_of_file(path):
    return TOP if path.parent.name == "ms_accum" else path.parent.name


def arrows():
    """Return which room imports which other."""
    made = set()
    for path in LIBRARY:
        room = room_of_file(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = imported(tree, "ms_accum" if room == TOP else f"ms_accum.{room}")
        made |= {(room, room_of(name)) for name in names if name.startswith("ms_accum.")}
    return {(room, other) for room, other in made if other not in (room, TOP)}


@pytest.mark.parametrize("room", [room for room in FLOOR if room != TOP])
def test_a_room_is_one(room):
    names = [path.stem for path in LIBRARY if room_of_file(path) == room]
    assert len(names) - 1 in MODULES_IN_A_ROOM, f"{room}/ has {len(names) - 1} modules: merge some, or make two rooms"
    body = ast.parse((ROOT / "ms_accum" / room / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr), f"{room}/__init__.py is its docstring and nothing else"


@pytest.mark.parametrize("room", [room for room in FLOOR if room != TOP])
def test_a_room_says_which_rooms_it_imports(room):
    text = (ROOT / "ms_accum" / room / "__init__.py").read_text(encoding="utf-8")
    said = re.search(r"Imports ([^.]*)\.", " ".join(text.split()))[1]
    made = {other for each, other in arrows() if each == room}
    assert set(re.findall(r"`(\w+)`", said)) == made, f"{room}/__init__.py must say: {sorted(made)}"


def within(room):
    """Return, for each module of a room, those of the room that it imports."""
    paths = [path for path in LIBRARY if room_of_file(path) == room and path not in FACES]
    package = "ms_accum" if room == TOP else f"ms_accum.{room}"
    return {
        path.stem: {
            name.removeprefix(f"{package}.").split(".")[0]
            for name in imported(ast.parse(path.read_text(encoding="utf-8")), package)
            if name.startswith(package) and room_of(name) == room
        }
        for path in paths
    }


@pytest.mark.parametrize("room", FLOOR)
def test_no_modules_of_a_room_import_each_other(room):
    try:
        graphlib.TopologicalSorter(within(room)).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"{' -> '.join(error.args[1])}: move what both need into a module of its own")


def test_a_circle_is_found():
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({**within(TOP), "accumulator": {"driver"}, "driver": {"accumulator"}}).prepare()


def test_every_folder_is_a_room():
    assert sorted({room_of_file(path) for path in LIBRARY}) == sorted(FLOOR), "give it its floor in FLOORS"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down(path):
    wrong = wrong_imports(path.read_text(encoding="utf-8"), room_of_file(path), path.stem)
    remedy = "hand it in from above, move what both need to a lower floor, or import a name from its module"
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}. To mend it: {remedy}."


@pytest.mark.parametrize(
    ("room", "module", "source"),
    [
        (TOP, "_check", "from .window import ends"),
        (TOP, "_check", "from . import _check"),
        ("network", "tree", "from ..window.ends import is_full"),
        ("network", "tree", "from .. import _check, driver"),
        ("loss", "weights", "from ..fitting import memory"),
        ("window", "running", "from ..cells import TrainOptim"),
        ("window", "running", "def f():\n    from ..driver import GradientAccumulation"),
        ("window", "running", "import ms_accum.cells"),
        ("saving", "trained", "from ms_accum.program.report import Bar"),
        ("saving", "trained", "from ms_accum import Accumulator"),
        ("program", "steps", "from ..evaluation import evaluate"),
        ("program", "steps", "from model_zoo import MLP"),
        (TOP, "driver", "import train"),
        (TOP, "driver", "from . import GradientAccumulation"),
        (TOP, "driver", "import ms_accum"),
    ],
)
def test_an_import_the_wrong_way_is_found(room, module, source):
    assert len(wrong_imports(source, room, module)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("network", "from .. import _check"),
        ("window", "from .. import _check\nfrom ..network import tree\nfrom .boundary import Boundary"),
        (TOP, "from .window.ends import is_full\nfrom . import _check"),
        ("program", "import ms_accumulator, training, os.path\nfrom . import report"),
    ],
)
def test_an_import_the_right_way_is_left_alone(room, source):
    assert wrong_imports(source, room) == []


# What ARCHITECTURE.md draws


def reached(arrows, start):
    """Return all that can be reached along the arrows."""
    found, left = set(), [start]
    while left:
        left += [end for begin, end in arrows if begin == left[0] and end not in found]
        found.update(end for begin, end in arrows if begin == left[0])
        del left[0]
    return found


def test_architecture_draws_the_rooms_as_they_are():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawn, made = set(re.findall(r"^ +(\w+) --> (\w+)$", text, re.MULTILINE)), arrows()
    assert drawn <= made, "draw no arrow that the code has not"
    assert all(other in reached(drawn, room) for room, other in made), "draw the arrows that are missing"
    assert all(FLOOR[room] > FLOOR[other] for room, other in drawn)
