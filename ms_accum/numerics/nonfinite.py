"""What happens to gradients that are not finite?"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from .. import _check
from ..network import tree
from ..network.accumulators import unique_name
from ..network.parameters import as_array
from ..ranks.group import Group

SKIP_WINDOW, SKIP_MICRO, RAISE = "skip_window", "skip_micro", "raise"
POLICIES = (SKIP_WINDOW, SKIP_MICRO, RAISE)
MOST = 100
"""int, the maximum number of files that a run writes, so that a failing run does not fill the disk."""
_made: dict[int, SkipMicro] = {}
"""By the id of the first accumulator while it exists: Cells that share accumulators share one object."""


@ms.jit_class
class SkipMicro:
    """Leaves out micro-batches whose gradient or loss is not finite, with their weight.

    The accumulators never contain NaN, and the window is the exact mean of its other micro-batches. A window without
    other micro-batches is skipped.
    """

    def __init__(self) -> None:
        name = unique_name("skip_micro")
        self.counts = Parameter(Tensor([0.0, 0.0], ms.float32), name=f"{name}.counts", requires_grad=False)
        """Parameter, in the open window: micro-batches not left out, and left out although their loss was finite."""
        self.left_out = Parameter(Tensor(0, ms.int32), name=f"{name}.left_out", requires_grad=False)
        """Parameter, the number of micro-batches left out so far, on all ranks."""
        self.own = Parameter(Tensor(0, ms.int32), name=f"{name}.own", requires_grad=False)
        """Parameter, those of this rank that the other ranks have not counted yet."""

    def __call__(self, gradients: Any, loss: Any = None, weight: Any = None) -> Any:
        """Leave out a micro-batch, in a graph.

        A micro-batch of weight 0 is not left out, because it does not count: its loss may be 0/0 for a good reason.

        Args:
            gradients (tuple[Tensor]): its gradients.
            loss (Optional[Tensor]): its loss. Default: ``None``, only the gradients are looked at.
            weight (Optional[Tensor]): its weight. Default: ``None``, it counts.

        Returns:
            tuple, the gradients, or zeros if the micro-batch does not count or is left out; 1.0, or 0.0 in these cases;
            and whether it is left out.
        """
        finite = ops.isfinite(tree.sum_of_elements(gradients))
        bad = ops.logical_not(finite)
        lost = ops.cast(bad, ms.float32)
        if loss is not None:
            lost = lost * ops.cast(ops.isfinite(loss), ms.float32)
            bad = ops.logical_not(ops.logical_and(finite, ops.isfinite(loss)))
        kept = 1.0 - ops.cast(bad, ms.float32)
        if weight is not None:
            counts = ops.cast(weight, ms.float32) != 0
            kept = kept * ops.cast(counts, ms.float32)
            lost = lost * ops.cast(counts, ms.float32)
            bad = ops.logical_and(bad, counts)
        ops.assign_add(self.counts, ops.stack((1.0 - ops.cast(bad, ms.float32), lost)))
        ops.assign_add(self.left_out, ops.cast(bad, ms.int32))
        ops.assign_add(self.own, ops.cast(bad, ms.int32))
        return tree.multiply_no_nan(gradients, kept), kept, bad

    def pass_over(self) -> None:
        """Count a micro-batch that is not run because it does not count, on the host."""
        ops.assign(self.counts, self.counts + Tensor([1.0, 0.0], ms.float32))

    @property
    def changed(self) -> tuple:
        """tuple[Parameter], those that a micro-batch changes."""
        return self.counts, self.left_out, self.own

    def sent(self) -> Any:
        """Return what is summed over the ranks at the end of a window: `counts` and `own`."""
        return ops.cat((self.counts, ops.reshape(ops.cast(self.own, ms.float32), (1,))))

    def count_of_all(self, summed: Any) -> Any:
        """Count what the other ranks left out; `summed` is the sum of `sent`, which is returned."""
        others = ops.cast(summed[2], ms.int32) - self.own
        counted = ops.assign_add(self.left_out, others)
        return ops.depend(summed, ops.assign(self.own, ops.depend(Tensor(0, ms.int32), counted)))

    def clear(self) -> None:
        """Begin a new window."""
        ops.assign(self.counts, Tensor([0.0, 0.0], ms.float32))


def skip_micro_of(grad_sum: Any) -> SkipMicro:
    """Return the object that all Cells with these accumulators share."""
    first = grad_sum[0]
    if id(first) not in _made:
        _made[id(first)] = SkipMicro()
        weakref.finalize(first, _made.pop, id(first))
    return _made[id(first)]


def check_dense(owner: str, skips: SkipMicro | None, networks: Iterable[nn.Cell]) -> None:
    """Raise an error for "skip_micro" with sparse gradients, which MindSpore can't compile."""
    if skips is not None and any(map(tree.gives_rows, networks)):
        remedy = "Use nn.Embedding, or nn.EmbeddingLookup(..., sparse=False)."
        _check.refuse(ValueError, owner, "nonfinite", "another one with sparse gradients", f"'{SKIP_MICRO}'", remedy)


