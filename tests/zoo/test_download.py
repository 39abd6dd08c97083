"""MNIST is downloaded completely or not at all, whatever the server sends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import model_zoo.data.archive
import model_zoo.data.download
from idx_files import fingerprints, left_in, pairs, real_mnist, write_mnist, zipped
from loopback import sends
from model_zoo import DataError, create_dataset, download_mnist
from model_zoo.data.download import MNIST
from model_zoo.data.mnist import find_split

ROOT = Path(model_zoo.__file__).parents[1]
# Long enough for a busy machine; what must stall is given less.
PATIENCE = 60.0


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Four small files that are taken for MNIST, by their names."""
    folder = write_mnist(tmp_path / "original", train=20, test=10)
    monkeypatch.setattr(model_zoo.data.download, "MNIST", MNIST._replace(files=fingerprints(folder)))
    return {name: (folder / name).read_bytes() for name in fingerprints(folder)}


def error_of(url, tmp_path, *, error=(OSError, ValueError), stall_seconds=PATIENCE):
    """Return the message of a failed download, after seeing that nothing is left."""
    with pytest.raises(error) as caught:
        download_mnist(tmp_path / "data", url, stall_seconds=stall_seconds)
    assert left_in(tmp_path) == set()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


# Successful downloads


@pytest.mark.parametrize("top", ["MNIST_Data/", ""])
def test_valid_archive(tmp_path, small, serve, top):
    url = serve(sends(zipped(pairs(small, top=top))))
    assert download_mnist(tmp_path / "data", url) == str(tmp_path / "data")
    assert fingerprints(tmp_path / "data") == model_zoo.data.download.MNIST.files
    assert create_dataset(tmp_path / "data", 10).get_dataset_size() == 2
    assert not [name for name in left_in(tmp_path) if not name.startswith("data")]


def test_folder_entries_and_stored_files_without_length(tmp_path, small, serve):
    entries = [(f"MNIST_Data/{name}", b"") for name in ("", "train/", "test/")]
    body = zipped(entries + pairs(small), method=zipfile.ZIP_STORED)
    download_mnist(tmp_path / "data", serve(sends(body, announced=False)))
    assert fingerprints(tmp_path / "data") == model_zoo.data.download.MNIST.files


@pytest.mark.parametrize("name", ["a/b c/数据", "here"])
def test_target_folder_may_exist(tmp_path, small, serve, name):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("mine")
    download_mnist(tmp_path / name, serve(sends(zipped(pairs(small)))))
    assert create_dataset(tmp_path / name, 10, usage="test").get_dataset_size() == 1
    assert (tmp_path / "here" / "notes.txt").read_text() == "mine"


def test_redirect_is_followed(tmp_path, small, serve):
    url = serve(sends(zipped(pairs(small))))

    def moved(handler):
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.end_headers()

    download_mnist(tmp_path / "data", serve(moved))
    assert fingerprints(tmp_path / "data") == model_zoo.data.download.MNIST.files


@pytest.mark.parametrize("layout", ["split", "flat", "torchvision", "dots"])
def test_existing_files_are_not_downloaded_again(tmp_path, small, layout):
    write_mnist(tmp_path / "data", train=20, test=10, layout=layout)
    before = left_in(tmp_path)
    download_mnist(tmp_path / "data", "http://127.0.0.1:1/nobody-listens")
    assert left_in(tmp_path) == before


def test_missing_file_is_added(tmp_path, small, serve):
    write_mnist(tmp_path / "data", train=20, test=10)
    (tmp_path / "data/test/t10k-labels-idx1-ubyte").unlink()
    kept = tmp_path / "data/train/train-images-idx3-ubyte"
    inode = kept.stat().st_ino
    download_mnist(tmp_path / "data", serve(sends(zipped(pairs(small)))))
    assert fingerprints(tmp_path / "data") == model_zoo.data.download.MNIST.files
    assert kept.stat().st_ino == inode


@pytest.mark.slow
def test_real_archive(tmp_path, serve):
    mnist = real_mnist(tmp_path / "original")
    files = {}
    for usage in ("train", "test"):
        for path in find_split(mnist, usage):
            files[f"{usage}/{path.name.replace('.idx', '-idx')}"] = path.read_bytes()
    # The planted fault: one bit.
    wrong = dict(files)
    name = "train/train-images-idx3-ubyte"
    wrong[name] = wrong[name][:-1] + bytes([wrong[name][-1] ^ 1])
    bodies = [zipped(pairs(some), method=zipfile.ZIP_STORED) for some in (wrong, files)]
    assert "SHA-256" in error_of(serve(sends(bodies[0])), tmp_path, error=DataError)
    download_mnist(tmp_path / "data", serve(sends(bodies[1])))
    assert fingerprints(tmp_path / "data") == model_zoo.data.download.MNIST.files
    download_mnist(tmp_path / "data", "http://127.0.0.1:1/nobody-listens")


# Failed downloads


def test_wrong_hash_is_rejected(tmp_path, small, serve):
    name = "train/train-labels-idx1-ubyte"
    wrong = {**small, name: small[name][:-1] + b"\x01"}
    message = error_of(serve(sends(zipped(pairs(wrong)))), tmp_path, error=DataError)
    assert name in message and "SHA-256" in message


