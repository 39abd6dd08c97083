"""The end of a window as one operator of our own on CPU, in C++, which is compiled when it is first needed.

MindSpore's kernels read the gradients four times: for the norm, to divide and clip, in the optimizer, and to empty the
accumulators. `native.cc` does it in two passes. Where it can't be compiled or loaded, or computes something else than
NumPy, MindSpore's kernels do it, with the same results but for rounding.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from filelock import FileLock, Timeout

SWITCH = "MS_ACCUM_NATIVE"
"""str, the environment variable that turns the operators off if it is 0."""
_SOURCE = Path(__file__).with_suffix(".cc")
_COMPILERS = ("g++", "c++", "clang++")
# Without fused multiply-add: the bytes of a result must not depend on the CPU.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno")
_FLAGS_TRIED = ((*_FLAGS, "-fno-trapping-math", "-march=native"), _FLAGS)
_LONGEST = 120.0  # seconds, for the compiler, and for another process that compiles
_DIGEST = hashlib.sha256().digest_size
_log = logging.getLogger("ms_accum")


def available() -> bool:
    """Return whether windows end in an operator of our own in this process: on CPU, with a C++ compiler.

    Its first call, or the first constructor of `ms_accum`, compiles it, which takes some 2 seconds once for each user
    and machine. ``MS_ACCUM_NATIVE=0`` in the environment turns it off. Why it is not available is logged.

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
    return _checked_library()


@functools.cache
def _checked_library() -> Path | None:
    compiler = _compiler()
    if compiler is None:
        tried = ", ".join(_COMPILERS)
        _log.info("The end of windows is left to MindSpore's kernels: no C++ compiler (CXX, %s) was found.", tried)
        return None
    try:
        path = _compiled(compiler)
        wrong = _first_wrong(ctypes.CDLL(str(path)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.warning("The end of windows is left to MindSpore's kernels, which are slower: %s", error)
        return None
    if wrong:
        _log.warning("The end of windows is left to MindSpore's kernels: '%s' of %s differs from NumPy.", wrong, path)
        return None
    _log.info("Windows end in an operator of ms_accum's own, %s. %s=0 turns it off.", path, SWITCH)
    return path


# Compiling, and the cache


def _compiled(compiler: Sequence[str]) -> Path:
    """Return the compiled source, from the user's cache, if it is there and no other user could have written it."""
    name = f"native-{_key(compiler)}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ms_accum"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(folder, stat.S_ISDIR):
            if not _is_whole(folder / name):
                with FileLock(str(folder / "lock"), timeout=_LONGEST):  # other ranks wait, and then find it
                    if not _is_whole(folder / name):
                        _compile(compiler, folder, name)
            return folder / name
    except (PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError, Timeout, NotImplementedError):
        pass  # the home is read-only, missing or somebody else's
    except OSError as error:
        _log.info("%s is not used: %s", folder, error)  # such as a full disk
    own = Path(tempfile.mkdtemp(prefix="ms_accum_"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return _compile(compiler, own, name)


def _compiler() -> list[str] | None:
    """Return the words of the command that compiles C++, if there is one; `CXX` of the environment goes first."""
    given = shlex.split(os.environ.get("CXX", ""))
    for words in (given, *([name] for name in _COMPILERS)):
        found = shutil.which(words[0]) if words else None
        if found:
            return [found, *words[1:]]
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


def _compile(compiler: Sequence[str], folder: Path, name: str) -> Path:
    """Compile the source into a file of this folder; a file that is there is replaced in one step."""
    for left_over in folder.glob("*.tmp"):  # of a process that was killed: this one has the lock
        left_over.unlink()
    descriptor, path = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=folder)
    os.close(descriptor)
    temporary = Path(path)
    try:
        for flags in _FLAGS_TRIED:  # not all compilers know all CPUs
            command = [*compiler, *flags, "-o", path, str(_SOURCE)]
            result = subprocess.run(command, capture_output=True, timeout=_LONGEST, stdin=subprocess.DEVNULL)
            if result.returncode == 0:
                break
        else:
            reason = result.stderr.decode(errors="replace").strip().partition("\n")[0][:200]
            raise ValueError(f"{compiler[0]} failed: {reason}")
        content = temporary.read_bytes()
        temporary.write_bytes(content + hashlib.sha256(content).digest())  # what loads it ignores what follows
        temporary.chmod(0o500)
        os.replace(temporary, folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    return folder / name


def _is_own(path: Path, kind: object) -> bool:
    """Return whether a path is of this kind, no link, belongs to this user, and can't be written by others."""
    found = path.lstat()
    return kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022  # type: ignore[operator]


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


def call(loaded: ctypes.CDLL, name: str, *arrays: np.ndarray) -> int:
    """Call an operator with arrays, as MindSpore does: inputs, then the output. Returns 0 if it succeeded."""
    data = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    axes = (ctypes.c_int * len(arrays))(*[array.ndim for array in arrays])
    shapes = [(ctypes.c_int64 * max(1, array.ndim))(*array.shape) for array in arrays]
    pointers = (ctypes.POINTER(ctypes.c_int64) * len(arrays))(
        *[ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) for shape in shapes]
    )
    return getattr(loaded, name)(len(arrays), data, axes, pointers, None, None, None)


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
