"""eval.py evaluates a model on the data it was trained for, and rejects other data."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import eval as evaluation
import train as training
from cifar_files import write_cifar10
from idx_files import write_mnist
from model_zoo import LeNet5
from ms_accum.app.process import CHECKPOINT, DATA, OK, USAGE
from ms_accum.saving import model_file
from ms_accum.saving.model_file import read_record, save_model, sidecar, write_record
from programs import closing, evaluate, one_line, plan, train

MNIST = ("--data_path=mnist", "--epochs=1", "--batch_size=16", "--mini_steps=2", "--ckpt_path=mnist.safetensors")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A model of MNIST, one of the digits, and MNIST."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_mnist(folder / "mnist", train=64, test=30)
        assert train(*MNIST) == OK
        assert train("--model=mlp", "--epochs=1", "--batch_size=512", "--ckpt_path=digits.ckpt") == OK
    return folder


@pytest.fixture
def models(both, tmp_path):
    shutil.copytree(both, tmp_path, dirs_exist_ok=True)
    return tmp_path


def rejected(capfd, *argv, code):
    assert evaluate(*argv) == code
    out, err = capfd.readouterr()
    assert out == ""
    return one_line(err)


@pytest.mark.parametrize("flags", [(), ("--debug",)])
def test_environment_variables_are_printed_with_debug_only(models, flags, monkeypatch, capfd):
    for module in (evaluation, training):
        monkeypatch.setattr(module, "tune_cpu", lambda network: {"VARIABLE": "1"})
    assert evaluate("--ckpt_path=digits.ckpt", *flags) == OK
    assert train("--model=mlp", "--max_updates=1", "--batch_size=512", *flags) == OK
    assert capfd.readouterr().out.count("runtime          VARIABLE=1\n") == 2 * bool(flags)


def test_model_and_data_are_printed_first(models, capfd):
    assert evaluate("--ckpt_path=digits.ckpt") == OK
    out = capfd.readouterr().out
    record = read_record("digits.ckpt")
    accuracy, correct, total = closing(out)
    assert (correct, total) == (record["correct"], record["total"])
    accuracy_text = f"{accuracy * 100:.2f} % ({correct}/{total})"
    shown = plan(out)
    assert list(shown.items()) == [
        ("file", "digits.ckpt"),
        ("model", "mlp, 1 update, momentum, lr 0.04"),
        ("data", "embedded digits, 360 test images of 28x28"),
        ("record", f"accuracy {accuracy_text} after training"),
        ("accuracy", accuracy_text),
    ]


def test_mnist_model_requires_data_path(models, capfd):
    message = rejected(capfd, "--ckpt_path=mnist.safetensors", code=USAGE)
    assert message == "argument --data_path: must be given, the folder of mnist: the model was trained on it"
    assert evaluate("--ckpt_path=mnist.safetensors", "--data_path=mnist") == OK
    assert plan(capfd.readouterr().out)["data"] == "mnist (mnist), 30 test images of 32x32"


def test_digits_model_rejects_data_path(models, capfd):
    message = rejected(capfd, "--ckpt_path=digits.ckpt", "--data_path=mnist", code=USAGE)
    assert message == "argument --data_path: the model was trained on the embedded digits; leave it out"


def test_folder_with_other_data_set_is_rejected(models, capfd):
    write_cifar10(models / "cifar")
    message = rejected(capfd, "--ckpt_path=mnist.safetensors", "--data_path=cifar", code=DATA)
    assert message.startswith("argument --data_path: must contain MNIST, but got 'cifar' with CIFAR-10")


def test_other_images_of_same_kind_are_evaluated_with_a_note(models, capfd):
    write_mnist(models / "other", train=64, test=12)
    assert evaluate("--ckpt_path=mnist.safetensors", "--data_path=other") == OK
    shown = plan(capfd.readouterr().out)
    assert shown["record"].endswith("/30) on other data after training") and shown["accuracy"].endswith("/12)")


@pytest.mark.parametrize(
    ("changed", "code", "mentioned"),
    [
        ({"image_size": 28}, DATA, "the test images of mnist have image_size 32, and the model was trained with 28"),
        ({"classes": 3}, DATA, "the test images of mnist have classes 10, and the model was trained with 3"),
        ({"channels": 3}, DATA, "the test images of mnist have channels 1, and the model was trained with 3"),
        ({"mean": 0.5}, DATA, "the test images of mnist have mean 0.1307, and the model was trained with 0.5"),
        ({"dataset": "imagenet"}, CHECKPOINT, "is of the dataset 'imagenet', and eval.py has mnist, digits, cifar10"),
        ({"model": "vgg"}, CHECKPOINT, "is of the model 'vgg', and eval.py has lenet5, mlp, resnet18, small_resnet"),
        ({"model": "mlp"}, CHECKPOINT, "mnist.safetensors' is of another architecture: missing dense_relu"),
    ],
    ids=str,
)
def test_record_that_does_not_match_is_rejected(changed, code, mentioned, models, capfd):
    record = {name: value for name, value in read_record("mnist.safetensors").items() if name != "version"}
    write_record("mnist.safetensors", {**record, **changed})
    assert mentioned in rejected(capfd, "--ckpt_path=mnist.safetensors", "--data_path=mnist", code=code)


def test_file_without_record_prints_assumptions(models, capfd):
    save_model(LeNet5(), "plain.ckpt")
    assert evaluate("--ckpt_path=plain.ckpt") == OK
    shown = plan(capfd.readouterr().out)
    assert shown["model"] == "lenet5, because its parameters fit"
    assert shown["data"] == "embedded digits, 360 test images of 32x32"
    assert shown["record"] == "none: which data it was trained on is not known"
    assert evaluate("--ckpt_path=plain.ckpt", "--model=lenet5", "--data_path=mnist") == OK
    assert plan(capfd.readouterr().out)["model"] == "lenet5, because --model says so"


def test_record_of_another_model_is_rejected(models, capfd):
    save_model(LeNet5(), "other.ckpt")
    os.rename(sidecar("digits.ckpt"), sidecar("other.ckpt"))
    message = rejected(capfd, "--ckpt_path=other.ckpt", code=CHECKPOINT)
    assert "is damaged or belongs to another file" in message and message.endswith(
        "Remove the record to use the model without it."
    )


def test_damaged_record_exits_with_checkpoint_code(models, capfd):
    path = Path(sidecar("digits.ckpt"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "record": {"version": model_file.VERSION}}))
    assert "'batch_size' is missing" in rejected(capfd, "--ckpt_path=digits.ckpt", code=CHECKPOINT)
