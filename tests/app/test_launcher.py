"""The launcher starts several processes, ends them together, and reports how they ended."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import gone
from ms_accum import launch as launcher
from ms_accum.app.launcher import log_folder
from ms_accum.app.process import DISK, Failure
from ms_accum.app.processes import HOST, Machine, cluster, failure_reason, reserve_port
from ms_accum.ranks.heartbeat import read
from ms_accum.ranks.lifetime import end_with

pytestmark = pytest.mark.several
ROOT = Path(__file__).resolve().parents[2]
KILLED = [
    "error: the scheduler was killed by SIGKILL; its log is log/scheduler.log",
    "error: no rank can continue without the scheduler: all ranks receive SIGTERM, to save their state and end",
]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SIGNAL_MESSAGES = {130: "interrupted", 143: "terminated", 129: "the terminal was closed"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)
SECOND = ("--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1")  # of two machines
BEGIN = "import json, os, signal, subprocess, sys, time\nrank = int(os.environ['RANK_ID'])\n"
# Each rank notes which signals it gets, and ends a second after the first.
NOTES = """
got = []
def note(number, frame):
    got.append(int(number))
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGHUP, note)
print("ready", flush=True)
open(f"ready{rank}", "w").close()
while not got:
    time.sleep(0.05)
time.sleep(1)
json.dump(got, open(f"got{rank}", "w"))
sys.exit(128 + got[0])
"""
STUBBORN = """
def ignore(number, frame):
    open(f"asked{rank}", "w").close()
signal.signal(signal.SIGINT, ignore)
signal.signal(signal.SIGTERM, ignore)
open(f"ready{rank}", "w").close()
while True:
    time.sleep(100)
"""


def start(folder, source, *flags, nproc=2, program=("program.py",), **options):
    (folder / "program.py").write_text(BEGIN + source)
    command = [sys.executable, "-m", "ms_accum.launch", f"--nproc={nproc}", "--log_dir=log", *flags, *program]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, text=True, start_new_session=True, **options)


def wait_for_end(job):
    out, err = job.communicate(timeout=60)
    return job.returncode, out.splitlines(), err.splitlines()


def launch(folder, source, *flags, **options):
    return wait_for_end(start(folder, source, *flags, **options))


def wait_for(job, *paths):
    while not all(path.exists() for path in paths):
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)


def both_ready(job, folder):
    wait_for(job, folder / "ready0", folder / "ready1")


def process_of(job, name, value):
    """Return the launcher's child that has this variable in its environment."""
    for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
        if f"{name}={value}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(name)


# What ranks get


def test_each_rank_gets_interpreter_flags_and_cluster_environment(tmp_path):
    source = """
with open(f"got{rank}", "w") as file:
    json.dump([sys.executable, os.getcwd(), sys.argv[1:], dict(os.environ), sys.stdin.read()], file)
"""
    program_flags = ["--nproc", "5", "-m", "--", "a b", "", "-h"]
    code, out, err = launch(tmp_path, source, program=("program.py", *program_flags))
    assert (code, out, err) == (0, ["ranks            2, logs in log"], [])
    ranks = [json.loads((tmp_path / f"got{rank}").read_text()) for rank in range(2)]
    for rank, (interpreter, folder, flags, environment, stdin) in enumerate(ranks):
        assert (interpreter, folder, flags, stdin) == (sys.executable, str(tmp_path), program_flags, "")
        expected = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "RANK_SIZE": "2", "MS_SCHED_HOST": "127.0.0.1"}
        expected.update(dict.fromkeys(("MS_NODE_ID", "RANK_ID", "DEVICE_ID"), str(rank)))
        assert {name: environment[name] for name in expected} == expected
    assert ranks[0][3]["MS_SCHED_PORT"] == ranks[1][3]["MS_SCHED_PORT"]


def test_module_runs_with_one_rank(tmp_path):
    code, out, err = launch(tmp_path, "print(sys.argv[1:])", "-m", nproc=1, program=("program", "-m", "x"))
    assert (code, out, err) == (0, ["ranks            1, logs in log", "[0] ['-m', 'x']"], [])


def test_reserved_port_is_free_only_with_address_reuse():
    with reserve_port() as keeper, reserve_port() as another, socket.socket() as scheduler, socket.socket() as stranger:
        address = keeper.getsockname()
        assert another.getsockname() != address
        with pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        scheduler.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        scheduler.bind(address)
        scheduler.listen()
        assert address[0] == HOST


