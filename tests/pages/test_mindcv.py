"""The code of docs/migration.md for MindCV runs, in an environment of its own that sees the packages of this one."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINDCV = "mindcv==0.3.0"


@pytest.mark.slow
@pytest.mark.ranks
def test_code_of_migration_page_runs(tmp_path):
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    data = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    of_mindcv = r"^```py-mindcv\n(.*?)^```\n\n```text\n(.*?)^```$"
    ((ours, printed),) = re.findall(of_mindcv, page, re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text(data + ours, encoding="utf-8")
    python = environment(tmp_path / "environment")
    done = run(python, tmp_path / "page.py", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == printed.strip(), done.stderr[-4000:]


def environment(folder):
    """Return an interpreter that has MindCV; the test is skipped if the package index can't be reached."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(packages, "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    installed = run(python, "-m", "pip", "install", "--no-deps", "--quiet", MINDCV)
    if installed.returncode:
        pytest.skip(f"{MINDCV} can't be installed: {installed.stderr[-200:]}")
    return python


def run(*command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=600, **options)
