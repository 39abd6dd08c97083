"""train.py --advise: what is measured, what follows from it, and in which words."""

from __future__ import annotations

import math
import os

import pytest

from ms_accum.app import plan
from ms_accum.app.advice import Advice, Measured, Noise, advice, flags_of, reasons
from ms_accum.app.process import OK, USAGE
from ms_accum.app.search import MicroBatch
from ms_accum.app.trials import Trial
from programs import one_line, process, settings_of, train

MIB = 2**20
GIVEN = ("--advise", "--effective_batch=64", "--memory_budget=2GiB")
pytestmark = pytest.mark.host


NOISE = Noise(100.0, 50)


def measured(split, single, *, noise=NOISE, window=64):
    """Return measurements from the seconds for the window by the rows of a micro-batch; None does not fit."""
    trials = tuple(
        Trial(rows, 100 * MIB * rows, seconds is not None, seconds) for rows, seconds in sorted(split.items())
    )
    best = min((trial for trial in trials if trial.fits), key=lambda trial: trial.seconds)
    found = MicroBatch(best.rows, math.ceil(window / best.rows), best.peak, trials, window)
    singles = tuple(Trial(rows, 100 * MIB * rows, True, seconds) for rows, seconds in sorted(single.items()))
    return Measured(found, singles, noise, 2**31)


@pytest.mark.parametrize(
    ("split", "single", "expected"),
    [
        # The smallest that is nearly as fast as the fastest of all.
        ({8: 2.0, 16: 1.0, 32: 1.0, 64: 1.1}, {8: 2.2, 16: 1.04, 32: 1.0, 64: 1.1}, (False, 16)),
        # Updates that take as long as a micro-batch.
        ({1: 2.0, 2: 1.5, 4: None}, {1: 4.0, 2: 2.5}, (True, 2)),
        # The window in one piece is a single micro-batch.
        ({16: 3.0, 32: 2.0, 64: 1.0}, {16: 3.0, 32: 2.0, 64: 1.0}, (False, 64)),
        # Just less than enough.
        ({16: 0.9, 64: None}, {16: 1.0}, (True, 16)),
    ],
)
def test_smallest_fast_micro_batch_is_advised(split, single, expected):
    assert advice(measured(split, single))[:2] == expected


def test_batch_norm_needs_rows_for_its_statistics():
    found = measured({4: 1.0, 32: 1.0, 64: 1.0}, {4: 1.0, 32: 1.0, 64: 1.0})
    assert advice(found).rows == 4 and advice(found, has_batch_norm=True).rows == 32


def test_flags_keep_the_schedule_over_the_data():
    """A quarter of the window has four times as many updates, and a decay per update that is its fourth root."""
    options = ("--lr_decay=cosine", "--min_lr=0.0001", "--warmup_updates=10", "--max_updates=100", "--eval_every=25")
    settings = settings_of(*GIVEN, *options, "--optimizer=adamw", "--lr=0.002", "--beta2=0.96", "--ema=0.9")
    assert flags_of(settings, Advice(False, 16, 1.0, 1.0)) == [
        *("--batch_size=16", "--mini_steps=1", "--lr=0.001", "--min_lr=5e-05", f"--beta2={0.96**0.25:.9g}"),
        *(f"--ema={0.9**0.25:.9g}", "--warmup_updates=40", "--max_updates=400", "--eval_every=100"),
    ]
    assert flags_of(settings, Advice(False, 64, 1.0, 1.0)) == ["--batch_size=64", "--mini_steps=1"]
    assert flags_of(settings, Advice(True, 16, 1.0, 1.0)) == ["--effective_batch=64", "--batch_size=16"]


def test_decays_near_1_can_be_pasted():
    settings = settings_of(
        "--advise", "--effective_batch=4096", "--memory_budget=2GiB", "--optimizer=adam", "--ema=0.999"
    )
    flags = [flag for flag in flags_of(settings, Advice(False, 1, 1.0, 1.0)) if flag.startswith(("--beta2", "--ema"))]
    pasted = settings_of("--optimizer=adam", *flags)
    assert (pasted.beta2, pasted.ema) == pytest.approx((0.999 ** (1 / 4096),) * 2, abs=1e-9)


