"""The end of a window as one operator of our own on CPU, in C++, which is compiled when it is first needed.

MindSpore's kernels read the gradients four times: for the norm, to divide and clip, in the optimizer, and to empty the
accumulators. `native.cc` does it in two passes. Where it can't be compiled or loaded, or computes something else than
NumPy, MindSpore's kernels do it, with the same results but for rounding.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import mindspore as ms
import numpy as np
from filelock import FileLock

from . import _check

SWITCH = "MS_ACCUM_NATIVE"
"""str, the environment variable that turns the operators off if it is 0."""
_SOURCE = Path(__file__).with_suffix(".cc")
_COMPILERS = ("g++", "c++", "clang++")
# Without fused multiply-add: the bytes of a result must not depend on the CPU.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno")
_FLAGS_TRIED = ((*_FLAGS, "-fno-trapping-math", "-march=native"), _FLAGS)
_LONGEST = 60.0  # seconds, for all compilers and for other processes that compile; it takes 2
_DIGEST = hashlib.sha256().digest_size
# What crashes when it is loaded or called must not take the user's process with it.
_PROBE = """
import ctypes, sys
one, size = (ctypes.c_float * 1)(3.0), (ctypes.c_int64 * 1)(1)
pointers = (ctypes.c_void_p * 2)(*[ctypes.addressof(one)] * 2)
shapes = (ctypes.c_void_p * 2)(*[ctypes.addressof(size)] * 2)
norm = ctypes.CDLL(sys.argv[1]).norm
sys.exit(norm(2, pointers, (ctypes.c_int * 2)(1, 1), shapes, None, None, None) or one[0] != 3.0)
"""
_log = logging.getLogger("ms_accum")


def available() -> bool:
    """Return whether this process uses the C++ operators at the end of a window: on CPU, with a C++ compiler.

    The first call, or the first constructor of `ms_accum`, compiles them, which takes some 2 seconds once for each user
    and machine. ``MS_ACCUM_NATIVE=0`` in the environment turns them off. The log says why they are not available.

    Examples:
        >>> import ms_accum.native
        >>> ms_accum.native.available() in (True, False)
        True
    """
    return library() is not None


def library() -> Path | None:
    """Return the path of the compiled and checked operators; None if they are not available."""
    if os.environ.get(SWITCH) == "0" or ms.get_context("device_target") != "CPU":
        return None
    path = _checked_library()
    if path is not None and not path.exists():  # the cache was emptied, and MindSpore reads the file for each graph
        _checked_library.cache_clear()
        path = _checked_library()
    return path


@functools.cache
def _checked_library() -> Path | None:
    """Return the operators from the user's cache, or compiled for this process alone, and log which."""
    reasons: list[str] = []
    try:
        compiler = _compiler()
        if compiler is None:
            tried = ", ".join(_COMPILERS)
            _log.info("The C++ operators are not used, because no C++ compiler (CXX, %s) was found.", tried)
            return None
        name, deadline = f"native-{_key(compiler)}.so", time.monotonic() + _LONGEST
        for folder in (_user_cache, _own_folder):
            try:
                path = _compiled(compiler, folder(), name, deadline)
                _compare(path)
                _log.info("The C++ operators are used: %s. %s=0 turns them off.", path, SWITCH)
                return path
            except Exception as error:  # noqa: BLE001 - whatever it is, MindSpore's kernels do the work
                reasons.append(_check.one_line(error))
    except Exception as error:  # noqa: BLE001
        reasons.append(_check.one_line(error))
    _log.warning(
        "The C++ operators can't be used, and MindSpore's kernels are slower: %s", "; ".join(dict.fromkeys(reasons))
    )
    return None


# Compiling, and the cache


