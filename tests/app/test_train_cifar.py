"""The programs train ResNet-18 on CIFAR-10, and reject other data before they start."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cifar_files import write_cifar10
from idx_files import write_mnist
from model_zoo import ResNet18
from model_zoo.data.cifar import RECORD
from ms_accum.app.process import DATA, OK, USAGE
from ms_accum.saving import training_state
from ms_accum.saving.model_file import save_model
from programs import ROOT, closing, evaluate, metrics, one_line, plan, process, train

CONFIG = f"--config={ROOT / 'configs' / 'cifar10_resnet18.yaml'}"
TINY = (CONFIG, "--data_path=data", "--batch_size=4", "--mini_steps=2", "--output_dir=out")
WARNING = re.compile(r"warning: BatchNorm layers \(20, the first is 'bn1'\) normalize each micro-batch by its own .*\n")


@pytest.mark.slow
def test_config_trains_eval_agrees_and_resume_gives_same_bytes(tmp_path, capfd):
    write_cifar10(tmp_path / "data", train=2, test=8)
    trained = process("train.py", *TINY, "--epochs=2", "--save_every=2", "--keep=9", cwd=tmp_path)
    assert trained.returncode == OK and WARNING.fullmatch(trained.stderr)
    shown = plan(trained.stdout)
    assert shown["model"] == "resnet18, 11,173,962 parameters, on CPU"
    assert shown["optimizer"] == "sgd, lr 0.1, momentum 0.9, weight decay 0.0005"
    assert [row["samples"] for row in metrics(tmp_path / "out")] == [8, 2] * 2
    assert evaluate("--data_path=data", "--ckpt_path=out/gradient_accumulation.ckpt") == OK
    out, err = capfd.readouterr()
    assert closing(out) == closing(trained.stdout) and closing(out)[2] == 8 and err == ""
    model = Path(tmp_path, "out", "gradient_accumulation.ckpt")
    expected = model.read_bytes()
    model.unlink()
    after_an_epoch, *_, last = sorted(Path(tmp_path, "out", "states").glob("*.safetensors"))
    weights = [training_state.read(str(path)).arrays["network.conv1.weight"] for path in (after_an_epoch, last)]
    assert (weights[0] != weights[1]).any()  # the second epoch trains
    with pytest.warns(UserWarning, match="BatchNorm layers"):
        assert train(*TINY, "--epochs=2", f"--resume={after_an_epoch}") == OK
    assert ": 2 updates, 1 epoch done" in plan(capfd.readouterr().out)["resumed"]
    assert model.read_bytes() == expected


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--dataset=cifar10"], "argument --data_path: must be given for cifar10; --download fetches it there"),
        (["--model=resnet18"], "argument --data_path: must be given for cifar10"),
        (["--model=resnet18", "--dataset=digits"], "argument --model: resnet18 does not accept the images of digits"),
        (["--dataset=cifar10", "--data_path=x", "--model=mlp"], "argument --model: mlp does not accept the images of"),
        (["--dataset=cifar100", "--data_path=x"], "argument --dataset: invalid choice: 'cifar100'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags_exit_with_usage_code(argv, says, capfd, tmp_path):
    assert train("--output_dir=out", *argv) == USAGE
    out, err = capfd.readouterr()
    assert says in one_line(err) and out == "" and os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["data_batch_4.bin", "test_batch.bin"])
@pytest.mark.parametrize("content", [b"", bytes(RECORD + 1), b"\x0a" + bytes(RECORD - 1), None])
def test_damaged_or_missing_file_exits_with_data_code(name, content, capfd, tmp_path):
    path = write_cifar10(tmp_path / "data") / name
    path.unlink() if content is None else path.write_bytes(content)
    assert train(*TINY) == DATA
    out, err = capfd.readouterr()
    assert name in one_line(err) and out == "" and os.listdir(tmp_path) == ["data"]


def test_other_data_set_in_folder_exits_with_data_code(capfd, tmp_path):
    write_mnist(tmp_path / "mnist")
    write_cifar10(tmp_path / "cifar")
    assert train("--dataset=cifar10", "--data_path=mnist") == DATA
    assert "data_batch_1.bin'. Download CIFAR-10" in one_line(capfd.readouterr().err)


def test_failed_download_exits_with_data_code(capfd, tmp_path):
    assert train("--dataset=cifar10", "--data_path=data", "--download=http://127.0.0.1:9/x.tar.gz") == DATA
    assert "argument --download: must be" in one_line(capfd.readouterr().err)
    assert os.listdir(tmp_path) == []


def test_eval_requires_data_path_of_model(capfd):
    save_model(ResNet18(), "a.ckpt")
    assert evaluate("--ckpt_path=a.ckpt") == USAGE
    assert "argument --data_path: must be the folder of dataset='cifar10', but got None" in one_line(
        capfd.readouterr().err
    )
