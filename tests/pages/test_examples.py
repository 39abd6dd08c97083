"""The examples run on the public API and print what the documents show."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]


UPDATES = {
    "tutorial_cells": 11,
    "tutorial_driver": 12,
    "tutorial_functional": 23,
}  # of 45 micro-batches in windows of 4, the Cells without a tail, or of 2


# A newcomer's three networks: the last line that is printed.
NETWORKS = {
    "basic": r"epoch: 1 update: \d+ evaluation: accuracy 0\.\d+, eval_loss \d\.\d+",
    "batch_norm_cnn": r"12 updates, accuracy \d+\.\d%",
    "lstm_model": r"12 updates, 0 skipped",
    "two_inputs": r"epoch: \d+ update: \d+ evaluation: accuracy 0\.\d+, eval_loss 0\.\d+",
}
# Each differs from basic.py by one feature.
EVALUATION = NETWORKS["basic"]
FEATURES = {
    "averaged_weights": EVALUATION,
    "check_gradients": EVALUATION,
    "clip_and_schedule": EVALUATION,
    "complete_batches": EVALUATION,
    "early_stopping": EVALUATION,
    "growing_windows": EVALUATION,
    "mixed_precision": EVALUATION,
    "model_fit": r"\{'accuracy': 0\.\d+\}",
    "resume": EVALUATION,
    "several_processes": EVALUATION,
}
# Each has a test of its own.
OTHERS = ("contrastive", "language_model", "lengths", "no_sync", "several_terms", "skipped_windows", "tensorboard")


def run(program, folder, *flags, launcher=()):
    """Run an example as its README says, but in another folder, with the packages of this clone."""
    command = [sys.executable, *launcher, str(ROOT / "examples" / f"{program}.py"), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("GLOG_v", None)  # what MindSpore warns of in our graphs is to be seen
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


PROGRAMS = sorted([*UPDATES, *NETWORKS, *FEATURES, *OTHERS])


def test_every_example_is_tested():
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.py")) == PROGRAMS


def test_every_example_is_listed_with_its_first_line():
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(\w+)\.py`\]\(\1\.py\) \| (.*) \|$", table, re.MULTILINE)
    sources = {name: (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8") for name in PROGRAMS}
    first_lines = {name: ast.get_docstring(ast.parse(source)) for name, source in sources.items()}
    assert dict(rows) == {name: str(text).splitlines()[0].rstrip(".") for name, text in first_lines.items()}
    assert len(rows) == len(PROGRAMS) and "(window.ipynb)" in table


@pytest.mark.slow
@pytest.mark.parametrize(("program", "updates"), UPDATES.items())
def test_tutorial_example(program, updates, tmp_path):
    done = run(program, tmp_path, "--epochs=1")
    assert (done.returncode, done.stderr) == (0, "")
    accuracy = re.fullmatch(rf"{updates} updates, accuracy (\d+\.\d)%", done.stdout.splitlines()[-1])
    assert 0 < float(accuracy[1]) <= 100


@pytest.mark.slow
@pytest.mark.parametrize(("program", "last"), NETWORKS.items())
def test_own_network_example(program, last, tmp_path):
    done = run(program, tmp_path, "--epochs=1")
    assert done.returncode == 0 and re.fullmatch(last, done.stdout.splitlines()[-1])
    warned = [line for line in done.stderr.splitlines() if "Warning" in line or "WARNING" in line]
    assert len(warned) == (program == "batch_norm_cnn") and ("normali" in done.stderr) is bool(warned)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "last"), FEATURES.items())
def test_feature_example(program, last, tmp_path):
    done = run(program, tmp_path, "--epochs=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(last, done.stdout.splitlines()[-1])
    assert "resume" != program or list((tmp_path / "states").glob("*.safetensors"))


@pytest.mark.slow
def test_no_sync_parameters_change_only_at_window_end(tmp_path):
    """And with them: the accumulators differ between ranks, the parameters never."""
    launcher = ("-m", "ms_accum.launch", "--nproc=2", "--log_dir=logs")
    done = run("no_sync", tmp_path, launcher=launcher)
    assert (done.returncode, done.stderr) == (0, "")
    logs = [(tmp_path / "logs" / f"worker_{rank}.log").read_text() for rank in (0, 1)]
    matches = [re.findall(r"^rank \d, (.*): parameter (.*), accumulator (.*)$", log, re.MULTILINE) for log in logs]
    assert len(matches[0]) == len(matches[1]) == 5
    moments, parameters, accumulators = zip(*matches[0])
    assert [moment.endswith("update") for moment in moments] == [False, False, True, False, True]
    assert parameters[0] == parameters[1] != parameters[2] == parameters[3] != parameters[4]
    assert parameters == tuple(zip(*matches[1]))[1]
    assert all(mine != theirs for mine, theirs in zip(accumulators[1:], tuple(zip(*matches[1]))[2][1:]))


NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?"


def shown(program):
    """Return the lines that the page on correctness shows below an example's command."""
    page = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    return re.search(rf"`python examples/{program}\.py`.*?```text\n(.*?)```", page, re.DOTALL)[1].splitlines()


