"""Run the programs in tests, in this process or in another one."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import eval as evaluation
import train as training
from programs.command import run

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("--model=mlp", "--batch_size=256", "--mini_steps=2")  # 6 micro-batches and 3 updates in an epoch


def train(*argv):
    """Return the exit code of train.py, and release the lock of its folder, which it keeps until its process ends."""
    code = run(training.main, argv)
    gc.collect()
    return code


def evaluate(*argv):
    """Return the exit code of eval.py."""
    return run(evaluation.main, argv)


def run_python(*arguments, cwd, **variables):
    """Run Python in another process with the packages of this clone; return how it ended, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)


def start(*command, cwd, **options):
    """Start a program in another process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = [command[0]] if command[0] == "-m" else [str(ROOT / command[0])]
    return subprocess.Popen([sys.executable, *program, *command[1:]], cwd=cwd, **{**pipes, **options})


def said(err):
    """Return what a run itself wrote to stderr: MindSpore logs an error if a signal comes while its pipeline waits."""
    return re.sub(r"(?m)^\[ERROR\] MD\(.*\n(?:Line of code : .*\nFile .*\n\n?)?", "", err)


def error_of(capsys):
    """Return the one line on stderr."""
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err[len("error: ") : -1]


def result_of(out):
    """Return the result in the last line of a program's output."""
    line = out.splitlines()[-1]
    assert line.startswith("============== {") and line.endswith("} =============="), out
    return ast.literal_eval(line.strip("= "))


def metrics_of(folder):
    """Return the lines of the metrics of a run."""
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
