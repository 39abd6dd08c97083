"""A first signal ends a program after saving, a second one at once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from ms_accum.app import process
from ms_accum.app.process import INTERRUPTED, RETRY_SECONDS, TERMINATED, Signals
from programs import lines_of, train_in

ROOT = Path(__file__).resolve().parents[2]
CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
SIGNAL_MESSAGES = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}


def send(number, signals):
    """Send a signal to this process as another one would, and wait until it has come."""
    os.kill(os.getpid(), number)
    while not signals.pending():
        time.sleep(0.01)


@pytest.mark.parametrize("number", CODES)
def test_first_signal_interrupts(number):
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            send(number, signals)
            time.sleep(20)
            pytest.fail("it slept on")
        assert signals.code == CODES[number]


def test_signal_wakes_waiting_thread():
    with Signals() as signals:
        # To its thread: those that NumPy and MindSpore started before this test do not block it.
        threading.Timer(0.2, lambda: signal.pthread_kill(signals._thread.ident, signal.SIGTERM)).start()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(20)
            pytest.fail("it slept on")


def compile_for_a_moment(signals, done, thread):
    """What MindSpore's compiler would do, called below under its name: it must not be interrupted."""
    signal.pthread_kill(thread.ident, signal.SIGINT)
    until = time.monotonic() + 20 * RETRY_SECONDS
    while not signals.pending() or time.monotonic() < until:
        time.sleep(0.001)
    done.append(True)


@pytest.mark.parametrize("to_thread", [True, False], ids=["waiting thread", "main thread"])
def test_code_called_by_mindspore_is_not_interrupted(to_thread):
    """The exception comes as soon as the program's own code is reached."""
    names = {**globals(), "__name__": "mindspore.common.compiler"}
    compiles = types.FunctionType(compile_for_a_moment.__code__, names)
    done = []
    with Signals() as signals:
        if not to_thread:  # as one that a program started before it blocked signals
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        with pytest.raises(KeyboardInterrupt):
            compiles(signals, done, signals._thread if to_thread else threading.main_thread())
            time.sleep(20)
            pytest.fail("it slept on")
    assert done == [True]


def test_code_called_by_other_modules_is_interrupted():
    """The twin of the test above: the same function under its own name."""
    done = []
    with Signals() as signals, pytest.raises(KeyboardInterrupt):
        compile_for_a_moment(signals, done, signals._thread)
    assert done == []


def test_block_defers_signal():
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt), signals.deferred():
            send(signal.SIGINT, signals)
            reached = True
        assert reached


def test_handlers_and_mask_are_restored():
    before = [signal.getsignal(number) for number in (*CODES, signal.SIGURG)]
    mask, threads = signal.pthread_sigmask(signal.SIG_BLOCK, ()), threading.active_count()
    with Signals():
        assert threading.active_count() == threads + 1
    assert [signal.getsignal(number) for number in (*CODES, signal.SIGURG)] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert threading.active_count() == threads


# The programs


ALL = ("--output_dir=out", "--model=mlp", "--epochs=40")


def start(folder, *flags, program=(str(ROOT / "train.py"),)):
    command = [sys.executable, "-u", *program, *ALL, *flags]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=folder, text=True, **pipes)


def wait_for(program, text):
    """Read until a line begins with `text`."""
    while not program.stdout.readline().startswith(text):
        assert program.poll() is None, program.stderr.read()


def wait_for_end(program):
    """Return the exit code and the error of a program."""
    out, err = program.communicate(timeout=120)
    return program.returncode, err.strip()


def model_of(folder):
    return (folder / "out" / "gradient_accumulation.ckpt").read_bytes()


def finished(folder, *flags):
    """Run to the end, in this process, and return the model's bytes."""
    assert train_in(folder, *ALL, *flags) == 0
    return model_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "moment"), [(signal.SIGINT, "epoch: 2 step: 3"), (signal.SIGTERM, "accumulators")])
def test_stopped_run_is_resumed_exactly(tmp_path, once, number, moment):
    """In the middle of the run, and while the first graph is compiled."""
    (tmp_path / "parts").mkdir()
    flags = ("--epochs=3", "--mini_steps=7")
    program = start(tmp_path / "parts", *flags)
    wait_for(program, moment)
    while not (tmp_path / "parts" / "out" / "states" / ".lock").exists():  # the run begins; before, there is no state
        assert program.poll() is None
    program.send_signal(number)
    code, error = wait_for_end(program)
    assert code == CODES[number]
    assert error.startswith(
        f"error: {SIGNAL_MESSAGES[code]}, the training state is in 'out/states/state-00000001.safetensors'"
    )
    assert error.count("\n") == 0
    whole = once("signals-whole", lambda folder: finished(folder, *flags))
    assert finished(tmp_path / "parts", *flags, "--resume") == model_of(whole)
    lines = [(folder / "out" / "metrics.jsonl").read_text().splitlines() for folder in (tmp_path / "parts", whole)]
    assert len(lines[0]) == len(lines[1]) == 3 * 7 + 3  # and an evaluation after each epoch


