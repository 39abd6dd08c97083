"""The record of a benchmark: its rows, settings, versions, machine and the code that was measured, as JSON."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# A change of these makes figures out of date.
_MEASURED = ("ms_accum/engine", "ms_accum/network", "ms_accum/native.py", "ms_accum/native.cc")


def code() -> dict[str, str]:
    """Return the commit, if there is one, and a digest of the code that decides about speed and memory.

    A commit says what to check out, the digest whether that code is still the one that is here.
    """
    root = Path(__file__).parents[1]
    places = [root / name for name in _MEASURED]
    paths = [path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])]
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    command = ["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found = ""
    return {"commit": found, "digest": digest.hexdigest()}


def machine() -> dict[str, Any]:
    """Return what the figures depend on, besides the versions."""
    flags = (_first("/proc/cpuinfo", "flags") or "").split()
    return {
        "instructions": next((name for name in ("avx512f", "avx2") if name in flags), platform.machine()),
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def save(name: str, output: str | Path, rows: Sequence[dict], settings: Mapping, versions: Mapping) -> Path:
    """Write `output`/`name`.json, and return its path."""
    record = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "code": code(),
        "versions": dict(versions),
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
    }
    path = Path(output) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def records() -> list[dict[str, Any]]:
    """Return the records of the benchmarks about time and memory, in the order of their names."""
    return [record for record in map(read, sorted(RESULTS.glob("*.json"))) if "machine" in record]


def rows(benchmark: str) -> list[dict[str, Any]]:
    """Return the rows that a benchmark has written."""
    return read(RESULTS / f"{benchmark}.json")["rows"]


def part(rows: Iterable[Mapping[str, Any]], name: str) -> list:
    """Return the rows of a part."""
    return [row for row in rows if row["part"] == name]


def groups(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple, list]:
    """Return the rows that have the same values of these keys, by the values, in the order of the rows."""
    grouped: dict[tuple, list] = {}
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in keys), []).append(row)
    return grouped


def read(path: Path) -> dict[str, Any]:
    """Return the record in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def _first(path: str, key: str) -> str | None:
    """Return the value of the first `key: value` line of a file of /proc."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
