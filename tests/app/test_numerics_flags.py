"""The flags for mixed precision, averages, window sizes and learning rates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mindspore import nn

from ms_accum.app.process import CHECKPOINT, OK, TRAINING, USAGE
from ms_accum.app.rates import rate_by_update
from ms_accum.saving.model_file import load_parameters, read_record
from programs import QUICK, closing, evaluate, metrics, one_line, plan, settings_of, train

pytestmark = pytest.mark.host
LINEAR = ("--lr_scaling=linear", "--base_batch=32")
MINI_STEPS = "argument --mini_steps/--accumulate_step/--gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [((), 4), (("--mini_steps=7",), 7), (("--mini_steps=0:1,100:4",), {0: 1, 100: 4}),
     (("--accumulate_step=9:2,0:1",), {0: 1, 9: 2})],
)  # fmt: skip
def test_window_sizes_are_parsed(argv, sizes):
    settings = settings_of(*argv)
    assert settings.mini_steps == sizes and settings.window == {"mini_steps": sizes}
    assert settings.record["mini_steps"] == (sizes if isinstance(sizes, int) else sizes[max(sizes)])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--mini_steps=1:2", f"{MINI_STEPS}: must begin with "
                             "update 0, such as 0:1,100:4, and have each update once, but got '1:2'"),
        ("--mini_steps=0:0", f"{MINI_STEPS}: must be an int >= 1, "
                             "but got '0'"),
        ("--mini_steps=0:1,x:2", f"{MINI_STEPS}: must be an int "
                                 ">= 0, but got 'x'"),
        ("--lr_scaling=linear", "argument --lr_scaling: needs --base_batch"),
        ("--base_batch=32", "argument --base_batch: needs --lr_scaling"),
        ("--ema=1", "argument --ema: must be a number >= 0 and < 1, but got '1'"),
        ("--loss_scale=0", "argument --loss_scale: must be a number > 0, but got '0'"),
        ("--warmup_updates=-1", "argument --warmup_updates: must be an int >= 0, but got '-1'"),
    ],
)  # fmt: skip
def test_conflicting_flags_are_rejected(argv, line, capfd):
    assert train(argv) == USAGE
    assert one_line(capfd.readouterr().err) == line


@pytest.mark.parametrize(
    ("argv", "rates"),
    [
        ((), [0.1]),
        (("--warmup_updates=4",), [0.025, 0.05, 0.075, 0.1]),
        (("--lr_scaling=linear", "--base_batch=32"), [0.4]),
        (("--lr_scaling=sqrt", "--base_batch=32"), [0.2]),
        (("--lr_scaling=linear", "--base_batch=32", "--effective_batch=48", "--batch_size=16"), [0.15]),
        (("--lr_scaling=linear", "--base_batch=32", "--mini_steps=0:1,2:2"), [0.1, 0.1, 0.2]),
        (("--lr_scaling=linear", "--base_batch=32", "--mini_steps=0:1,2:2", "--warmup_updates=2"), [0.05, 0.1, 0.2]),
        (("--mini_steps=0:1,3:4",), [0.1]),
    ],
)
def test_learning_rates_follow_window(argv, rates):
    """The last rate is that of all later updates."""
    computed = settings_of("--lr=0.1", *argv).rates
    assert computed == pytest.approx([*rates, *rates[-1:] * (len(computed) - len(rates))])


@pytest.mark.parametrize(
    ("argv", "rates"),
    [
        (("--lr_decay=linear",), [0.1, 0.075, 0.05, 0.025]),
        (("--lr_decay=cosine",), [0.1, 0.1 * (2 + 2**0.5) / 4, 0.05, 0.1 * (2 - 2**0.5) / 4]),
        (("--lr_decay=linear", "--warmup_updates=2"), [0.05, 0.1, 0.1, 0.05]),
        (("--lr_decay=linear", *LINEAR, "--mini_steps=0:1,2:2"), [0.1, 0.075, 0.1, 0.05]),
        (("--lr_decay=cosine", "--warmup_updates=4"), [0.025, 0.05, 0.075, 0.1]),
    ],
)  # fmt: skip
def test_learning_rates_decay_over_run(argv, rates):
    assert settings_of("--lr=0.1", *argv).with_updates(1, 4).rates == pytest.approx(rates)


def test_resumed_run_with_decay_needs_same_number_of_updates():
    flags = ("--lr_decay=cosine",)
    assert settings_of(*flags).with_updates(1, 7).config.items() >= {"updates": 7, "lr_decay": "cosine"}.items()
    assert "updates" not in settings_of().with_updates(1, 7).config


@pytest.mark.slow
def test_rate_in_use_decays(capfd):
    assert train("--lr_decay=linear", "--lr=0.1", "--output_dir=out", *QUICK) == OK
    assert plan(capfd.readouterr().out)["optimizer"].startswith("momentum, lr 0.1, linear to 0")
    rates = [line["lr"] for line in metrics("out")]
    assert rates == pytest.approx([0.1 * (1 - update / len(rates)) for update in range(len(rates))], rel=1e-5)


def test_rate_scaling_counts_ranks():
    settings = settings_of("--lr=0.1", "--lr_scaling=linear", "--base_batch=128")
    assert settings.rates == [0.1] and settings.for_ranks(2).rates == [0.2]


@pytest.mark.parametrize("rates", [[0.5], [0.25, 0.5, 1.0]])
def test_optimizer_uses_rates(rates):
    parameter = nn.Dense(1, 1).weight
    optimizer, seen = nn.SGD([parameter], rate_by_update(rates)), []
    for _ in range(5):
        before = float(parameter.asnumpy().item())
        optimizer((parameter * 0 + 1,))
        seen.append(before - float(parameter.asnumpy().item()))
    assert seen == pytest.approx([*rates, *rates[-1:] * 5][:5], rel=1e-5)


def test_float16_gets_dynamic_loss_scale():
    assert [settings_of(f"--amp={amp}").loss_scale for amp in ("off", "O1", "O2", "O3", "bf16")] == [
        None, "dynamic", "dynamic", "dynamic", None]  # fmt: skip
    assert settings_of("--amp=O2", "--loss_scale=64").loss_scale == 64.0


def test_unsupported_bfloat16_is_named(capfd):
    assert train("--amp=bf16", *QUICK) == USAGE
    line = one_line(capfd.readouterr().err)
    assert line.startswith("argument --amp: must be off or O1 to O3 on CPU, but got bf16, which its matrix product")


@pytest.mark.slow
def test_ema_is_saved_and_evaluated(capfd):
    argv = ("--ema=0.5", "--keep_best", "--save_every=2", "--output_dir=out", *QUICK[:-1])
    assert train(*argv, "--batch_size=64", "--epochs=2") == OK
    out = capfd.readouterr().out
    shown, last, average = closing(out), "out/gradient_accumulation.ckpt", "out/gradient_accumulation.ema.ckpt"
    assert plan(out)["average"] == "of the weights, decay 0.5"
    last_weights, average_weights = (
        {name: parameter.asnumpy() for name, parameter in load_parameters(path).items()} for path in (last, average)
    )
    assert last_weights.keys() == average_weights.keys() and not all(
        np.array_equal(last_weights[name], average_weights[name]) for name in last_weights
    )
    record = read_record(average)
    assert [record["correct"], record["total"]] == [*shown[1:]] and read_record(last)["correct"] is None
    assert evaluate("--use_ema", f"--ckpt_path={last}") == OK
    assert closing(capfd.readouterr().out) == shown
    assert evaluate("--use_ema", f"--ckpt_path={average}") == CHECKPOINT
    assert "there is no 'out/gradient_accumulation.ema.ema.ckpt'; train.py --ema" in one_line(capfd.readouterr().err)


@pytest.mark.slow
def test_ema_of_another_run_is_not_replaced(capfd):
    assert train("--ema=0.5", *QUICK, "--ckpt_path=a.ckpt") == OK
    Path("a.ckpt").unlink()
    capfd.readouterr()
    assert train(*QUICK, "--output_dir=other", "--ckpt_path=a.ckpt") == USAGE
    assert one_line(capfd.readouterr().err).startswith("argument --ckpt_path: 'a.ema.ckpt' exists")
    assert not Path("a.ckpt").exists()


@pytest.mark.slow
def test_verify_prints_one_table(capfd):
    assert train("--verify", "--model=mlp", "--batch_size=16", "--mini_steps=3") == OK
    out = capfd.readouterr().out
    assert out.splitlines()[0].split() == ["parameter", "norm", "difference"] and out.endswith("The gradients agree.\n")


@pytest.mark.slow
def test_verify_fails_with_exit_code_1(capfd, monkeypatch):
    monkeypatch.setattr("ms_accum.loss.objective.Weight.counted", lambda self, micro_batch: 1.0)
    assert train("--verify", "--model=mlp", "--effective_batch=40", "--batch_size=16") == TRAINING
    assert one_line(capfd.readouterr().err) == "the gradients of micro-batches and of one large batch differ"


@pytest.mark.slow
def test_metrics_of_clean_run_have_no_bad_micro_batches(capfd):
    assert train("--nonfinite=skip_micro", "--loss_scale=1024", *QUICK) == OK
    assert plan(capfd.readouterr().out)["precision"] == "amp off, loss scale 1024.0"
    assert not any("bad" in line for line in metrics("out"))
