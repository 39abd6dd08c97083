"""--batch_schedule sets the windows, and for Seesaw the rates, when the number of micro-batches is known."""

from __future__ import annotations

import argparse

import pytest

from ms_accum import ramp_up, seesaw, windows_by_samples
from ms_accum.app.batch_schedule import schedule
from ms_accum.app.process import OK, USAGE
from programs import lines_of, one_line, plan, settings_of, train

SEESAW = ("--batch_schedule=seesaw", "--lr_decay=cosine", "--mini_steps=1", "--lr=0.1")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ("samples:0:1,1000:4", windows_by_samples({0: 1, 1000: 4}, micro_batch_size=64, micro_batches=30)),
        ("tokens:0:1,1000:4", windows_by_samples({0: 1, 1000: 4}, micro_batch_size=64 * 8, micro_batches=30)),
        ("warmup:1-4:1000", ramp_up(1, 4, 1000, micro_batch_size=64)),
    ],
)
def test_windows_are_those_of_the_functions(text, windows):
    assert schedule(text).windows(64, 8, 30) == windows
    settings = settings_of(f"--batch_schedule={text}", "--batch_size=32").for_ranks(2)
    expected = schedule(text).windows(64, 1, 30)
    assert settings.with_schedule(30).mini_steps == expected


def test_seesaw_has_its_rates():
    settings = settings_of(*SEESAW, "--epochs=3", "--warmup_updates=4").with_schedule(45)
    made = seesaw(0.1, 45, 1, epochs=3, warmup_updates=4)
    assert (settings.mini_steps, settings.rates) == made
    limited = settings_of(*SEESAW, "--batch_schedule=seesaw:2", "--epochs=3").with_schedule(45)
    assert set(limited.mini_steps.values()) == {1, 2}


@pytest.mark.parametrize(
    "text",
    ["", "x", "seesaw:", "seesaw:0", "seesaw:x", "warmup", "warmup:1:2", "warmup:0-4:100", "samples:1:4", "samples:0:0"]
    + ["samples:0:1,0:2", "samples:0:1,20:2,10:3", "tokens:0:1,x:2", "tokens:0:1:2", "warmup:1-4:99999999999"],
)
def test_other_texts_are_rejected(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be seesaw, seesaw:MAX, warmup:"):
        schedule(text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--batch_schedule=seesaw",), "seesaw needs --lr_decay, where it grows the window instead"),
        ((*SEESAW, "--max_updates=5"), "seesaw can't be combined with --max_updates"),
        ((*SEESAW, "--min_lr=0.01"), "seesaw can't be combined with --min_lr"),
        ((*SEESAW, "--tail=drop"), "seesaw can't be combined with --tail"),
        ((*SEESAW, "--mini_steps=0:1,5:2"), "sets the windows, so --mini_steps must be one number"),
        (("--batch_schedule=samples:0:1,9:2", "--mini_steps=2"), "sets the windows; leave --mini_steps out"),
        (
            ("--batch_schedule=samples:0:1", "--effective_batch=64"),
            "changes --mini_steps, so --effective_batch",
        ),
    ],
)
def test_contradictory_flags_are_rejected(argv, message, capfd):
    assert train(*argv) == USAGE
    assert one_line(capfd.readouterr().err).startswith(f"argument --batch_schedule: {message}")


def test_run_has_the_windows_and_rates_of_its_schedule(capfd):
    flags = (*SEESAW, "--model=mlp", "--batch_size=64", "--epochs=2", "--eval_every=end", "--output_dir=out")
    assert train(*flags) == OK
    made = seesaw(0.1, 23, 1, epochs=2)
    lines = [line for line in lines_of("out") if "update" in line]
    assert [line["lr"] for line in lines] == pytest.approx(made.learning_rates, rel=1e-6)
    assert sum(line["samples"] for line in lines) == 2 * 1437 and len(lines) < 46
    assert plan(capfd.readouterr().out)["effective batch"].startswith("64 to ")
    assert train("--resume", "--output_dir=out", "--epochs=3") != OK  # other windows
    assert "mini_steps was" in one_line(capfd.readouterr().err)
