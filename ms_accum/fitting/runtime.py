"""Which environment variables make MindSpore's CPU runtime fast?

The runtime reads them when it runs its first kernel, so they can be set after MindSpore is imported.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import mindspore as ms
from mindspore import nn

from .. import _check

# On AVX-512 machines the wheel's oneDNN runs convolutions in a slow reference kernel; limited to AVX2 it uses a fast
# one. Matrix products are faster without the limit, so it is set only for networks with convolutions.
_KERNELS = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
_SHOWN = "ONEDNN_MAX_CPU_ISA=AVX2"
_AVX512 = 0x20  # bit of AVX-512's first level in oneDNN's effective instruction set

# The host thread busy-waits and so takes a core from the kernels. With this setting it runs the kernels itself.
_HOST = {"MS_DEV_HOST_BLOCKING_RUN": "1"}

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Conv1dTranspose, nn.Conv2dTranspose, nn.Conv3dTranspose)


def tune_cpu(network: nn.Cell) -> dict[str, str]:
    """Set environment variables that make MindSpore's CPU runtime fast for a network; your own settings are kept.

    Call it before anything is computed. Results differ by rounding only. On other devices it does nothing.

    Args:
        network (Cell): the network that will run.

    Returns:
        dict[str, str], the environment variables that were set, with their values.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from ms_accum import tune_cpu
        >>> from ms_accum.zoo import MLP
        >>> settings = tune_cpu(MLP())
        >>> tune_cpu(MLP())
        {}
    """
    if ms.get_context("device_target") != "CPU":
        return {}
    version = tuple(int(part) for part in ms.__version__.split(".")[:2])
    wanted = _HOST if version >= (2, 8) else {}
    if version >= (2, 9) and _has_avx512() and _convolves(network):
        wanted = {**wanted, **_KERNELS}
    chosen = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(chosen)
    if _KERNELS.items() <= chosen.items() and _uses_avx512():
        for name in _KERNELS:
            del os.environ[name], chosen[name]
        _check.warn(
            f"For 'tune_cpu', it is too late to set {_SHOWN}: a network has run in this process, and convolutions may "
            f"take 15 times as long. Call it before, or start Python with {_SHOWN}.",
        )
    return chosen


def _uses_avx512() -> bool:
    """Return whether oneDNN uses AVX-512 kernels. If oneDNN has not read the variable yet, this call makes it do so."""
    try:
        library = ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / "libdnnl.so.3"))
        return bool(library.dnnl_get_effective_cpu_isa() & _AVX512)
    except (OSError, AttributeError):
        return False


def _convolves(network: nn.Cell) -> bool:
    return any(isinstance(cell, _CONVOLUTIONS) for _, cell in network.cells_and_names())


def _has_avx512() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
