"""Schedules of window sizes and rates, compared with a run that is simulated micro-batch by micro-batch."""

from __future__ import annotations

import itertools
import math

import pytest
from mindspore import nn

from helpers import Recorder, Slope, micro_batch, slope_driver
from ms_accum import (
    Checkpointer,
    GradientAccumulation,
    Stopped,
    batch_schedule,
    batch_warmup,
    scale_adam,
    seesaw,
    windows_by,
)
from ms_accum.app.settings import part_of_rate
from ms_accum.engine.ends import Sizes, window_starts
from runs import stop_after

pytestmark = pytest.mark.host
TAILS = ("flush", "carry", "drop")


def attempts(mini_steps, micro_batches, per_epoch=None, tail="flush"):
    """The driver's rule: for each window, the micro-batches before it, and those in it; and before its first try.

    Where the end of an epoch discards a window, the next one is another try of the same update.
    """
    size_of, made, held, tried = Sizes("x", "mini_steps", mini_steps).size_after, [], 0, None
    for number in range(1, micro_batches + 1):
        tried = number - 1 if tried is None else tried
        held += 1
        is_last = number == micro_batches or (per_epoch is not None and number % per_epoch == 0)
        if held == size_of(len(made)) or (is_last and tail == "flush"):
            made.append((number - held, held, tried))
            held, tried = 0, None
        elif is_last and tail == "drop":
            held = 0
    return made


def windows_of(*run, **options):
    """For each window, the micro-batches before it, and those in it."""
    return [(read, held) for read, held, _ in attempts(*run, **options)]


def full(windows, mini_steps):
    """The windows with their sizes, also where an epoch's end made one shorter."""
    size_of = Sizes("x", "mini_steps", mini_steps).size_after
    return [(read, size_of(update)) for update, (read, _) in enumerate(windows)]


# Sizes by what was read


def samples_before(read, rows, per_epoch):
    """The samples of so many micro-batches, whose last one in an epoch may be shorter, one after the other."""
    batches = math.inf if per_epoch is None else math.ceil(per_epoch / rows)
    last = None if per_epoch is None else per_epoch - (batches - 1) * rows
    return sum(last if number % batches == 0 else rows for number in range(1, read + 1))


SIZES = {0: 1, 37: 3, 80: 2, 200: 5}


