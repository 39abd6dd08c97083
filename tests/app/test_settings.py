"""All flags end in one immutable record."""

from __future__ import annotations

import dataclasses

import pytest

from programs import settings_of
from train import flags


def test_each_flag_has_a_field():
    """But for the one that is about reading flags."""
    flag_values = vars(flags().parse_args(()))
    fields = {field.name for field in dataclasses.fields(settings_of())}
    assert fields == {
        *flag_values,
        "ranks",
        "updates",
        "is_latest",
        "flag_texts",
        "resumed_flags",
    } - {"config"}


def test_settings_are_immutable():
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
def test_driver_arguments(argv, ranks, loaded, window):
    settings = settings_of(*argv).for_ranks(ranks)
    assert (settings.ranks, settings.loaded_rows, settings.window) == (ranks, loaded, window)


def test_found_micro_batch_replaces_auto():
    settings = settings_of("--effective_batch=64", "--batch_size=auto", "--memory_budget=1GiB")
    assert settings.auto and settings.memory_budget == 2**30 and settings.for_ranks(1) == settings
    resolved = settings.with_micro_batches_of(16)
    assert not resolved.auto and resolved.window == {"micro_batch_size": 16} and settings.auto


def test_output_paths():
    settings = settings_of()
    assert settings.output_dir is None and settings.is_latest
    settings = settings.in_folder("runs/007")
    assert settings.models == ["runs/007/gradient_accumulation.ckpt"] and settings.is_latest
    settings = settings_of("--output_dir=a", "--ckpt_path=b/c.safetensors", "--keep_best", "--save_every=3")
    assert settings.models == ["b/c.safetensors", "b/c.best.safetensors"] and settings.states == "a/states"
    assert settings.metrics == "a/metrics.jsonl" and not settings.is_latest
    assert not settings_of("--ckpt_path=b/c.ckpt").is_latest


def test_config_that_resume_compares():
    config = settings_of("--lr=0.5", "--model=mlp").config
    names = ["model", "dataset", "batch_size", "effective_batch", "lr", "momentum", "weight_decay", "seed"]
    names += ["amp", "lr_scaling", "base_batch", "warmup_updates", "lr_decay"]
    assert config == dict(zip(names, ("mlp", "digits", 32, None, 0.5, 0.9, 0, 1, "off", "none", None, 0, "none")))
