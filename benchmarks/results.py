"""What becomes of a measurement?"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

RESULTS = Path(__file__).parent / "results"

Row = Mapping[str, Any]


def machine() -> dict[str, Any]:
    """Return what the figures depend on, besides the versions."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def save(
    name: str, output: str | Path, rows: Sequence[Row], settings: Mapping[str, Any], versions: Mapping[str, str]
) -> Path:
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


def show(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Print a table. `columns` maps a row's keys to how their values are formatted: `{"network": "", "ms": ".2f"}`."""
    cells = [[_cell(row.get(key), spec) for key, spec in columns.items()] for row in rows]
    lines = [list(columns), *cells]
    widths = [max(map(len, column)) for column in zip(*lines)]
    to_left = [not spec for spec in columns.values()]
    for number, line in enumerate(lines):
        padded = [cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(line, widths, to_left)]
        print("  ".join(padded).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def plot(path: str | Path, draw: Callable[[Any], None], size: tuple[float, float] = (9.0, 5.0)) -> None:
    """Write a PNG of what `draw` puts into a matplotlib Figure, where matplotlib is there."""
    try:
        from matplotlib.figure import Figure  # a Figure of its own draws with Agg and needs no display
    except ImportError:
        print("no plot: matplotlib is missing (pip install -r benchmarks/requirements.txt)")
        return
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


def _cell(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec) if spec else str(value)


def _first(path: str, key: str) -> str | None:
    """Return the value of the first `key: value` line of a file of /proc."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