@pytest.mark.parametrize(("user_settings", "lower"), [({}, "1"), ({"MS_RETRY_INTERVAL_LOWER": "4"}, "4")])
def test_retry_interval_is_one_second_unless_set_by_user(monkeypatch, user_settings, lower):
    for name in ("LOWER", "UPPER"):
        monkeypatch.delenv(f"MS_RETRY_INTERVAL_{name}", raising=False)
    for name, value in user_settings.items():
        monkeypatch.setenv(name, value)
    environment = cluster(Machine(2, port=8118))
    assert (environment["MS_RETRY_INTERVAL_LOWER"], environment["MS_RETRY_INTERVAL_UPPER"]) == (lower, "1")


@pytest.mark.skipif(sys.platform != "linux", reason="others can't ask for it")
@pytest.mark.parametrize(("parent", "code"), [(os.getpid, 0), (lambda: 1, 1)], ids=["there", "gone"])
def test_process_whose_parent_ended_before_its_start_ends(parent, code):
    assert subprocess.run([sys.executable, "-c", ""], preexec_fn=end_with(parent()), check=False).returncode == code


def test_launcher_does_not_import_mindspore():
    look = "import sys, ms_accum.launch; print('mindspore' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


# Output


def test_rank_0_is_shown_by_lines_and_all_ranks_are_logged(tmp_path):
    source = """
print("of", rank)
print("[WARNING] DISTRIBUTED(1,7f,python):2026 a notice of MindSpore", file=sys.stderr)
print("[ERROR] DISTRIBUTED(1,7f,python):2026 an error of MindSpore", file=sys.stderr)
sys.stdout.write("no end of line")
"""
    code, out, err = launch(tmp_path, source)
    assert (code, out[1:]) == (0, ["[0] of 0", "[0] no end of line"])
    assert err == ["[0] [ERROR] DISTRIBUTED(1,7f,python):2026 an error of MindSpore"]
    for rank in range(2):
        log = (tmp_path / "log" / f"worker_{rank}.log").read_text()
        assert all(text in log for text in (f"of {rank}\n", "a notice", "an error", "no end of line"))


def test_stdout_and_stderr_of_rank_0_do_not_split_lines(tmp_path):
    source = """
for _ in range(20):
    sys.stdout.write("one ")
    print("another", file=sys.stderr)
    time.sleep(0.02)
    print("line")
"""
    code, out, err = launch(tmp_path, source)
    assert (code, out[1:], err) == (0, ["[0] one line"] * 20, ["[0] another"] * 20)
    assert sorted((tmp_path / "log" / "worker_0.log").read_text().split("\n")) == [
        "",
        *["another"] * 20,
        *["one line"] * 20,
    ]


BAR = 'sys.stdout.write("\\r 10%\\r 20%\\n"); print("next")'


def test_last_state_of_progress_bar_is_shown(tmp_path):
    assert launch(tmp_path, BAR)[1][1:] == ["[0]  20%", "[0] next"]


def test_progress_bar_is_overwritten_on_terminal(tmp_path):
    ours, its = pty.openpty()
    job = start(tmp_path, BAR, stdout=its)
    assert job.wait(timeout=60) == 0
    job.stderr.close()
    assert os.read(ours, 1000).endswith(b"[0]  10%\r[0]  20%\r\n[0] next\r\n")
    os.close(ours)
    os.close(its)


@pytest.mark.slow
def test_closed_terminal_does_not_end_run(tmp_path):
    job = start(tmp_path, "time.sleep(1)\nfor line in range(9999): print(line)", stderr=subprocess.DEVNULL)
    job.stdout.close()
    assert job.wait(timeout=60) == 0
    assert (tmp_path / "log" / "worker_0.log").read_text().endswith("9998\n")


def test_logs_of_earlier_job_are_removed(tmp_path):
    assert launch(tmp_path, "print('first')", nproc=3)[0] == 0
    (tmp_path / "log" / "worker_notes.log").touch()
    (tmp_path / "log" / "worker_2.beat").touch()
    (tmp_path / "log" / "worker_\u00b2.log").touch()
    assert launch(tmp_path, "", nproc=2)[0] == 0
    assert [path.name for path in sorted((tmp_path / "log").iterdir())] == [
        "scheduler.log",
        "worker_0.log",
        "worker_1.log",
        "worker_notes.log",
        "worker_\u00b2.log",
    ]
    assert (tmp_path / "log" / "worker_0.log").read_text() == ""