@pytest.mark.parametrize("kept", [0, 1, 2000, -1])
@pytest.mark.parametrize("announced", [True, False])
def test_truncated_body_is_rejected(tmp_path, small, serve, kept, announced):
    body = zipped(pairs(small))
    error_of(serve(sends(body[:kept], length=len(body), announced=announced)), tmp_path)


def test_stalled_server_times_out(tmp_path, small):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip"
        assert "no data arrived for 1 seconds" in error_of(url, tmp_path, error=TimeoutError, stall_seconds=1)


def test_too_large_archive_is_rejected(tmp_path, small, serve, monkeypatch):
    monkeypatch.setattr(model_zoo.data.archive, "OVERHEAD", 1 << 16)
    assert "it is longer than" in error_of(serve(sends(bytes(1 << 20), announced=False)), tmp_path, error=OSError)


def test_html_page_is_rejected(tmp_path, small, serve):
    assert "valid zip archive" in error_of(serve(sends(b"<html>moved</html>")), tmp_path, error=DataError)


def test_hostile_archive_is_rejected(tmp_path, small, serve):
    body = zipped([*pairs(small), ("../evil", b"x")])
    assert "'../evil'" in error_of(serve(sends(body)), tmp_path, error=DataError)


def test_interrupt_leaves_no_files(tmp_path, small, monkeypatch):
    def interrupted(url, target, **kwargs):
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model_zoo.data.download, "fetch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download_mnist(tmp_path / "data")
    assert left_in(tmp_path) == set()


# Existing files


@pytest.mark.parametrize("name", ["train/train-images-idx3-ubyte", "test/t10k-labels-idx1-ubyte"])
def test_files_of_another_data_set_are_not_replaced(tmp_path, small, name):
    other = tmp_path / "data" / name
    other.parent.mkdir(parents=True)
    other.write_bytes(b"Fashion-MNIST")
    with pytest.raises(DataError, match="which does not belong to MNIST") as caught:
        download_mnist(tmp_path / "data", "http://127.0.0.1:1/nobody-listens")
    assert str(other) in str(caught.value) and other.read_bytes() == b"Fashion-MNIST"


@pytest.mark.parametrize("name", ["data", "data/train"])
def test_file_in_place_of_folder_is_rejected(tmp_path, small, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(DataError, match="must be a folder, but got the file"):
        download_mnist(tmp_path / "data", "http://127.0.0.1:1/nobody-listens")


def test_failure_while_moving_files_is_rolled_back(tmp_path, small, serve, monkeypatch):
    replace, moves = os.replace, []

    def full(source, target):
        moves.append(target)
        if len(moves) == 3:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    url = serve(sends(zipped(pairs(small))))
    assert "No space left" in error_of(url, tmp_path, error=OSError)


# Arguments


def test_working_directory_does_not_matter(tmp_path, small, serve, monkeypatch):
    """Ours has modules named as others' packages are."""
    monkeypatch.chdir(Path(model_zoo.data.__file__).parent)
    download_mnist(tmp_path / "data", serve(sends(zipped(pairs(small)))))
    assert fingerprints(tmp_path / "data") == model_zoo.data.download.MNIST.files


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"url": "file:///etc/passwd"}, ValueError, "'url' must be an http:// or https:// address"),
        ({"url": "ftp://host/x.zip"}, ValueError, "'url' must be an http:// or https:// address"),
        ({"url": "MNIST_Data.zip"}, ValueError, "but got 'MNIST_Data.zip'."),
        ({"url": "https://"}, ValueError, "but got 'https://'."),
        ({"url": "https://host:port/"}, ValueError, "but got 'https://host:port/'."),
        ({"url": "http://[x/"}, ValueError, "'url' must be"),
        ({"url": "http://host/a\nb"}, ValueError, "but got 'http://host/a\\nb'."),
        ({"url": None}, TypeError, "'url' must be a str, but got type NoneType."),
        ({"stall_seconds": 0}, ValueError, "'stall_seconds' must be a number > 0, but got 0."),
        ({"stall_seconds": float("nan")}, ValueError, "'stall_seconds' must be a number > 0"),
        ({"stall_seconds": "60"}, TypeError, "'stall_seconds' must be a number > 0, but got type"),
        ({"data_path": ""}, ValueError, "'data_path' must be a path, but got ''."),
        ({"data_path": None}, TypeError, "'data_path' must be a path, but got type NoneType."),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, arguments, error, reason):
    with pytest.raises(error) as caught:
        download_mnist(**{"data_path": tmp_path / "data", **arguments})
    message = str(caught.value)
    assert message.startswith("For 'download_mnist', ") and reason in message
    assert not isinstance(caught.value, DataError)
    assert len(message.splitlines()) == 1 and left_in(tmp_path) == set()


@pytest.mark.several
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_program_can_be_interrupted_while_waiting(tmp_path, number, code):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip"
        command = [sys.executable, str(ROOT / "train.py"), "--data_path=data", f"--download={url}"]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as program:
            connection, _ = silent.accept()
            with connection:
                program.send_signal(number)
                assert program.wait(timeout=PATIENCE) == code
            assert program.stderr.read() == f"error: {'interrupted' if code == 130 else 'terminated'}\n"
    assert left_in(tmp_path) == set()
