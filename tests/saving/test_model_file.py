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
from mindspore.train.checkpoint_pb2 import Checkpoint

from model_zoo import MLP, LeNet5
from ms_accum.saving.files import remove_leftovers
from ms_accum.saving.model_file import (
    CheckpointError,
    check_folder,
    check_name,
    differences,
    load_model,
    load_parameters,
    save_model,
)

ROOT = Path(__file__).resolve().parents[2]


def arrays(network):
    return {parameter.name: parameter.asnumpy().copy() for parameter in network.get_parameters()}


def same(left, right):
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


def half():
    network = LeNet5()
    for parameter in network.get_parameters():
        parameter.set_dtype(ms.float16)
    return network


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a LeNet5."""
    path = str(tmp_path / "model.ckpt")
    save_model(LeNet5(), path)
    return path


def fail_to_write(network, path, **options):
    """Fail like a full disk, after writing a part of the file."""
    with open(path, "wb") as file:
        file.write(b"a part")
    raise OSError(28, "No space left on device", path)


# Saving


def test_saved_model_is_loaded(tmp_path):
    network, other = LeNet5(), LeNet5()
    assert not same(arrays(network), arrays(other))
    save_model(network, str(tmp_path / "a.ckpt"))
    load_model(other, str(tmp_path / "a.ckpt"))
    assert same(arrays(network), arrays(other))


def test_mindspore_reads_a_saved_model(saved):
    network = LeNet5()
    load_model(network, saved)
    plain = {name: parameter.asnumpy() for name, parameter in ms.load_checkpoint(saved).items()}
    assert same(plain, arrays(network))


def test_checkpoint_of_mindspore_is_loaded(tmp_path):
    network, other = LeNet5(), LeNet5()
    ms.save_checkpoint(network, str(tmp_path / "plain.ckpt"))
    load_model(other, str(tmp_path / "plain.ckpt"))
    assert same(arrays(network), arrays(other))


def test_saving_again_replaces_the_file(saved, tmp_path):
    network, other = LeNet5(), LeNet5()
    save_model(network, saved)
    load_model(other, saved)
    assert same(arrays(network), arrays(other))
    assert os.listdir(tmp_path) == ["model.ckpt"]


def test_old_checkpoint_survives_a_failing_save(saved, tmp_path, monkeypatch):
    with open(saved, "rb") as file:
        before = file.read()
    monkeypatch.setattr(ms, "save_checkpoint", fail_to_write)
    with pytest.raises(OSError, match="No space left"):
        save_model(LeNet5(), saved)
    with open(saved, "rb") as file:
        assert file.read() == before
    assert os.listdir(tmp_path) == ["model.ckpt"]


def test_recent_temporary_folders_are_not_removed(tmp_path):
    new, old = tmp_path / ".saving-new", tmp_path / ".saving-old"
    new.mkdir(), old.mkdir()
    hour_ago = old.stat().st_mtime - 3600
    os.utime(old, (hour_ago, hour_ago))
    remove_leftovers(tmp_path, age=3600)
    assert os.listdir(tmp_path) == [".saving-new"]
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def little_room():
    """Limit files to 50,000 bytes; a LeNet5 needs 247,000."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_old_checkpoint_survives_a_full_disk(saved, little_room):
    before = {name: parameter.asnumpy() for name, parameter in load_parameters(saved).items()}
    with pytest.raises(OSError, match="File too large"):
        save_model(LeNet5(), saved)
    assert same(before, {name: parameter.asnumpy() for name, parameter in load_parameters(saved).items()})


def test_full_disk_leaves_no_partial_file_and_names_the_file(saved, little_room, tmp_path):
    with pytest.raises(OSError, match=r"model.ckpt' \(2\d\d,\d{3} bytes\) can't be written: .*File too large"):
        save_model(LeNet5(), saved)
    assert os.listdir(tmp_path) == ["model.ckpt"]