def test_sizes_by_samples_are_those_of_a_simulated_run():
    checked = 0
    for tail, rows, per_epoch in itertools.product(TAILS, (1, 4, 10), (None, 50, 53, 57)):
        sizes = windows_by(SIZES, rows, per_epoch=per_epoch, tail=tail)
        batches = None if per_epoch is None else math.ceil(per_epoch / rows)
        windows = attempts(sizes, 450 // rows, batches, tail)
        for update, (_, _, tried) in enumerate(windows):
            samples = samples_before(tried, rows, per_epoch)
            expected = [size for key, size in SIZES.items() if key <= samples][-1]
            assert Sizes("x", "y", sizes).size_after(update) == expected, (tail, rows, per_epoch, update)
        checked += len(windows)
    assert checked > 1000


def test_simulation_detects_epochs_that_are_ignored():
    """The mutant: one stream where the run has epochs with short windows."""
    stream = windows_by({0: 2, 100: 4}, 10)
    assert stream == {0: 2, 5: 4} != windows_by({0: 2, 100: 4}, 10, per_epoch=50) == {0: 2, 6: 4}
    begin = windows_of(stream, 20, 5)[5][0]
    assert samples_before(begin, 10, 50) < 100  # too early


def test_short_last_micro_batch_is_counted_exactly():
    assert windows_by({0: 1, 60: 2}, 8, per_epoch=20) == {0: 1, 9: 2}  # 8 + 8 + 4, three times
    assert windows_by({0: 1, 60: 2}, 8) == {0: 1, 8: 2}


def test_tokens_are_counted_like_samples():
    assert windows_by({0: 1, 20 * 64: 4}, 2 * 64) == windows_by({0: 1, 20: 4}, 2) == {0: 1, 10: 4}


def test_keys_of_one_window_give_the_last_size():
    assert windows_by({0: 4, 1: 2, 2: 3}, 1) == {0: 4, 1: 3}
    assert windows_by({0: 4, 10: 4}, 1) == {0: 4}


def test_windows_larger_than_an_epoch_are_not_scheduled_with_drop():
    for schedule in (
        seesaw(0.1, 80, per_epoch=8, tail="drop"),
        batch_warmup(0.1, 1, 32, 80, over=9, per_epoch=8, tail="drop"),
    ):
        assert max(schedule.mini_steps.values()) == 8


@pytest.mark.parametrize("tail", TAILS)
def test_driver_has_the_window_of_its_samples(tail):
    """The real driver, on two epochs of 11 rows."""
    sizes = windows_by({0: 1, 3: 3, 14: 2}, 1, per_epoch=11, tail=tail)
    model, recorder = slope_driver(tail=tail), Recorder()
    model.train_process(2, [micro_batch(float(number)) for number in range(11)], sizes, report=recorder, ckpt_path=None)
    assert [record.samples for record in recorder.records] == [held for _, held in windows_of(sizes, 22, 11, tail)]


# Rates


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_constant_windows_have_the_rates_of_the_program(decay):
    for size, warmup in ((1, 0), (1, 5), (4, 3)):
        schedule = batch_schedule(0.1, size, 20 * size, warmup_updates=warmup, decay=decay, min_lr=0.01)
        expected = [0.1 * part_of_rate(update, 20, warmup, decay, 0.1) for update in range(20)]
        assert schedule.learning_rates == pytest.approx(expected, rel=1e-12) and schedule.mini_steps == {0: size}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("make", [
    lambda **run: batch_schedule(0.1, {0: 2, 3: 5, 6: 3}, 50, rule="sqrt", **run),
    lambda **run: batch_warmup(0.1, 2, 9, 50, over=20, **run),
    lambda **run: batch_warmup(0.1, 2, 9, 50, over=20, factor=1.5, **run),
], ids=["sizes", "warm-up", "factor"])  # fmt: skip
def test_rates_are_those_of_a_simulated_run(make, tail):
    for per_epoch, warmup in itertools.product((None, 50, 25, 17), (0, 4)):
        schedule = make(per_epoch=per_epoch, tail=tail, warmup_updates=warmup, min_lr=0.01)
        windows = full(windows_of(schedule.mini_steps, 50, per_epoch, tail), schedule.mini_steps)
        assert schedule.updates == len(windows)
        for (read, size), rate in zip(windows, schedule.learning_rates):
            assert rate == pytest.approx(0.1 * cosine(read, size, 50, 2, warmup) * math.sqrt(size / 2), rel=1e-9)


def cosine(read, size, micro_batches, first, warmup, lowest=0.1):
    if read < warmup * first:
        return min(1, (read + size) / (warmup * first))
    angle = math.pi * (read - warmup * first) / (micro_batches - warmup * first)
    return lowest + (1 - lowest) * (1 + math.cos(angle)) / 2


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_rate_follows_the_size_by_the_rule(rule, factor):
    schedule = batch_schedule(0.1, {0: 1, 4: 4}, 12, decay="none", rule=rule)
    assert schedule.learning_rates == pytest.approx([0.1] * 4 + [0.1 * factor] * 2)


# Batch warm-up


def test_windows_double_where_the_line_does():
    schedule = batch_warmup(0.1, 1, 8, 100, over=28, decay="none")
    reached = {size: next(read for read, s in windows_of(schedule.mini_steps, 100) if s >= size) for size in (2, 4, 8)}
    assert reached == {2: 4, 4: 12, 8: 28}
    assert set(schedule.mini_steps.values()) == {1, 2, 4, 8}
    assert schedule.learning_rates[-1] == pytest.approx(0.1 * math.sqrt(8))


def test_largest_window_need_not_be_a_power():
    assert list(batch_warmup(0.1, 1, 6, 60, over=20).mini_steps.values()) == [1, 2, 4, 6, 4]  # 4 remain


# Seesaw


def test_published_example_halves_into_root():
    """Where the linear rate is 1/2 and 1/4, windows double and the rate falls by the root of two."""
    schedule = seesaw(0.1, 64, decay="linear")
    windows = windows_of(schedule.mini_steps, 64)
    for (read, size), rate in zip(windows, schedule.learning_rates):
        cuts = math.floor(math.log2(64 / (64 - read)))
        assert size == min(2**cuts, 64 - read)
        assert rate == pytest.approx(0.1 * 2**-cuts * math.sqrt(size))
    at = [next(read for read, held in windows if held == size) for size in (2, 4, 8)]
    assert at == [32, 48, 56]  # 1/2, 1/4 and 1/8 remain


@pytest.mark.parametrize("rule", ["sqrt", "linear"])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("first", "most", "factor"), [(1, None, 2), (1, 4, 2), (4, None, 1.5), (3, 7, 1.2)])
def test_seesaw_is_that_of_a_simulated_run(rule, smooth, first, most, factor):
    total, warmup = 240, 5
    power = {"sqrt": 0.5, "linear": 1}[rule]
    for per_epoch, tail in ((None, "flush"), (100, "flush"), (70, "carry"), (60, "drop")):
        schedule = seesaw(
            0.1, total, first=first, most=most, factor=factor, smooth=smooth,
            per_epoch=per_epoch, tail=tail, warmup_updates=warmup, min_lr=0.002, rule=rule,
        )  # fmt: skip
        windows = full(windows_of(schedule.mini_steps, total, per_epoch, tail), schedule.mini_steps)
        assert len(windows) == schedule.updates
        for (read, size), rate in zip(windows, schedule.learning_rates):
            part = cosine(read, size, total, first, warmup, 0.02)
            cuts = 0
            while read >= warmup * first and part <= factor ** -(cuts + 1) * (1 + 1e-9):
                cuts += 1
            if tail != "drop":  # there, a size may be that of a window which was discarded
                assert size == min(round(first * factor**cuts), most or total, total - read)
            stepped = part if smooth or read < warmup * first else factor**-cuts
            assert rate == pytest.approx(0.1 * stepped * (size / first) ** power, rel=1e-6)


