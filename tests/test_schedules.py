"""Schedules of windows and rates are what a simulation of the driver's windows gives, and need no compilation."""

from __future__ import annotations

import math

import pytest

from helpers import Recorder, micro_batch, seen_gradient, slope_driver
from ms_accum import Checkpointer, scale_adam, seesaw, windows_by_samples
from ms_accum.engine.ends import Sizes, windows_by_epoch

pytestmark = pytest.mark.host


def simulated(sizes, per_epoch, epochs):
    """Yield the micro-batches before each window of a run that flushes tails, and the size that is meant for it."""
    size_of, update, seen = Sizes("x", "y", sizes).of, 0, 0
    for _ in range(epochs):
        left = per_epoch
        while left:
            size = size_of(update)
            yield seen, size
            took = min(size, left)
            left, seen, update = left - took, seen + took, update + 1


# Windows by samples


@pytest.mark.parametrize("per_epoch", [None, 1, 7, 10, 64])
@pytest.mark.parametrize("sizes", [{0: 1}, {0: 1, 100: 4}, {0: 3, 50: 2, 400: 5}, {0: 2, 1: 3, 2: 4}, {0: 8, 300: 8}])
def test_windows_have_the_size_of_the_samples_before_them(sizes, per_epoch):
    rows = 8
    by_update = windows_by_samples(sizes, micro_batch_size=rows, micro_batches=per_epoch)
    for seen, size in simulated(by_update, per_epoch or 10**4, 12 if per_epoch else 1):
        assert size == [window for begin, window in sizes.items() if begin <= seen * rows][-1]
        if seen > 200:
            break


def test_ends_of_epochs_shift_later_sizes():
    """The mutant: without the short windows, the change would come too late."""
    sizes, options = {0: 4, 160: 1}, {"micro_batch_size": 8}
    assert windows_by_samples(sizes, micro_batches=5, **options) == {0: 4, 8: 1}
    assert windows_by_samples(sizes, **options) == {0: 4, 5: 1}


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({5: 1}, {}, "'sizes' must be a dict of window sizes by the number of samples before them, with a size for 0"),
        ({0: 1, -3: 2}, {}, "'sizes' must be a dict"),
        ([1, 2], {}, "'sizes' must be a dict"),
        ({0: 0}, {}, "'sizes' must be an int >= 1, but got 0"),
        ({0: 1}, {"micro_batch_size": 0}, "'micro_batch_size' must be an int >= 1"),
        ({0: 1}, {"micro_batches": 0}, "'micro_batches' must be an int >= 1"),
    ],
)
def test_wrong_sizes_are_rejected(sizes, options, message):
    with pytest.raises((TypeError, ValueError), match=rf"For 'windows_by_samples', {message}"):
        windows_by_samples(sizes, **{"micro_batch_size": 8, **options})


# Seesaw