def differ(shown, printed):
    """Return the lines shown that were not printed, up to 2 in a number's last digit; rounding errors are all equal."""
    printed = {re.sub(NUMBER, "#", line): line for line in printed}
    return [line for line in shown if not alike(line, printed.get(re.sub(NUMBER, "#", line), ""))]


def alike(line, other):
    numbers, others = ([Decimal(number) for number in re.findall(NUMBER, text)] for text in (line, other))
    return len(numbers) == len(others) and all(
        abs(a - b) <= 2 * Decimal(1).scaleb(a.as_tuple().exponent) or max(abs(a), abs(b)) < Decimal("1e-5")
        for a, b in zip(numbers, others)
    )


@pytest.mark.slow
def test_language_model_shows_error_of_mean_of_means(tmp_path):
    done = run("language_model", tmp_path, "--epochs=5")
    assert (done.returncode, done.stderr) == (0, "")
    assert differ(shown("language_model"), done.stdout.splitlines()) == []
    loss = {name: float(value) for name, value in re.findall(r"^(.+): loss (\d\.\d+)", done.stdout, re.MULTILINE)}
    miss = dict(re.findall(r"^(.+): loss .*difference (\S+)$", done.stdout, re.MULTILINE))
    assert float(miss["weighted by tokens"]) < 1e-6 and float(miss["mean of means"]) > 0.1
    assert loss["epoch 5"] < loss["epoch 1"] / 2


@pytest.mark.slow
def test_contrastive_shows_error_of_plain_accumulation(tmp_path):
    done = run("contrastive", tmp_path, "--epochs=5")
    assert (done.returncode, done.stderr) == (0, "")
    assert differ(shown("contrastive"), done.stdout.splitlines()) == []
    miss = dict(re.findall(r"^(\w+), 8 micro-batches: .*difference (\S+)$", done.stdout, re.MULTILINE))
    assert float(miss["CoupledLoss"]) < 1e-5 and float(miss["plain"]) > 0.1
    shares = [float(share) for share in re.findall(r": (\d+\.\d)% of 360 test digits", done.stdout)]
    assert shares[0] < 2 and shares[1] > 15


@pytest.mark.slow
def test_skipped_window_is_written(tmp_path):
    done = run("skipped_windows", tmp_path)
    assert done.returncode == 0 and done.stdout == "11 updates, 1 skipped\n" and "1 window skipped" in done.stderr
    files = sorted((tmp_path / "skipped").iterdir())
    assert [path.name for path in files] == [f"step-8-micro-batch-{number}.npz" for number in (1, 2, 3, 4)]
    assert [bool(np.isnan(np.load(path)["arr_0"]).any()) for path in files] == [False, True, False, False]


@pytest.mark.slow
def test_several_terms_shows_error_of_single_weight(tmp_path):
    done = run("several_terms", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert differ(shown("several_terms"), done.stdout.splitlines()) == []
    miss = dict(re.findall(r"^(.+): relative difference of the gradient (\S+)$", done.stdout, re.MULTILINE))
    assert float(miss["terms"]) < 1e-6 and all(float(miss[f"one weight, {name}"]) > 1e-2 for name in ("rows", "tokens"))


@pytest.mark.slow
def test_lengths_pads_less_with_few_shapes(tmp_path):
    done = run("lengths", tmp_path, "--epochs=2")
    assert (done.returncode, done.stderr) == (0, "")
    shapes, padding, *_, last = done.stdout.splitlines()
    assert shapes == "24 micro-batches of 32 x 16, 21 x 24, 12 x 40, 8 x 64"
    assert (padding, last) == ("padding 24%; with one shape 64%", "12 updates for 18,244 words")


@pytest.mark.slow
def test_tensorboard_example_writes_events(tmp_path):
    pytest.importorskip("tensorboardX")
    done = run("tensorboard", tmp_path)
    assert done.stdout.splitlines()[-1] == "24 updates in 'events'", done.stderr
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))