def test_each_job_has_its_own_log_folder_by_default(tmp_path):
    (tmp_path / "program.py").write_text("print(1)")
    command = [sys.executable, "-m", "ms_accum.launch", "program.py"]
    jobs = [subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE) for _ in range(2)]
    folders = {job.communicate(timeout=60)[0].splitlines()[0].split()[-1].decode() for job in jobs}
    assert [job.returncode for job in jobs] == [0, 0]
    assert len(folders) == 2
    assert {(tmp_path / folder / "worker_0.log").read_text() for folder in folders} == {"1\n"}


# How it ends


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        ("sys.exit('error: no data')", 1, "ended with exit code 1: no data"),
        ("print('error: full'); print('x'); sys.exit(5)", 5, "ended with exit code 5: full"),
        ("raise ValueError('bad')", 1, "ended with exit code 1: ValueError: bad"),
        ("print('[WARNING] ME(1)'); print('hm'); sys.exit(3)", 3, "ended with exit code 3: hm"),
        ("sys.exit(4)", 4, "ended with exit code 4: it printed nothing"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
)
def test_failed_rank_is_named_and_other_ranks_are_ended(tmp_path, failure, code, message):
    source = f"if rank == 1:\n    time.sleep(0.5); {failure}\ntime.sleep(100)"
    assert launch(tmp_path, source)[::2] == (code, [f"error: rank 1 {message}; its log is log/worker_1.log"])


def test_output_of_killed_rank_is_in_its_log(tmp_path):
    source = """
print("before")
open(f"ready{rank}", "w").close()
while not (os.path.exists("ready0") and os.path.exists("ready1")):  # the first to be killed ends the other one
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert launch(tmp_path, source)[0] == 137
    assert [(tmp_path / "log" / f"worker_{rank}.log").read_text() for rank in range(2)] == ["before\n"] * 2


def test_output_of_rank_0_comes_before_its_error(tmp_path):
    code, _, err = launch(tmp_path, "if rank: time.sleep(100)\nprint('error: so', file=sys.stderr); sys.exit(2)")
    error = "error: rank 0 ended with exit code 2; its log is log/worker_0.log"  # its own message is shown once
    assert (code, err) == (2, ["[0] error: so", error])


@pytest.mark.parametrize("first", [0, 1])
def test_error_of_several_ranks_is_shown_once(tmp_path, first):
    """Whichever rank fails first, and although rank 0's lines are shown and those of other ranks are in their logs."""
    source = f"""
def fail(*signal):
    print("error: no data", file=sys.stderr, flush=True)
    sys.exit(3)
if rank == 0 and {first} == 1:  # it fails when the launcher has shown the error of rank 1
    signal.signal(signal.SIGTERM, fail)
    open("ready0", "w").close()
    time.sleep(100)
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *signal: sys.exit(3))
    print("error: no data", file=sys.stderr, flush=True)
    time.sleep(100)
def is_there():
    return os.path.exists("ready0") if {first} else "error" in open("log/worker_0.log").read()  # logged when shown
while not is_there():
    time.sleep(0.01)
fail()
"""
    code, out, err = launch(tmp_path, source)
    reason = ": no data" if first else ""
    end = f"error: rank 1 ended with exit code 3{reason}; its log is log/worker_1.log"
    assert (code, err) == (3, [end] if first else ["[0] error: no data", end])
    assert (tmp_path / "log" / "worker_0.log").read_text() == "error: no data\n"


def test_different_errors_of_ranks_are_all_shown(tmp_path):
    source = """
asked = []
signal.signal(signal.SIGTERM, lambda *arguments: asked.append(1))
open(f"ready{rank}", "w").close()
while not asked if rank == 0 else not os.path.exists("ready0"):  # rank 0: until rank 1 has failed
    time.sleep(0.01)
print(f"error: {['so', 'other'][rank]}", file=sys.stderr)
sys.exit(2)
"""
    error = "error: rank 1 ended with exit code 2: other; its log is log/worker_1.log"
    code, _, err = launch(tmp_path, source)
    assert code == 2 and sorted(err) == ["[0] error: so", error]


def test_failure_of_last_running_rank_fails_the_job(tmp_path):
    assert launch(tmp_path, "time.sleep(rank); sys.exit(7 * rank)")[0] == 7


