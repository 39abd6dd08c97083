"""Are saved models complete, and are invalid ones rejected before anything is changed?"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from helpers import cross_entropy
from model_zoo import MLP, LeNet5
from ms_accum import Checkpointer, GradientAccumulation
from ms_accum.saving.files import write_bytes
from ms_accum.saving.model_file import (
    CheckpointError,
    check_path,
    kinds_in,
    load_common,
    load_model,
    save_model,
)

pytestmark = pytest.mark.usefixtures("eager")
ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("ckpt", "safetensors")


def small():
    return nn.Dense(2, 3)


def arrays(network):
    return {parameter.name: parameter.asnumpy().copy() for parameter in network.get_parameters()}


def same(left, right):
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


@pytest.fixture(params=FORMATS)
def saved(request, tmp_path):
    """A model of a small network, in each format."""
    path = tmp_path / f"model.{request.param}"
    save_model(small(), path)
    return path


# Saving


@pytest.mark.parametrize("suffix", FORMATS)
def test_models_are_exchanged_with_mindspore(tmp_path, suffix):
    network, other, path = LeNet5(), LeNet5(), tmp_path / f"梯度 累积.{suffix}"
    assert not same(arrays(network), arrays(other))
    save_model(network, path)
    load_model(other, path)
    assert same(arrays(network), arrays(other))
    plain = ms.load_checkpoint(str(path), format=suffix)
    assert same({name: parameter.asnumpy() for name, parameter in plain.items()}, arrays(network))
    ms.save_checkpoint(network, str(tmp_path / f"plain.{suffix}"), format=suffix)
    other = LeNet5()
    load_model(other, tmp_path / f"plain.{suffix}")
    assert same(arrays(network), arrays(other))


def test_equal_models_are_equal_files(tmp_path):
    """The library writes several entries of metadata in an order of chance."""
    network, contents = small(), set()
    for number in range(8):
        save_model(network, tmp_path / f"{number}.safetensors")
        contents.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(contents) == 1


@pytest.fixture
def little_room():
    """Limit files to 50,000 bytes; a LeNet5 needs 247,000."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", FORMATS)
