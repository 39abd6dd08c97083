"""Micro-batches by a budget of tokens: samples that differ in length, packed into few shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _check

_OWNER = "TokenBatches"
_MULTIPLE = 8  # lengths are rounded up to it, because kernels are made for such sizes
_USUAL = {"i": np.int32, "u": np.int32, "f": np.float32}  # types of 8 bytes are those of Python's numbers
_LARGE = 8


class Shape(NamedTuple):
    """The rows of a micro-batch, and the positions of each row."""

    rows: int
    positions: int


class TokenBatches:
    """Pack samples of different lengths into padded micro-batches of at most `tokens` positions.

    All micro-batches have one of a few shapes, because each shape is compiled. The shapes are chosen from the lengths,
    so that there is little padding: samples of similar lengths come together. In an epoch each sample is in exactly one
    micro-batch; the last ones are filled up with rows of padding. Padding must count nothing: give the loss an
    ``ignore_index`` for which `pad` stands in the labels, and the driver a `weight` that counts the other labels.

    Read it like a list of micro-batches, once an epoch; ``len()`` is their number, and each is a tuple of arrays. With
    several ranks give each its own samples.

    Args:
        samples (Union[Sequence, Iterable, Dataset]): samples, each an array, or a tuple of columns: sequences, whose
            first axis are the positions, and numbers. A list, an iterable that can be read again, or a dataset of
            MindSpore's that is not batched.
        tokens (int): the most positions of a micro-batch, with padding.
        pad (Union[float, Sequence[float]]): what fills up a column, such as ``(0, -100)`` for tokens and labels; one
            number is for all columns. Default: 0.
        sequences (Optional[Sequence[int]]): the columns that are sequences, by number from 0. Default: ``None``, all
            that are not a single number per sample.
        shapes (int): the most shapes of micro-batches. Default: 4.
        lengths (Optional[Sequence[int]]): the lengths of all samples, in any order. Default: ``None``, the samples are
            read once to find them.
        longest (Optional[int]): the positions of a sample that are used; the rest is cut off. No row is longer, so give
            the most that the network takes. Default: ``None``, a sample with more than `tokens` is an error.
        seed (Optional[int]): shuffles a list with this seed, in each epoch otherwise. Default: ``None``, samples are
            taken as they come, which for a dataset of MindSpore's may be another order in each epoch.

    Raises:
        TypeError: If an argument has the wrong type, or the samples can be read only once.
        ValueError: If an argument is out of range, there are no samples, or one of them is empty, too long, or has
            columns that differ.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> from ms_accum import TokenBatches
        >>> sentences = [np.arange(1, length + 1) for length in (3, 9, 5, 30, 8, 7, 12, 14)]
        >>> batches = TokenBatches(sentences, tokens=32, shapes=2)
        >>> batches.shapes, len(batches)
        ([Shape(rows=2, positions=16), Shape(rows=1, positions=32)], 5)
        >>> [batch.shape for (batch,) in batches]
        [(2, 16), (1, 32), (2, 16), (2, 16), (2, 16)]
    """

    def __init__(
        self,
        samples: Any,
        tokens: int,
        *,
        pad: float | Sequence[float] = 0,
        sequences: Sequence[int] | None = None,
        shapes: int = 4,
        lengths: Sequence[int] | None = None,
        longest: int | None = None,
        seed: int | None = None,
    ):
        most = _check.positive_int(_OWNER, "tokens", tokens)
        if longest is not None and _check.positive_int(_OWNER, "longest", longest) > most:
            _check.raise_invalid(ValueError, _OWNER, "longest", f"at most {most}, as 'tokens'", longest)
        is_dataset = hasattr(samples, "create_tuple_iterator")  # which may have the methods of a list, too
        self._is_list = not is_dataset and hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
        can_be_read = self._is_list or is_dataset or (hasattr(samples, "__iter__") and iter(samples) is not samples)
        if not can_be_read:
            rule = "a list, a dataset, or an object whose '__iter__' starts anew"
            _check.raise_invalid(TypeError, _OWNER, "samples", rule, type(samples).__name__)
        if seed is not None and not self._is_list:
            remedy = "Shuffle where the samples come from."
            _check.raise_invalid(ValueError, _OWNER, "seed", "None unless 'samples' is a list", seed, remedy)
        self._seed = None if seed is None else _check.count(_OWNER, "seed", seed)
        self._longest = longest
        self.samples = samples
        """Union[Sequence, Iterable, Dataset], the samples."""
        self._columns = _Columns(pad, sequences)
        self._rows_of_dataset: Iterator | None = None
        self.next_epoch = 0
        """int, the number of the epoch that is read next, on which the order of a list depends."""
        if lengths is None:
            lengths = [self._columns.length(number, columns) for number, columns in self._read(is_epoch=False)]
        elif self._is_list and len(lengths) != len(samples):
            _check.raise_invalid(ValueError, _OWNER, "lengths", f"{len(samples)} numbers, one a sample", len(lengths))
        found = np.array([self._used(number, length, most) for number, length in enumerate(lengths)], np.int64)
        if not found.size:
            _check.raise_invalid(ValueError, _OWNER, "samples", "samples", "none")
        if found.min() < 1:  # those that were given; samples without positions are found when they are read
            _check.raise_invalid(ValueError, _OWNER, "lengths", "numbers >= 1", int(found.min()))
        self.shapes = shapes_of(found, most, _check.positive_int(_OWNER, "shapes", shapes), longest)
        """list[Shape], the shapes of micro-batches, from the shortest rows to the longest."""
        kinds = self._kind(found).tolist()
        sizes = [shape.rows * shape.positions for shape, _ in packed(zip(kinds, kinds), self.shapes)]
        self._number = len(sizes)
        self.padding = 1 - int(found.sum()) / sum(sizes)
        """float, the part of an epoch's positions that is padding."""

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        for shape, samples in packed(self._by_kind(), self.shapes):
            yield self._columns.padded(samples, shape)

    @property
    def source(self) -> TokenBatches:
        """TokenBatches, itself, if any epoch can be read next: the driver then resumes without reading those before."""
        if not self._is_list:
            raise AttributeError("the epochs of what is not a list are read one after the other")
        return self

    def begin_with_epoch(self, number: int) -> None:
        """Make the next pass that of this epoch, from 0."""
        self.next_epoch = _check.count(_OWNER, "epoch", number)

    def _by_kind(self) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
        """Yield the samples of an epoch, and the shape of each by its number."""
        last = self.shapes[-1].positions
        for number, columns in self._read(is_epoch=True):
            length = self._used(number, self._columns.length(number, columns), last)
            yield int(self._kind(length)), self._columns.cut(columns, length)

    def _kind(self, lengths: Any) -> Any:
        return np.searchsorted([shape.positions for shape in self.shapes], lengths)

    def _used(self, number: int, length: int, most: int) -> int:
        """Return how many positions of a sample are used, at most `most`."""
        if length > most and (self._longest is None or self._longest > most):
            rule, remedy = f"samples of at most {most} positions", "Raise 'tokens', or cut them with 'longest'."
            _check.raise_invalid(ValueError, _OWNER, "samples", rule, f"{length} in number {number}", remedy)
        return min(length, self._longest or length)

    def _read(self, *, is_epoch: bool) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
        """Yield the samples with their numbers, in the order of an epoch, or to find their lengths."""
        if self._is_list:
            numbered = self._numbered(is_epoch)
        elif hasattr(self.samples, "create_tuple_iterator"):
            numbered = enumerate(self._rows(is_epoch))
        else:
            numbered = enumerate(self.samples)
        for number, sample in numbered:
            yield number, self._columns.of(number, sample)

    def _numbered(self, is_epoch: bool) -> Iterator[tuple[int, Any]]:
        """Yield the samples of a list with their numbers, shuffled in an epoch if there is a seed."""
        numbers = range(len(self.samples))
        if is_epoch and self._seed is not None:
            numbers = np.random.default_rng([self._seed, self.next_epoch]).permutation(len(self.samples)).tolist()
        if is_epoch:
            self.next_epoch += 1
        for number in numbers:
            yield number, self.samples[number]

    def _rows(self, is_epoch: bool) -> Iterator[tuple]:
        """Yield the rows of a dataset: epochs by one iterator, as a new one would repeat the first order."""
        if not is_epoch:
            yield from map(tuple, self.samples.create_tuple_iterator(output_numpy=True, num_epochs=1))
            return
        rows, self._rows_of_dataset = self._rows_of_dataset, None
        if rows is None:
            rows = self.samples.create_tuple_iterator(output_numpy=True, num_epochs=-1)
        yield from map(tuple, rows)
        self._rows_of_dataset = rows  # an epoch that is not read to its end begins anew


