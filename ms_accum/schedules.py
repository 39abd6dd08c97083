"""Schedules of window sizes and learning rates, as pure functions: a resumed run computes the same values again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import count
from numbers import Real
from typing import Any, Callable, NamedTuple

from . import _check
from .engine.ends import TAILS, Sizes, window_starts

DECAYS = ("none", "linear", "cosine")
RULES = ("none", "linear", "sqrt")
_ROUNDING = 1e-9  # a cosine of exactly one half may be computed as a little more


@_check.documented
class BatchSchedule(NamedTuple):
    """The window sizes and the learning rates of a run."""

    mini_steps: dict[int, int]
    """dict[int, int], the micro-batches in a window, by the first update that has them."""
    learning_rates: list[float]
    """list[float], the learning rate of each update; an optimizer's `learning_rate`."""

    @property
    def updates(self) -> int:
        """int, the number of updates of the run."""
        return len(self.learning_rates)


class _Run(NamedTuple):
    """The data of a run, and its learning rate with windows of `first` micro-batches."""

    lr: float
    micro_batches: int
    first: int
    per_epoch: int | None
    tail: str
    warmup: int
    """The micro-batches in which the rate rises."""
    decay: str
    lowest: float
    """The rate at the end of the decay, as a part of `lr`."""
    power: float
    """The rate is multiplied by this power of the window's size divided by `first`."""

    def windows(self, size_at: Callable[[int], int]) -> list[tuple[int, int]]:
        """Return for each window the micro-batches read before it, and its size, which ends with the run."""
        largest = self.per_epoch if self.tail == "drop" and self.per_epoch else self.micro_batches

        def size_in_run(read: int) -> int:
            return min(size_at(read), largest, self.micro_batches - read)

        return list(window_starts(size_in_run, self.micro_batches, per_epoch=self.per_epoch, tail=self.tail))

    def part(self, read: int, size: int) -> float:
        """Return the part of `lr` in a window of this size that begins after `read` micro-batches."""
        if read < self.warmup:
            return min(1.0, (read + size) / self.warmup)
        return self.decayed(read)

    def decayed(self, read: int) -> float:
        """Return the part of `lr` after `read` micro-batches if there were no warm-up left."""
        progress = max(0, read - self.warmup) / max(1, self.micro_batches - self.warmup)
        part = {"none": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[self.decay]
        return self.lowest + (1 - self.lowest) * part

    def rate(self, part: float, size: int) -> float:
        """Return the learning rate of a window of this size, for a part of `lr`."""
        return self.lr * part * (size / self.first) ** self.power


def _run(
    owner: str,
    lr: float,
    micro_batches: int,
    first: int,
    *,
    per_epoch: int | None,
    tail: str,
    warmup_updates: int,
    decay: str,
    min_lr: float,
    rule: str,
) -> _Run:
    """Return the run that the arguments of a public function describe, or raise an error about them."""
    lr, first = _check.positive_number(owner, "lr", lr), _check.positive_int(owner, "first", first)
    if _check.instance(owner, "min_lr", min_lr, Real, "a number") != 0 and not 0 < min_lr <= lr:
        _check.raise_invalid(ValueError, owner, "min_lr", f">= 0 and <= {lr:g}, the largest rate", min_lr)
    return _Run(
        lr=lr,
        micro_batches=_check.positive_int(owner, "micro_batches", micro_batches),
        first=first,
        per_epoch=None if per_epoch is None else _check.positive_int(owner, "per_epoch", per_epoch),
        tail=_check.one_of(owner, "tail", tail, TAILS),
        warmup=_check.count(owner, "warmup_updates", warmup_updates) * first,
        decay=_check.one_of(owner, "decay", decay, DECAYS),
        lowest=min_lr / lr,
        power={"none": 0.0, "linear": 1.0, "sqrt": 0.5}[_check.one_of(owner, "rule", rule, RULES)],
    )


def _by_update(sizes: Iterable[int]) -> dict[int, int]:
    """Return the size of each window as a dict of the updates at which it changes."""
    changes: dict[int, int] = {}
    last = None
    for update, size in enumerate(sizes):
        if size != last:
            changes[update] = last = size
    return changes


def _check_fills(owner: str, name: str, largest: int, per_epoch: int | None, tail: str) -> None:
    """Raise an error if windows of the largest size would never fill, because each epoch discards them."""
    if tail == "drop" and per_epoch is not None and largest > per_epoch:
        rule = f"at most {per_epoch} micro-batches, those of an epoch, with tail='drop'"
        _check.raise_invalid(ValueError, owner, name, rule, largest)


def windows_by(
    sizes: Mapping[int, int],
    per_micro_batch: int,
    *,
    micro_batches: int | None = None,
    per_epoch: int | None = None,
    tail: str = "flush",
) -> dict[int, int]:
    """Return window sizes by update, for sizes that are given by the number of samples or tokens that were read.

    A window has the size of the last key that was reached before it began; a size never changes inside a window.
    Without `per_epoch` the data is one stream without ends of epochs. With it, windows end with epochs as `tail`
    defines, and what is read is counted exactly, also where the last micro-batch of an epoch is shorter.

    Args:
        sizes (Mapping[int, int]): the micro-batches in a window, by the samples (or tokens) read before it; the first
            key is 0.
        per_micro_batch (int): the samples (or tokens) of a micro-batch, on all ranks together.
        micro_batches (Optional[int]): the micro-batches of the run; sizes that it does not reach are left out.
            Default: ``None``, all sizes are reached.
        per_epoch (Optional[int]): the samples (or tokens) of an epoch. Default: ``None``, no ends of epochs.
        tail (str): as for `GradientAccumulation`. Samples that ``"drop"`` discards count as read. Default:
            ``"flush"``.

    Returns:
        dict[int, int], the window sizes by their first update; pass it as `mini_steps`, `accumulate_step` or
        `gradient_accumulation_steps`.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If a number is too small, `sizes` has no key 0, a size is larger than an epoch with
            ``tail="drop"``, or `tail` is not one of the three.

    Examples:
        >>> from ms_accum import windows_by
        >>> windows_by({0: 1, 100: 2, 300: 4}, per_micro_batch=50)
        {0: 1, 2: 2, 4: 4}
        >>> windows_by({0: 1, 6400: 4}, per_micro_batch=8 * 64)  # tokens: 8 rows of 64
        {0: 1, 13: 4}
        >>> windows_by({0: 2, 100: 4}, per_micro_batch=10, per_epoch=50)  # 2 + 2 + 1 micro-batches in an epoch
        {0: 2, 6: 4}
    """
    owner = "windows_by"
    steps = Sizes(owner, "sizes", _check.instance(owner, "sizes", sizes, Mapping, "a dict of sizes")).steps
    amount = _check.positive_int(owner, "per_micro_batch", per_micro_batch)
    in_epoch = None if per_epoch is None else _check.positive_int(owner, "per_epoch", per_epoch)
    most = None if micro_batches is None else _check.positive_int(owner, "micro_batches", micro_batches)
    _check.one_of(owner, "tail", tail, TAILS)
    batches = None if in_epoch is None else math.ceil(in_epoch / amount)
    _check_fills(owner, "sizes", max(size for _, size in steps), batches, tail)

    def read(begin: int) -> int:
        if batches is None or in_epoch is None:
            return begin * amount
        epochs, more = divmod(begin, batches)
        return epochs * in_epoch + more * amount

    def size_at(begin: int) -> int:
        return [size for key, size in steps if key <= read(begin)][-1]

    def until_last() -> Iterable[int]:
        for begin, size in window_starts(size_at, most, per_epoch=batches, tail=tail):
            yield size
            if read(begin) >= steps[-1][0] and size == steps[-1][1]:
                return

    return _by_update(until_last())


def ramp_up(first: int, last: int, samples: int, *, micro_batch_size: int) -> dict[int, int]:
    """Return window sizes that grow linearly with the number of samples seen, from `first` to `last`.

    The data is one stream: short windows at the ends of epochs are not counted.

    Args:
        first (int): the number of micro-batches in the first window.
        last (int): the number of micro-batches in a window after `samples` samples.
        samples (int): the number of samples over which the window grows.
        micro_batch_size (int): the rows of a micro-batch, on all ranks together.

    Returns:
        dict[int, int], the window sizes by their first update; pass it as `mini_steps`, `accumulate_step` or
        `gradient_accumulation_steps`.

    Raises:
        TypeError: If an argument is not an int.
        ValueError: If an argument is less than 1, or `last` less than `first`.

    Examples:
        >>> from ms_accum import ramp_up
        >>> ramp_up(1, 4, 1000, micro_batch_size=50)
        {0: 1, 7: 2, 11: 3, 13: 4}
    """
    arguments = {"first": first, "last": last, "samples": samples, "micro_batch_size": micro_batch_size}
    first, last, samples, rows = (_check.positive_int("ramp_up", name, value) for name, value in arguments.items())
    if last < first:
        _check.raise_invalid(ValueError, "ramp_up", "last", f">= {first}, the size of the first window", last)

    def until_last() -> Iterable[int]:
        for _, size in window_starts(lambda read: min(last, first + int((last - first) * read * rows / samples))):
            yield size
            if size == last:
                return

    return _by_update(until_last())


def batch_schedule(
    lr: float,
    mini_steps: int | Mapping[int, int],
    micro_batches: int,
    *,
    per_epoch: int | None = None,
    tail: str = "flush",
    warmup_updates: int = 0,
    decay: str = "cosine",
    min_lr: float = 0.0,
    rule: str = "sqrt",
) -> BatchSchedule:
    """Return the learning rates that belong to given window sizes.

    The rate falls with the data that was read, not with the updates: a run with larger windows has fewer updates, and
    the same rates after the same data. It is multiplied for larger windows by `rule`.

    Args:
        lr (float): the largest learning rate of windows of the first size.
        mini_steps (Union[int, Mapping]): the window sizes, such as those of `windows_by` or `ramp_up`.
        micro_batches (int): the micro-batches of the run.
        per_epoch (Optional[int]): the micro-batches of an epoch. Default: ``None``, no ends of epochs.
        tail (str): as for `GradientAccumulation`. Default: ``"flush"``.
        warmup_updates (int): windows of the first size, during whose data the rate rises from 0. Default: 0.
        decay (str): how the rate falls after that until the end of the run: ``"cosine"`` (half a period), ``"linear"``
            or ``"none"``. Default: ``"cosine"``.
        min_lr (float): the rate at the end. Default: 0.
        rule (str): what the rate is multiplied by for windows that are `n` times as large: ``"sqrt"`` of n (usual for
            the Adam family), ``"linear"``: n (usual for SGD), or ``"none"``: 1. Default: ``"sqrt"``.

    Returns:
        BatchSchedule, the sizes and a learning rate for each update.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> from ms_accum import batch_schedule, windows_by
        >>> sizes = windows_by({0: 1, 40: 4}, per_micro_batch=10)
        >>> schedule = batch_schedule(0.1, sizes, micro_batches=12, decay="linear")
        >>> schedule.mini_steps, [round(rate, 3) for rate in schedule.learning_rates]
        ({0: 1, 4: 4}, [0.1, 0.092, 0.083, 0.075, 0.133, 0.067])
    """
    sizes = Sizes("batch_schedule", "mini_steps", mini_steps)
    if sizes.function is not None:
        _check.raise_invalid(TypeError, "batch_schedule", "mini_steps", "an int or a dict", "a function")
    run = _run(
        "batch_schedule",
        lr,
        micro_batches,
        sizes.size_after(0),
        per_epoch=per_epoch,
        tail=tail,
        warmup_updates=warmup_updates,
        decay=decay,
        min_lr=min_lr,
        rule=rule,
    )
    updates = count()  # a window's size follows from the number of updates before it
    windows = window_starts(
        lambda _: sizes.size_after(next(updates)), run.micro_batches, per_epoch=run.per_epoch, tail=run.tail
    )
    rates = [run.rate(run.part(read, size), size) for read, size in windows]
    largest = max(size for first, size in sizes.steps if first <= len(rates))
    _check_fills("batch_schedule", "mini_steps", largest, run.per_epoch, run.tail)
    return BatchSchedule(dict(sizes.steps), rates)


def batch_warmup(
    lr: float,
    first: int,
    last: int,
    micro_batches: int,
    *,
    over: int,
    factor: float = 2,
    per_epoch: int | None = None,
    tail: str = "flush",
    warmup_updates: int = 0,
    decay: str = "cosine",
    min_lr: float = 0.0,
    rule: str = "sqrt",
) -> BatchSchedule:
    """Return a batch warm-up: windows double early in a run, and the learning rate grows by sqrt(2) each time.

    The method is that of "Critical Batch Size Revisited" (arXiv 2505.23971). The paper doubles the batch where its
    measurements allow it; here, windows double where a line from `first` to `last` reaches the double. For positions
    that you have measured, use `windows_by` and `batch_schedule`.

    Args:
        lr (float): the largest learning rate of windows of `first` micro-batches.
        first (int): the micro-batches in the first window.
        last (int): the micro-batches in the largest windows.
        micro_batches (int): the micro-batches of the run.
        over (int): the micro-batches after which windows have the size `last`.
        factor (float): what windows grow by at once. Default: 2.
        per_epoch (Optional[int]): the micro-batches of an epoch. Default: ``None``, no ends of epochs.
        tail (str): as for `GradientAccumulation`. Default: ``"flush"``.
        warmup_updates (int), decay (str), min_lr (float), rule (str): as for `batch_schedule`.

    Returns:
        BatchSchedule, the sizes and a learning rate for each update. The last window has the micro-batches that remain;
        with ``tail="drop"``, none is larger than an epoch.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or `last` is less than `first`.

    Examples:
        >>> from ms_accum import batch_warmup
        >>> schedule = batch_warmup(0.1, 1, 4, micro_batches=20, over=6, decay="none")
        >>> schedule.mini_steps, [round(rate, 3) for rate in schedule.learning_rates]
        ({0: 1, 2: 2, 4: 4, 7: 2}, [0.1, 0.1, 0.141, 0.141, 0.2, 0.2, 0.2, 0.141])
    """
    owner = "batch_warmup"
    run = _run(
        owner,
        lr,
        micro_batches,
        first,
        per_epoch=per_epoch,
        tail=tail,
        warmup_updates=warmup_updates,
        decay=decay,
        min_lr=min_lr,
        rule=rule,
    )
    last, over = _check.positive_int(owner, "last", last), _check.positive_int(owner, "over", over)
    factor = _factor(owner, factor)
    if last < first:
        _check.raise_invalid(ValueError, owner, "last", f">= {first}, the size of the first window", last)

    def size_at(read: int) -> int:
        line = 1 + (last / first - 1) * read / over
        return last if read >= over else min(last, round(first * factor ** _steps(line, factor)))

    windows = run.windows(size_at)
    rates = [run.rate(run.part(read, size), size) for read, size in windows]
    return BatchSchedule(_by_update(size for _, size in windows), rates)


def seesaw(
    lr: float,
    micro_batches: int,
    *,
    first: int = 1,
    most: int | None = None,
    factor: float = 2,
    smooth: bool = False,
    per_epoch: int | None = None,
    tail: str = "flush",
    warmup_updates: int = 0,
    decay: str = "cosine",
    min_lr: float = 0.0,
    rule: str = "sqrt",
) -> BatchSchedule:
    """Return Seesaw's schedule: where a learning rate would halve, windows double and the rate falls by sqrt(2) only.

    The method is that of arXiv 2510.14717. A run with windows of `first` micro-batches and a rate that falls by `decay`
    is replaced by one with larger windows and larger rates, so it has fewer updates for the same data. Each time the
    replaced rate has fallen by `factor`, windows grow by `factor`, and the rate falls by its square root.

    Args:
        lr (float): the largest learning rate of the replaced run.
        micro_batches (int): the micro-batches of the run.
        first (int): the micro-batches in a window of the replaced run. Default: 1.
        most (Optional[int]): the micro-batches in the largest windows; from there on the rate falls by `factor`.
            Default: ``None``, no limit.
        factor (float): what windows grow by at once. Default: 2.
        smooth (bool): whether the rate falls between these steps, as the replaced one does. Default: ``False``, it is
            constant between them, as in the paper.
        per_epoch (Optional[int]): the micro-batches of an epoch. Default: ``None``, no ends of epochs.
        tail (str): as for `GradientAccumulation`. Default: ``"flush"``.
        warmup_updates (int): windows of the replaced run in which the rate rises from 0. Default: 0.
        decay (str): how the replaced rate falls: ``"cosine"`` or ``"linear"``. Default: ``"cosine"``.
        min_lr (float): the replaced rate at the end. Default: 0.
        rule (str): ``"sqrt"`` for the Adam family; ``"linear"`` for SGD, whose rate stays as it is where windows grow.
            Default: ``"sqrt"``.

    Returns:
        BatchSchedule, the sizes and a learning rate for each update. The last window has the micro-batches that remain;
        with ``tail="drop"``, none is larger than an epoch.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> from ms_accum import seesaw
        >>> schedule = seesaw(0.1, micro_batches=16, decay="linear")
        >>> schedule.mini_steps, [round(rate, 3) for rate in schedule.learning_rates]
        ({0: 1, 8: 2, 10: 4}, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.071, 0.071, 0.05])
    """
    owner = "seesaw"
    _check.one_of(owner, "decay", decay, DECAYS[1:])
    _check.one_of(owner, "rule", rule, RULES[1:])
    run = _run(
        owner,
        lr,
        micro_batches,
        first,
        per_epoch=per_epoch,
        tail=tail,
        warmup_updates=warmup_updates,
        decay=decay,
        min_lr=min_lr,
        rule=rule,
    )
    _check.instance(owner, "smooth", smooth, bool, "a bool")
    factor = _factor(owner, factor)
    largest = run.micro_batches if most is None else _check.positive_int(owner, "most", most)
    if largest < run.first and most is not None:
        _check.raise_invalid(ValueError, owner, "most", f">= {first}, the size of the first window", most)

    def steps_at(read: int) -> int:
        return _steps(1 / run.decayed(read), factor)

    def rate_of(read: int, size: int) -> float:
        if smooth or read < run.warmup:
            return run.rate(run.part(read, size), size)
        return run.rate(factor ** -steps_at(read), size)

    windows = run.windows(lambda read: min(largest, round(run.first * factor ** steps_at(read))))
    return BatchSchedule(_by_update(size for _, size in windows), [rate_of(*window) for window in windows])


def _factor(owner: str, factor: Any) -> float:
    factor = _check.positive_number(owner, "factor", factor)
    if factor <= 1:
        _check.raise_invalid(ValueError, owner, "factor", "> 1", factor)
    return factor


def _steps(ratio: float, factor: float) -> int:
    """Return how often a ratio >= 1 can be divided by `factor` until it is less than that."""
    return math.floor(math.log(ratio, factor) + _ROUNDING)


def scale_adam(beta2: float, base_batch: int, batch: int) -> float:
    """Return the decay of Adam's second moment for another batch, with the same half-life in samples or tokens.

    The rule is that of arXiv 2507.07101: ``beta2 ** (batch / base_batch)``.

    Args:
        beta2 (float): the decay that was chosen for `base_batch`.
        base_batch (int): the batch size for which `beta2` was chosen.
        batch (int): the effective batch: rows of a micro-batch times micro-batches in a window times ranks.

    Returns:
        float, the decay for `batch`.

    Raises:
        TypeError: If `beta2` is not a number, or a batch size is not an int.
        ValueError: If `beta2` or the result is not between 0 and 1, or a batch size is less than 1.

    Examples:
        >>> from ms_accum import scale_adam
        >>> scale_adam(0.95, base_batch=512, batch=8), scale_adam(0.99, 12, 48)
        (0.9991988633566534, 0.96059601)
    """
    owner = "scale_adam"
    ratio = _check.positive_int(owner, "batch", batch) / _check.positive_int(owner, "base_batch", base_batch)
    beta2 = _check.positive_number(owner, "beta2", beta2)
    if beta2 >= 1:
        _check.raise_invalid(ValueError, owner, "beta2", "< 1", beta2)
    scaled = beta2**ratio
    if not 0 < scaled < 1:
        _check.raise_invalid(ValueError, owner, "batch", "one for which the decay is > 0 and < 1", batch)
    return scaled