PENDING = """
import os, sys
from ms_accum.app import process
from ms_accum.app.flags import Parser

process.block_signals()
os.kill(os.getpid(), int(sys.argv.pop(1)))
parser = Parser("A program for the tests.")
parser.add_program()
sys.exit(process.run(lambda arguments: print("it ran"), parser))
"""


@pytest.mark.parametrize("number", CODES)
def test_signal_before_run_ends_with_one_line(number):
    """For example while MindSpore is imported. Without `raise_pending` it ends in a traceback."""
    command = [sys.executable, "-c", PENDING, str(int(number))]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60, "check": False}
    for _ in range(5):
        done = subprocess.run(command, **options)
        expected = (CODES[number], "", f"error: {SIGNAL_MESSAGES[CODES[number]]}\n")
        assert (done.returncode, done.stdout, done.stderr) == expected


# train.py with one function that prints a line when it is called, then reads whether to wait for a signal or continue.
PAUSED = """
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
sys.path.insert(0, sys.argv.pop(1))
import train
from ms_accum.app import process, steps, tasks
from ms_accum.saving import training_state

def paused(part):
    def run(*arguments, **options):
        print("now", flush=True)
        while sys.stdin.readline() == "wait\\n":
            while not process.SIGNALS.pending():
                time.sleep(0.01)
            print("asked", flush=True)
        return part(*arguments, **options)
    return run

owner, name = {
    "saving": (training_state, "save_file"),
    "evaluating": (tasks, "evaluate_together"),
    "recording": (steps, "write_record"),
}[sys.argv.pop(1)]
setattr(owner, name, paused(getattr(owner, name)))
sys.exit(process.run(train.main, train.flags()))
"""
FLAGS = ("--epochs=1", "--batch_size=128", "--mini_steps=2", "--save_every=2", "--keep_best")  # 6 updates


def start_paused(folder, part, flags=FLAGS):
    return start(folder, *flags, program=("-c", PAUSED, str(ROOT), part))


def send_words(program, *words):
    program.stdin.write("".join(f"{word}\n" for word in words))
    program.stdin.flush()


def send_signal(program, number):
    """Send a signal and wait until it has come."""
    program.send_signal(number)
    send_words(program, "wait")
    wait_for(program, "asked")


@pytest.fixture(scope="module")
def whole_model(once):
    return model_of(once("signals-paused", lambda folder: finished(folder, *FLAGS)))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["saving", "evaluating"])
def test_signal_finishes_current_step_and_saves(tmp_path, whole_model, part):
    program = start_paused(tmp_path, part)
    wait_for(program, "now")
    send_signal(program, signal.SIGTERM)
    send_words(program, *["go"] * 9)
    code, error = wait_for_end(program)
    assert code == TERMINATED
    # The first is the one that was due.
    assert error.startswith("error: terminated, the training state is in 'out/states/state-00000002.safetensors'")
    assert finished(tmp_path, *FLAGS, "--resume") == whole_model


@pytest.mark.slow
@pytest.mark.parametrize("part", ["saving", "evaluating"])
def test_second_signal_keeps_earlier_state(tmp_path, whole_model, part):
    program = start_paused(tmp_path, part)
    wait_for(program, "now")
    send_words(program, "go")
    wait_for(program, "now")
    send_signal(program, signal.SIGTERM)
    program.send_signal(signal.SIGINT)
    assert wait_for_end(program)[0] == INTERRUPTED
    states = tmp_path / "out" / "states"
    assert [path.name for path in states.glob("*.safetensors")] == ["state-00000001.safetensors"]
    assert finished(tmp_path, *FLAGS, "--resume") == whole_model
    assert not list(states.glob(".saving*"))


