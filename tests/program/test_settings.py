"""Do the flags end in one record that nobody changes?"""

from __future__ import annotations

import dataclasses

import pytest

from model_zoo import MLP
from ms_accum.program import plan
from ms_accum.program.main import Failure
from programs import settings_of
from train import flags


def test_it_has_a_field_for_each_flag():
    """But for the one that is about reading flags."""
    given = vars(flags().parse_args(()))
    fields = {field.name for field in dataclasses.fields(settings_of())}
    assert fields == {*given, "ranks", "updates", "is_latest", "given", "before"} - {"config"}


def test_two_names_of_a_flag_in_a_config_are_one_too_many(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mini_steps: 5\naccumulate_step: 4\n")
    with pytest.raises(Failure, match="has the keys 'mini_steps' and 'accumulate_step', which are the same flag"):
        settings_of(f"--config={path}")


class States:
    """The state of a run that was to have 40 epochs."""

    resumed = ("a state",)

    def epochs_done(self):
        """It stopped inside one."""

    def settings(self):
        return {"notes": {"epochs": 40}}


@pytest.mark.parametrize(("epochs", "shown"), [(25, ["with 25 epochs, not 40 as it began (see --epochs)"]), (40, [])])
def test_a_resumed_run_with_fewer_epochs_is_pointed_out(epochs, shown, capsys):
    opening = plan.reporters(settings_of(f"--epochs={epochs}"), States(), ())[0]
    opening.on_train_begin(None)
    lines = [line.partition(" ")[2].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["a state", *shown]


def test_it_is_not_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings_of().batch_size = 7


@pytest.mark.parametrize(
    ("argv", "ranks", "loaded", "window"),
    [
        ((), 1, 32, {"mini_steps": 4}),
        (("--batch_size=8", "--mini_steps=3"), 2, 8, {"mini_steps": 3}),
        (("--effective_batch=100",), 1, 100, {"micro_batch_size": 32}),
        (("--effective_batch=100",), 2, 50, {"micro_batch_size": 32}),
        (("--effective_batch=64",), 2, 32, {"mini_steps": 1}),
        (("--effective_batch=24",), 1, 24, {"mini_steps": 1}),
        (("--effective_batch=24",), 3, 8, {"mini_steps": 1}),
        (("--effective_batch=24", "--batch_size=5"), 2, 12, {"micro_batch_size": 5}),
    ],
)
def test_what_the_driver_gets(argv, ranks, loaded, window):
    settings = settings_of(*argv).on(ranks)
    assert (settings.ranks, settings.loaded_rows, settings.window) == (ranks, loaded, window)


def test_a_micro_batch_that_is_found_takes_the_place_of_auto():
    settings = settings_of("--effective_batch=64", "--batch_size=auto", "--memory_budget=1GiB")
    assert settings.auto and settings.memory_budget == 2**30 and settings.on(1) == settings
    found = settings.with_micro_batches_of(16)
    assert not found.auto and found.window == {"micro_batch_size": 16} and settings.auto


def test_where_it_writes():
    settings = settings_of()
    assert settings.output_dir is None and settings.is_latest
    settings = settings.in_folder("runs/007")
    assert settings.models == ["runs/007/gradient_accumulation.ckpt"] and settings.is_latest
    settings = settings_of("--output_dir=a", "--ckpt_path=b/c.safetensors", "--keep_best", "--save_every=3")
    assert settings.models == ["b/c.safetensors", "b/c.best.safetensors"] and settings.states == "a/states"
    assert settings.metrics == "a/metrics.jsonl" and not settings.is_latest
    assert not settings_of("--ckpt_path=b/c.ckpt").is_latest


def test_what_a_resumed_run_must_have_had():
    found = settings_of("--lr=0.5", "--model=mlp").config
    names = ["model", "dataset", "batch_size", "effective_batch", "lr", "momentum", "weight_decay", "seed"]
    assert found == dict(zip(names, ("mlp", "digits", 32, None, 0.5, 0.9, 0, 1)))


@pytest.mark.parametrize(
    ("argv", "ranks", "said"), [((), 1, False), (("--zero=1",), 1, True), (("--zero=1",), 2, False)]
)
def test_zero_in_a_single_process_is_said_to_do_nothing(argv, ranks, said, capsys):
    plan.show_plan(settings_of("--model=mlp", *argv).on(ranks).with_updates(12), "CPU", MLP(), 45, "")
    lines = capsys.readouterr().out.splitlines()
    assert ("zero             no effect: a single process has nothing to shard" in lines) is said


@pytest.mark.parametrize(
    "argv",
    [
        ("--tail=carry", "--clip_norm=0.25", "--weight_decay=0.0005", "--mini_steps=16", "--zero=1"),
        ("--effective_batch=1000", "--batch_size=96", "--optimizer=adamw", "--weight_decay=0.0005", "--reduction=sum"),
    ],
)
def test_a_terminal_of_80_columns_shows_each_line_of_the_plan(argv, capsys):
    plan.show_runtime({"MS_DEV_HOST_BLOCKING_RUN": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"})
    plan.show_plan(settings_of(*argv).in_folder("runs/001").with_updates(23_440), "Ascend", MLP(), 18_750, "")
    plan.show_end(settings_of(*argv).in_folder("runs/001"), 754.0, None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize(("flags", "shown"), [((), False), (("--tensorboard",), True)])
def test_the_end_says_where_the_curves_are(flags, shown, capsys):
    plan.show_end(settings_of(*flags).in_folder("runs/001"), 1.0, None)
    assert ("tensorboard      runs/001/tensorboard" in capsys.readouterr().out.splitlines()) is shown


@pytest.mark.parametrize(("seconds", "text"), [(4.26, "4.3 s"), (754.0, "12.6 min"), (5400.0, "1.5 h")])
def test_times_are_in_fitting_units(seconds, text, capsys):
    plan.show_end(settings_of().in_folder("runs/001"), seconds, "previous.ckpt")
    shown = capsys.readouterr().out
    assert shown.startswith(f"time             {text}\n")
    assert "copied to        gradient_accumulation.ckpt (previous file: previous.ckpt)\n" in shown