def test_mutants_of_seesaw_miss():
    """Windows that double where the rate halves twice, and a rate that is halved although windows double."""
    schedule = seesaw(0.1, 64, decay="linear", most=2)
    windows = windows_of(schedule.mini_steps, 64)
    first = next(update for update, (_, size) in enumerate(windows) if size == 2)
    assert windows[first][0] == 32 != 48
    assert schedule.learning_rates[first] == pytest.approx(0.1 / math.sqrt(2)) != pytest.approx(0.05)


def test_limit_lets_the_rate_fall_in_full():
    schedule = seesaw(0.1, 64, decay="linear", most=2)
    rates = sorted({round(rate, 9) for rate in schedule.learning_rates}, reverse=True)
    halves = [0.1, 0.1 / 2**0.5, 0.05 / 2**0.5, 0.025 / 2**0.5, 0.0125 / 2**0.5]
    assert rates[:5] == pytest.approx(halves, abs=1e-8)


def test_rate_for_sgd_stays_where_windows_grow():
    rates = seesaw(0.1, 48, first=1, most=4, decay="linear", rule="linear").learning_rates
    assert rates[:30] == pytest.approx([0.1] * 30)


def test_whole_run_is_read():
    """Each micro-batch once, whatever remains at the end."""
    for total, factor in itertools.product((1, 2, 63, 64, 65, 200), (2, 1.3)):
        for schedule in (seesaw(0.1, total, factor=factor), batch_warmup(0.1, 1, 7, total, over=30, factor=factor)):
            windows = full(windows_of(schedule.mini_steps, total, tail="carry"), schedule.mini_steps)
            assert sum(size for _, size in windows) == total and len(windows) == schedule.updates


# Adam


def test_half_life_is_kept():
    for base, batch in ((512, 1), (12, 48), (8, 8)):
        half_life = [
            math.log(0.5, beta2) * rows for beta2, rows in ((0.95, base), (scale_adam(0.95, base, batch), batch))
        ]
        assert half_life[0] == pytest.approx(half_life[1], rel=1e-12)
    mutant = 0.95 * 512 / 513  # of another rule
    assert math.log(0.5, mutant) != pytest.approx(math.log(0.5, 0.95) * 512, rel=1e-3)


# With the driver


@pytest.mark.parametrize("stop", [3, 9, 11])
def test_run_resumes_to_the_byte_inside_the_ramp(tmp_path, stop):
    def make():
        network, schedule = Slope(), seesaw(0.25, 16, decay="linear")
        model = GradientAccumulation(network, None, nn.Momentum([network.w], schedule.learning_rates, 0.9))

        def train(checkpointer=None):
            data = [micro_batch(float(number)) for number in range(1, 9)]
            sizes = schedule.mini_steps
            model.train_process(2, data, sizes, report=(), ckpt_path=None, checkpointer=checkpointer)
            return network.w.asnumpy().tobytes()

        return train

    expected = make()()
    with pytest.raises(Stopped):
        make()(Checkpointer(tmp_path, stop=stop_after(stop)))
    assert make()(Checkpointer(tmp_path, resume="auto")) == expected


