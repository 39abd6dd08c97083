"""The lines that a program prints about its settings fit a terminal of 80 columns."""

from __future__ import annotations

import pytest

from model_zoo import MLP
from ms_accum._check import quantity
from ms_accum.app import plan
from ms_accum.app.plan import Hint
from ms_accum.app.tasks import Accuracy
from ms_accum.training.callbacks import Callbacks, Facts
from programs import settings_of
from update_records import record

# Before the run


@pytest.mark.parametrize(
    ("argv", "ranks", "shown"), [((), 1, False), (("--zero=1",), 1, True), (("--zero=1",), 2, False)]
)
def test_zero_in_single_process_is_reported_as_no_effect(argv, ranks, shown, capsys):
    settings = settings_of("--model=mlp", *argv).for_ranks(ranks)
    plan.show_plan(settings.with_updates(settings.epochs, 12), "CPU", MLP(), "", 45, "")
    lines = capsys.readouterr().out.splitlines()
    assert ("zero             no effect: a single process has nothing to shard" in lines) is shown


@pytest.mark.parametrize(
    "argv",
    [
        ("--tail=carry", "--clip_norm=0.25", "--weight_decay=0.0005", "--mini_steps=16", "--zero=1"),
        ("--effective_batch=1000", "--batch_size=96", "--optimizer=adamw", "--weight_decay=0.0005", "--reduction=sum"),
    ],
)
def test_plan_lines_fit_80_columns(argv, capsys):
    plan.show_runtime({"MS_DEV_HOST_BLOCKING_RUN": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"})
    settings = settings_of(*argv).in_folder("runs/001")
    plan.show_plan(settings.with_updates(settings.epochs, 23_440), "Ascend", MLP(), "", 18_750, "")
    plan.show_end(settings_of(*argv).in_folder("runs/001"), 754.0, "gradient_accumulation.previous.ckpt")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "row", "0 rows"),
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "epoch", "2 epochs"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (2_000, "update", "2,000 updates"),
    ],
)
def test_quantity(number, noun, text):
    assert quantity(number, noun) == text


@pytest.mark.parametrize(
    ("flags", "batches", "lines"),
    [
        (("--batch_size=256", "--mini_steps=1"), 1, ["256 = 256 rows x 1 micro-batch", "1 micro-batch"]),
        (("--batch_size=1", "--mini_steps=4"), 8, ["4 = 1 row x 4 micro-batches", "8 micro-batches"]),
        (("--batch_size=32", "--effective_batch=33"), 1, ["33 = 32 rows x 1 micro-batch + 1 row", "1 window"]),
        (("--batch_size=512", "--mini_steps=2"), 4, ["1,024 = 512 rows x 2 micro-batches", "4 micro-batches"]),
    ],
)
def test_windows_are_described_in_singular_and_plural(flags, batches, lines, capsys):
    settings = settings_of("--epochs=1", *flags).with_updates(1, 1)
    plan.show_plan(settings, "CPU", MLP(), "", batches, "")
    shown = {line[:16].rstrip(): line[17:] for line in capsys.readouterr().out.splitlines()}
    assert [shown[name] for name in ("effective batch", "an epoch", "the run")] == [*lines, "1 epoch, 1 update"]


# During the run


class States:
    """The state of a run that was to have 40 epochs."""

    resumed = ("a state",)

    def epochs_done(self):
        """It stopped inside one."""

    def settings(self):
        return {"notes": {"epochs": 40}}


@pytest.mark.parametrize(("epochs", "shown"), [(25, ["with 25 epochs, not 40 as it began (see --epochs)"]), (40, [])])
def test_resume_with_fewer_epochs_is_reported(epochs, shown, capsys):
    opening = plan.reporters(settings_of(f"--epochs={epochs}"), States(), ())[0]
    opening.on_train_begin(None)
    lines = [line.partition(" ")[2].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["a state", *shown]


@pytest.mark.parametrize(
    ("seconds", "rows", "hint"),
    [
        (0.008, 32, "hint             a micro-batch takes 2.0 ms, mostly the fixed cost of a call;"),
        (0.008, 64, ""),  # 4 ms are not short
        (0.08, 32, ""),
    ],
)
def test_short_micro_batches_are_reported_once(seconds, rows, hint, capsys):
    with Callbacks([Hint(rows)], Facts()) as calls:
        calls("on_train_begin", planned=None)
        for number, took in enumerate((9.0, seconds, seconds, 100 * seconds)):  # the first compiles, one is disturbed
            calls.step_end(record(number + 1, seconds=took))
        calls("on_train_end")
    out = capsys.readouterr().out
    assert out.startswith(hint) and out.count("\n") == 2 * bool(hint)
    assert max(map(len, out.splitlines()), default=0) <= 80


# At its end


@pytest.mark.parametrize(("flags", "shown"), [((), False), (("--tensorboard",), True)])
def test_tensorboard_folder_is_printed_at_end(flags, shown, capsys):
    plan.show_end(settings_of(*flags).in_folder("runs/001"), 1.0, None)
    assert ("tensorboard      runs/001/tensorboard" in capsys.readouterr().out.splitlines()) is shown


@pytest.mark.parametrize(("seconds", "text"), [(4.26, "4.3 s"), (754.0, "12.6 min"), (5400.0, "1.5 h")])
def test_duration_units(seconds, text, capsys):
    plan.show_end(settings_of().in_folder("runs/001"), seconds, "previous.ckpt")
    shown = capsys.readouterr().out
    assert shown.startswith(f"time             {text}\n")
    kept = "kept             previous.ckpt, the former file\n"
    assert f"copied to        gradient_accumulation.ckpt\n{kept}" in shown


def test_closing_lines(capsys):
    plan.show_result(Accuracy(49, 50))
    readable, closing = "accuracy         98.00 % (49/50)\n", "============== {'Accuracy': 0.98} ==============\n"
    assert capsys.readouterr().out == f"{readable}{closing}"
