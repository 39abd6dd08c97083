"""Does a record belong to its model only, and are damaged or crafted records rejected?"""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from helpers import cross_entropy
from ms_accum import Checkpointer, GradientAccumulation
from ms_accum.saving import model_file
from ms_accum.saving.model_file import (
    DEFAULT,
    CheckpointError,
    copy_model,
    keep_previous,
    load_model,
    load_parameters,
    read_record,
    save_model,
    sidecar,
    write_record,
)

pytestmark = pytest.mark.host

RECORD = {
    "model": "lenet5",
    "dataset": "digits",
    "data": "516915b66cec364a",
    "test_data": "49db61fdfc7c5b57",
    "rows": 1437,
    "image_size": 32,
    "channels": 1,
    "classes": 10,
    "mean": 0.3,
    "std": [0.1, 0.2],
    "optimizer": "momentum",
    "reduction": "mean",
    "tail": "flush",
    "lr": 0.04,
    "momentum": 0.9,
    "weight_decay": 0,
    "clip_norm": None,
    "batch_size": 32,
    "ranks": 1,
    "seed": 1,
    "epochs": 2,
    "updates": 24,
    "skipped": 0,
    "mini_steps": 4,
    "effective_batch": None,
    "zero": None,
    "correct": 352,
    "total": 360,
    "ms_accum": "0.1.0",
    "mindspore": "2.10.0",
    "python": "3.11.7",
}


def small():
    return nn.Dense(2, 3)


@pytest.fixture(params=["ckpt", "safetensors"])
def saved(request, tmp_path):
    path = tmp_path / f"model.{request.param}"
    save_model(small(), path, RECORD)
    return path


def test_record_is_read_and_mindspore_reads_the_model(saved):
    assert read_record(saved) == {"version": 1, **RECORD}
    plain = ms.load_checkpoint(str(saved), format=saved.suffix[1:], crc_check=True)
    network = small()
    load_model(network, saved)
    assert len(plain) == 2
    assert all((plain[name].asnumpy() == value.asnumpy()).all() for name, value in network.parameters_dict().items())


def test_replacing_a_record_keeps_the_weights(saved):
    before = {name: parameter.asnumpy() for name, parameter in load_parameters(str(saved)).items()}
    write_record(saved, {**RECORD, "correct": 1})
    assert read_record(saved)["correct"] == 1
    after = {name: parameter.asnumpy() for name, parameter in load_parameters(str(saved)).items()}
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert {path.name for path in saved.parent.iterdir()} <= {saved.name, f"{saved.name}.json"}


def test_model_saved_without_a_record_has_none(saved):
    save_model(small(), saved)
    assert read_record(saved) is None and os.listdir(saved.parent) == [saved.name]


def test_record_of_another_file_is_rejected(tmp_path):
    path = tmp_path / "model.ckpt"
    save_model(small(), path, RECORD)
    ms.save_checkpoint(small(), str(path))
    with pytest.raises(CheckpointError, match="or belongs to another file: .* Remove the record"):
        read_record(path)


def test_flipped_bits_of_a_record_are_rejected(saved):
    """In safetensors by loading the model as well, as the record is in the metadata; else by reading the record."""
    path = saved if saved.suffix == ".safetensors" else Path(sidecar(saved))
    content = path.read_bytes()
    begin = content.index(b"lenet5")
    for byte in range(begin, begin + 60):
        changed = bytearray(content)
        changed[byte] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            read_record(saved)
            load_parameters(str(saved))


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "x" * 201},
        {"model": "\x1b[2J"},
        {"model": 3},
        {"rows": -1},
        {"rows": True},
        {"rows": 2**53},
        {"mean": [0.1] * 17},
        {"mean": float("nan")},
        {"mean": [[0.1]]},
        {"lr": 10**400},
        {"total": "360"},
        {"total": 360, "correct": None},
        {"total": None, "correct": 300},
        {"total": 360, "correct": 361},
        {"version": 2},
        {"another": 1},
        {"seed": ...},
    ],
    ids=str,
)
def test_invalid_record_is_neither_written_nor_read(changed, saved, monkeypatch):
    record = {name: value for name, value in {**RECORD, **changed}.items() if value is not ...}
    with pytest.raises(ValueError, match="For 'write_record', 'record' must have the fields of a record, but "):
        write_record(saved, record)
    with monkeypatch.context() as patch:
        patch.setattr(model_file, "fault_of_record", lambda record: None)
        write_record(saved, record)
    with pytest.raises(CheckpointError, match="^The record of '.*' can't be used: "):
        read_record(saved)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 60_000, b"[]", b'{"record": {}}', b'{"record": [], "sha256": 1}', b"9" * 9999, b"\xff" * 9],
    ids=lambda content: repr(content[:20]),
)
def test_invalid_record_file_is_rejected(content, tmp_path):
    path = tmp_path / "model.ckpt"
    save_model(small(), path)
    Path(sidecar(path)).write_bytes(content)
    with pytest.raises(CheckpointError, match="^The record of '.*' can't be used: "):
        read_record(path)


