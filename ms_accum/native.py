"""Operators of our own in C++ for the end of a window on CPU (`native.cc`), built when the package is installed.

MindSpore's kernels read the gradients four times: for the norm, to divide and clip, in the optimizer, and to empty the
accumulators. These do it in two passes. Where they were not built, MindSpore's kernels do it, with the same results but
for rounding.
"""

from __future__ import annotations

import functools
import logging
import os
import sysconfig
from pathlib import Path

import mindspore as ms

SWITCH = "MS_ACCUM_NATIVE"
"""str, the environment variable that turns the operators off if it is 0."""
_log = logging.getLogger("ms_accum")


def available() -> bool:
    """Return whether this process uses the C++ operators at the end of a window, on CPU.

    The installation builds them if there is a C++ compiler. ``MS_ACCUM_NATIVE=0`` in the environment turns them off.

    Examples:
        >>> import ms_accum.native
        >>> ms_accum.native.available() in (True, False)
        True
    """
    return library() is not None


def library() -> Path | None:
    """Return the path of the operators; None if they are not available."""
    if os.environ.get(SWITCH) == "0" or ms.get_context("device_target") != "CPU":
        return None
    return _built()


@functools.cache
def _built() -> Path | None:
    """Return the file that the installation has built for this CPU, unless MindSpore could not load it."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    paths = [Path(__file__).resolve().parent / f"{name}{suffix}" for name in _names()]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        _log.info("The C++ operators are not used: the installation did not build them.")
        return None
    allowed = os.environ.get("MS_CUSTOM_AOT_WHITE_LIST")
    if allowed is not None and not (allowed and path.is_relative_to(os.path.realpath(allowed))):
        _log.info("The C++ operators are not used: MS_CUSTOM_AOT_WHITE_LIST does not have %s.", path.parent)
        return None
    if not str(path).isascii() or ":" in str(path):  # MindSpore would take what follows a colon for the operator
        _log.info("The C++ operators are not used: MindSpore can't load them from %s.", path.parent)
        return None
    return path


def _names() -> list[str]:
    """Return the names under which the operators may have been built, the fastest one for this CPU first."""
    try:
        has_avx2 = " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        has_avx2 = False
    return ["_native_avx2", "_native"] if has_avx2 else ["_native"]