def test_old_model_survives_a_full_disk(tmp_path, suffix, little_room):
    """No part of the new file is left, and the error names it."""
    path = tmp_path / f"model.{suffix}"
    save_model(small(), path)
    before = path.read_bytes()
    with pytest.raises(OSError, match=rf"model.{suffix}' \(2\d\d,\d{{3}} bytes\) can't be written: .*File too large"):
        save_model(LeNet5(), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_saving_to_a_link_keeps_the_link(tmp_path):
    """The name of the link determines the format."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "real" / "model.bin")
    save_model(small(), tmp_path / "link.ckpt")
    assert (tmp_path / "link.ckpt").is_symlink() and os.listdir(tmp_path / "real") == ["model.bin"]
    load_model(small(), tmp_path / "link.ckpt")


def test_other_files_replace_a_link(tmp_path):
    """In a stranger's folder it may lead to any file."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "config.json").symlink_to(tmp_path / "mine")
    write_bytes(tmp_path / "config.json", b"{}")
    assert (tmp_path / "mine").read_text() == "precious" and (tmp_path / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(("umask", "permissions"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path, umask, permissions, suffix):
    before = os.umask(umask)
    try:
        save_model(small(), tmp_path / f"model.{suffix}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / f"model.{suffix}").stat().st_mode) == permissions


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model.pt", "'ckpt_path' must end with '.ckpt' or '.safetensors', but got 'model.pt'"),
        ("folder.ckpt", "'ckpt_path' must name a file, but got the folder 'folder.ckpt'"),
        ("pipe.ckpt", "'ckpt_path' must name a file, but got the device or pipe 'pipe.ckpt'"),
        ("none/model.ckpt", "the folder of 'ckpt_path' must exist, but got 'none'. Create it first."),
        ("link.ckpt", "the folder of 'ckpt_path' must exist, but got 'missing'"),
    ],
)
def test_invalid_paths_are_rejected(path, message, tmp_path):
    (tmp_path / "folder.ckpt").mkdir()
    os.mkfifo(tmp_path / "pipe.ckpt")
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "missing" / "model.ckpt")
    with pytest.raises(ValueError, match=f"^For 'train_process', {message}"):
        check_path("train_process", path, small())


def test_read_only_folder_is_rejected(monkeypatch):
    # Asked of the system, because tests may run as root, to whom no folder is read-only.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ValueError, match="the folder of 'ckpt_path' must be writable, but got 'model.ckpt'"):
        check_path("train_process", "model.ckpt", small())


def train(**options):
    network = nn.SequentialCell(nn.Flatten(), small())
    model = GradientAccumulation(network, cross_entropy(), nn.SGD(network.trainable_params(), 0.1), check="off")
    batch = (ms.Tensor(np.ones((4, 2), np.float32)), ms.Tensor(np.array([0, 1, 2, 0], np.int32)))
    model.train_process(1, [batch], 1, report=(), **options)


def test_model_is_saved_before_the_training_state(monkeypatch):
    def fail(state, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ms_accum.saving.checkpointer.write", fail)
    with pytest.raises(OSError, match="No space left"):
        train(checkpointer=Checkpointer("states"))
    load_model(nn.SequentialCell(nn.Flatten(), small()), "gradient_accumulation.ckpt")


# What does not fit


def half():
    network = LeNet5()
    for parameter in network.get_parameters():
        parameter.set_dtype(ms.float16)
    return network


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("network", "names"),
    [
        (MLP, ["missing dense_relu_sequential.0.weight", "and 11 more"]),
        (lambda: LeNet5(num_class=3), ["fc3.weight is Float32 (10, 84) instead of Float32 (3, 84)", "fc3.bias is"]),
        (half, ["conv1.weight is Float32 (6, 1, 5, 5) instead of Float16 (6, 1, 5, 5)", "more"]),
        (lambda: nn.SequentialCell(LeNet5()), ["missing 0.conv1.weight", "more"]),
    ],
    ids=["other network", "other classes", "other type", "other names"],
)
def test_another_architecture_is_rejected_and_nothing_is_changed(tmp_path, network, names, suffix):
    path, network = tmp_path / f"model.{suffix}", network()
    save_model(LeNet5(), path)
    before = arrays(network)
    with pytest.raises(CheckpointError) as error:
        load_model(network, path)
    assert [name for name in ["' is of another architecture: ", *names] if name not in str(error.value)] == []
    assert same(before, arrays(network))


# What is no model


def check_rejected(path, data=None):
    """Check that a file, with this content, is rejected, and the network is not changed."""
    if data is not None:
        path.write_bytes(data)
    network = small()
    before = arrays(network)
    with pytest.raises(CheckpointError, match=path.name) as error:
        load_model(network, path)
    assert "\n" not in str(error.value)
    assert same(before, arrays(network))


class Payload:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def as_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")


def as_npz(path):
    with open(path, "wb") as file:
        np.savez(file, a=np.zeros(3))


def as_too_large(path):
    """A header that promises more than there is."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("garbage\n" * 100),
        lambda path: path.write_bytes(bytes(range(256)) * 10),
        lambda path: path.write_bytes(pickle.dumps(Payload())),
        as_zip,
        as_npz,
        as_too_large,
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: None,
    ],
    ids=["empty", "text", "bytes", "pickle", "zip", "npz", "too large", "folder", "pipe", "device", "missing"],
)
def test_files_of_other_kinds_are_rejected(write, suffix, tmp_path):
    path = tmp_path / f"bad.{suffix}"
    write(path)
    check_rejected(path)
    assert not os.path.exists("executed")


def sparse(path, begin=b""):
    """Write a file of a tebibyte that takes no room on the disk."""
    path.write_bytes(begin)
    os.truncate(path, 2**40)


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_of_any_size_are_rejected_before_they_are_read(suffix, tmp_path):
    path = tmp_path / f"bad.{suffix}"
    sparse(path)
    check_rejected(path)
    header = json.dumps({"w": {"dtype": "U8", "shape": [2**40 - 108], "data_offsets": [0, 2**40 - 108]}}).encode()
    begin = {"ckpt": b"\x0a\x80\x80\x80\x80\x80\x1f", "safetensors": b"\x64" + bytes(7) + header.ljust(100)}
    sparse(path, begin[suffix])  # one value that fills the file
    check_rejected(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_file_with_much_that_is_left_over_is_rejected_before_it_is_read(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"large.{suffix}"
    save_model(nn.SequentialCell(small(), nn.Dense(3, 300)), path)
    network = nn.SequentialCell(small())
    assert sorted(load_common(network, path).left_over) == ["1.bias", "1.weight"]
    monkeypatch.setattr("ms_accum.saving.model_file._LEFT_OVER", 1000)
    monkeypatch.setattr("ms_accum.saving.model_file._read", lambda path: pytest.fail("it is read"))
    with pytest.raises(CheckpointError, match=rf"large.{suffix}' has too much .* at most 1,144 bytes .* has \d,\d\d\d"):
        load_common(network, path)


def test_type_and_shape_of_each_parameter_are_known_before_it_is_read(tmp_path):
    network, kinds = nn.Cell(), ("bool_", "int8", "uint16", "float16", "int32", "float32", "int64", "float64")
    for kind in kinds:
        network.insert_param_to_cell(kind, ms.Parameter(ms.Tensor(np.ones((2, 3)), getattr(ms, kind)), name=kind))
    network.insert_param_to_cell("scalar", ms.Parameter(ms.Tensor(1.5, ms.float32), name="scalar"))
    expected = {parameter.name: (str(parameter.dtype), parameter.shape) for parameter in network.get_parameters()}
    for suffix in FORMATS:
        path = tmp_path / f"model.{suffix}"
        save_model(network, path)
        assert kinds_in(path) == expected
        load_model(network, path)


def test_every_truncation_is_rejected(saved):
    content = saved.read_bytes()
    # Without all of its checksum a `.ckpt` is one that MindSpore wrote without, and whole.
    harmless = len(content) - 17 if saved.suffix == ".ckpt" else None
    for length in range(len(content)):
        if length != harmless:
            check_rejected(saved, content[:length])


def test_truncations_without_a_checksum_are_rejected(tmp_path):
    """MindSpore's loader reads a part of some of them."""
    ms.save_checkpoint(small(), str(tmp_path / "plain.ckpt"))
    content = (tmp_path / "plain.ckpt").read_bytes()
    for length in range(len(content)):
        check_rejected(tmp_path / "cut.ckpt", content[:length])


def test_400_flipped_bits_are_rejected(saved):
    """All but those of the name of the digest, without which the file is one of another program."""
    content, rng = saved.read_bytes(), random.Random(1)
    name = content.find(b"ms_accum")
    of_name = range(name, name + len(b"ms_accum")) if name >= 0 else ()
    for bit in rng.sample(range(8 * len(content)), 400):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        if bit // 8 not in of_name:
            check_rejected(saved, bytes(changed))


# What survives a kill


@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_model_and_state_are_complete_after_every_kill(tmp_path, kills):
    command = [sys.executable, str(ROOT / "tests" / "save_runs.py"), str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == kills and result["bad"] == []
    # Some of them have to hit a save in its middle, or nothing was tried.
    assert result["leftovers"] > kills / 10