def policy_of(owner: str, given: Any, *, in_graph: bool = False) -> str:
    """Return the policy of the user's argument, or raise an error if it is invalid. A graph can't use "raise"."""
    if isinstance(given, SkipMicro):
        return SKIP_MICRO
    policy = _check.one_of(owner, "nonfinite", given, POLICIES)
    if in_graph and policy == RAISE:
        choices = f"'{SKIP_WINDOW}' or '{SKIP_MICRO}'"
        remedy = "A compiled step can't raise an error: read 'skipped' after the step, and raise it yourself."
        _check.refuse(ValueError, owner, "nonfinite", choices, repr(given), remedy)
    return policy


class BadBatches:
    """Writes micro-batches whose loss or gradient is not finite to a folder, each as an ``.npz`` of its columns.

    If only the gradient of a window is not finite, all its micro-batches are written.

    Args:
        folder (str): the folder, created with the first file. Existing files are not replaced.
        group (Optional[Group]): the ranks; file names contain the rank.
    """

    def __init__(self, folder: Any, group: Group | None = None):
        owner = "GradientAccumulation"
        _check.instance(owner, "save_bad_batches", folder, (str, os.PathLike), "a path")
        self._folder = Path(os.path.abspath(os.path.expanduser(folder)))
        if os.path.exists(self._folder) and not os.path.isdir(self._folder):
            _check.refuse(ValueError, owner, "save_bad_batches", "a folder", f"the file '{folder}'")
        self._kept: dict[int, list[np.ndarray]] = {}
        self._left = MOST
        self._prefix = "" if group is None else f"rank-{group.rank}-"

    def keep(self, number: int, micro_batch: tuple) -> None:
        """Keep a copy of a micro-batch, with its number in the window, until the window has ended."""
        if number == 1:
            self._kept.clear()
        self._kept[number] = [as_array(column).copy() for column in micro_batch]

    def window_ended(self, record: Any, bad: Sequence[int]) -> None:
        """Write the micro-batches of the window that were not finite; `bad` contains their numbers in the window."""
        kept, self._kept = self._kept, {}
        if not (bad or record.skipped) or record.overflow or not record.samples:
            return
        if not bad and self._prefix:  # it may be a micro-batch of another rank
            return
        shift = record.bad[0] - bad[0] if bad else 0
        for number in [number for number in (bad or kept) if number in kept][: self._left]:
            which = f"micro-batch-{number + shift}" if bad else f"part-{number}"
            self._write(f"{self._prefix}epoch-{record.epoch}-window-{record.step}-{which}", kept[number])

    def _write(self, name: str, columns: Sequence[np.ndarray]) -> None:
        self._left -= 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            np.savez(_free(self._folder, name), *columns)
        except OSError as error:  # the run continues
            self._left = 0
            _check.warn(f"'{self._folder / name}' can't be written: {error.strerror}. No more such files are written.")


def _free(folder: Path, name: str) -> Path:
    """Return a path that does not exist: runs may share a folder."""
    suffixes = itertools.chain([""], (f"-{again}" for again in itertools.count(2)))
    paths = (folder / f"{name}{suffix}.npz" for suffix in suffixes)
    return next(path for path in paths if not path.exists())
