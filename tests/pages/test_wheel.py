"""The wheel has the library and nothing else, installs into a fresh environment, and trains there from another folder.

MindSpore is not installed again: the fresh environment sees the packages of this one behind its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from ms_accum import __version__ as VERSION

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "ms_accum", "model_zoo", "programs")
PROGRAM = """
import mindspore as ms
import numpy as np
from mindspore import nn

import ms_accum
from ms_accum import GradientAccumulation, native

rows = np.ones((12, 4), np.float32), np.zeros(12, np.int32)
dataset = ms.dataset.NumpySlicesDataset(rows, ["x", "y"], shuffle=False).batch(2)
network = nn.Dense(4, 3)
model = GradientAccumulation(network, nn.CrossEntropyLoss(), nn.Adam(network.trainable_params()))
before = network.trainable_params()[0].asnumpy().copy()
model.train_process(1, dataset, 2, report=(), ckpt_path=None)
assert (network.trainable_params()[0].asnumpy() != before).any()
print(int(model.updates), native.available(), ms_accum.__file__)
"""


def run(*command, cwd):
    """Run a command without the variables that name other packages, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_wheel_installs_and_trains(tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    venv.create(tmp_path / "environment", with_pip=True)
    python = tmp_path / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
    base = {"base": str(tmp_path / "environment"), "platbase": str(tmp_path / "environment")}
    own = Path(sysconfig.get_path("purelib", vars=base))
    (own / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")

    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, clone]
    built = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("no package index, from which the build gets setuptools")
    assert built.returncode == 0, built.stderr[-4000:]
    (wheel,) = tmp_path.glob("ms_accum-*.whl")
    files = {path.relative_to(ROOT) for path in (ROOT / "ms_accum").rglob("*.py")} | {Path("ms_accum/py.typed")}
    packed = {*zipfile.ZipFile(wheel).namelist()}
    assert {path.as_posix() for path in files} <= packed
    assert {name.split("/")[0] for name in packed} == {"ms_accum", f"ms_accum-{VERSION}.dist-info"}

    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAM, encoding="utf-8")
    updates, compiled, package = run(python, "mine.py", cwd=tmp_path).splitlines()[-1].split()
    assert (updates, Path(package)) == ("3", own / "ms_accum/__init__.py")
    assert compiled == str(shutil.which("c++") is not None), "without a compiler the package has no operators in C++"
    assert run(python, "-m", "ms_accum.selftest", cwd=tmp_path).count("  ok\n") >= 9  # not bfloat16 on CPU


TYPED = """
import ms_accum
from model_zoo import LeNet5
from ms_accum import Accumulator, updates_per_epoch

LeNet5(num_class="ten")
updates_per_epoch("45", 4)
Accumulator(1, 2, clip="1")
ms_accum.Nothing
version: int = ms_accum.__version__
"""


def test_type_checkers_see_the_public_names(tmp_path):
    """Each of the last five lines is wrong."""
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(TYPED, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent", "typed.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    errors = [line.split("[")[-1] for line in done.stdout.splitlines() if ": error: " in line]
    assert errors == ["arg-type]", "arg-type]", "call-arg]", "attr-defined]", "assignment]"], done.stdout
