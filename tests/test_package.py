"""The installed package agrees with pyproject.toml."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:  # before Python 3.11; pytest brings it
    import tomli as tomllib

import ms_accum
from ms_accum import inspect, launch, plot, selftest
from ms_accum.app import launcher, process

ROOT = Path(__file__).resolve().parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, SETUPTOOLS = CONFIG["project"], CONFIG["tool"]["setuptools"]
COMMANDS = (inspect, launch, plot, selftest)
EXTRAS = PROJECT["optional-dependencies"]
# Requirements by what is imported, where the names differ.
DISTRIBUTIONS = {"PIL": "pillow", "google": "protobuf", "sklearn": "scikit-learn", "yaml": "PyYAML"}


def lines(name):
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def folder_of(package):
    """Return the folder of an installed package in the clone: its own, or that of the nearest one above it."""
    for name in (package, package.rpartition(".")[0]):
        if name in SETUPTOOLS["package-dir"]:
            return ROOT / SETUPTOOLS["package-dir"][name] / package[len(name) + 1 :].replace(".", "/")
    return ROOT / package.replace(".", "/")


def third_party(path, everywhere):
    """Return what a file imports of others: when it is imported itself, or anywhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else tree.body
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    nodes = ast.walk(tree) if everywhere else tree.body
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    roots = {name.split(".")[0] for name in modules} - {"ms_accum", "model_zoo"}
    return {DISTRIBUTIONS.get(name, name) for name in roots if name not in STANDARD}


STANDARD = getattr(sys, "stdlib_module_names", None)  # since Python 3.10
PROGRAMS = {path for path in ROOT.glob("*.py") if path.name != "setup.py"}  # which only the build runs
SOURCES = sorted([*(ROOT / "ms_accum").rglob("*.py"), *(ROOT / "model_zoo").rglob("*.py"), *PROGRAMS])


# pyproject.toml


def test_version_equals_pyproject():
    assert PROJECT["version"] == ms_accum.__version__


def test_requirements_files_equal_pyproject():
    assert lines("requirements.txt") == ["-e .", *PROJECT["dependencies"], *EXTRAS["examples"], *EXTRAS["test"]]
    extras, *others = EXTRAS["dev"]
    assert extras == "ms-accum[examples,test]" and lines("requirements-dev.txt") == others
    assert EXTRAS["plot"] + EXTRAS["tensorboard"] == EXTRAS["test"][:2]


@pytest.mark.skipif(STANDARD is None, reason="Python 3.9 does not list its own modules")
def test_imported_packages_are_required():
    at_once = set().union(*(third_party(path, everywhere=False) for path in SOURCES))
    assert at_once == names(PROJECT["dependencies"])
    anywhere = set().union(*(third_party(path, everywhere=True) for path in SOURCES))
    optional = EXTRAS["examples"] + EXTRAS["plot"] + EXTRAS["tensorboard"]
    assert anywhere - at_once == names(optional)


def test_all_packages_are_installed():
    folders = {path.parent for package in ("ms_accum", "model_zoo") for path in (ROOT / package).rglob("*.py")}
    assert {folder_of(package) for package in SETUPTOOLS["packages"]} == folders
    assert {name.split(".")[0] for name in SETUPTOOLS["packages"] + SETUPTOOLS["py-modules"]} == {
        "ms_accum",
        "model_zoo",
    }


def test_package_data_is_installed():
    patterns = SETUPTOOLS["package-data"]
    for package in SETUPTOOLS["packages"]:
        others = {path.name for path in folder_of(package).iterdir() if path.is_file() and path.suffix != ".py"}
        assert others == set(patterns.get(package, ())), package


def test_programs_are_installed():
    files = {f"{name.rpartition('.')[2]}.py" for name in SETUPTOOLS["py-modules"]}
    assert files == {path.name for path in PROGRAMS} == {Path(p).name for p in process.PROGRAMS.values()}
    assert set(process.PROGRAMS.values()) == {str(ROOT / name) for name in files}
    commands = {f"ms-accum-{module.__name__.rpartition('.')[2]}" for module in COMMANDS}
    assert set(PROJECT["scripts"]) == {*process.PROGRAMS, *commands}
    for place in PROJECT["scripts"].values():
        module, _, function = place.partition(":")
        modules = {module.__name__: module for module in (process, *COMMANDS)}
        assert callable(getattr(modules[module], function))


def test_python_classifiers_equal_requires_python():
    low, high = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    named = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", line) for line in PROJECT["classifiers"]]
    assert [int(match[1]) for match in named if match] == list(range(low, high))


def python(program, cwd, **environment):
    """Run a program in a folder, with the clone on the path as when it is installed: after what is the user's."""
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)


# Console scripts

RUN = "import sys; sys.argv = ['/bin/ms-accum-{0}', {1!r}]; from ms_accum.app.process import {2} as run; run()"


@pytest.mark.parametrize(("name", "function"), [("train", "train"), ("eval", "evaluate")])
def test_console_script_imports_no_user_modules(name, function, tmp_path):
    for theirs in ("train.py", "eval.py", "mindspore.py"):
        (tmp_path / theirs).write_text("raise SystemExit('not ours')\n", encoding="utf-8")
    done = python(RUN.format(name, "--help", function), tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"usage: ms-accum-{name} [--")
    done = python(RUN.format(name, "--epoch_s=1", function), tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: unrecognized arguments: --epoch_s=1")


@pytest.fixture
def launched(monkeypatch):
    """Return the list of the commands that the launcher would run."""
    commands_run = []
    monkeypatch.setattr(launcher, "launch", lambda command, *options: commands_run.append(command) or 0)
    return commands_run


def test_launcher_finds_console_script_by_name(launched):
    assert launch.main(["--nproc=2", "ms-accum-train", "--epochs", "1"]) == 0
    assert launched == [[str(ROOT / "train.py"), "--epochs", "1"]]


def test_launcher_prefers_file_and_module(launched, tmp_path):
    (tmp_path / "ms-accum-train").touch()
    assert launch.main(["ms-accum-train", "x"]) == launch.main(["-m", "ms-accum-train"]) == 0
    assert launched == [["ms-accum-train", "x"], ["-m", "ms-accum-train"]]


def test_config_without_pyyaml_prints_one_line(tmp_path):
    (tmp_path / "run.yaml").write_text("epochs: 1\n", encoding="utf-8")
    (tmp_path / "yaml.py").write_text("raise ImportError('not installed')\n", encoding="utf-8")
    done = python(RUN.format("train", "--config=run.yaml", "train"), tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: argument --config: needs PyYAML. Run: pip install PyYAML\n"
