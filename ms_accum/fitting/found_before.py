"""What did an earlier search find?"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms

from .batch_size import MicroBatch
from .trials import Trial


class FoundBefore:
    """A file of search results, by the settings that they depend on.

    If the file can't be read or written, the search is repeated.

    Args:
        path (str): the JSON file; its folder is created when a result is stored.
        **key (Any): what the result depends on, besides the machine, the device and the version of MindSpore.
    """

    def __init__(self, path: str | os.PathLike[str], **key: Any):
        self._path = Path(path)
        here = {"machine": platform.node(), "cores": _cores(), "device": ms.get_context("device_target")}
        self._key = json.dumps({**key, **here, "mindspore": ms.__version__}, sort_keys=True)

    def get(self) -> MicroBatch | None:
        """Return the result of an earlier search with the same settings, or None."""
        try:
            fields = self._all()[self._key]
            return MicroBatch(**{**fields, "trials": tuple(Trial(*tried) for tried in fields["trials"])})
        except (KeyError, TypeError):
            return None

    def keep(self, found: MicroBatch) -> None:
        """Store a result."""
        results = {**self._all(), self._key: found._asdict()}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)  # not written into: it may be a link
            self._path.write_text(json.dumps(results, indent=1), encoding="utf-8")

    def _all(self) -> Mapping[str, Any]:
        if not self._path.is_file():  # a pipe would be waited for
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
