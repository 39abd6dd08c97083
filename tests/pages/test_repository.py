"""Imports go one way, nothing runs text, starts a shell or unpickles; pages repeat what pyproject.toml says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The folders of ms_accum from the ground up. A module imports from its own folder and from lower ones; the modules at
# the top of the package, which users import, stand between `training` and the commands.
LAYERS = ["network", "ranks", "layers", "loss", "engine", "saving", "training", "top", "commands"]
GROUND = {"_check", "native"}  # import nothing of the package, and are imported anywhere
COMMANDS = {"launch", "selftest"}  # modules at the top that are programs: `python -m ms_accum.launch`
# What each package of the clone may import of the others; the wheel has ms_accum only.
OTHERS = {
    "ms_accum": set(),
    "model_zoo": set(),
    "programs": {"ms_accum", "model_zoo"},
    "examples": {"ms_accum", "model_zoo"},
}
OURS = {*OTHERS, "train", "eval", "tests", "benchmarks"}
FORBIDDEN = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
UNSAFE = {"pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
SOURCES = [path for folder in OTHERS for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES += sorted(ROOT.glob("*.py"))


def layer_of(parts):
    """Return the layer of a module of ms_accum, whose name has these parts after the package's."""
    folder = "commands" if parts[0] in COMMANDS else parts[0]
    return LAYERS.index(folder) if folder in LAYERS else LAYERS.index("top")


def imported(source, package):
    """Yield the modules that a source in a package imports, as absolute names; from a package, also the names in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            is_folder = (ROOT / module.replace(".", "/")).is_dir()
            yield from (f"{module}.{alias.name}" for alias in node.names) if is_folder else [module]


def wrong_imports(source, path):
    """Return what a file of the repository may not import."""
    parts = path.with_suffix("").parts
    if parts[0] not in OTHERS:  # train.py and eval.py
        return []
    names = [name.split(".") for name in imported(source, ".".join(parts[:-1]))]
    wrong = [name for name in names if name[0] in OURS - {parts[0], *OTHERS[parts[0]]}]
    if parts[0] != "ms_accum" or parts[1] == "__init__":
        return wrong
    ours = [name for name in names if name[0] == "ms_accum" and name[1:2] and name[1] not in {*GROUND, "__version__"}]
    return wrong + [name for name in ours if parts[1] in GROUND or layer_of(name[1:]) > layer_of(parts[1:])]


def dangerous(source):
    """Return where a source runs text, starts a shell or unpickles."""
    wrong = [name for name in imported(source, "") if name.split(".")[0] in UNSAFE]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe = [given.get(name, "False") != "False" for name in ("shell", "allow_pickle")]
            wrong += [ast.unparse(node)] if any(unsafe) or ast.unparse(node.func) in FORBIDDEN else []
    return wrong


def test_imports_go_down_and_nothing_is_dangerous():
    sources = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in SOURCES}
    assert {path: wrong for path, source in sources.items() if (wrong := wrong_imports(source, path))} == {}
    assert {path: wrong for path, source in sources.items() if (wrong := dangerous(source))} == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ms_accum/network/tree.py", "from ..training.sizes import is_full"),
        ("ms_accum/engine/window.py", "def f():\n    from ..driver import GradientAccumulation"),
        ("ms_accum/_check.py", "from .engine import ends"),
        ("ms_accum/driver.py", "from model_zoo import MLP"),
        ("ms_accum/driver.py", "from .launch import main"),
        ("model_zoo/mlp.py", "import ms_accum"),
        ("programs/tasks.py", "import train"),
    ],
)
def test_imports_that_go_up_are_found(path, source):
    assert len(wrong_imports(source, Path(path))) == 1


@pytest.mark.parametrize(
    "source",
    ["eval(x)", "run(x, shell=True)", "yaml.load(f, SafeLoader)", "import pickle", "np.load(f, allow_pickle=True)"],
)
def test_what_is_dangerous_is_found(source):
    assert dangerous(source) and not dangerous("yaml.safe_load(f)\nrun(x, shell=False)\nnetwork.eval(x)")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/mindspore_faults.md"])
def test_pages_for_developers_point_at_what_is_there(page):
    names = re.findall(r"`([a-z_]+/[a-z_]+(?:\.\w+)*)(?:\([^`]*\))?`", (ROOT / page).read_text(encoding="utf-8"))
    assert len(names) > 20
    for name in names:
        path, *inside = name.removesuffix(".py").split(".")
        source = next(filter(Path.exists, (ROOT / "ms_accum" / f"{path}.py", ROOT / f"{path}.py")), None)
        assert source is not None and all(re.search(rf"\b{each}\b", source.read_text("utf-8")) for each in inside), name


def test_no_two_modules_of_the_library_have_one_name():
    names = [path.name for path in (ROOT / "ms_accum").rglob("*.py") if path.name != "__init__.py"]
    assert len(names) == len(set(names))


INSTALLING = ("README.md", "README_CN.md", "docs/index.md", "docs/index.zh.md")
ADDRESS = r'(?:git clone |url += \{|url: "|repository-code: ")([^\s"}]+)'


@pytest.mark.parametrize("page", [*INSTALLING, "CITATION.cff"])
def test_pages_have_the_address_and_the_dependencies_of_the_project(page):
    project, text = ((ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", page))
    address = re.search(r'^Source = "(\S+)"', project, re.MULTILINE)
    assert address and set(re.findall(ADDRESS, text)) == {address[1]}
    if page in INSTALLING:  # beside the MindSpore of a device, which pip must not replace
        (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
        others = [each for each in re.findall(r'^ *("[^"]+")', listed, re.MULTILINE) if "mindspore" not in each]
        lines = re.findall(r"pip install ((?:\"[^\"\n]+\" ?)+)", text)
        assert len(others) == 4 and lines and all(each in line for each in others for line in lines)
