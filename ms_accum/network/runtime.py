"""Sets the environment variables that make MindSpore's CPU runtime fast.

The runtime reads them when it runs its first kernel, so constructors can set them after MindSpore is imported.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mindspore as ms
from mindspore import Parameter, nn

from .. import _check
from . import private

# On AVX-512 machines the oneDNN in the wheel runs convolutions in a slow reference kernel; limited to AVX2 it uses a
# fast one. Matrix products are faster without the limit, so it is set only for networks with convolutions.
_KERNELS = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
_SHOWN = "ONEDNN_MAX_CPU_ISA=AVX2"
_AVX512 = 0x20  # the bit of AVX-512's first level in oneDNN's effective instruction set

# The host thread busy-waits, which takes a core from the kernels. With this setting it runs the kernels itself.
_HOST = {"MS_DEV_HOST_BLOCKING_RUN": "1"}

_TOO_LATE = (
    f"For '%s', it is too late to set {_SHOWN}: a network has run in this process, and convolutions may take 15 times "
    f"as long. Call tune_cpu(network) before, or start Python with {_SHOWN}."
)
_log = logging.getLogger("ms_accum")


def tune_cpu(network: nn.Cell) -> dict[str, str]:
    """Set environment variables that make MindSpore's CPU runtime fast for a network.

    `GradientAccumulation`, `Accumulator`, `TrainForwardBackward` and `evaluate` do this automatically and log it with
    level INFO. Call it yourself if the network runs before you create one of them, or if all convolutions are frozen
    and you create an `Accumulator`, which sees only the parameters of its optimizer. Results differ by rounding only.
    On other devices it does nothing. Variables that are already set are kept:
    ``MS_DEV_HOST_BLOCKING_RUN=0 ONEDNN_MAX_CPU_ISA=DEFAULT`` in the environment keeps MindSpore's defaults.

    Args:
        network (Cell): the network that will run.

    Returns:
        dict[str, str], the environment variables that were set, and their values.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from model_zoo import MLP
        >>> from ms_accum import tune_cpu
        >>> settings = tune_cpu(MLP())
        >>> tune_cpu(MLP())
        {}
    """
    new_settings, late = _set_variables(network.get_parameters())
    if late:
        _check.warn(_TOO_LATE.replace("%s", "tune_cpu"))
    return new_settings


def tune(owner: str, parameters: Iterable[Parameter]) -> None:
    """Do what `tune_cpu` does for a network with these parameters, but log instead of returning or warning.

    Args:
        owner (str): the name used in messages.
        parameters (Iterable[Parameter]): the network's parameters; of those of an optimizer, frozen ones are missing.
    """
    new_settings, late = _set_variables(parameters)
    if new_settings:
        shown = " ".join(f"{name}={value}" for name, value in new_settings.items())
        _log.info("For '%s', %s was set, which makes MindSpore's CPU runtime faster.", owner, shown)
    if late:
        _check.log_once(_TOO_LATE, owner)


@contextmanager
def synchronously() -> Iterator[None]:
    """Run each operator outside graphs to its end inside the block, so that an error is raised by the call.

    Otherwise a kernel that raises an error while later ones are launched may end the process with a segmentation fault.
    """
    previous = private.set_synchronous(True)
    try:
        yield
    finally:
        private.set_synchronous(previous)


def _set_variables(parameters: Iterable[Parameter]) -> tuple[dict[str, str], bool]:
    """Set the variables for a network with these parameters; return them, and whether it was too late for some."""
    if ms.get_context("device_target") != "CPU":
        return {}, False
    version = tuple(int(part) for part in ms.__version__.split(".")[:2])
    settings = dict(_HOST) if version >= (2, 8) else {}
    keeps_kernels = _KERNELS.keys() <= os.environ.keys() or version < (2, 9)
    if not keeps_kernels and _has_avx512() and _has_convolutions(parameters):
        settings.update(_KERNELS)
    new_settings = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new_settings)
    late = _KERNELS.items() <= new_settings.items() and _uses_avx512()
    if late:
        for name in _KERNELS:
            del os.environ[name], new_settings[name]
    return new_settings, late


def _uses_avx512() -> bool:
    """Return whether oneDNN uses AVX-512 kernels. This call makes oneDNN read the variable, unless it has already."""
    try:
        library = ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / "libdnnl.so.3"))
        return bool(library.dnnl_get_effective_cpu_isa() & _AVX512)
    except (OSError, AttributeError):
        return False


def _has_convolutions(parameters: Iterable[Parameter]) -> bool:
    return any(parameter.ndim > 3 for parameter in parameters)  # kernels of 1-D convolutions have four axes, too


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
