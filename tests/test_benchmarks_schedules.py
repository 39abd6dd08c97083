"""The benchmark `schedules`: all ways read the same rows, and what is counted. No test measures speed."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import schedules
from benchmarks.options import NotAvailable
from benchmarks.schedules import COSINE, WAYS, compared, schedule_of, updates_to
from ms_accum.engine.ends import Sizes
from test_benchmarks import RECORD, benchmark


@pytest.mark.slow
def test_benchmark_runs(tmp_path):
    names = (COSINE, "cosine, N=2, rate times 1.41")
    record, printed = benchmark("schedules", tmp_path, "--contenders", *names)
    assert set(record) == RECORD and "validation" in printed
    runs = [row for row in record["rows"] if row["part"] == "run"]
    assert [(row["way"], row["updates"]) for row in runs] == [(names[0], 4), (names[1], 2)]
    assert runs[0]["validation"] != runs[1]["validation"]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_reads_all_micro_batches(way):
    schedule = schedule_of(way, 2000)
    size_of = Sizes("x", "y", schedule.mini_steps).size_after
    assert sum(map(size_of, range(schedule.updates))) == 2000
    warmup = [update for update, rate in enumerate(schedule.learning_rates) if rate >= schedule.learning_rates[0]]
    assert len(warmup) > 0.9 * schedule.updates and max(schedule.learning_rates) <= 2e-3


def test_controls_are_other_schedules():
    seesaw, control = schedule_of("Seesaw", 2000), schedule_of("Seesaw's windows, cosine's rates", 2000)
    assert seesaw.mini_steps == control.mini_steps and seesaw.learning_rates[-1] > 3 * control.learning_rates[-1]


def curve(*losses):
    return [{"micro_batches": 100 * n, "updates": 50 * n, "loss": loss} for n, loss in enumerate(losses, 1)]


def test_updates_to_a_loss_are_interpolated():
    assert updates_to(1.9, curve(2.4, 2.0, 1.8, 1.7)) == 125
    assert updates_to(1.9, curve(2.4, 1.9)) == 100 and updates_to(1.9, curve(1.5)) == 50
    assert updates_to(1.9, curve(2.4, 2.0)) is None


def runs(way, losses, updates, reached):
    pairs = enumerate(zip(losses, reached), 1)
    return [
        {"part": "run", "way": way, "seed": n, "updates": updates, "validation": loss, "updates_to_target": to}
        for n, (loss, to) in pairs
    ]


def test_ways_are_compared_with_the_cosine_of_their_seed():
    rows = runs(COSINE, (1.8, 2.0), 100, (80, 90)) + runs("x", (1.9, 2.0), 60, (50, None))
    cosine, other = compared(rows)
    assert cosine["differences"] == [0, 0] and cosine["to_target"] == [80, 90] and cosine["fewer"] == 0
    assert other["differences"] == pytest.approx([0.1, 0]) and other["fewer"] == 0.4
    assert other["to_target"] == []  # not from all seeds


def test_table_shows_means_and_spread():
    rows = runs(COSINE, (1.8, 2.0), 2000, (80, 90)) + runs("x", (1.9, 2.0), 1200, (50, None))
    head, _, cosine, other = schedules._table((rows, schedules.WORDS[""])).splitlines()
    assert head.endswith("| difference from the first | updates to 1.90 |")
    assert cosine == "| cosine, N=1 | 2,000 | 0% | 1.900 (1.800 to 2.000) | +0.000 | 85 (80 to 90) |"
    assert other == "| x | 1,200 | 40% | 1.950 (1.900 to 2.000) | +0.050 (+0.000 to +0.100) | never |"


def test_each_way_has_a_chinese_name():
    assert {*WAYS} - {"Seesaw"} == {*schedules.WORDS[".zh"].ways}


def arguments(**given):
    options = dict.fromkeys(["networks", "windows", "rounds", "contenders"])
    return Namespace(**{**options, "command": "schedules", "short": False, "output": "nowhere", **given})


def test_missing_text_raises_error_naming_variable(monkeypatch):
    monkeypatch.delenv("SHAKESPEARE_DATA", raising=False)
    with pytest.raises(NotAvailable, match="schedules needs the real tinyshakespeare: set SHAKESPEARE_DATA to where"):
        schedules.run(arguments())


def test_other_options_are_rejected():
    with pytest.raises(ValueError, match="argument --windows: schedules has no such choice"):
        schedules.run(arguments(windows=[2]))