@pytest.mark.slow
def test_signal_stops_last_evaluation_at_once(tmp_path, whole_model):
    program = start_paused(tmp_path, "evaluating", FLAGS[:3])  # it is evaluated after it has been saved
    wait_for(program, "now")
    send_signal(program, signal.SIGINT)
    send_words(program, "go")
    code, error = wait_for_end(program)
    model = "out/gradient_accumulation.ckpt"
    assert code == INTERRUPTED and error == (
        f"error: interrupted; the model is '{model}', not evaluated yet: eval.py --ckpt_path={model} does that, or "
        "--resume --output_dir=out"
    )
    assert model_of(tmp_path) == whole_model
    assert [line["updates"] for line in lines_of(tmp_path / "out") if "updates" in line] == []
    assert finished(tmp_path, *FLAGS[:3], "--resume") == whole_model
    evaluation = lines_of(tmp_path / "out")[-1]
    assert (evaluation["updates"], evaluation["epoch"], evaluation["total"]) == (6, 1, 360)
    whole = lines_of(tmp_path / "out")
    assert finished(tmp_path, *FLAGS[:3], "--resume") == whole_model
    assert lines_of(tmp_path / "out") == whole  # once


@pytest.mark.slow
def test_signal_after_complete_run_is_reported(tmp_path):
    """It came while the last batch was evaluated, or its result was written."""
    program = start_paused(tmp_path, "recording", FLAGS[:3])
    wait_for(program, "now")
    send_signal(program, signal.SIGTERM)
    send_words(program, "go")
    code, error = wait_for_end(program)
    assert code == TERMINATED and re.fullmatch(
        r"error: terminated; the run is complete: accuracy .* % \(\d+/360\)", error
    )


@pytest.mark.slow
def test_signal_in_eval_is_one_line(tmp_path):
    """At many moments of eval.py, of which one third or more is compiling."""
    assert train_in(tmp_path, *ALL, *FLAGS[:3]) == 0
    command = [sys.executable, "-u", str(ROOT / "eval.py"), "--ckpt_path=out/gradient_accumulation.ckpt"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for moment in range(12):
        program = subprocess.Popen(command, cwd=tmp_path, **pipes)
        while not program.stdout.readline().startswith("record"):
            assert program.poll() is None, program.stderr.read()
        time.sleep(0.05 * moment)  # the test is that any moment is safe
        program.send_signal(signal.SIGINT)
        code, error = wait_for_end(program)
        assert (code, error) in ((INTERRUPTED, "error: interrupted"), (0, "")), moment
        assert sorted(os.listdir(tmp_path)) == ["out"]


KILLS = int(os.environ.get("MS_ACCUM_KILLS", "10"))
"""int, how often train.py is ended at a random moment in the test below."""


@pytest.mark.slow
def test_run_survives_kills_at_random_moments(tmp_path):
    """By SIGKILL too: each state is complete, and the next start resumes it and removes leftovers."""
    command = [sys.executable, str(ROOT / "tests" / "kill_runs.py"), str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 30 * KILLS, check=True)
    summary = json.loads(done.stdout)
    assert summary["faults"] == summary["left"] == []
    assert summary["resumed"] + summary["begun"] + summary["refused"] == KILLS + 1 and summary["updates"] > KILLS


SLEEPER = """
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
from ms_accum.app.process import Signals
with Signals() as signals, signals.deferred():
    print("ready", flush=True)
    while not signals.pending():
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("second", CODES)
def test_second_signal_ends_program_at_once(tmp_path, second):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGTERM)
        assert program.stdout.readline() == "asked\n"
        assert program.poll() is None
        while program.poll() is None:  # the same one is the same request, for a second
            program.send_signal(second)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(timeout=0.1)
        assert program.returncode == CODES[second]


@pytest.mark.parametrize(
    ("first", "then", "seconds", "ends"),
    [
        (signal.SIGTERM, signal.SIGTERM, 0.5, False),
        (signal.SIGTERM, signal.SIGTERM, 1.5, True),
        (signal.SIGTERM, signal.SIGINT, 0.0, True),
        (signal.SIGHUP, signal.SIGHUP, 9.0, False),
        (signal.SIGINT, signal.SIGHUP, 9.0, False),
        (signal.SIGHUP, signal.SIGTERM, 0.0, True),
    ],
)
def test_which_second_signals_end_the_program(first, then, seconds, ends, monkeypatch):
    """A shell that ends sends SIGHUP twice; what an init system sends to launcher and ranks gets to the ranks twice."""
    now = [100.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    left = []
    monkeypatch.setattr(process.os, "_exit", left.append)
    signals = Signals()
    signals._deferred = True
    signals._record(first)
    now[0] += seconds
    signals._record(then)
    assert left == ([process.CODES[then]] if ends else []) and signals.code == process.CODES[first]
