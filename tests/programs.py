"""Run the two programs in tests, in this process or in another one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eval as evaluation
import train as training
from ms_accum.app.process import run

ROOT = Path(__file__).resolve().parents[1]
CLOSING = re.compile(
    r"accuracy +[\d.]+ % \(([\d,]+)/([\d,]+)\)\n============== \{'Accuracy': ([0-9.e-]+)\} ==============\n"
)
QUICK = ("--model=mlp", "--epochs=1", "--batch_size=256", "--mini_steps=2", "--output_dir=out")


def refused(parser, argv, capfd, main=None):
    """Run a program with this parser, and return the exit code and the one line on stderr."""
    code = run(main or (lambda arguments: pytest.fail("the program ran")), parser, argv)
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    return code, err[len("error: ") : -1]


def raising(error):
    """Return a program that raises this error."""

    def main(arguments):
        raise error

    return main


def train(*argv):
    return run(training.main, training.flags(), argv)


def settings_of(*argv):
    """Return what a run with these flags is."""
    return training.flags().parse(argv)


def train_in(folder, *argv):
    """Do so in another folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train(*argv)


def evaluate(*argv):
    return run(evaluation.main, evaluation.flags(), argv)


def process(*command, cwd, **options):
    command = [sys.executable, str(ROOT / command[0]), *command[1:]]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **options)


def one_line(err):
    """Return the message, if the error output is exactly one line of the right form."""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err[len("error: ") : -1]


def closing(out):
    """Return accuracy, correct and total, if the output ends with the closing lines."""
    match = CLOSING.search(out)
    assert match and match.end() == len(out)
    correct, total = (int(number.replace(",", "")) for number in match.groups()[:2])
    accuracy = float(match[3])
    assert accuracy == correct / total
    return accuracy, correct, total


def plan(out):
    """Return the lines before training by their first words."""
    return {line[:16].rstrip(): line[17:] for line in out.splitlines() if not line.startswith(("epoch:", "="))}


def lines_of(folder):
    """Return all that a run has written about updates and evaluations."""
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def metrics(folder):
    """Return what a run has written about its updates."""
    return [line for line in lines_of(folder) if "update" in line]
