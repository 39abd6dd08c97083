"""The benchmark of several ranks runs, and its graphs send what the cost model predicts."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import ranks, scaling
from benchmarks.contenders import Entry, start
from benchmarks.process import ContenderError
from benchmarks.ranks import APART, ONE
from benchmarks.scaling import KEPT, WAYS
from test_benchmarks import RECORD, benchmark

pytestmark = pytest.mark.several


@pytest.mark.slow
def test_ranks_benchmark_runs(tmp_path):
    record, printed = benchmark("ranks", tmp_path)
    assert set(record) == RECORD
    assert not (tmp_path / "ranks.png").exists()
    parts = {
        name: [row for row in record["rows"] if row["part"] == name] for name in ("time", "sent", "alone", "memory")
    }
    assert sum(map(len, parts.values())) == len(record["rows"])
    check_times(parts["time"])
    for row in parts["sent"]:
        # The model sends what the graphs send, but for a few numbers that go with it or after it.
        sets = scaling.sent_sets(row["way"], row["window"], 2, scatters=False)
        assert row["ring_mib"] / row["set_mib"] == pytest.approx(sets, rel=1e-3)
        assert row["AllReduce"] >= scaling.collectives(row["way"], row["window"], scatters=False).count("AllReduce")
        assert row["loopback_mib"] > row["ring_mib"]
    assert len(parts["sent"]) == 3 * len(WAYS)
    assert {row["operator"] for row in parts["alone"]} == {"AllReduce", "AllGather"}
    assert all(row["ms"] >= row["ms_min"] > 0 and row["model_ms"] > 0 for row in parts["alone"])
    single, sharded = parts["memory"]
    for row in (single, sharded):
        kept = scaling.kept_sets(row["way"], row["ranks"])
        assert {name: row[name] for name in KEPT} == pytest.approx(kept, rel=1e-3)
    assert (single["way"], sharded["way"]) == (ONE, "ZeRO-2")
    assert "predicted" in printed


def check_times(rows):
    cases = [(row["window"], row["way"]) for row in rows]
    expected = [(window, way) for window in (1, 2, 4) for way in (ONE, APART, *WAYS)]
    assert cases == [case for case in expected if case != (1, APART)]
    for row in rows:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["ratio"] > 0 and (row["way"] in WAYS) == ("predicted_ms" in row)
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


def test_predictions_equal_cost_model():
    """Ranks that take 10 ms a micro-batch and 5 ms a boundary, and a second for each 100 bytes."""
    key = {"ranks": 2, "network": "mlp"}
    times = [{**key, "way": APART, "window": window, "ms": 10 * window + 5} for window in (2, 4, 8)]
    times += [{**key, "way": way, "window": 4, "ms": 1.0} for way in WAYS]
    alone = [{"operator": operator, "bandwidth": 100, "latency": 0} for operator in ranks.OPERATORS]
    ranks._predict(times, 800, alone)
    predicted = {row["way"]: row["predicted_ms"] for row in times if "predicted_ms" in row}
    expected = {"window's end": 8, "every micro-batch": 32, "ZeRO-1": 12, "ZeRO-2": 36}
    assert predicted == pytest.approx({way: 45 + 1e3 * seconds for way, seconds in expected.items()})


def test_predicted_update_time_is_not_negative():
    """The machine was slower during the largest window, so the line through the two largest begins at -50 ms."""
    key = {"ranks": 2, "network": "mlp"}
    times = [{**key, "way": APART, "window": window, "ms": ms} for window, ms in ((4, 50), (8, 150))]
    times.append({**key, "way": "window's end", "window": 1, "ms": 1.0})
    ranks._predict(times, 0, [{"operator": operator, "bandwidth": 1, "latency": 0} for operator in ranks.OPERATORS])
    assert times[-1]["predicted_ms"] == 150 / 8