def part(progress, decay):
    return 1 - progress if decay == "linear" else (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize(("per_epoch", "epochs", "first", "warm_up"), [(100, 1, 1, 0), (37, 3, 2, 5), (500, 1, 4, 10)])
def test_window_doubles_where_the_other_rate_would_be_halved(decay, per_epoch, epochs, first, warm_up):
    made = seesaw(0.1, per_epoch, first, epochs=epochs, decay=decay, warmup_updates=warm_up)
    total, begin = per_epoch * epochs, warm_up * first
    windows = list(simulated(made.mini_steps, per_epoch, epochs))
    assert (
        len(made.learning_rates)
        == len(windows)
        == sum(windows_by_epoch(per_epoch, Sizes("x", "y", made.mini_steps), "flush", epochs))
    )
    sizes = sorted(set(made.mini_steps.values()))
    assert sizes == [first * 2**number for number in range(len(sizes))] and len(sizes) > 2
    for update, ((seen, size), rate) in enumerate(zip(windows, made.learning_rates)):
        if update < warm_up:
            assert size == first and rate == pytest.approx(0.1 * (update + 1) / warm_up)
            continue
        reference = part((seen - begin) / (total - begin), decay)
        halvings = min(math.floor(-math.log2(reference) + 1e-9), len(sizes) - 1)
        assert size == first * 2**halvings
        if size < sizes[-1]:
            assert rate == pytest.approx(0.1 / math.sqrt(2) ** halvings)
    assert 0 < made.learning_rates[-1] < made.learning_rates[0] or warm_up


def test_long_run_has_38_percent_fewer_updates():
    assert len(seesaw(1.0, 10**5).learning_rates) == pytest.approx(0.622 * 10**5, rel=1e-3)
    assert len(seesaw(1.0, 10**5, decay="linear").learning_rates) == pytest.approx(2 / 3 * 10**5, rel=1e-3)


def test_last_windows_follow_the_rate_of_the_other_schedule():
    made = seesaw(0.1, 1000, 1, max_mini_steps=2)
    assert made.mini_steps == {0: 1, 500: 2} and made.learning_rates[499] == 0.1
    assert made.learning_rates[500] == pytest.approx(0.1 / math.sqrt(2)) and made.learning_rates[-1] < 1e-5
    # The product of rate and window is the other schedule's, with sqrt(2) for the window: at half of its rate, once.
    assert made.learning_rates[625] == pytest.approx(0.1 / math.sqrt(2) * 2 * part(0.75, "cosine"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0}, "'learning_rate' must be"),
        ({"micro_batches": 0}, "'micro_batches' must be an int >= 1"),
        ({"mini_steps": 1.5}, "'mini_steps' must be an int >= 1"),
        ({"decay": "none"}, r"'decay' must be 'cosine' or 'linear'|'decay' must be one of"),
        ({"factor": 1}, "'factor' must be an int >= 2, but got 1"),
        (
            {"mini_steps": 4, "max_mini_steps": 2},
            "'max_mini_steps' must be >= 4, the size of the first",
        ),
        ({"warmup_updates": -1}, "'warmup_updates' must be"),
        ({"epochs": 0}, "'epochs' must be an int >= 1"),
    ],
)
def test_wrong_arguments_of_seesaw_are_rejected(options, message):
    with pytest.raises((TypeError, ValueError), match=f"For 'seesaw', (?:{message})"):
        seesaw(**{"learning_rate": 0.1, "micro_batches": 100, **options})


def test_warm_up_of_the_complete_run_keeps_the_window():
    made = seesaw(0.1, 10, 2, warmup_updates=50)
    assert made.mini_steps == {0: 2} and made.learning_rates == pytest.approx([0.1 * n / 50 for n in range(1, 6)])


# Adam


def test_half_life_in_samples_stays():
    for batch in (1, 32, 4096):
        beta2 = scale_adam(0.95, 512, batch)
        assert batch * math.log(2) / -math.log(beta2) == pytest.approx(512 * math.log(2) / -math.log(0.95))
    assert scale_adam(0.99, 7, 7) == 0.99


@pytest.mark.parametrize("beta2", [0, 1, 1.5, -0.1, "0.9", True])
def test_wrong_decays_are_rejected(beta2):
    with pytest.raises((TypeError, ValueError), match="For 'scale_adam', 'beta2' must be"):
        scale_adam(beta2, 32, 64)


# In the driver


def numbers(count=24):
    return [micro_batch(1.0 + number) for number in range(count)]


def trained(schedule, states=None, **options):
    model = slope_driver()
    recorder = Recorder()
    model.train_process(
        2, numbers(), schedule.mini_steps, report=(recorder,), ckpt_path=None, checkpointer=states, **options
    )
    return recorder.records, seen_gradient(model).tobytes(), model.updates


def test_run_resumes_inside_a_schedule_to_the_same_bytes(tmp_path):
    schedule = seesaw(0.1, 24, 2, epochs=2)
    records, weights, updates = trained(schedule)
    assert updates == len(schedule.learning_rates) and len(schedule.mini_steps) > 2
    for stop in range(1, updates):
        folder = tmp_path / str(stop)
        begun, *_ = trained(schedule, Checkpointer(folder), max_updates=stop)
        rest, resumed, _ = trained(schedule, Checkpointer(folder, resume="auto"))
        assert [record.samples for record in begun + rest] == [record.samples for record in records]
        assert resumed == weights
    assert trained(seesaw(0.1, 24, 2, epochs=1))[1] != weights  # the mutant: other windows
