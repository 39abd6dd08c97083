"""The structure of the project: imports, packages and forbidden constructs.

Each rule is a function from a source text to what is wrong with it; each is fed a text that breaks it.
"""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted((ROOT / "ms_accum").rglob("*.py"))
ZOO = sorted((ROOT / "model_zoo").rglob("*.py"))
FOLDERS = ("benchmarks", "benchmarks/programs", "benchmarks/conformance", "benchmarks/conformance/programs")  # no .envs
BENCHMARKS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
PROGRAMS = [*sorted(ROOT.glob("*.py")), *sorted((ROOT / "examples").glob("*.py")), *BENCHMARKS]

FACES = [ROOT / package / "__init__.py" for package in ("ms_accum", "model_zoo")]

# The rooms by floors, from the ground; TOP are the modules that users import. A room imports rooms of lower floors.
TOP = "top"
APP = "app"
NATIVE = "native"  # a module with its source in C++, which users import, too
FLOORS = (
    (NATIVE,),
    ("network",),
    ("ranks",),
    ("layers",),
    ("loss",),
    ("engine",),
    ("saving",),
    ("training",),
    (TOP,),
    (APP,),
)
COMMANDS = ("launch", "inspect", "plot", "selftest")  # beside the library, for `python -m ms_accum.launch`
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
EVERYWHERE = "_check"  # may be imported by all, and imports none
VERSION = "ms_accum.__version__"  # of the package itself, which imports nothing by that
OUTSIDE = ("model_zoo", "train", "eval", "examples", "benchmarks", "tests")

BASES = {
    "nn.Cell": "what MindSpore compiles",
    "Compiled": "an nn.Cell that runs as a graph in every mode: how a Cell is called can only be inherited",
    "nn.WithLossCell": "what a network says of its compilation goes over",
    "ops.constexpr(has_in_place, get_instance=False)": "it has one answer inside a graph and one outside",
    "ops.constexpr(lambda: False, get_instance=False)": "it notes calls outside a graph, and none inside",
    "Callback": "what MindSpore's Model calls",
    "LearningRateSchedule": "optimizers take a schedule only if it is one",
    "dict": "MindSpore's RunContext takes nothing else",
    "Protocol": "an interface, nothing is inherited",
    "NamedTuple": "a record, nothing is inherited",
    "argparse.Action": "what a flag does can only be inherited",
    "argparse.ArgumentParser": "its errors can be changed by overriding `error` only",
    "Exception": "what is raised must be one",
    "ValueError": "callers may catch the kind of error that it is",
    "RuntimeError": "callers may catch the kind of error that it is",
}
FORBIDDEN_CALLS = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load")
FORBIDDEN_IMPORTS = ("pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib")


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
    if len(parts) > 1 and parts[1] in COMMANDS:
        return APP
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else TOP


def package_of(room, module):
    return "ms_accum" if room in (TOP, NATIVE) or module in COMMANDS else f"ms_accum.{room}"


def wrong_imports(source, room, module=""):
    """Return the imports of a module of `ms_accum` that do not go down."""
    wrong = []
    for name in imported(ast.parse(source), package_of(room, module)):
        package, _, target = name.partition(".")
        if package in OUTSIDE and not (package == "model_zoo" and room == APP):
            wrong.append(f"{name} is not a part of the package")
        if package != "ms_accum" or name == VERSION or (target.split(".")[0] == EVERYWHERE and module != EVERYWHERE):
            continue
        other = room_of(name)
        if not (ROOT / f"{name.replace('.', '/')}.py").is_file():
            wrong.append(f"{name}, which is no module")
        elif module == EVERYWHERE or (other != room and FLOOR[other] >= FLOOR[room]):
            wrong.append(f"{name}, of {other}")
    return wrong


def library_imports(source):
    return [name for name in imported(ast.parse(source), "model_zoo") if name.split(".")[0] == "ms_accum"]


def name_of(node):
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def unlisted_bases(source):
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    bases = [(c.name, ast.unparse(b).replace("lambda :", "lambda:")) for c in classes for b in c.bases]  # Python 3.9
    return [f"{name}({base})" for name, base in bases if base not in BASES]


