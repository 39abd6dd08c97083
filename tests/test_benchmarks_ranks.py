"""The benchmark of several ranks runs."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import ranks
from benchmarks.contenders import Entry, start
from benchmarks.process import ContenderError
from benchmarks.ranks import APART, KEPT, ONE, WAYS
from test_benchmarks import RECORD, benchmark

pytestmark = pytest.mark.several


@pytest.mark.slow
def test_ranks_benchmark_runs(tmp_path):
    record, printed = benchmark("ranks", tmp_path)
    assert set(record) == RECORD
    parts = {name: [row for row in record["rows"] if row["part"] == name] for name in ("time", "memory")}
    assert sum(map(len, parts.values())) == len(record["rows"])
    check_times(parts["time"])
    single, sharded = parts["memory"]
    for row in (single, sharded):
        kept = (1, 1, 2) if row["way"] == ONE else (1, 1 / 2, 3 / 2)  # Adam; a shard of 2 ranks
        assert [row[name] for name in KEPT] == pytest.approx(kept, rel=1e-3)
    assert (single["way"], sharded["way"]) == (ONE, "ZeRO-2")
    assert "ratio" in printed


def check_times(rows):
    cases = [(row["window"], row["way"]) for row in rows]
    expected = [(window, way) for window in (1, 2, 4) for way in (ONE, APART, *WAYS)]
    assert cases == [case for case in expected if case != (1, APART)]
    for row in rows:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["ratio"] > 0
        assert row["way"] != ONE or row["ratio"] == 1


@pytest.mark.slow
def test_failed_job_raises_error_with_launcher_message(tmp_path):
    entry = Entry("job", "mindspore", "ranks_job.py")
    flags = ("--ranks", "2", "--folder", str(tmp_path), "--network", "resnet", "--ways", APART)
    with pytest.raises(ContenderError, match="(?s)'job' died.*exit code 2"), start(entry, *flags):
        pass


@pytest.mark.parametrize(
    ("option", "value"), [("contenders", ["torch"]), ("networks", ["resnet"]), ("windows", [1, 4])]
)
def test_unsupported_options_are_rejected(option, value):
    options = dict.fromkeys(("networks", "windows", "contenders", "rounds", "short"))
    with pytest.raises(ValueError, match=f"--{option}"):
        ranks.run(Namespace(**{**options, option: value}))