def _user_cache() -> Path:
    """Return the user's folder for it; raise an error if others could write it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    if not folder.is_absolute():
        raise ValueError(f"{folder} is not an absolute path")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve() / "ms_accum"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(folder, stat.S_ISDIR):
        raise ValueError(f"{folder} is a link, or other users can write it")
    return folder


def _own_folder() -> Path:
    """Return a folder of this process, which removes it at its end."""
    folder, process = Path(tempfile.mkdtemp(prefix="ms_accum_")).resolve(), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)
    return folder


def _compiled(compiler: Sequence[str], folder: Path, name: str, deadline: float) -> Path:
    """Return the compiled source in this folder, where it may already be."""
    path = folder / name
    path.as_posix().encode()  # an error for a name that MindSpore can't pass on
    if ":" in str(path):  # MindSpore would load what is before it
        raise ValueError(f"{folder} contains a colon")
    if not _is_whole(path):
        with FileLock(str(folder / "lock"), timeout=max(0.0, deadline - time.monotonic())):  # others wait, and find it
            if not _is_whole(path):
                _compile(compiler, path, deadline)
    return path


def _compiler() -> list[str] | None:
    """Return the words of the command that compiles C++, if there is one; `CXX` of the environment goes first."""
    given = shlex.split(os.environ.get("CXX", ""))
    for words in (given, *([name] for name in _COMPILERS)):
        path = shutil.which(words[0]) if words else None
        if path:
            return [path, *words[1:]]
    return None


def _key(compiler: Sequence[str]) -> str:
    """Return a name for what the result depends on: source, compiler, CPU and versions."""
    resolved = os.stat(compiler[0])
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        cpu = sorted({line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        cpu = [platform.processor()]
    facts = (compiler, resolved.st_size, resolved.st_mtime_ns, _FLAGS_TRIED, platform.machine(), platform.libc_ver())
    digest = hashlib.sha256(_SOURCE.read_bytes())
    digest.update(repr((*facts, cpu, ms.__version__, platform.python_version())).encode())
    return digest.hexdigest()[:16]


def _compile(compiler: Sequence[str], path: Path, deadline: float) -> None:
    """Compile the source into a file, in one step, and only if it runs; the caller has the lock."""
    for left_over in path.parent.glob("*.tmp"):  # of a process that was killed
        with contextlib.suppress(OSError):
            left_over.unlink()
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        for flags in _FLAGS_TRIED:  # not all compilers support all CPUs
            failed, text = _run([*compiler, *flags, "-o", name, str(_SOURCE)], deadline)
            if not failed:
                break
        else:
            raise ValueError(f"{compiler[0]} failed: {text[:200]}")
        content = temporary.read_bytes()
        temporary.write_bytes(content + hashlib.sha256(content).digest())  # what loads it ignores what follows
        temporary.chmod(0o500)
        if _run([sys.executable, "-I", "-c", _PROBE, name], deadline)[0]:
            raise ValueError(f"what {compiler[0]} made does not run")
        _compare(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _run(command: Sequence[str], deadline: float) -> tuple[int, str]:
    """Run a command to its end, with all that it starts, until the deadline; return its code and its first line."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **options) as process:  # type: ignore[call-overload]
        try:
            text = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            raise ValueError(f"{command[0]} took longer than {_LONGEST:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, text.decode(errors="replace").strip().partition("\n")[0]


def _is_own(path: Path, kind: Callable[[int], bool]) -> bool:
    """Return whether a path is of this kind, no link, belongs to this user, and can't be written by others."""
    status = path.lstat()
    return kind(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _is_whole(path: Path) -> bool:
    """Return whether a compiled file is there, complete, and written by this user."""
    try:
        if not _is_own(path, stat.S_ISREG):
            return False
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


# The check of what has been compiled


def call(loaded: ctypes.CDLL, name: str, *arrays: np.ndarray, types: Sequence[bytes] = ()) -> int:
    """Call an operator with arrays, as MindSpore does: inputs, then the output. Returns 0 if it succeeded.

    Args:
        loaded (CDLL): the compiled operators.
        name (str): the operator.
        *arrays (ndarray): what it gets.
        types (Sequence[bytes]): their types in MindSpore's words. Default: not given.
    """
    data = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    axes = (ctypes.c_int * len(arrays))(*[array.ndim for array in arrays])
    shapes = [(ctypes.c_int64 * max(1, array.ndim))(*array.shape) for array in arrays]
    pointers = (ctypes.POINTER(ctypes.c_int64) * len(arrays))(
        *[ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) for shape in shapes]
    )
    words = (ctypes.c_char_p * len(types))(*types) if types else None
    return getattr(loaded, name)(len(arrays), data, axes, pointers, words, None, None)


def _compare(path: Path) -> None:
    """Raise an error unless MindSpore takes the operators, and they compute what NumPy does."""
    allowed = os.environ.get("MS_CUSTOM_AOT_WHITE_LIST")
    if allowed is not None and not (allowed and path.is_relative_to(os.path.realpath(allowed))):
        raise ValueError(f"MS_CUSTOM_AOT_WHITE_LIST does not have {path.parent}")
    wrong = _first_wrong(ctypes.CDLL(str(path)))
    if wrong:
        raise ValueError(f"'{wrong}' differs from NumPy")


def _first_wrong(loaded: ctypes.CDLL) -> str:
    """Return the name of an operator that differs from NumPy in a small window, or ""."""
    values = np.linspace(-1.0, 1.0, 37, dtype=np.float32)
    gradients, parameters, moments = [2 * values, values[:5].reshape(5, 1)], [values + 3, values[:5] * 2], []
    gradients, parameters = [array.copy() for array in gradients], [array.copy() for array in parameters]
    moments = [np.ones_like(array) for array in parameters]
    one, flag = np.zeros(1, np.float32), np.zeros(1, np.bool_)
    squares = sum(float(np.square(array, dtype=np.float64).sum()) for array in gradients)
    if call(loaded, "norm", *gradients, one) or not np.isclose(one[0], np.sqrt(squares), rtol=1e-6):
        return "norm"
    numbers = [np.array(number, np.float32) for number in (0.5, 0.0, 0.25, 0.125, 1.0)]
    layout, momentum, step = np.array([2, 1, 0, 1], np.int32), np.array([0.5], np.float32), np.zeros(1, np.int32)
    expected = []
    for gradient, parameter in zip(gradients, parameters):
        moment = 0.5 + (0.5 * gradient.reshape(parameter.shape) + 0.125 * parameter)
        expected.append(parameter - np.float32(0.25) * moment)
    arrays = [*gradients, *parameters, *moments, flag]
    failed = call(loaded, "momentum", np.array([True]), *numbers, layout, momentum, step, *arrays)
    equal = all(np.allclose(array, other, rtol=1e-6) for array, other in zip(parameters, expected))
    if failed or not (equal and flag[0] and step[0] == 1 and not any(array.any() for array in gradients)):
        return "momentum"
    return ""
