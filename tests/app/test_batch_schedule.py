"""The texts of --batch_schedule, and the sizes and rates that runs get from them."""

from __future__ import annotations

import argparse
import math

import pytest

from ms_accum import batch_schedule as rates_for
from ms_accum import batch_warmup, seesaw, windows_by
from ms_accum.app import batch_schedule as module
from ms_accum.app.batch_schedule import FORMS, RunOfData, batch_schedule, schedule_of
from ms_accum.app.process import OK, USAGE
from ms_accum.app.settings import part_of_rate
from programs import lines_of, one_line, plan, train

RUN = RunOfData(
    micro_batches=60, per_epoch=30, rows_per_epoch=236, rows=8, mini_steps=1, lr=0.1, warmup_updates=4,
    lr_decay="cosine", min_lr=0.01, lr_scaling="none", is_adaptive=True,
)  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "sizes", "options"), [
    ("seesaw", "seesaw", {}, {}),
    ("seesaw:max=64", "seesaw", {}, {"most": 64}),
    ("seesaw:factor=1.5,smooth,max=8", "seesaw", {}, {"factor": 1.5, "smooth": True, "most": 8}),
    ("warmup:1-8:20000", "warmup", {}, {"first": 1, "last": 8, "samples": 20000}),
    ("updates:0:1,100:4", "updates", {0: 1, 100: 4}, {}),
    ("samples:20000:4,0:1", "samples", {0: 1, 20000: 4}, {}),
    ("tokens:0:1,1000000:4", "tokens", {0: 1, 1000000: 4}, {}),
])  # fmt: skip
def test_texts_are_converted(text, kind, sizes, options):
    found = batch_schedule(text)
    assert (found.text, found.kind, found.sizes, found.options) == (text, kind, sizes, options)


def test_each_form_in_the_help_is_converted():
    forms = FORMS.replace(" or ", ", ").split(", ")
    assert {batch_schedule(form).kind for form in forms} == set(module.KINDS)