def dangerous(source):
    """Return where a source runs texts, starts a shell or unpickles."""
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


# By name: the check, the files and the remedy.
RULES = {
    "imports ms_accum": (library_imports, ZOO, "hand in what it needs: model_zoo is of use without ms_accum"),
    "inherits": (unlisted_bases, LIBRARY, "hand the other one in, or list the base in BASES with the reason"),
    "is dangerous": (dangerous, LIBRARY + ZOO + PROGRAMS, "parse data, start programs with lists of arguments"),
    "asserts": (asserts, LIBRARY + ZOO, "raise an error that says the rule, what arrived and the way out"),
}
PLANTED = {
    "imports ms_accum": ["import ms_accum", "def f():\n    from ms_accum.engine.ends import is_full"],
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
VALID = {
    "imports ms_accum": ["import ms_accumulator", "from .data.mnist import load_mnist\nfrom . import lenet"],
    "inherits": ["class A: pass", "class A(nn.Cell): pass"],
    "is dangerous": ["yaml.safe_load(f)", "run(x, shell=False)", "evaluate(x)", "net.eval(x)", "np.load(f)"],
    "asserts": ["raise ValueError"],
}


def rule_cases():
    for rule, (check, paths, remedy) in RULES.items():
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            yield pytest.param(check, path, remedy, id=f"{name}-{rule}")


@pytest.mark.parametrize(("check", "path", "remedy"), list(rule_cases()))
def test_file_follows_rule(check, path, remedy):
    wrong = check(path.read_text(encoding="utf-8"))
    assert not wrong, f"{path.relative_to(ROOT)}: {'; '.join(wrong)}. To mend it: {remedy}."


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in RULES for source in PLANTED[rule]])
def test_rule_violations_are_detected(rule, source):
    assert RULES[rule][0](source)


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in RULES for source in VALID[rule]])
def test_valid_sources_pass_rules(rule, source):
    assert RULES[rule][0](source) == []


# The rooms


def room_of_file(path):
    if path.parent.name == "ms_accum":
        return APP if path.stem in COMMANDS else NATIVE if path.stem == NATIVE else TOP
    return path.parent.name


def arrows():
    """Return which room imports which other."""
    made = set()
    for path in LIBRARY:
        room = room_of_file(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = imported(tree, package_of(room, path.stem))
        made |= {
            (room, room_of(name))
            for name in names
            if name.startswith("ms_accum.") and name not in (f"ms_accum.{EVERYWHERE}", VERSION)
        }
    return {(room, other) for room, other in made if other != room}


@pytest.mark.parametrize("room", [room for room in FLOOR if room not in (TOP, NATIVE)])
def test_package_init_contains_only_docstring(room):
    body = ast.parse((ROOT / "ms_accum" / room / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr), f"{room}/__init__.py is its docstring and nothing else"


def imports_within(room):
    """Return, for each module of a room, those of the room that it imports."""
    paths = [path for path in LIBRARY if room_of_file(path) == room and path not in FACES]
    return {
        path.stem: {
            name.removeprefix(f"{package}.").split(".")[0]
            for package in [package_of(room, path.stem)]
            for name in imported(ast.parse(path.read_text(encoding="utf-8")), package)
            if name.startswith(package) and room_of(name) == room
        }
        for path in paths
    }


@pytest.mark.parametrize("room", FLOOR)
def test_package_has_no_circular_imports(room):
    try:
        graphlib.TopologicalSorter(imports_within(room)).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"{' -> '.join(error.args[1])}: move what both need into a module of its own")


def test_circular_import_is_detected():
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(
            {**imports_within(TOP), "accumulator": {"driver"}, "driver": {"accumulator"}}
        ).prepare()


def test_every_folder_has_a_layer():
    assert sorted({room_of_file(path) for path in LIBRARY}) == sorted(FLOOR), "give it its floor in FLOORS"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_to_lower_layers_only(path):
    wrong = wrong_imports(path.read_text(encoding="utf-8"), room_of_file(path), path.stem)
    remedy = "hand it in from above, move what both need to a lower floor, or import a name from its module"
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}. To mend it: {remedy}."


