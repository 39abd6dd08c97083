"""The self-test: each check turns red with a planted fault, and the report shows what was found.

The faults are planted in the library. What a check expects comes from NumPy or from plain MindSpore, which they leave
alone.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_accum.engine.boundary
import ms_accum.engine.ends
import ms_accum.engine.graph_window
import ms_accum.training.record
from helpers import MUTATIONS, in_both, never_emptied
from ms_accum import AccumulatedTrainStep, FlushTail, selftest
from ms_accum.app import checks, process, self_test
from ms_accum.app.process import DISK, INTERRUPTED, OK, TERMINATED, TRAINING, USAGE, run
from ms_accum.app.self_test import FAILED, MEASURED, NOT_RUN, PASSED
from ms_accum.engine.coupled import LossOfRepresentations
from ms_accum.engine.ema import Ema
from ms_accum.engine.graph_window import GraphWindow
from ms_accum.engine.loss_scale import DynamicScale
from ms_accum.engine.native_update import NativeUpdate
from ms_accum.engine.window import Window
from ms_accum.loss.objective import Weight
from ms_accum.loss.terms import Terms
from ms_accum.network import tree
from programs import one_line

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {check.name: check for check in (*checks.CHECKS, *checks.MORE_CHECKS)}
NO_DIVISION = MUTATIONS["no division"]
ONE_LATE = MUTATIONS["one late"]


def cleared_by_multiplying(total, finite=False):
    return tree.multiply_in_place(total, 0.0)


def weight_ignored(total, gradients, weight):
    return tree.add(total, gradients)


def half_added(total, gradients):
    return tree.add_weighted(total, gradients, 0.5)


def twice_the_norm(gradients, after=None):
    return 2.0 * ops.sqrt(tree.sum_of_squares(gradients))


def on_each_micro_batch(window, gradients, weight=None, extra=()):
    advanced = ops.assign_add(window.boundary.optimizer.global_step, 1)
    return tree.add(window.grad_sum, ops.depend(gradients, advanced))


def averaged_the_other_way(ema, updated, kept=Ema.kept):
    return 1.0 - kept(ema, updated)


def without_sums(window):
    return {name: sums for name, sums in STATE.fget(window).items() if not name.startswith("grad_sum")}


STATE = Window.state
_last = ops.MultitypeFuncGraph("last")


@_last.register("Tensor", "Tensor")
def _dense(gradient, parameter):
    return gradient


@_last.register("RowTensor", "Tensor")
def _last_row_wins(gradient, parameter):
    return ops.tensor_scatter_update(ops.zeros_like(parameter), gradient.indices.reshape(-1, 1), gradient.values)


def last_row_wins(gradients, parameters):
    return tree._map(_last, gradients, parameters)


def one_row_less(network, *columns):
    return SECOND_PASS(network, *columns) * 2.0


SECOND_PASS = LossOfRepresentations.construct

# Faults by the name of the check: what is replaced in ms_accum, or an operator of MindSpore.
FAULTS = {
    "float32: equal to one large batch": NO_DIVISION,
    "float16: equal to one large batch": NO_DIVISION,
    "uneven micro-batches and a tail": [(Weight, "counted", lambda weight, micro_batch: 1.0)],
    "the same in graph mode": NO_DIVISION,
    "the same with compile=False": [(Weight, "counted", lambda weight, micro_batch: 1.0)],
    "the same in Model": [
        (FlushTail, "_flush", lambda callback, run_context: None),
        (AccumulatedTrainStep, "epoch_begins", lambda step, micro_batches: None),
    ],
    "Accumulator in a compiled step": in_both("add_weighted", weight_ignored),
    "Accumulator in a plain loop": [(GraphWindow, "flush", lambda window, scalars=None: False)],
    "clip_norm": in_both("norm", twice_the_norm, "global_norm"),
    "learning-rate schedule": [(Window, "add", on_each_micro_batch)],
    "NaN: skip_window": [*in_both("clear", cleared_by_multiplying), (NativeUpdate, "__init__", never_emptied)],
    "NaN: skip_micro": in_both("add_no_nan", tree.add_weighted),
    "NaN: raise": [(ms_accum.training.record, "raise_not_finite", lambda window: None)],
    "Ema": [(Ema, "kept", averaged_the_other_way)],
    "loss scale, with overflows": [(DynamicScale, "adjust", lambda scale, updated, loss, left_out=None: None)],
    "resume inside a window": [(Window, "state", property(without_sums))],
    "sparse gradients": [(tree, "dense", last_row_wins)],
    "a loss of several terms": [(Terms, "counted", lambda terms, micro_batch: (1.0, 1.0))],
    "optimizers": in_both("add_weighted", weight_ignored),
    "operators": [(ops, "minimum", lambda x, y: ops.maximum(x, y))],
    "convolution and pooling": NO_DIVISION,
    "reduction='sum'": in_both("add", half_added),
    "tail='carry'": ONE_LATE,
    "a growing window": ONE_LATE,
    "CoupledLoss": [(LossOfRepresentations, "construct", one_row_less)],
    "resume in graph mode": [(Window, "state", property(without_sums))],
    "more optimizers": in_both("add_weighted", weight_ignored),
}
# Those that run, or whose fault shows, in compiled graphs only.
COMPILED = ("the same in graph mode", "resume in graph mode", "sparse gradients", "optimizers", "more optimizers")
COMPILED += ("CoupledLoss", "operators")
FAST = [name for name in FAULTS if name not in COMPILED]
MAKERS = {"nn.SGD": checks.OPTIMIZERS["nn.SGD"]}  # one is enough for a fault


def check_of(name):
    return checks.Check(name, partial(checks.check_optimizers, MAKERS)) if "optimizers" in name else BY_NAME[name]


def plant(monkeypatch, name):
    for place, attribute, replacement in FAULTS[name]:
        monkeypatch.setattr(place, attribute, replacement)


def check_fault_turns_red(name, monkeypatch):
    check = check_of(name)
    good = self_test.run_check(check)
    assert good.status == PASSED, good
    plant(monkeypatch, name)
    bad = self_test.run_check(check)
    assert bad.status == FAILED and (bad.error is None or bad.error > 10 * good.tolerance), bad


def test_every_check_has_planted_fault():
    assert set(FAULTS) | {"cost", "bfloat16: equal to one large batch"} == set(BY_NAME)


@pytest.mark.host
@pytest.mark.parametrize("name", FAST)
def test_fault_turns_check_red(name, monkeypatch):
    check_fault_turns_red(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.default
@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_graph_turns_check_red(name, monkeypatch):
    check_fault_turns_red(name, monkeypatch)


# What a check needs and does not get


def raising(error):
    def check():
        raise error

    return checks.Check("a check", check)


def broken(*arguments, **options):
    raise RuntimeError("it is broken")


@pytest.mark.host
def test_error_of_check_is_failure_with_one_line():
    row = self_test.run_check(raising(RuntimeError("For 'X', it\nis\x1b broken.\n\n- C++ Call Stack:")))
    assert (row.status, row.note) == (FAILED, "RuntimeError: it")


@pytest.mark.host
def test_what_plain_mindspore_does_not_run_is_no_failure(monkeypatch):
    row = self_test.run_check(raising(checks.NotHere("no kernel")))
    assert (row.status, row.note, row.error) == (NOT_RUN, "MindSpore: no kernel", None)
    assert self_test.run_check(BY_NAME["bfloat16: equal to one large batch"]).status == NOT_RUN
    monkeypatch.setattr(checks, "_drive", broken)
    assert self_test.run_check(BY_NAME["float16: equal to one large batch"]).status == FAILED


@pytest.mark.slow
def test_failed_check_does_not_spoil_the_next():
    """After an error outside a graph MindSpore continues to record gradients."""

    def forward(x):
        return broken() if x.shape else x

    def fails_while_recording():
        ms.value_and_grad(forward)(Tensor([1.0], ms.float32))

    assert self_test.run_check(checks.Check("fails", fails_while_recording)).status == FAILED
    assert not checks.api._pynative_executor.grad_flag()
    assert self_test.run_check(BY_NAME["uneven micro-batches and a tail"]).status == PASSED
    with pytest.raises(RuntimeError):
        fails_while_recording()
    assert checks.api._pynative_executor.grad_flag()  # what is avoided


@pytest.mark.host
def test_nan_is_no_success():
    assert not checks.Measured(float("nan"), 1.0).passed
    assert checks._error([np.array([np.nan])], [np.ones(1)], [np.zeros(1)]) == np.inf


def test_missing_and_wrong_operators_are_named(monkeypatch):
    def no_kernel(*arguments):
        raise RuntimeError("Unsupported op [IsFinite]")

    monkeypatch.setattr(ops, "isfinite", no_kernel)
    monkeypatch.setattr(mint, "sum", lambda x, axis=None: ops.mean(x))
    row = self_test.run_check(BY_NAME["operators"])
    assert row.status == FAILED and row.note == "not right: isfinite, mint.sum"
    assert row.details["isfinite"] == "missing: Unsupported op [IsFinite]" and row.details["cat"] == PASSED
    assert row.details["mint.sum"].startswith("wrong by ")


@pytest.mark.host
@pytest.mark.parametrize("writes", [True, False])
def test_operators_that_the_library_does_not_use_here_are_not_tried(writes, monkeypatch):
    """With MindSpore 2.7 `Tensor.mul_` leaves its operand unchanged on CPU."""
    monkeypatch.setattr(tree, "_WRITES", writes)
    assert ("Tensor.mul_" in checks._operators()) == writes


@pytest.mark.host
def test_optimizer_that_is_rejected_or_fails_is_named(monkeypatch):
    makers = {name: checks.OPTIMIZERS[name] for name in ("nn.SGD", "nn.Lamb")}
    result = checks.check_optimizers(makers)
    assert result.passed and result.note == "1 of 2 run" and result.details["nn.SGD"] == "ok"
    assert result.details["nn.Lamb"].startswith("rejected: 'optimizer' must be one that MindSpore runs on CPU")
    monkeypatch.setattr(checks, "_updated", broken)
    result = checks.check_optimizers({"nn.SGD": makers["nn.SGD"]})
    assert not result.passed and result.note == "0 of 1 run, not right: nn.SGD"
    assert result.details["nn.SGD"] == "it is broken"


# The report and the program

FEW = tuple(checks.Check(name, BY_NAME[name].run) for name in ("clip_norm", "Ema"))


def self_tested(*argv, **options):
    return run(self_test.main, selftest.flags(), argv, **options)


def send(number, signals):
    """Send a signal to this process as another one would, and wait until it has come."""
    os.kill(os.getpid(), number)
    while not signals.pending():
        time.sleep(0.01)


@pytest.mark.host
def test_table_block_and_json_show_the_same(capfd, monkeypatch):
    not_run = checks.Check("bfloat16", raising(checks.NotHere("no kernel")).run)
    measured = checks.Check("cost", lambda: checks.Measured(None, None, "MLP", {"driver": "1 ms"}))
    monkeypatch.setattr(checks, "CHECKS", (*FEW, not_run, measured))
    assert self_tested("--json=result.json", "--device_target=CPU") == OK
    out, err = capfd.readouterr()
    assert err == "" and "4 checks in " in out
    table, _, block = out.partition("To report the result, paste this into an issue:\n\n")
    assert "\nclip_norm " in table and "ok\n" in table and "\n  driver                            1 ms\n" in table
    assert block.startswith("```text\nms_accum self-test: 4 checks in ") and block.endswith("```\n")
    assert "\nnot run: bfloat16 (MindSpore: no kernel)\n" in block and "\ncost: driver: 1 ms\n" in block
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert result["ok"] and result["complete"] and set(result["facts"]) >= {"ms_accum", "device", "versions", "system"}
    assert [row["status"] for row in result["checks"]] == [PASSED, PASSED, NOT_RUN, MEASURED]


@pytest.mark.host
def test_failure_is_exit_code_and_one_line(capfd, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS", (*FEW, raising(ValueError("no"))))
    plant(monkeypatch, "clip_norm")
    assert self_tested("--json=result.json") == TRAINING
    out, err = capfd.readouterr()
    assert one_line(err) == "2 of 3 checks failed: clip_norm, a check"
    assert "\nFAILED: clip_norm " in out and "a check (ValueError: no)" in out
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert not result["ok"] and [row["status"] for row in result["checks"]] == [FAILED, PASSED, FAILED]


@pytest.mark.host
def test_signal_inside_mindspore_ends_program_before_the_next_check(capfd, monkeypatch):
    def signalled():
        send(signal.SIGTERM, process.SIGNALS)
        return checks.Measured(0.0, 1.0)

    monkeypatch.setattr(process, "_is_in_mindspore", lambda frame: True)
    monkeypatch.setattr(checks, "CHECKS", (checks.Check("first", signalled), *FEW))
    assert self_tested() == TERMINATED
    out, err = capfd.readouterr()
    assert one_line(err) == "terminated" and "\nfirst " in out and out.endswith("  ok\n")


@pytest.mark.host
def test_signal_between_calls_of_mindspore_ends_the_line_of_the_check(capfd, monkeypatch):
    def signalled():
        send(signal.SIGINT, process.SIGNALS)
        time.sleep(20)
        pytest.fail("it slept on")

    monkeypatch.setattr(checks, "CHECKS", (checks.Check("first", signalled), *FEW))
    assert self_tested() == INTERRUPTED
    out, err = capfd.readouterr()
    assert one_line(err) == "interrupted" and out.endswith(f"\n{'first':36}stopped\n")


@pytest.mark.host
def test_missing_mindspore_is_one_line(tmp_path):
    (tmp_path / "mindspore.py").write_text("raise ImportError('libascend_hal.so: cannot open')", encoding="utf-8")
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    done = command("ms_accum.selftest", cwd=tmp_path, PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (TRAINING, "")
    assert one_line(done.stderr) == "libascend_hal.so: cannot open"


@pytest.mark.host
def test_full_adds_checks(monkeypatch):
    assert {check.name for check in self_test.chosen(False, None)} == {check.name for check in checks.CHECKS}
    assert {check.name for check in self_test.chosen(True, None)} == set(BY_NAME)


@pytest.mark.host
@pytest.mark.parametrize(
    ("flag", "code", "message"),
    [
        ("--jsn=a", USAGE, "unrecognized arguments: --jsn=a"),
        ("--json=none/a.json", DISK, "none/a.json"),
        ("--json=", USAGE, "argument --json: must be a path, but got ''"),
        ("--device_target=Ascend", USAGE, "Ascend is not available here"),
    ],
)
def test_wrong_flags_are_rejected_before_the_checks(flag, code, message, capfd):
    assert self_tested(flag) == code
    assert message in one_line(capfd.readouterr().err)


def command(*argv, cwd, **environment):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment}
    environment.pop("GLOG_v", None)  # as the user's
    command = [sys.executable, "-m", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_self_test_passes_in_two_minutes_of_computing(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command("ms_accum.selftest", "--json=result.json", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == OK, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["ok"] and {row["name"] for row in result["checks"]} == {check.name for check in checks.CHECKS}
    assert {path.name for path in tmp_path.iterdir()} == {"result.json"}
    cost = result["checks"][-1]["details"]
    assert set(cost) == {"plain MindSpore", "driver", "Accumulator"}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 120


# Several processes: tests/selftest_ranks.py plants a fault on some of the ranks


def on_two_ranks(fault, tmp_path):
    """Return the exit code, what rank 0 printed, and the log of rank 1."""
    argv = ("ms_accum.launch", "--nproc=2", "--log_dir=logs", str(ROOT / "tests/selftest_ranks.py"), fault)
    done = command(*argv, cwd=tmp_path)
    return done, (tmp_path / "logs/worker_1.log").read_text(encoding="utf-8", errors="replace")


@pytest.mark.slow
@pytest.mark.several
@pytest.mark.parametrize("fault", ["none", "gradients not summed", "parts not summed", "on rank 1"])
def test_only_rank_0_prints_and_faults_of_ranks_turn_red(fault, tmp_path):
    done, log = on_two_ranks(fault, tmp_path)
    rows = {row["name"]: row for row in json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["checks"]}
    red = {name for name, row in rows.items() if row["status"] == FAILED}
    of_ranks = {check.name for check in (*checks.RANK_CHECKS, *checks.MORE_RANK_CHECKS)}
    assert set(rows) == {"clip_norm", *of_ranks}
    expected = {
        "none": set(),
        "gradients not summed": of_ranks,  # nor the weights, with ZeRO-1
        "parts not summed": {"ranks: ZeRO-1"},
        "on rank 1": {"clip_norm"},
    }[fault]
    assert red == expected, done.stdout
    assert (done.returncode == OK) == (not expected)
    assert fault != "on rank 1" or rows["clip_norm"]["note"] == "rank 1"
    assert "ranks: NaN on one rank" in done.stdout and "processes        2" in done.stdout
    assert f"{'check':36}" not in log and "```" not in log
