"""The self-test passes here, and finds faults."""

from __future__ import annotations

import pytest

from ms_accum import selftest
from ms_accum.ranks.group import Group


@pytest.mark.slow
def test_selftest_passes(capsys):
    assert selftest.main(["--device_target=CPU"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and lines[2] == "```text" and "ranks 1" in lines[3] and lines[-1] == "```"
    assert len(lines[5:-1]) == 10 and "the same in float16" in out and "resumed inside a window" in out
    assert [line[:20] for line in lines[5:-1] if not line.endswith("  ok")] == ["the same in bfloat16"]


@pytest.mark.usefixtures("eager")
def test_selftest_ends_with_1_if_a_check_fails(monkeypatch, capsys):
    def raises(error):
        raise error

    checks = [
        ("right", lambda: 1e-6),
        ("wrong", lambda: 1e-4),
        ("NaN", lambda: float("nan")),
        ("error", lambda: raises(RuntimeError("a reason\n- C++ Call Stack"))),
        ("not here", lambda: raises(selftest.NotHere("why"))),
    ]
    monkeypatch.setattr(selftest, "checks_of", lambda group: [(*check, 1e-5) for check in checks])
    assert selftest.main([]) == 1
    out, err = capsys.readouterr()
    assert err == "error: 3 of 5 checks failed: wrong, NaN, error\n"
    ends = [line.split(" s  ")[1] for line in out.splitlines()[5:-1]]
    assert ends == ["ok", "FAILED", "FAILED", "FAILED: RuntimeError: a reason", "not run: why"]
    assert "1.0e-04" in out


@pytest.mark.usefixtures("eager")
def test_device_that_is_not_here_ends_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        selftest.main(["--device_target=Ascend"])
    assert caught.value.code == 2
    assert "argument --device_target: Ascend is not available here, CPU is" in capsys.readouterr().err


MUTANTS = {  # a fault in ms_accum, and the check that finds it
    "equal to one large batch: uneven rows, a tail": {"weight": 1.0},
    "clip_norm, and a schedule by update": {"clip_norm": None},
    "NaN: a window or a micro-batch is left out": {"nonfinite": "skip_window"},
    "loss scale with overflows, an average": {"loss_scale": None},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), MUTANTS.items())
def test_selftest_finds_faults(name, options, monkeypatch):
    driver = selftest.GradientAccumulation
    monkeypatch.setattr(selftest, "GradientAccumulation", lambda *what, **how: driver(*what, **{**how, **options}))
    ((check, tolerance),) = [(check, most) for found, check, most in selftest.checks_of(Group(0, 1)) if found == name]
    assert selftest.run_check(name, check, tolerance) == selftest.FAILED