def test_rank_that_does_not_end_is_killed_after_grace(tmp_path):
    source = "if rank == 1:\n    while not os.path.exists('ready0'): time.sleep(0.1)\n    sys.exit(3)\n" + STUBBORN
    code, _, err = launch(tmp_path, source, "--grace=1.5")
    assert (code, err[1:]) == (3, ["error: rank 0 did not end within 1.5 s and was killed"])


EXCHANGING = """
from ms_accum.ranks.heartbeat import exchange
def ask(number, frame):
    open(f"asked{rank}", "w").close()
signal.signal(signal.SIGTERM, ask)
open(f"ready{rank}", "w").close()
if rank == 1:
    while not os.path.exists("ready0"): time.sleep(0.1)
    sys.exit(3)
with exchange():
    while INSIDE:
        time.sleep(0.1)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rank_waiting_for_failed_rank_is_ended_before_grace(tmp_path, inside):
    """It can do nothing else; one that has left the exchange, and may be saving, has the grace."""
    code, _, err = launch(tmp_path, EXCHANGING.replace("INSIDE", str(inside)), f"--grace={90 if inside else 5}")
    waited = "was waiting for all ranks and was ended" if inside else "did not end within 5 s and was killed"
    assert (code, err[1:]) == (3, [f"error: rank 0 {waited}"]) and (tmp_path / "asked0").exists()


def test_end_of_scheduler_is_an_error(tmp_path):
    job = start(tmp_path, NOTES)
    both_ready(job, tmp_path)
    os.kill(process_of(job, "MS_ROLE", "MS_SCHED"), signal.SIGKILL)
    code, _, err = wait_for_end(job)
    assert (code, err) == (137, KILLED)


@pytest.mark.parametrize("over", [True, False])
def test_ended_programs_are_not_waited_for_without_scheduler(tmp_path, over):
    """Their processes would wait for it, and for ever, when MindSpore closes."""
    beats = "from ms_accum.ranks.heartbeat import Heartbeat\nheart = Heartbeat()\nheart.beat()\n"
    waits = "def ask(number, frame):\n    open(f'asked{rank}', 'w').close()\n"
    ends = "    time.sleep(0.3)\n" + ("    heart._write(b'over', 20)\n" if over else "")
    waits += ends + "signal.signal(signal.SIGTERM, ask)\nopen(f'ready{rank}', 'w').close()\n"
    job = start(tmp_path, beats + waits + "while True: time.sleep(100)", f"--grace={90 if over else 1.5}")
    both_ready(job, tmp_path)
    os.kill(process_of(job, "MS_ROLE", "MS_SCHED"), signal.SIGKILL)
    code, _, err = wait_for_end(job)
    late = [f"error: rank {rank} did not end within 1.5 s and was killed" for rank in range(2) if not over]
    assert (code, err) == (137, [*KILLED, *late])
    assert all((tmp_path / f"asked{rank}").exists() for rank in range(2))


@pytest.mark.parametrize(
    "age", [pytest.param(40, id="late"), pytest.param(0, id="another reason", marks=pytest.mark.slow)]
)
def test_late_rank_is_named(tmp_path, age):
    """A rank that waits in vain ends with an error that names nobody. What holds its output leaves the other one time
    to end before it is complete."""
    source = """
from ms_accum.ranks.heartbeat import Heartbeat
heart = Heartbeat()
for _ in range(1200 - 200 * rank):
    heart.beat()
os.utime(os.environ["MS_ACCUM_HEARTBEAT"], (time.time() - AGE,) * 2)
open(f"ready{rank}", "w").close()
while not os.path.exists("ready1"): time.sleep(0.1)
if rank == 0:
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "30")
    sys.exit("RuntimeError:")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
