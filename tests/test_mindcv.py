"""MindCV's optimizers and schedulers train as with one large batch, and the code of docs/migration.md runs with them.

MindCV is installed into an environment of its own, which sees the packages of this one behind its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.several]
HERE = Path(__file__).resolve().parent
MINDCV = "mindcv==0.3.0"
BIN = "Scripts" if os.name == "nt" else "bin"
UPDATES = 6
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "lion", "nadam", "adan", "rmsprop", "adagrad")
SCHEDULES = 8


def run(*command, **options):
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=1200, check=False, cwd=HERE.parent, **options
    )


def install(folder):
    """Make the environment; write a file with the reason if the index can't be reached."""
    own = folder / "environment"
    venv.create(own, with_pip=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(own), "platbase": str(own)})
    Path(packages, "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    installed = run(own / BIN / "python", "-m", "pip", "install", "--no-deps", "--quiet", MINDCV)
    if installed.returncode:
        (folder / "reason").write_text((installed.stderr or "pip failed").strip().splitlines()[-1], encoding="utf-8")


@pytest.fixture(scope="session")
def python(once):
    """The interpreter that has MindCV."""
    folder = once("mindcv", install)
    if (folder / "reason").exists():
        pytest.skip(f"{MINDCV} can't be installed: {(folder / 'reason').read_text(encoding='utf-8')}")
    return folder / "environment" / BIN / "python"


@pytest.fixture(scope="session")
def lines(python, once):
    """What tests/mindcv_runs.py prints."""

    def compare(folder):
        done = run(python, HERE / "mindcv_runs.py")
        assert done.returncode == 0, done.stderr[-4000:]
        (folder / "lines").write_text(done.stdout, encoding="utf-8")

    printed = (once("mindcv-runs", compare) / "lines").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in printed if line.startswith("{")]


def test_training_equals_large_batch(lines):
    """Schedules have one rate for each update, windows a tail, and micro-batches different sizes."""
    compared = [line for line in lines if "miss" in line]
    assert len(compared) == len(OPTIMIZERS) * SCHEDULES + 1  # and a group for each layer
    assert {line["optimizer"] for line in compared} == {*OPTIMIZERS}
    for line in compared:
        assert line["miss"] <= 1e-5, line
        assert line["clocks"] == [UPDATES, UPDATES], line


def test_reported_rates_equal_schedule(lines):
    shown = [line for line in lines if line.get("rates")]
    assert shown
    for line in shown:
        assert line["shown"] == pytest.approx(line["rates"], rel=1e-6), line


def test_optimizer_unsupported_on_cpu_is_rejected(lines):
    (refused,) = [line["refused"] for line in lines if "refused" in line]
    assert refused.startswith("For 'GradientAccumulation', 'optimizer' must be one that MindSpore runs on CPU")
    assert "but got Lamb. Use nn.AdamWeightDecay" in refused


# docs/migration.md


def program_of_page():
    """Return the page's data and its code for MindCV, as one program, and what the page says that it prints."""
    page = (HERE.parent / "docs" / "migration.md").read_text(encoding="utf-8")
    data = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ((ours, printed),) = re.findall(r"^```py-mindcv\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return data[1] + ours, printed


def last_line(python, folder, source):
    (folder / "page.py").write_text(source, encoding="utf-8")
    done = run(python, folder / "page.py", env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def test_code_of_migration_page_runs(python, tmp_path):
    source, printed = program_of_page()
    assert last_line(python, tmp_path, source) == printed.strip() == "9 updates, 9 rates"
