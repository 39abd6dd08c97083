"""The record of a benchmark: its rows, settings, versions and machine as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_MAKERS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}


def kind() -> str:
    """Return the kind of this machine, such as avx2-amd, which names the folder of its results."""
    maker = _MAKERS.get(_first("/proc/cpuinfo", "vendor_id") or "")
    return f"{instructions()}-{maker}" if maker else instructions()


def instructions() -> str:
    """Return the widest vector instructions of this machine."""
    flags = (_first("/proc/cpuinfo", "flags") or "").split()
    return next((name for name in ("avx512f", "avx2") if name in flags), platform.machine()).removesuffix("f")


def machine() -> dict[str, Any]:
    """Return what the figures depend on, besides the versions."""
    return {
        "instructions": instructions(),
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
        "versions": dict(versions),
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
    }
    path = Path(output) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def records(machine: str) -> list[dict[str, Any]]:
    """Return the records of a kind of machine, in the order of the benchmarks' names."""
    return [read(path) for path in sorted((RESULTS / machine).glob("*.json"))]


def rows(machine: str, benchmark: str) -> list[dict[str, Any]]:
    """Return the rows that a benchmark has written on a kind of machine, or none."""
    path = RESULTS / machine / f"{benchmark}.json"
    return read(path)["rows"] if path.exists() else []


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
