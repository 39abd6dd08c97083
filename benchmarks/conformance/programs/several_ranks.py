"""A case of several ranks: a launcher starts the program again, once for each rank, with the case in a file.

Programs of all libraries import this: it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.conformance.case import Case, Result

LIMIT = 100
_CASE, _RESULT = "CONFORMANCE_CASE", "CONFORMANCE_RESULT"


def case_of_rank() -> Case | None:
    """Return the case, if this process is a rank that a launcher has started."""
    path = os.environ.get(_CASE)
    return None if path is None else Case.of(json.loads(Path(path).read_text(encoding="utf-8")))


def write(result: Result) -> None:
    """Write the result, on rank 0."""
    Path(os.environ[_RESULT]).write_text(json.dumps(result.as_json()), encoding="utf-8")


def launched(case: Case, launcher: Sequence[str], program: str) -> Result:
    """Start the program on the ranks of a case, and return what rank 0 has written."""
    with tempfile.TemporaryDirectory() as folder:
        given, written = Path(folder, "case.json"), Path(folder, "result.json")
        given.write_text(json.dumps(case.as_json()), encoding="utf-8")
        environment = {**os.environ, _CASE: str(given), _RESULT: str(written), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", *launcher, program, *sys.argv[1:]]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        if not written.exists():
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            raise RuntimeError(errors[0].strip() if errors else (done.stderr or done.stdout).strip()[-300:])
        fields = json.loads(written.read_text(encoding="utf-8"))
        return Result(**{**fields, "words": fields["words"] + done.stderr})