# Errors


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: windows_by({1: 2}, 1), ValueError, "For 'windows_by', 'sizes' must be an int >= 1, a dict"),
    (lambda: windows_by(4, 1), TypeError, "'sizes' must be a dict of sizes, but got int"),
    (lambda: windows_by({0: 1}, 0), ValueError, "'per_micro_batch' must be an int >= 1, but got 0"),
    (lambda: windows_by({0: 1}, 1, per_epoch=0), ValueError, "'per_epoch' must be an int >= 1, but got 0"),
    (lambda: windows_by({0: 1}, 1, tail="cut"), ValueError, "'tail' must be one of 'flush', 'carry', 'drop'"),
    (lambda: windows_by({0: 2, 9: 6}, 1, per_epoch=5, tail="drop"), ValueError,
     "'sizes' must be at most 5 micro-batches, those of an epoch, with tail='drop', but got 6"),
    (lambda: batch_schedule(0.1, abs, 4), TypeError, "'mini_steps' must be an int or a dict, but got a function"),
    (lambda: batch_schedule(0.1, {0: 1}, 4, rule="log"), ValueError, "'rule' must be one of 'none', 'linear', 'sqrt'"),
    (lambda: batch_schedule(0.1, 2, 4, decay="step"), ValueError, "'decay' must be one of"),
    (lambda: batch_schedule(0.1, 2, 4, min_lr=0.2), ValueError, "'min_lr' must be >= 0 and <= 0.1, the largest"),
    (lambda: batch_schedule(0.1, 2, 4, min_lr=-0.1), ValueError, "'min_lr' must be >= 0 and <= 0.1, the largest"),
    (lambda: batch_schedule(0.1, {0: 1, 3: 6}, 20, per_epoch=5, tail="drop"), ValueError,
     "'mini_steps' must be at most 5 micro-batches, those of an epoch, with tail='drop', but got 6"),
    (lambda: seesaw(0.1, 9, smooth="no"), TypeError, "'smooth' must be a bool, but got str"),
    (lambda: scale_adam(0.95, 1, 10**9), ValueError, "'batch' must be one for which the decay is > 0 and < 1"),
    (lambda: scale_adam(1 - 1e-10, 10**9, 1), ValueError, "'batch' must be one for which the decay is > 0 and < 1"),
    (lambda: batch_schedule(0, 2, 4), ValueError, "'lr' must be a finite number > 0"),
    (lambda: batch_warmup(0.1, 4, 2, 9, over=3), ValueError, "'last' must be >= 4, the size of the first window"),
    (lambda: batch_warmup(0.1, 1, 2, 9, over=0), ValueError, "'over' must be an int >= 1"),
    (lambda: batch_warmup(0.1, 1, 2, 9, over=3, factor=1), ValueError, "'factor' must be > 1, but got 1.0"),
    (lambda: seesaw(0.1, 9, decay="none"), ValueError, "'decay' must be one of 'linear', 'cosine', but got 'none'"),
    (lambda: seesaw(0.1, 9, rule="none"), ValueError, "'rule' must be one of 'linear', 'sqrt'"),
    (lambda: seesaw(0.1, 9, first=4, most=2), ValueError, "'most' must be >= 4, the size of the first window"),
    (lambda: seesaw(0.1, 9.0), TypeError, "'micro_batches' must be an int >= 1"),
    (lambda: scale_adam(1, 8, 8), ValueError, "'beta2' must be < 1, but got 1.0"),
    (lambda: scale_adam(0.9, 8, 0), ValueError, "'batch' must be an int >= 1"),
])  # fmt: skip
def test_invalid_arguments_are_rejected(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_sizes_that_a_run_does_not_reach_are_not_looked_for():
    assert windows_by({0: 1, 10**15: 4}, 1, micro_batches=9) == {0: 1}
    assert windows_by({0: 1, 6: 4}, 2, micro_batches=9) == windows_by({0: 1, 6: 4}, 2) == {0: 1, 3: 4}
    assert batch_schedule(0.1, {0: 1, 99: 6}, 20, per_epoch=5, tail="drop").updates == 20


def test_window_starts_without_end():
    assert list(itertools.islice(window_starts(lambda _: 3), 3)) == [(0, 3), (3, 3), (6, 3)]
    assert list(window_starts(lambda _: 3, 7, per_epoch=5)) == [(0, 3), (3, 3), (5, 3)]
    assert list(window_starts(lambda _: 3, 10, per_epoch=5, tail="drop")) == [(0, 3), (5, 3)]
    assert list(window_starts(lambda _: 3, 10, per_epoch=5, tail="carry")) == [(0, 3), (3, 3), (6, 3)]