def test_names_with_spaces_and_chinese_characters(tmp_path):
    network, other = LeNet5(), LeNet5()
    path = str(tmp_path / "梯度 累积.ckpt")
    save_model(network, path)
    load_model(other, path)
    assert same(arrays(network), arrays(other))


# Where to


@pytest.mark.parametrize("path", ["new.ckpt", "folder/new.ckpt", Path("folder") / "new.ckpt", "old.ckpt"], ids=str)
def test_paths_that_pass_the_checks_can_be_saved(path, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "old.ckpt").touch()
    check_name("train_process", path)
    check_folder("train_process", path)
    assert sorted(os.listdir(tmp_path)) == ["folder", "old.ckpt"]
    save_model(LeNet5(), path)
    assert len(load_parameters(str(path))) == 8


def test_path_objects_are_saved_and_loaded(tmp_path):
    save_model(LeNet5(), tmp_path / "a.ckpt")
    load_model(LeNet5(), tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("check", "path", "message"),
    [
        (check_name, "model.pt", "'ckpt_path' must end with '.ckpt' or '.safetensors', but got 'model.pt'"),
        (check_name, "", "'ckpt_path' must end with '.ckpt' or '.safetensors', but got ''"),
        (check_name, "folder.ckpt", "'ckpt_path' must name a file, but got the folder 'folder.ckpt'"),
        (check_folder, "none/model.ckpt", "the folder of 'ckpt_path' must exist, but got 'none'. Create it first."),
        (check_folder, "file/model.ckpt", "the folder of 'ckpt_path' must exist, but got 'file'"),
    ],
)
def test_invalid_paths_are_rejected(check, path, message, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(ValueError, match=f"^For 'train_process', {message}"):
        check("train_process", path)


def test_read_only_folder_is_rejected(monkeypatch):
    # Asked of the system, because tests may run as root, to whom no folder is read-only.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ValueError, match="the folder of 'ckpt_path' must be writable, but got 'model.ckpt'"):
        check_folder("train_process", "model.ckpt")


# What does not fit


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (MLP, ["missing dense_relu_sequential.0.weight", "and 11 more"]),
        (lambda: LeNet5(num_class=3), ["fc3.weight is Float32 (10, 84) instead of Float32 (3, 84)", "fc3.bias is"]),
        (lambda: LeNet5(num_channel=3), ["conv1.weight is Float32 (6, 1, 5, 5) instead of Float32 (6, 3, 5, 5)"]),
        (half, ["conv1.weight is Float32 (6, 1, 5, 5) instead of Float16 (6, 1, 5, 5)", "more"]),
        (lambda: nn.SequentialCell(LeNet5()), ["missing 0.conv1.weight", "more"]),
    ],
    ids=["other network", "other classes", "other channels", "other type", "other names"],
)
def test_another_architecture_is_rejected_and_nothing_is_changed(saved, network, names):
    network = network()
    before = arrays(network)
    with pytest.raises(CheckpointError) as error:
        load_model(network, saved)
    assert [name for name in ["model.ckpt' is of another architecture: ", *names] if name not in str(error.value)] == []
    assert same(before, arrays(network))


def test_each_difference_is_listed():
    network = nn.Dense(2, 3)
    parameters = {"weight": ms.Parameter(np.zeros((3, 4), np.float32)), "gamma": ms.Parameter(np.zeros(1, np.float32))}
    assert differences(network, parameters) == [
        "missing bias",
        "unexpected gamma",
        "weight is Float32 (3, 4) instead of Float32 (3, 2)",
    ]
    assert differences(network, {parameter.name: parameter for parameter in network.get_parameters()}) == []


# What is no checkpoint


def as_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")


