"""End train.py at random moments, resume it, and look at what is left: python tests/kill_runs.py FOLDER KILLS

Each start resumes the one before, and is ended by SIGKILL, SIGTERM or SIGINT in turn at random, with a fixed seed. It
prints what was wrong as JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ms_accum.saving.training_state import open_state

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--model=mlp", "--batch_size=512", "--mini_steps=1", "--epochs=1000000", "--save_every=2", "--keep_best")
CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
LONGEST = 9.0  # seconds: it imports MindSpore, compiles, trains, saves and evaluates


def blocks_signals(pid):
    """Return whether a process has come to where it blocks signals: Python itself starts before, and is no program."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16) & 1 << signal.SIGTERM - 1)


def updates_in(folder):
    """Return the updates of the newest state, which has to be whole; 0 if there is none."""
    newest = max(folder.glob("runs/*/states/state-*.safetensors"), default=None)
    return 0 if newest is None else open_state(str(newest))[1]["updates"]


def ended(folder, environment, flags, number, seconds):
    """Start the program, send it a signal, and return its exit code, what it printed, and its errors."""
    command = [sys.executable, "-u", str(ROOT / "train.py"), *flags]
    files = [open(folder / name, "w+", encoding="utf-8") for name in ("out", "err")]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=files[0], stderr=files[1])
    while not blocks_signals(process.pid) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(number)
    code = process.wait(timeout=120)
    for file in files:
        file.close()
    return code, (folder / "out").read_text(), (folder / "err").read_text()


def faults_of(number, before, after, code, out, err):
    """Yield what is wrong with a start, which resumed from `before` updates."""
    if "Traceback" in out + err or len(err.splitlines()) != (number != signal.SIGKILL):
        yield f"not one line: {err[:500]!r}"
    elif err and not err.startswith("error: "):
        yield f"no error: {err!r}"
    refused = "ended before it saved a state" in err  # said with exit code 2, before MindSpore is imported
    if code != (2 if refused else CODES[number]):
        yield f"exit code {code} after {number.name}: {err[:200]!r}"
    resumed = re.search(r"^resumed .*: ([0-9,]+) updates", out, re.MULTILINE)
    if resumed and int(resumed[1].replace(",", "")) != before:
        yield f"resumed with {resumed[1]} updates instead of {before}"
    if after < before:
        yield f"{after} updates after {before}"


def main(folder, kills):
    rng, faults, ends = random.Random(30), [], dict.fromkeys(("resumed", "begun", "refused"), 0)
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLOG_")}
    environment["TMPDIR"] = str(temporary)
    refused = True
    for kill in range(kills + 1):
        number, seconds = rng.choice(list(CODES)), rng.uniform(0, LONGEST)
        if kill == kills:  # the last one ends in order, and leaves nothing
            number, seconds = signal.SIGTERM, LONGEST
        before = updates_in(folder)
        # A run that ended before its first state can't be resumed, and says so: it is started again.
        flags = FLAGS if refused else ("--resume",)
        code, out, err = ended(folder, environment, flags, number, seconds)
        after = updates_in(folder)
        faults += [
            f"{kill}: {fault}" for fault in faults_of(number, before if not refused else 0, after, code, out, err)
        ]
        refused = code == 2 or not after
        ends["refused" if code == 2 else "begun" if flags is FLAGS else "resumed"] += 1
    leftovers = [path.name for path in temporary.iterdir()]
    leftovers += [path.name for path in folder.glob("runs/*/states/.saving-*")]
    leftovers += [path.name for path in folder.iterdir() if path.name not in ("runs", "temporary", "out", "err")]
    print(json.dumps({"kills": kills, **ends, "updates": updates_in(folder), "faults": faults, "left": leftovers}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