def shapes_of(lengths: np.ndarray, tokens: int, most: int, longest: int | None = None) -> list[Shape]:
    """Return at most this number of shapes with which samples of these lengths need the fewest positions."""
    rounded = np.minimum(-(-lengths // _MULTIPLE) * _MULTIPLE, longest or tokens)
    positions, counts = np.unique(rounded, return_counts=True)
    before = np.concatenate(([0], np.cumsum(counts)))
    # Of the fewest positions for the shortest samples with one shape, with two, ...: the last shape ends with length j,
    # and that before it with one that is shorter.
    fewest = np.concatenate(([np.inf], before[1:] * positions))
    ends: list[np.ndarray] = []
    for _ in range(most - 1):
        wanted = fewest[:-1, None] + (before[None, 1:] - before[:-1, None]) * positions[None, :]
        wanted[np.tril_indices(len(positions), -1)] = np.inf
        previous, found = wanted.argmin(0), wanted.min(0)
        better = found < fewest[1:]
        ends.append(np.where(better, previous, -1))
        fewest = np.concatenate(([np.inf], np.where(better, found, fewest[1:])))
    chosen, end = [len(positions) - 1], len(positions)
    for previous in reversed(ends):
        if previous[end - 1] > 0:
            end = int(previous[end - 1])
            chosen.append(end - 1)
    return [Shape(int(tokens // positions[at]), int(positions[at])) for at in sorted(chosen)]


def packed(samples: Iterable[tuple[int, Any]], shapes: Sequence[Shape]) -> Iterator[tuple[Shape, list]]:
    """Yield micro-batches from samples with the numbers of their shapes: a shape, and the samples in it.

    A micro-batch is complete with its last row. The rest of an epoch is packed from the longest to the shortest, so
    that short samples fill up the rows of long ones.
    """
    waiting: list[list] = [[] for _ in shapes]
    for kind, sample in samples:
        waiting[kind].append(sample)
        if len(waiting[kind]) == shapes[kind].rows:
            yield shapes[kind], waiting[kind]
            waiting[kind] = []
    rest = [(shapes[kind], sample) for kind in reversed(range(len(shapes))) for sample in waiting[kind]]
    while rest:
        shape = rest[0][0]
        yield shape, [sample for _, sample in rest[: shape.rows]]
        rest = rest[shape.rows :]


class _Columns:
    """The columns of samples, and how they are padded.

    Args:
        pad (Union[float, Sequence[float]]), sequences (Optional[Sequence[int]]): as for `TokenBatches`.
    """

    def __init__(self, pad: Any, sequences: Sequence[int] | None):
        self._pad, self._sequences = pad, sequences
        self._kinds: list[tuple] | None = None  # of the first sample: what all have in common

    def of(self, number: int, sample: Any) -> tuple[np.ndarray, ...]:
        """Return the columns of a sample as arrays."""
        columns = tuple(_array(number, column) for column in (sample if isinstance(sample, tuple) else (sample,)))
        if self._kinds is None:
            self._begin(columns)
        if self._of_rows(columns) != self._kinds:
            rule, got = "samples with the columns of the first", f"other numbers or shapes of them in number {number}"
            _check.raise_invalid(ValueError, _OWNER, "samples", rule, got)
        return columns

    def _begin(self, columns: tuple[np.ndarray, ...]) -> None:
        """Find out from the first sample which columns are sequences, and what pads each."""
        if self._sequences is None:
            self._sequences = [number for number, column in enumerate(columns) if column.ndim]
        right = [number for number in self._sequences if 0 <= number < len(columns) and columns[number].ndim]
        if not right or len(right) < len(self._sequences):
            rule = f"columns with positions, of {len(columns)}"
            _check.raise_invalid(ValueError, _OWNER, "sequences", rule, list(self._sequences))
        pads = list(self._pad) if isinstance(self._pad, (tuple, list)) else [self._pad] * len(columns)
        if len(pads) != len(columns):
            rule = f"a number, or one for each of the {_check.quantity(len(columns), 'column')} of a sample"
            _check.raise_invalid(ValueError, _OWNER, "pad", rule, self._pad)
        for number, (pad, column) in enumerate(zip(pads, columns)):
            if not _holds(column.dtype, pad):
                rule = f"a number that column {number} of {column.dtype} can have"
                _check.raise_invalid(ValueError, _OWNER, "pad", rule, pad)
        self._pads, self._kinds = pads, self._of_rows(columns)

    def _of_rows(self, columns: tuple[np.ndarray, ...]) -> list[tuple]:
        """Return what the columns of all samples have in common: the shape of a position, or of a number."""
        sequences = self._sequences or ()
        return [column.shape[number in sequences :] for number, column in enumerate(columns)]

    def length(self, number: int, columns: tuple[np.ndarray, ...]) -> int:
        """Return the number of positions of a sample."""
        lengths = {len(columns[sequence]) for sequence in self._sequences or ()}
        if len(lengths) > 1:
            got = f"{' and '.join(map(str, sorted(lengths)))} in number {number}"
            _check.raise_invalid(ValueError, _OWNER, "samples", "samples whose sequences have one length", got)
        (length,) = lengths
        if not length:
            _check.raise_invalid(ValueError, _OWNER, "samples", "samples with positions", f"none in number {number}")
        return length

    def cut(self, columns: tuple[np.ndarray, ...], length: int) -> tuple[np.ndarray, ...]:
        """Return a sample's first positions."""
        sequences = self._sequences or ()
        return tuple(column[:length] if number in sequences else column for number, column in enumerate(columns))

    def padded(self, samples: Sequence[tuple[np.ndarray, ...]], shape: Shape) -> tuple[np.ndarray, ...]:
        """Return a micro-batch of this shape with these samples."""
        micro_batch = []
        for number, rest in enumerate(self._of_rows(samples[0])):
            size = (shape.rows, shape.positions) if number in (self._sequences or ()) else (shape.rows,)
            array = np.full((*size, *rest), self._pads[number], samples[0][number].dtype)
            for row, columns in enumerate(samples):
                value = columns[number]
                array[(row, slice(len(value))) if len(size) > 1 else row] = value
            micro_batch.append(array)
        return tuple(micro_batch)


def _array(number: int, column: Any) -> np.ndarray:
    """Return a column of a sample as an array."""
    array = np.asarray(column.asnumpy() if hasattr(column, "asnumpy") else column)
    if array.dtype.kind not in "biuf":
        rule, got = "samples of numbers", f"{type(column).__name__} in number {number}"
        _check.raise_invalid(TypeError, _OWNER, "samples", rule, got)
    if array.dtype.itemsize < _LARGE:
        return array
    usual = array.astype(_USUAL[array.dtype.kind])
    if array.dtype.kind != "f" and (usual != array).any():
        rule, got = "samples of numbers below 2**31", f"larger ones in number {number}"
        _check.raise_invalid(ValueError, _OWNER, "samples", rule, got)
    return usual


def _holds(dtype: np.dtype, number: Any) -> bool:
    """Return whether a type can have a number exactly; a label that wraps is not the one that the loss ignores."""
    try:
        with np.errstate(all="ignore"):
            return bool(np.array(number).astype(dtype) == number) or (dtype.kind == "f" and number != number)
    except (TypeError, ValueError):
        return False
