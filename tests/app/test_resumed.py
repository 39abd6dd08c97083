"""`--resume` alone uses the flags of the run; a crafted state can set nothing but settings."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from idx_files import write_mnist
from ms_accum.app import outputs, steps
from ms_accum.app.process import CHECKPOINT, DATA, OK, TERMINATED, USAGE, Failure
from ms_accum.saving.training_state import VERSION, state_digest
from programs import one_line, plan, settings_of, train

STATE = "runs/001/states/state-00000001.safetensors"
# Flags of every kind: whole numbers, numbers, words, switches, a dict, an interval.
FLAGS = {
    "mini_steps": "0:1,3:2",
    "lr": "0.02",
    "clip_norm": "1.5",
    "keep_best": "",
    "save_every": "5min",
    "epochs": "3",
    "amp": "O1",
    "nonfinite": "raise",
    "batch_size": "16",
    "dataset": "digits",
    "model": "mlp",
}


def save(flags, path=STATE):
    """Write a state that has nothing but flags."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    text = json.dumps({"version": VERSION, "config": {"notes": {"flags": flags}}})
    arrays = {"a": np.zeros(2, np.float32)}
    save_file(arrays, path, metadata={"facts": text, "sha256": state_digest(arrays, text)})


def stop_at(micro_batches, monkeypatch):
    asked = itertools.count(1)
    monkeypatch.setattr(steps.SIGNALS, "pending", lambda: next(asked) >= micro_batches)


# The programs


RUN = ("--model=mlp", "--data_path=data", "--batch_size=8", "--mini_steps=3", "--epochs=2", "--seed=5")
RUN = (*RUN, "--optimizer=adam", "--clip_norm=0.5", "--nonfinite=raise", "--save_every=100", "--warmup_updates=2")


def test_resume_alone_uses_flags_of_run(monkeypatch, capfd):
    """On data in a folder, which an earlier version compared with the embedded digits."""
    write_mnist("data")
    with monkeypatch.context() as patch:
        stop_at(7, patch)
        assert train(*RUN) == TERMINATED
    capfd.readouterr()
    assert train("--resume") == OK
    out = capfd.readouterr().out
    assert plan(out)["flags"] == f"{' '.join(sorted((*RUN, '--dataset=mnist')))}, as in {STATE}"
    assert out.index("flags  ") < out.index("data  ")  # before they are used
    assert train("--resume", "--lr=0.5") == CHECKPOINT
    line = one_line(capfd.readouterr().err)
    assert "belongs to a run with other settings: lr was 0.001 and is 0.5. Give --allow_config_change" in line
    os.rename("data", "moved")
    assert train("--resume") == DATA and "'data'" in one_line(capfd.readouterr().err)


@pytest.mark.slow
def test_resumed_run_equals_uninterrupted_run(monkeypatch):
    write_mnist("data")
    assert train(*RUN) == OK
    with monkeypatch.context() as patch:
        stop_at(7, patch)
        assert train(*RUN) == TERMINATED
    os.rename("data", "moved")  # its content is compared, not its name
    assert train("--resume", "--data_path=moved", "--log_every=1") == OK
    first, second = (Path(f"runs/00{number}/gradient_accumulation.ckpt").read_bytes() for number in (1, 2))
    assert first == second


# Which flags


def test_flags_of_every_kind_are_restored():
    save(FLAGS)
    expected = settings_of(*(f"--{name}={text}" if text else f"--{name}" for name, text in FLAGS.items()))
    settings = settings_of("--resume")
    changed = {name for name in vars(expected) if getattr(expected, name) != getattr(settings, name)}
    assert changed == {"resume", "output_dir", "flag_texts", "resumed_flags"}
    assert settings.flag_texts == {**FLAGS, "resume": "auto"}
    assert settings.output_dir == "runs/001" and settings.resumed_flags.source == STATE
    assert settings_of(f"--resume={STATE}").lr == settings_of("--resume", "--output_dir=runs/001").lr == 0.02


def test_given_flags_override_and_are_saved():
    save(FLAGS)
    settings = settings_of("--resume", "--epochs=9", "--lr=0.1")
    assert (settings.epochs, settings.lr, settings.clip_norm) == (9, 0.1, 1.5)
    saved = outputs.flags_to_save(settings.flag_texts, dataset=settings.dataset, model=settings.model)
    assert saved == {**FLAGS, "epochs": "9", "lr": "0.1"}


@pytest.mark.parametrize("flag", ["--overwrite", "--verify", "--download", "--debug", "--config=f", "--output_dir=o"])
def test_flags_of_one_start_are_not_saved(flag, monkeypatch):
    Path("f").write_text("lr: 0.5")
    texts = settings_of("--data_path=data", "--dataset=mnist", flag).flag_texts
    saved = {"data_path": "data", "dataset": "mnist", "model": "lenet5", **({"lr": "0.5"} if "f" in flag[-1] else {})}
    assert outputs.flags_to_save(texts, dataset="mnist", model="lenet5") == saved