def test_rate_of_sgd_follows_the_batch():
    flags = flags_of(settings_of(*GIVEN, "--optimizer=sgd", "--lr=0.08"), Advice(False, 16, 1.0, 1.0))
    assert flags == ["--batch_size=16", "--mini_steps=1", "--lr=0.02"]
    scaled = settings_of(*GIVEN, "--optimizer=sgd", "--lr=0.08", "--lr_scaling=linear", "--base_batch=64")
    assert flags_of(scaled, Advice(False, 16, 1.0, 1.0)) == ["--batch_size=16", "--mini_steps=1"]


@pytest.mark.parametrize("noise", [NOISE, Noise(math.nan, 4)])
@pytest.mark.parametrize(
    ("split", "single", "words"),
    [
        ({16: 1.0, 64: 1.0}, {16: 1.0, 64: 1.0}, "An update after each 16 rows trains 64 rows per second in 1.562 GiB"),
        ({2: 1.0, 64: None}, {2: 2.0}, "it would be 32: updates take the time. If you have little data rather than "),
        ({2: 1.0, 64: None}, {2: 2.0}, "compare with --batch_size=2 --mini_steps=1 --lr="),
        ({16: 2.0, 64: 1.0}, {16: 2.0, 64: 1.0}, "The window of 64 rows fits in one piece, in 6.25 GiB of 2 GiB"),
    ],
)
def test_reasons_say_that_the_noise_scale_is_a_poor_guide(split, single, words, noise):
    found = measured(split, single, noise=noise)
    text = reasons(settings_of(*GIVEN), found, advice(found))
    assert words in text and "It is a poor guide to the best window (arXiv 2505.23971)" in text
    assert ("about 100 rows in the first 50 updates" in text) is (not math.isnan(noise.rows))
    assert "nan" not in text


def test_table_and_paragraph_are_as_wide_as_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    found = measured({16: 1.0, 32: 2.0, 64: None}, {16: 1.0, 32: 2.0})
    plan.show_advice(found.table, "do not accumulate: --x", reasons(settings_of(*GIVEN), found, advice(found)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 70 and lines[5].startswith("advice           do not accumulate")
    assert lines[2].split() == ["64", "64", "16", "4", "1.562", "GiB"]
    assert lines[4].split() == ["64", "1", "does", "not", "fit"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--mini_steps=0:1,9:4",), "argument --advise: is for windows of one size; give --effective_batch"),
        (("--batch_schedule=updates:0:1",), "argument --advise: is for windows of one size; give --effective_batch"),
        (("--batch_size=auto",), "argument --advise: needs the rows of a window; give --effective_batch"),
        (("--batch_size=1", "--mini_steps=1"), "argument --advise: needs a window of several rows; give "),
        (("--effective_batch=8",), "argument --memory_budget: must be given on CPU"),
        (("--verify",), "argument --advise: can't be combined with --verify"),
    ],
)
def test_runs_without_one_window_are_rejected(argv, message, capfd):
    assert train("--advise", *argv) == USAGE
    assert one_line(capfd.readouterr().err).startswith(message)


def test_window_is_that_of_the_flags():
    settings = settings_of("--advise", "--batch_size=12", "--mini_steps=4", "--tail=drop", "--memory_budget=1GiB")
    assert (settings.window_rows, settings.auto, settings.memory_budget) == (48, True, 2**30)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_advice_can_be_followed(tmp_path):
    done = process("train.py", "--model=mlp", "--advise", *GIVEN[1:], "--memory_budget=8GiB", cwd=tmp_path)
    assert done.returncode == OK, done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing is trained, and nothing written
    verdict = next(line for line in done.stdout.splitlines() if line.startswith("advice  ") and "accumulate:" in line)
    flags = verdict.partition("accumulate:")[2].split()
    done = process("train.py", "--model=mlp", "--epochs=1", *flags, cwd=tmp_path)
    assert done.returncode == OK, done.stderr