time.sleep(100)
"""
    code, _, err = launch(tmp_path, source.replace("AGE", str(age)))
    assert code == 1 and err[1] == "error: rank 0 ended with exit code 1; its log is log/worker_0.log"
    message = (
        r"error: rank 1 was late: it had finished 1,000 micro-batches, the last 4\d s ago; rank 0 had finished 1,200"
    )
    assert len(err) == 2 + bool(age) and (not age or re.fullmatch(message, err[2]))


@pytest.mark.parametrize("text", [None, b"", b"x", b"\0" * 20, b"7".rjust(20), b"7".rjust(20) + b"over"])
def test_heartbeat_is_parsed(tmp_path, text):
    path = tmp_path / "worker_0.beat"
    if text is not None:
        path.write_bytes(text)
    heartbeat = read(path)
    if text in (None, b"x"):
        assert heartbeat is None
    else:
        assert (
            heartbeat[0] == (7 if b"7" in text else 0)
            and 0 <= heartbeat.age < 60
            and heartbeat.over is text.endswith(b"over")
        )


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_each_rank_gets_signal_once(tmp_path, number):
    """Sent as a terminal does on Ctrl-C: to the whole group. One rank ends long before the other."""
    job = start(tmp_path, NOTES.replace("time.sleep(1)", "time.sleep(1 + rank)"))
    both_ready(job, tmp_path)
    os.killpg(job.pid, number)
    code, _, err = wait_for_end(job)
    assert (code, err) == (CODES[number], [f"error: {SIGNAL_MESSAGES[code]}"])
    assert [json.loads((tmp_path / f"got{rank}").read_text()) for rank in range(2)] == [[number], [number]]


@pytest.mark.slow
def test_rank_that_fails_after_signal_is_named(tmp_path):
    job = start(tmp_path, NOTES.replace("128 + got[0]", "143 - 138 * rank"))
    both_ready(job, tmp_path)
    job.send_signal(signal.SIGTERM)
    code, _, err = wait_for_end(job)
    error = "error: rank 1 ended with exit code 5: ready; its log is log/worker_1.log"
    assert (code, err) == (5, [error])


@pytest.mark.slow
def test_saving_after_signal_may_exceed_grace(tmp_path):
    """The other ranks have ended earlier, with the signal's exit code, which is not a failure."""
    source = NOTES.replace("time.sleep(1)", "time.sleep(4 * (1 - rank))\nprint('saved')")
    job = start(tmp_path, source, "--grace=1")
    both_ready(job, tmp_path)
    job.send_signal(signal.SIGTERM)
    code, out, err = wait_for_end(job)
    assert (code, err) == (143, ["error: terminated"]) and out[-1] == "[0] saved"


@pytest.mark.slow
@pytest.mark.parametrize("asked", [pytest.param((0, 1), id="all"), pytest.param((1,), id="one")])
def test_signal_sent_directly_to_ranks_stops_the_job(tmp_path, asked):
    """The first rank ends with the signal's exit code, which is not a failure: the other one is saving."""
    source = NOTES.replace("while not got:", "while not (got or os.path.exists('got1')):")
    source = source.replace("time.sleep(1)", "time.sleep(3 * (1 - rank))\nprint('saved')")
    job = start(tmp_path, source.replace("128 + got[0]", "143"), "--grace=0.5")
    both_ready(job, tmp_path)
    for rank in asked:
        os.kill(process_of(job, "MS_NODE_ID", rank), signal.SIGTERM)
    code, out, err = wait_for_end(job)
    assert (code, err) == (143, ["error: terminated"]) and out[-1] == "[0] saved"
    assert json.loads((tmp_path / "got0").read_text()) == [15] * (0 in asked)


@pytest.mark.slow
def test_rank_waiting_for_rank_ended_by_signal_is_ended(tmp_path):
    """As where ranks join: only one rank received the signal, and the others would wait for it for minutes."""
    source = """
from ms_accum.ranks.heartbeat import exchange
if rank == 1: sys.exit(143)
with exchange():
    while True: time.sleep(0.1)
"""
    code, _, err = launch(tmp_path, source)
    assert (code, err) == (143, ["error: rank 0 was waiting for all ranks and was ended", "error: terminated"])


@pytest.mark.slow
def test_rank_that_ended_earlier_is_named(tmp_path):
    source = """
from ms_accum.ranks.heartbeat import Heartbeat
heart = Heartbeat()
for _ in range(5 - 2 * rank):
    heart.beat()
open(f"ready{rank}", "w").close()
if rank == 1: sys.exit(0)
while not os.path.exists("ready1"): time.sleep(0.1)
time.sleep(1)
sys.exit("RuntimeError: waited")
"""
    _, _, err = launch(tmp_path, source)
    assert err[2:] == ["error: rank 1 had ended before, after 3 micro-batches; rank 0 had finished 5"]


def test_stranded_ranks_are_ended_when_scheduler_ends_after_a_rank(tmp_path):
    """No rank has failed, and the remaining program has ended."""
    source = """
from ms_accum.ranks.heartbeat import Heartbeat
heart = Heartbeat()
heart.beat()
open(f"ready{rank}", "w").close()
if rank == 1: sys.exit(0)
heart._write(b"over", 20)
time.sleep(100)
"""
    job = start(tmp_path, source)
    both_ready(job, tmp_path)
    os.kill(process_of(job, "MS_ROLE", "MS_SCHED"), signal.SIGKILL)
    code, _, err = wait_for_end(job)
    assert (code, err) == (137, KILLED)