def as_npz(path):
    with open(path, "wb") as file:
        np.savez(file, a=np.zeros(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("garbage\n" * 100),
        lambda path: path.write_bytes(bytes(range(256)) * 10),
        lambda path: path.write_bytes(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01."),
        as_zip,
        as_npz,
        lambda path: path.mkdir(),
        lambda path: None,
    ],
    ids=["empty", "text", "bytes", "pickle", "zip", "npz", "folder", "missing"],
)
def test_files_of_other_kinds_are_rejected(write, tmp_path):
    write(tmp_path / "bad.ckpt")
    network = LeNet5()
    before = arrays(network)
    with pytest.raises(CheckpointError, match="bad.ckpt' is not a"):
        load_model(network, str(tmp_path / "bad.ckpt"))
    assert same(before, arrays(network))


@pytest.mark.parametrize("part", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file_is_rejected(saved, part, tmp_path):
    with open(saved, "rb") as file:
        content = file.read()
    (tmp_path / "cut.ckpt").write_bytes(content[: int(len(content) * part)])
    network = LeNet5()
    before = arrays(network)
    with pytest.raises(CheckpointError, match="cut.ckpt"):
        load_model(network, str(tmp_path / "cut.ckpt"))
    assert same(before, arrays(network))


def check_rejected(path, data, network=None):
    """Check that a file with this content is rejected, and the network is not changed."""
    path.write_bytes(data)
    network = network or nn.Dense(2, 3)
    before = arrays(network)
    with pytest.raises(CheckpointError, match=path.name) as error:
        load_model(network, str(path))
    assert "\n" not in str(error.value)
    assert same(before, arrays(network))


@pytest.fixture(params=["ckpt", "safetensors"])
def small(request, tmp_path):
    """A checkpoint of a small network, in each format."""
    path = tmp_path / f"small.{request.param}"
    save_model(nn.Dense(2, 3), path)
    return path


def test_every_truncation_is_rejected(small):
    content = small.read_bytes()
    # Without all of its checksum a `.ckpt` is one that MindSpore wrote without, and whole.
    harmless = len(content) - 17 if small.suffix == ".ckpt" else None
    for length in range(len(content)):
        if length != harmless:
            check_rejected(small, content[:length])


def flip_bits(path, count, seed):
    content, rng = path.read_bytes(), random.Random(seed)
    for bit in rng.sample(range(8 * len(content)), count):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        check_rejected(path, bytes(changed))


def test_flipped_bits_are_rejected(small):
    flip_bits(small, 60, seed=1)


@pytest.mark.slow
def test_400_flipped_bits_are_rejected(small):
    flip_bits(small, 400, seed=2)


def test_trailing_bytes_are_rejected(small):
    check_rejected(small, small.read_bytes() + b"\x12\x00")


def crafted(*values):
    """Return the bytes of a checkpoint with these values: name, dims, kind, content."""
    message = Checkpoint()
    for name, dims, kind, content in values:
        value = message.value.add()
        value.tag = name
        value.tensor.dims.extend(dims)
        value.tensor.tensor_type = kind
        value.tensor.tensor_content = content
    return message.SerializeToString()


BIAS = ("bias", [3], "Float32", bytes(12))
WEIGHT = ("weight", [3, 2], "Float32", bytes(24))


@pytest.mark.parametrize(
    "values",
    [
        [("weight", [1000, 1000], "Float32", bytes(4)), BIAS],
        [("weight", [2**40], "Float32", bytes(24)), BIAS],
        [("weight", [2**62, 4], "Float32", b""), BIAS],
        [("weight", [-3, -2], "Float32", bytes(24)), BIAS],
        [("weight", [3, 2], "Float77", bytes(24)), BIAS],
        [("weight", [3, 2], "str", bytes(24)), BIAS],
        [WEIGHT, BIAS, WEIGHT],
        [("weight", [3, 2], "Float32", bytes(12)), ("weight", [3, 3], "Float32", bytes(12)), BIAS],
    ],
    ids=["too few bytes", "2**40", "overflow", "negative", "unknown kind", "text", "twice", "slices that differ"],
)
def test_crafted_file_does_not_reach_the_loader(values, tmp_path, monkeypatch):
    monkeypatch.setattr(ms, "load_checkpoint", lambda *arguments, **options: pytest.fail("it was loaded"))
    check_rejected(tmp_path / "crafted.ckpt", crafted(*values))


def test_value_without_a_tensor_does_not_reach_the_loader(tmp_path, monkeypatch):
    monkeypatch.setattr(ms, "load_checkpoint", lambda *arguments, **options: pytest.fail("it was loaded"))
    message = Checkpoint()
    message.value.add().tag = "weight"
    check_rejected(tmp_path / "crafted.ckpt", message.SerializeToString())


def test_parameter_in_slices_is_loaded(tmp_path):
    (tmp_path / "sliced.ckpt").write_bytes(
        crafted(("weight", [3, 2], "Float32", bytes(8)), ("weight", [3, 2], "Float32", bytes(16)), BIAS)
    )
    network = nn.Dense(2, 3)
    load_model(network, str(tmp_path / "sliced.ckpt"))
    assert not any(array.any() for array in arrays(network).values())


class Payload:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_pickle_is_not_executed(suffix, tmp_path):
    check_rejected(tmp_path / f"bad.{suffix}", pickle.dumps(Payload()))
    assert not os.path.exists("executed")


def test_safetensors_are_saved_and_loaded(tmp_path):
    network, other = LeNet5(), LeNet5()
    save_model(network, tmp_path / "model.safetensors")
    load_model(other, tmp_path / "model.safetensors")
    assert same(arrays(network), arrays(other))


def test_saving_to_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "real" / "model.ckpt")
    save_model(LeNet5(), tmp_path / "link.ckpt")
    assert (tmp_path / "link.ckpt").is_symlink() and os.listdir(tmp_path / "real") == ["model.ckpt"]


def test_name_of_a_link_determines_the_format(tmp_path):
    (tmp_path / "link.ckpt").symlink_to("model.bin")  # which is not there yet
    check_name("f", tmp_path / "link.ckpt")
    save_model(LeNet5(), tmp_path / "link.ckpt")
    assert os.path.isfile(tmp_path / "model.bin") and len(load_parameters(str(tmp_path / "link.ckpt"))) == 8


def test_dangling_links_and_pipes_are_rejected(tmp_path):
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "missing" / "model.ckpt")
    with pytest.raises(ValueError, match="the folder of 'ckpt_path' must exist"):
        check_folder("f", tmp_path / "link.ckpt")
    os.mkfifo(tmp_path / "pipe.ckpt")
    with pytest.raises(ValueError, match="'ckpt_path' must name a file, but got the device or pipe"):
        check_name("f", tmp_path / "pipe.ckpt")


@pytest.mark.parametrize(("umask", "permissions"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path, umask, permissions):
    before = os.umask(umask)
    try:
        save_model(LeNet5(), tmp_path / "model.ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.ckpt").stat().st_mode) == permissions


# What survives a kill


def survivors(folder, kills):
    """Kill `kills` processes while they save, and return what they left."""
    command = [sys.executable, str(ROOT / "tests" / "save_runs.py"), str(folder), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_survivors(result, kills):
    assert result["kills"] == kills and result["bad"] == []
    # Some of them have to hit a save in its middle, or nothing was tried.
    assert result["leftovers"] > kills / 10


def test_checkpoint_is_complete_after_every_kill(tmp_path):
    check_survivors(survivors(tmp_path, 15), 15)


@pytest.mark.slow
def test_checkpoint_is_complete_after_200_kills(tmp_path):
    check_survivors(survivors(tmp_path, 200), 200)


def test_another_extension_is_rejected(saved, tmp_path):
    os.rename(saved, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="model.pt"):
        load_parameters(str(tmp_path / "model.pt"))


def test_parameters_are_loaded_by_name(saved):
    parameters = load_parameters(saved)
    assert list(parameters) == list(arrays(LeNet5())) and parameters["fc3.bias"].shape == (10,)