@pytest.mark.parametrize(
    ("room", "module", "source"),
    [
        (TOP, "_check", "from .engine import ends"),
        (TOP, "_check", "from . import _check"),
        ("network", "tree", "from ..engine.ends import is_full"),
        ("network", "tree", "from .. import _check, driver"),
        ("loss", "objective", "from ..engine import window"),
        ("training", "window", "from ..driver import GradientAccumulation"),
        ("engine", "window", "def f():\n    from ..driver import GradientAccumulation"),
        ("loss", "objective", "import ms_accum.engine.cells"),
        ("saving", "checkpointer", "from ms_accum.app.plan import Bar"),
        ("saving", "checkpointer", "from ms_accum import Accumulator"),
        ("program", "steps", "from ..evaluation import evaluate"),
        ("training", "run", "from model_zoo import MLP"),
        (TOP, "driver", "from model_zoo.mlp import MLP"),
        (TOP, "driver", "import train"),
        (TOP, "driver", "from . import GradientAccumulation"),
        (TOP, "driver", "import ms_accum"),
    ],
)
def test_imports_of_higher_layers_are_detected(room, module, source):
    assert len(wrong_imports(source, room, module)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("network", "from .. import _check"),
        ("engine", "from .. import _check\nfrom ..network import tree\nfrom .boundary import Boundary"),
        (TOP, "from .engine.ends import is_full\nfrom . import _check"),
        ("app", "from model_zoo import MODELS\nfrom model_zoo.next_token import IGNORED"),
        ("app", "import ms_accumulator, trainer, os.path\nfrom . import plan"),
    ],
)
def test_imports_of_lower_layers_are_allowed(room, source):
    assert wrong_imports(source, room) == []


# What ARCHITECTURE.md draws


def reachable_from(arrows, start):
    """Return all that can be reached along the arrows."""
    reachable, todo = set(), [start]
    while todo:
        todo += [end for begin, end in arrows if begin == todo[0] and end not in reachable]
        reachable.update(end for begin, end in arrows if begin == todo[0])
        del todo[0]
    return reachable


def test_architecture_diagram_equals_imports():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawn, made = set(re.findall(r"^ +(\w+) --> (\w+)$", text, re.MULTILINE)), arrows()
    assert drawn <= made, "draw no arrow that the code has not"
    assert all(other in reachable_from(drawn, room) for room, other in made), "draw the arrows that are missing"
    assert all(FLOOR[room] > FLOOR[other] for room, other in drawn)


# References to internal documents

INTERNAL = r"\b(DESIGN|FACE|FACTS|CASES)(\.md|'s)|^# [A-Z]{1,2}\d+\b|\b[Ii]ssues? \d+|(^|[\s\"'`(=])/work/"
WRITTEN = (
    "tests/**/*.py",
    "docs/**/*.md",
    "configs/*",
    "*.md",
    "*.toml",
    "*.yml",
    "*.cff",
    ".ci/*",
    ".github/**/*.yml",
)


def internal_references(text):
    """Return the lines that name an internal document, list or folder."""
    return [line for line in text.splitlines() if re.search(INTERNAL, line)]


def test_no_references_to_internal_documents():
    paths = [path for pattern in WRITTEN for path in ROOT.glob(pattern) if path.is_file()]
    paths += [*LIBRARY, *ZOO, *PROGRAMS]
    assert len(paths) > 200
    assert {
        path.name: lines for path in paths if (lines := internal_references(path.read_text(encoding="utf-8")))
    } == {}


@pytest.mark.parametrize("parts", ["# |E10", "# FA|CE's words", "see DES|IGN.md", "as in is|sue 30", "cd /wo|rk/main"])
def test_references_to_internal_documents_are_detected(parts):
    line = parts.replace("|", "")
    assert internal_references(f"x = 1\n{line}\n") == [line]
    assert not internal_references("# Every optimizer\nFACTS = {}\nan open [issue](x)\n./work/a\n")