@pytest.mark.parametrize(
    ("saved", "changed_flag", "expected"),
    [
        ({"effective_batch": "128", "memory_budget": "1GiB", "batch_size": "auto"}, "--mini_steps=2", "mini_steps"),
        ({"mini_steps": "2", "batch_size": "8"}, "--effective_batch=16", "effective_batch"),
        ({"optimizer": "sgd", "momentum": "0.5", "lr": "0.5"}, "--optimizer=adam", "optimizer"),
        ({"lr_scaling": "linear", "base_batch": "8"}, "--lr_scaling=none", "lr_scaling"),
        ({"dataset": "mnist", "model": "lenet5", "data_path": "x"}, "--dataset=digits", "dataset"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_changed_flag_replaces_contradicting_flags(saved, changed_flag, expected):
    """Whether the run may be continued so is decided later, by its settings."""
    save(saved)
    same = f"--{expected}={saved[expected]}" if expected in saved else None
    assert getattr(settings_of("--resume", changed_flag), expected) == getattr(settings_of(changed_flag), expected)
    if same:
        assert settings_of("--resume", same).flag_texts.keys() == saved.keys() | {"resume"}


def test_conflict_with_flags_of_run_names_both():
    save({"dataset": "digits", "model": "mlp"})
    message = r"digits are embedded.*\(the run that is resumed has --dataset=digits --model=mlp\)"
    with pytest.raises(Failure, match=message):
        settings_of("--resume", "--data_path=x")


def test_newest_undamaged_state_is_used():
    save({"epochs": "7"})
    save({"epochs": "8"}, STATE.replace("1.safe", "2.safe"))
    assert settings_of("--resume").epochs == 8
    Path(STATE.replace("1.safe", "3.safe")).write_bytes(b"damaged")
    newer_state = Path(STATE.replace("1.safe", "2.safe"))
    newer_state.write_bytes(newer_state.read_bytes().replace(b'\\"8\\"', b'\\"9\\"'))
    assert settings_of("--resume").epochs == 7


def test_state_without_flags_gives_none():
    """Of an earlier version."""
    os.makedirs(os.path.dirname(STATE))
    for config in ({}, {"notes": {}}, {"notes": 3}, 3):
        text = json.dumps({"version": VERSION, "config": config})
        arrays = {"a": np.zeros(2, np.float32)}
        save_file(arrays, STATE, metadata={"facts": text, "sha256": state_digest(arrays, text)})
        assert settings_of("--resume").resumed_flags.flags == {}
    assert settings_of("--resume=none.safetensors").resumed_flags.flags == {}
    assert settings_of().resumed_flags is None


# Crafted states


@pytest.mark.parametrize(
    "flags",
    [
        3,
        ["--lr=1"],
        {"lr": 0.5},
        {"lr": "-1"},
        {"lr": "nan"},
        {"lr": ""},
        {"lr": "1 --overwrite"},
        {"epochs": "99999999999999"},
        {"mini_steps": "0:1,0:2"},
        {"model": "../../etc"},
        {"tensorboard": "yes"},
        {"overwrite": "", "nothing": "x"},
        {"nothing\x1b[2J": "x"},
        {"help": ""},
    ],
    ids=str,
)
def test_crafted_flags_are_one_line_error(flags, capfd):
    save(flags)
    assert train("--resume") == CHECKPOINT
    line = one_line(capfd.readouterr().err)
    assert STATE in line and line.isprintable() and len(line) < 400
    assert os.listdir(".") == ["runs"] and os.listdir("runs/001") == ["states"]


START = ("overwrite", "allow_config_change", "download", "debug", "resume", "config", "verify", "output_dir")


@pytest.mark.parametrize("flag", START)
def test_state_cannot_set_flags_of_one_start(flag, capfd):
    save({flag: "" if flag in ("overwrite", "allow_config_change", "debug", "verify") else "x", "epochs": "7"})
    assert train("--resume") == CHECKPOINT and f"--{flag}" in one_line(capfd.readouterr().err)


@pytest.mark.parametrize("resume", ["auto", STATE])
def test_state_cannot_set_path_to_write(resume, capfd):
    """Unless that is in the folder of the run, links included, or it is given again."""
    path = "precious.ckpt"
    save({"ckpt_path": path})
    assert train(f"--resume={resume}") == USAGE
    message = "argument --ckpt_path: the run that is resumed has 'precious.ckpt'; a state does not say where to write"
    assert one_line(capfd.readouterr().err).startswith(message)
    assert settings_of(f"--resume={resume}", "--ckpt_path=other.ckpt").ckpt_path == "other.ckpt"
    save({"ckpt_path": "runs/001/inside.ckpt"})
    assert settings_of(f"--resume={resume}").ckpt_path == "runs/001/inside.ckpt"
    os.symlink(os.path.abspath(path), "runs/001/inside.ckpt")
    with pytest.raises(Failure, match="does not say where to write"):
        settings_of(f"--resume={resume}")


def test_state_cannot_set_download_path():
    save({"dataset": "mnist", "model": "mlp", "data_path": "precious"})
    with pytest.raises(Failure, match="argument --data_path: must be given for mnist"):
        settings_of("--resume", "--download")