def test_huge_files_and_folders_are_not_read(tmp_path):
    path = tmp_path / "model.ckpt"
    save_model(small(), path)
    with open(sidecar(path), "wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(CheckpointError, match="can't be used"):
        read_record(path)
    os.unlink(sidecar(path))
    os.mkdir(sidecar(path))
    with pytest.raises(CheckpointError, match="can't be used"):
        read_record(path)


def test_copy_includes_the_record(saved, tmp_path):
    target = tmp_path / f"copy{saved.suffix}"
    for _ in range(2):
        copy_model(str(saved), str(target))
        assert read_record(target) == read_record(saved) and len(load_parameters(str(target))) == 2
    save_model(small(), saved)
    copy_model(str(saved), str(target))
    assert read_record(target) is None


def test_module_imports_neither_mindspore_nor_numpy():
    code = "import sys, ms_accum.saving.model_file; print({'mindspore', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "set()\n"


# The model that is replaced


def test_previous_model_is_kept_with_its_record(tmp_path):
    path = tmp_path / "a.b.ckpt"
    assert keep_previous(path) is None
    save_model(small(), path, RECORD)
    before = path.read_bytes()
    kept = keep_previous(path)
    assert kept == str(tmp_path / "a.b.previous.ckpt") and path.read_bytes() == before
    save_model(small(), path)
    assert Path(kept).read_bytes() == before and read_record(kept)["model"] == "lenet5"
    keep_previous(path)
    assert read_record(kept) is None and Path(kept).read_bytes() == path.read_bytes() != before
    assert sorted(os.listdir(tmp_path)) == ["a.b.ckpt", "a.b.previous.ckpt"]


def test_previous_model_is_copied_if_links_are_not_supported(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", fail)
    test_previous_model_is_kept_with_its_record(tmp_path)


def trained(path=None, **options):
    network = nn.SequentialCell(nn.Flatten(), small())
    model = GradientAccumulation(network, cross_entropy(), nn.SGD(network.trainable_params(), 0.1), check="off")
    batch = (ms.Tensor(np.ones((4, 2), np.float32)), ms.Tensor(np.array([0, 1, 2, 0], np.int32)))
    model.train_process(1, [batch], 1, report=(), **options, **({} if path is None else {"ckpt_path": path}))
    return Path(path or DEFAULT).read_bytes()


def test_train_process_keeps_the_previous_model_of_the_default_name(caplog):
    with caplog.at_level(logging.WARNING, logger="ms_accum"):
        first = trained()
        assert caplog.messages == [] and os.listdir() == [DEFAULT]
        second = trained()
    message = f"'{DEFAULT}' is replaced; the model that it held is kept as 'gradient_accumulation.previous.ckpt'."
    assert caplog.messages == [message]
    assert Path("gradient_accumulation.previous.ckpt").read_bytes() == first and Path(DEFAULT).read_bytes() == second


def test_model_is_saved_before_the_training_state(monkeypatch):
    def fail(state, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ms_accum.saving.checkpointer.write", fail)
    with pytest.raises(OSError, match="No space left"):
        trained("model.ckpt", checkpointer=Checkpointer("states"))
    assert len(load_parameters("model.ckpt")) == 2


def test_default_name_is_that_of_train_process():
    assert inspect.signature(GradientAccumulation.train_process).parameters["ckpt_path"].default == DEFAULT


def test_model_under_a_chosen_name_is_replaced(caplog):
    trained("model.ckpt")
    trained("model.ckpt")
    assert caplog.messages == [] and os.listdir() == ["model.ckpt"]


def test_without_logging_the_warning_is_on_stderr(tmp_path):
    """Nothing is printed to stdout, which other programs may read."""
    code = (
        "import mindspore.nn as nn\nfrom ms_accum.saving.model_file import save_trained\n"
        "for _ in range(2): save_trained(nn.Dense(2, 3), 'gradient_accumulation.ckpt')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("'gradient_accumulation.ckpt' is replaced; ") and done.stderr.count("\n") == 1