# As MindSpore words it: the line of the exception is empty.
KERNEL = """Traceback (most recent call last):
RuntimeError:\x20
----------------------------------------------------
- Kernel error:
----------------------------------------------------
Launch kernel failed: Default/AllReduce-op0

----------------------------------------------------
- C++ Call Stack: (For framework developers)
----------------------------------------------------
mindspore/ccsrc/backend/kernel_actor.cc:995 OnMemoryAllocFinish
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (KERNEL, "RuntimeError: Launch kernel failed: Default/AllReduce-op0"),
        ("RuntimeError:\n", "RuntimeError:"),
        ("ValueError: so\nRuntimeError: \n---\n- Kernel error:\n\n", "RuntimeError:"),
        ("error: so\n", "so"),
    ],
)
def test_failure_reason_is_found_in_log(tmp_path, text, words):
    (tmp_path / "log").write_text(text)
    assert failure_reason(tmp_path / "log") == words


def test_failure_shows_first_line_with_information():
    message = KERNEL.partition("RuntimeError:")[2]
    assert str(Failure(RuntimeError(message), 1)) == "Launch kernel failed: Default/AllReduce-op0"
    assert str(Failure(ValueError("one\ntwo"), 1)) == "one"
    assert str(Failure(ValueError(" \n---\n"), 1)) == "ValueError"


def test_failure_reason_is_short_and_printable(tmp_path):
    code, _, err = launch(tmp_path, "if rank: sys.stderr.write('\\x1b[31m' + 'x' * 60_000); sys.exit(3)")
    assert code == 3 and len(err[0]) < 400 and err[0].isprintable() and "xxx...; its log is" in err[0]


@pytest.mark.slow
def test_failure_after_signal_leaves_grace_to_other_ranks(tmp_path):
    """The job ends with the exit code of the failure, because the state is not saved."""
    job = start(
        tmp_path, NOTES.replace("time.sleep(1)", "time.sleep(100 * (1 - rank))\nif rank: sys.exit(5)"), "--grace=1"
    )
    both_ready(job, tmp_path)
    job.send_signal(signal.SIGTERM)
    code, _, err = wait_for_end(job)
    error = "error: rank 1 ended with exit code 5: ready; its log is log/worker_1.log"
    assert (code, err) == (5, [error, "error: rank 0 did not end within 1 s and was killed"])


@pytest.mark.slow
def test_sighup_stays_ignored_under_nohup(tmp_path):
    """Started with `nohup`."""
    job = start(tmp_path, NOTES, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    both_ready(job, tmp_path)
    job.send_signal(signal.SIGHUP)
    job.send_signal(signal.SIGTERM)
    code, _, err = wait_for_end(job)
    assert (code, err) == (143, ["error: terminated"])
    assert [json.loads((tmp_path / f"got{rank}").read_text()) for rank in range(2)] == [[15], [15]]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_stream_is_tolerated(tmp_path, closed):
    (tmp_path / "program.py").write_text(BEGIN + "print('said'); print('so', file=sys.stderr); sys.exit(7 * rank)")
    command = f"exec {sys.executable} -m ms_accum.launch --nproc=2 --log_dir=log program.py {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=ENVIRONMENT, check=False, timeout=60)
    assert done.returncode == 7
    assert sorted((tmp_path / "log" / "worker_0.log").read_text().splitlines()) == ["said", "so"]


@pytest.mark.slow
def test_second_signal_ends_ranks_at_once(tmp_path):
    job = start(tmp_path, STUBBORN)
    both_ready(job, tmp_path)
    job.send_signal(signal.SIGTERM)
    wait_for(job, tmp_path / "asked0", tmp_path / "asked1")
    job.send_signal(signal.SIGINT)
    code, _, err = wait_for_end(job)
    killed = [f"error: rank {rank} did not end within 1 s and was killed" for rank in range(2)]
    assert (code, err) == (143, [*killed, "error: terminated"])


def test_ranks_end_when_launcher_is_killed(tmp_path):
    job = start(tmp_path, STUBBORN)
    both_ready(job, tmp_path)
    processes = [process_of(job, "MS_NODE_ID", rank) for rank in range(2)] + [process_of(job, "MS_ROLE", "MS_SCHED")]
    job.kill()
    wait_for_end(job)
    assert all(gone(process) for process in processes)


def test_processes_started_by_ranks_end(tmp_path):
    source = "child = subprocess.Popen(['sleep', '100'])\nopen(f'got{rank}', 'w').write(str(child.pid))"
    assert launch(tmp_path, source)[0] == 0
    assert all(gone((tmp_path / f"got{rank}").read_text()) for rank in range(2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc=0", "program.py"], "argument --nproc: must be an int >= 1, but got '0'"),
        (["--nproc=two", "program.py"], "argument --nproc: must be an int >= 1, but got 'two'"),
        (["--grace=nan", "program.py"], "argument --grace: must be a number >= 0, but got 'nan'"),
        (["--np=2", "program.py"], "unrecognized arguments: --np=2; did you mean --nproc?"),
        (["nowhere.py"], "argument script.py: 'nowhere.py' is not a file"),
        ([], "the following arguments are required: script.py [its flags]"),
    ],
)
def test_wrong_flags_are_one_line_error(tmp_path, flags, message):
    (tmp_path / "program.py").touch()
    command = [sys.executable, "-m", "ms_accum.launch", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


# Several machines; tests/ranks/test_machines.py runs two.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nnodes=1", "--node_rank=0"], "argument --node_rank: needs --nnodes=2 or more, the number of machines"),
        (["--master_addr=10.0.0.1"], "argument --master_addr: needs --nnodes=2 or more, the number of machines"),
        (["--master_port=9000"], "argument --master_port: needs --nnodes=2 or more, the number of machines"),
        (["--nnodes=2", "--node_rank=0"], "argument --master_addr: must be given with --nnodes=2"),
        (["--nnodes=2", "--master_addr=127.0.0.1"], "argument --node_rank: must be given with --nnodes=2"),
        ([*SECOND, "--node_rank=2"], "argument --node_rank: must be < 2, the number of machines, but got 2"),
        ([*SECOND, "--master_port=65536"], "argument --master_port: must be <= 65535, but got 65536"),
        ([*SECOND, "--master_addr=a..b"], "argument --master_addr: 'a..b' has no address: "),
        ([*SECOND, "--master_addr=0.0.0.0"], "argument --master_addr: '0.0.0.0' is not the address of a machine"),
        ([*SECOND, "--master_addr="], "argument --master_addr: '' is not the address of a machine"),
        (
            ["--nnodes=2", "--node_rank=0", "--master_addr=192.0.2.1"],
            "argument --master_addr: port 8118 of 192.0.2.1 can't be used on this machine, number 0 of 2: ",
        ),
    ],
)
def test_wrong_flags_for_several_machines_are_one_line_error(capfd, tmp_path, flags, message):
    (tmp_path / "program.py").touch()
    assert launcher.main([*flags, "program.py"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_used_port_is_an_error_before_ranks_start(capfd, tmp_path):
    (tmp_path / "program.py").touch()
    with socket.create_server((HOST, 0)) as other_job:
        port = other_job.getsockname()[1]
        flags = ["--nnodes=2", "--node_rank=0", f"--master_addr={HOST}", f"--master_port={port}"]
        assert launcher.main([*flags, "program.py"]) == 2
    assert f"port {port} of {HOST} can't be used on this machine" in capfd.readouterr().err


@pytest.mark.parametrize("node", [0, 1])
def test_each_machine_starts_its_ranks_and_the_first_one_the_scheduler(tmp_path, node):
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
    source = "json.dump(dict(os.environ), open(f'got{rank}', 'w'))\nprint('I am', rank)"
    flags = ("--nnodes=2", f"--node_rank={node}", "--master_addr=localhost", f"--master_port={port}")
    code, out, err = launch(tmp_path, source, *flags)
    own = f"{2 * node} to {2 * node + 1}"
    shown = f"ranks            {own} of 4, scheduler at {HOST}:{port} (only this machine can reach it), logs in log"
    assert (code, out, err) == (0, [shown, *["[0] I am 0"] * (node == 0)], [])
    for device in range(2):
        rank = 2 * node + device
        environment = json.loads((tmp_path / f"got{rank}").read_text())
        expected = {"MS_WORKER_NUM": "4", "RANK_SIZE": "4", "MS_SCHED_HOST": HOST, "MS_SCHED_PORT": str(port)}
        expected |= {"MS_ROLE": "MS_WORKER", "RANK_ID": str(rank), "MS_NODE_ID": str(rank), "DEVICE_ID": str(device)}
        assert {name: environment[name] for name in expected} == expected
        assert (tmp_path / "log" / f"worker_{rank}.log").read_text() == f"I am {rank}\n"
    assert (tmp_path / "log" / "scheduler.log").exists() == (node == 0)


@pytest.mark.host
def test_machines_share_a_log_folder(tmp_path):
    """Logs of the other machine's ranks stay, and a link in the place of one of this machine is not followed."""
    for rank in (0, 3, 4):
        (tmp_path / f"worker_{rank}.log").touch()
    second = Machine(2, nnodes=2, node_rank=1)
    log_folder(str(tmp_path), second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker_0.log", "worker_3.log"]
    (tmp_path / "worker_2.log").symlink_to("/nowhere")
    with pytest.raises(OSError, match="it leads to"):
        log_folder(str(tmp_path), second)


def test_failure_on_second_machine_points_to_the_others(tmp_path):
    code, _, err = launch(tmp_path, "sys.exit('RuntimeError: waited')", *SECOND, nproc=1)
    error = "error: rank 1 ended with exit code 1: RuntimeError: waited; its log is log/worker_1.log"
    assert (code, err) == (1, [error, "error: the reason may be on another machine: see the launcher's output there"])


def test_killed_rank_on_second_machine_is_its_own_reason(tmp_path):
    code, _, err = launch(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", *SECOND, nproc=1)
    assert (code, err) == (137, ["error: rank 1 was killed by SIGKILL; its log is log/worker_1.log"])


def test_unusable_log_folder_is_one_line_error(tmp_path):
    (tmp_path / "log").touch()
    code, _, err = launch(tmp_path, "open('ran', 'w')")
    assert (code, err) == (5, ["error: the job can't be started: [Errno 17] File exists: 'log'"])
    assert not (tmp_path / "ran").exists()


# A cluster

SUM = """
from ms_accum.app.process import SIGNALS
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
import mindspore as ms
import numpy as np
from mindspore import communication, nn, ops

class Sum(nn.Cell):
    def __init__(self):
        super().__init__()
        self.sum = ops.AllReduce()

    def construct(self, x):
        return self.sum(x)

ms.set_context(mode=ms.GRAPH_MODE)
communication.init()
assert (communication.get_rank(), communication.get_group_size()) == (rank, 2)
total = Sum()
print(total(ms.Tensor(np.array([1 + rank, 10], np.float32))).asnumpy().tolist(), flush=True)
"""
FOREVER = """
open(f"ready{rank}", "w").close()
with SIGNALS:
    while True:
        total(ms.Tensor(np.ones(2, np.float32)))
"""


@pytest.mark.slow
def test_ranks_compute_all_reduce_sum(tmp_path):
    code, out, err = launch(tmp_path, SUM)
    assert (code, out[1:], err) == (0, ["[0] [3.0, 20.0]"], [])
    assert (tmp_path / "log" / "worker_1.log").read_text().startswith("[3.0, 20.0]\n")


@pytest.mark.slow
def test_killed_rank_ends_ranks_waiting_for_it(tmp_path):
    """Here they can't do what SIGTERM asks for: their main threads are inside of MindSpore."""
    wait = (
        "open(f'ready{rank}', 'w').close()\nwith SIGNALS:\n    while True: total(ms.Tensor(np.ones(2, np.float32)))\n"
    )
    job = start(tmp_path, SUM + wait, "--grace=3")
    both_ready(job, tmp_path)
    began = time.monotonic()
    os.kill(process_of(job, "MS_NODE_ID", 1), signal.SIGKILL)
    code, _, err = wait_for_end(job)
    assert time.monotonic() - began < 60
    ours = [line for line in err if line.startswith("error: ")]
    assert (code, ours[0]) == (137, "error: rank 1 was killed by SIGKILL; its log is log/worker_1.log")


@pytest.mark.host
@pytest.mark.parametrize("name", ["scheduler.log", "worker_1.log", "worker_0.beat"])
def test_link_out_of_log_folder_is_not_followed(tmp_path, capfd, name):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / name).symlink_to(tmp_path / "precious")
    (tmp_path / "program.py").touch()
    assert launcher.main(["--nproc=2", "--log_dir=log", "program.py"]) == DISK
    message = f"'log/{name}' can't be written: it leads to '{tmp_path}/precious', out of its folder. Remove the link."
    assert capfd.readouterr().err == f"error: the job can't be started: {message}\n"
    assert (tmp_path / "precious").read_text() == "mine"
