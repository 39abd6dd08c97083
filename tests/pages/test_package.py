"""The packages: what they import, when, and what pyproject.toml says of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:  # before Python 3.11; pytest brings it
    import tomli as tomllib

import model_zoo
import ms_accum

pytestmark = pytest.mark.usefixtures("eager")
ROOT = Path(__file__).resolve().parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = CONFIG["project"]
EXTRAS = PROJECT["optional-dependencies"]
LIBRARY = sorted((ROOT / "ms_accum").rglob("*.py"))
PACKAGES = ("model_zoo", "programs")  # of the clone only
SOURCES = [*LIBRARY, *(path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")))]
SOURCES += [ROOT / "train.py", ROOT / "eval.py"]
STANDARD = getattr(sys, "stdlib_module_names", None)  # since Python 3.10
# Requirements by what is imported, where the names differ.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "PyYAML"}
# Pillow and protobuf, which MindSpore requires; the last is imported for type checkers only, which know it.
NOT_OURS = {"PIL", "google", "typing_extensions"}


def lines(name):
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def third_party(path, everywhere):
    """Return what a file imports of others: when it is imported itself, or anywhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree) if everywhere else tree.body)
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    roots = {name.split(".")[0] for name in modules} - {"ms_accum", *PACKAGES} - NOT_OURS
    return {DISTRIBUTIONS.get(name, name) for name in roots if name not in STANDARD}


# pyproject.toml


def test_version_equals_pyproject():
    assert PROJECT["version"] == ms_accum.__version__


def test_requirements_files_equal_pyproject():
    assert lines("requirements.txt") == ["-e .", *PROJECT["dependencies"], *EXTRAS["examples"], *EXTRAS["test"]]
    extras, *others = EXTRAS["dev"]
    assert extras == "ms-accum[examples,test]" and lines("requirements-dev.txt") == others


@pytest.mark.skipif(STANDARD is None, reason="Python 3.9 does not list its own modules")
def test_imported_packages_are_required():
    at_once = set().union(*(third_party(path, everywhere=False) for path in LIBRARY))
    assert at_once == names(PROJECT["dependencies"])
    anywhere = set().union(*(third_party(path, everywhere=True) for path in SOURCES))
    assert anywhere - at_once == names(EXTRAS["examples"])


def test_python_classifiers_equal_requires_python():
    low, high = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    named = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", line) for line in PROJECT["classifiers"]]
    assert [int(match[1]) for match in named if match] == list(range(low, high))


# The public names


@pytest.mark.parametrize("package", [ms_accum, model_zoo], ids=lambda package: package.__name__)
def test_public_names_are_those_that_type_checkers_see(package):
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.asname: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    del typed[None]  # what the package itself needs
    assert typed == package._MODULES and list(package._MODULES) == sorted(package._MODULES) == package.__all__
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_import_loads_no_heavy_modules():
    heavy = ("ms_accum", "model_zoo", "sklearn", "mindspore", "numpy", "matplotlib")
    program = f"import sys, ms_accum, model_zoo; print(*(name for name in {heavy} if name in sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "ms_accum model_zoo\n"