@pytest.mark.parametrize(("text", "message"), [
    ("", "must be such as seesaw, seesaw:max=64"),
    ("cosine", "must be such as seesaw"),
    ("4", "must be such as seesaw"),
    ("updates", "must be such as seesaw"),
    ("updates:4", "must be such as seesaw"),
    ("samples:5:1", "must begin with update 0, such as 0:1,100:4"),
    ("tokens:0:1,0:2", "have each update once"),
    ("samples:0:0", "must be an int >= 1, but got '0'"),
    ("seesaw:", "seesaw has max=N, factor=X and smooth, but got ''"),
    ("seesaw:64", "seesaw has max=N, factor=X and smooth, but got '64'"),
    ("seesaw:max", "but got 'max'"),
    ("seesaw:smooth=1", "but got 'smooth=1'"),
    ("seesaw:max=2,max=4", "must have max once"),
    ("seesaw:max=0", "must be an int >= 1"),
    ("seesaw:factor=1", "must be a number > 1"),
    ("warmup:8:20000", "must be such as warmup:1-8:20000"),
    ("warmup:1-8", "must be such as warmup:1-8:20000"),
    ("warmup:8-1:20", "must grow from the first size to the last"),
    ("warmup:1-8:0", "must be an int >= 1"),
])  # fmt: skip
def test_invalid_texts_are_one_line(text, message):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        batch_schedule(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_updates_with_constant_windows_have_the_rates_of_the_program():
    found = schedule_of(batch_schedule("updates:0:1"), RUN)
    assert found.mini_steps == {0: 1}
    assert found.learning_rates == pytest.approx([0.1 * part_of_rate(u, 60, 4, "cosine", 0.1) for u in range(60)])


def test_samples_count_an_epochs_short_micro_batch():
    found = schedule_of(batch_schedule("samples:0:1,240:4"), RUN)
    assert found.mini_steps == {0: 1, 31: 4}
    assert windows_by({0: 1, 240: 4}, 8) == {0: 1, 30: 4}  # the mutant, where each micro-batch has 8 rows
    assert found.updates == 31 + 8
    assert found == rates_for(0.1, {0: 1, 31: 4}, 60, rule="none", **RUN.rates)


def test_tokens_are_rows_times_their_length():
    run = RUN._replace(tokens_per_row=64)
    assert schedule_of(batch_schedule("tokens:0:1,6400:4"), run) == schedule_of(
        batch_schedule("samples:0:1,100:4"), run
    )
    with pytest.raises(ValueError, match="tokens is for text; images have samples"):
        schedule_of(batch_schedule("tokens:0:1,6400:4"), RUN)


def test_seesaw_begins_with_the_programs_window():
    run = RUN._replace(mini_steps=2)
    found = schedule_of(batch_schedule("seesaw:max=8"), run)
    assert found == seesaw(0.1, 60, first=2, most=8, **run.rates) and found.mini_steps[0] == 2
    with pytest.raises(ValueError, match="seesaw needs --lr_decay cosine or linear, whose rates it replaces"):
        schedule_of(batch_schedule("seesaw"), RUN._replace(lr_decay="none"))


def test_warmup_ends_after_its_samples():
    found = schedule_of(batch_schedule("warmup:1-4:236"), RUN)
    assert found == batch_warmup(0.1, 1, 4, 60, over=30, **RUN.rates)


@pytest.mark.parametrize(("scaling", "is_adaptive", "power"), [
    ("none", True, 0.5), ("none", False, 1), ("sqrt", False, 0.5), ("linear", True, 1),
])  # fmt: skip
def test_rate_follows_windows_by_optimizer_or_flag(scaling, is_adaptive, power):
    run = RUN._replace(lr_scaling=scaling, is_adaptive=is_adaptive, lr_decay="none", warmup_updates=0, min_lr=0)
    found = schedule_of(batch_schedule("warmup:1-4:80"), run)
    assert max(found.learning_rates) == pytest.approx(0.1 * 4**power)
    by_flag = schedule_of(batch_schedule("updates:0:1,3:4"), run)
    factor = {"none": 1, "sqrt": math.sqrt(4), "linear": 4}[scaling]
    assert by_flag.learning_rates[3] == pytest.approx(0.1 * factor)


# In the program

SEESAW = ("--batch_schedule=seesaw", "--lr_decay=cosine", "--mini_steps=1", "--lr=0.1")


@pytest.fixture
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--batch_schedule=seesaw",), "seesaw needs --lr_decay cosine or linear, whose rates it replaces"),
        ((*SEESAW, "--max_updates=5"), "can't be combined with --max_updates; give --mini_steps and --epochs"),
        ((*SEESAW, "--mini_steps=0:1,5:2"), "changes the windows, so --mini_steps must be one number"),
        (("--batch_schedule=samples:0:1", "--effective_batch=64"), "can't be combined with --effective_batch"),
        (("--batch_schedule=tokens:0:1,9:2",), "tokens is for text; images have samples"),
    ],
)
@pytest.mark.usefixtures("_here")
def test_contradictory_flags_are_rejected(argv, message, capfd):
    assert train(*argv) == USAGE
    assert one_line(capfd.readouterr().err).startswith(f"argument --batch_schedule: {message}")


@pytest.mark.usefixtures("_here")
def test_run_has_the_windows_and_rates_of_its_schedule(capfd):
    flags = (*SEESAW, "--model=mlp", "--batch_size=64", "--epochs=2", "--eval_every=end", "--output_dir=out")
    assert train(*flags) == OK
    made = seesaw(0.1, 46, per_epoch=23, rule="linear")
    lines = [line for line in lines_of("out") if "update" in line]
    assert [line["lr"] for line in lines] == pytest.approx(made.learning_rates, rel=1e-6)
    assert sum(line["samples"] for line in lines) == 2 * 1437 and len(lines) < 46
    assert plan(capfd.readouterr().out)["effective batch"].startswith("64 to ")
    assert train("--resume", "--output_dir=out", "--epochs=3") != OK  # other windows
    assert "mini_steps was" in one_line(capfd.readouterr().err)
