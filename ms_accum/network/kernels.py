"""What measures and empties gradients inside graphs: MindSpore's kernels, or operators of our own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from .. import native
from . import tree
from .compiled import in_graphs

_ONE = Tensor(1.0, ms.float32)
_KEEPS_NAN, _NO_NAN = Tensor(False), Tensor(True)


@ms.jit_class
class Kernels:
    """Those of MindSpore, on every device and outside of graphs."""

    library: Path | None = None
    """Optional[Path], the compiled operators of our own."""

    def __init__(self) -> None:
        self.add = tree.add
        self.add_weighted = tree.add_weighted
        self.add_no_nan = tree.add_no_nan
        self.all_finite = tree.all_finite
        self.norm = tree.global_norm
        self.sum_of_squares = tree.sum_of_squares
        self.clear = tree.clear


@ms.jit_class
class NativeKernels:
    """Those of `native.cc`, in graphs on CPU: they do what the functions of `tree` do, and sum in float64.

    Args:
        library (Path): the compiled operators.
    """

    def __init__(self, library: Path):
        self.library = library
        self._add = operator(library, "add", ms.bool_)
        self._all_finite = operator(library, "all_finite", ms.bool_)
        self._norm = operator(library, "norm", ms.float32)
        self._sum_of_squares = operator(library, "sum_of_squares", ms.float32)
        self._empty = operator(library, "empty", ms.bool_)

    def add(self, total: tuple, gradients: tuple) -> Tensor:
        """Add `gradients` to the Parameters of `total`."""
        return self._add(_ONE, _KEEPS_NAN, *total, *tree.in_float32(gradients))

    def add_weighted(self, total: tuple, gradients: tuple, weight: Tensor | None) -> Tensor:
        """Add `weight` times `gradients` to the Parameters of `total`."""
        return self._add(ops.cast(weight, ms.float32), _KEEPS_NAN, *total, *tree.in_float32(gradients))

    def add_no_nan(self, total: tuple, gradients: tuple, weight: Tensor | None) -> Tensor:
        """Do what `add_weighted` does; a weight of 0 adds 0 also for NaN."""
        return self._add(ops.cast(weight, ms.float32), _NO_NAN, *total, *tree.in_float32(gradients))

    def all_finite(self, gradients: tuple) -> Tensor:
        """Return whether all elements are finite."""
        return ops.reshape(self._all_finite(*tree.in_float32(gradients)), ())

    def norm(self, gradients: tuple, after: Any = None) -> Tensor:
        """Return the 2-norm of all elements."""
        return ops.reshape(self._norm(*tree.in_float32(gradients)), ())

    def sum_of_squares(self, gradients: tuple) -> Tensor:
        """Return the sum of the squares of all elements."""
        return ops.reshape(self._sum_of_squares(*tree.in_float32(gradients)), ())

    def clear(self, total: tuple, finite: bool = False) -> Tensor:
        """Assign zero to every Parameter of `total`."""
        return self._empty(*total)


def operator(library: Path, name: str, dtype: Any) -> ops.Custom:
    """Return an operator of `native.cc`, whose result has one element.

    Without the attribute MindSpore takes it for a function of its inputs, and runs it before or after what reads and
    writes the same Parameters, as it likes: weights read after it in a graph were the old ones.
    """
    made = ops.Custom(f"{library}:{name}", lambda *_: (1,), lambda *_: dtype, "aot")
    made.add_prim_attr("side_effect_mem", True)
    return made


def kernels(compiles: bool, accumulators: Iterable[Parameter] = ()) -> Kernels | NativeKernels:
    """Return the fastest kernels that can be used here.

    Args:
        compiles (bool): whether what uses them is compiled in PyNative mode, too.
        accumulators (Iterable[Parameter]): the accumulators, if the user made them. Default: float32 ones.
    """
    wide = all(parameter.dtype == ms.float32 for parameter in accumulators)
    library = native.library() if wide and in_graphs(compiles) else None
    return Kernels() if library is None else NativeKernels(library)
