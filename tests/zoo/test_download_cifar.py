"""CIFAR-10 is downloaded completely or not at all. What it shares with MNIST is tested there."""

from __future__ import annotations

import hashlib
import os

import pytest

import model_zoo.data.download
from cifar_files import entries, tarred, write_cifar10
from idx_files import fingerprints, left_in
from loopback import sends
from model_zoo import DataError, create_dataset, download_cifar10
from model_zoo.data.cifar import TOP
from model_zoo.data.download import CIFAR10

NOBODY = "http://127.0.0.1:1/nobody-listens"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """An archive of six small files that is taken for CIFAR-10's, by its SHA-256."""
    folder = write_cifar10(tmp_path / "original", train=4, test=2, top=TOP)
    body = tarred(entries({name: (folder / name).read_bytes() for name in fingerprints(folder)}))
    sizes = {name: ((folder / name).stat().st_size, None) for name in CIFAR10.files}
    expected = CIFAR10._replace(files=sizes, sha256=hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(model_zoo.data.download, "CIFAR10", expected)
    return body


def error_of(url, tmp_path, *, error=(OSError, ValueError)):
    """Return the message of a failed download, after seeing that nothing is left."""
    with pytest.raises(error) as caught:
        download_cifar10(tmp_path / "data", url)
    assert left_in(tmp_path) == set()
    message = str(caught.value)
    assert message.startswith("For 'download_cifar10', ") and len(message.splitlines()) == 1
    return message


def test_known_sizes_and_hash():
    assert list(CIFAR10.files) == [f"{TOP}/data_batch_{n}.bin" for n in range(1, 6)] + [f"{TOP}/test_batch.bin"]
    assert set(CIFAR10.files.values()) == {(30_730_000, None)} and len(CIFAR10.sha256) == 64


def test_valid_archive(tmp_path, small, serve):
    assert download_cifar10(tmp_path / "data", serve(sends(small))) == str(tmp_path / "data")
    assert fingerprints(tmp_path / "data") == fingerprints(tmp_path / "original")
    assert create_dataset(tmp_path / "data", 10, dataset="cifar10").get_dataset_size() == 2
    assert not [name for name in left_in(tmp_path) if not name.startswith("data")]


@pytest.mark.parametrize("top", ["", TOP])
def test_existing_files_are_not_downloaded_again(tmp_path, small, top):
    write_cifar10(tmp_path / "data", train=4, test=2, top=top)
    before = left_in(tmp_path)
    download_cifar10(tmp_path / "data", NOBODY)
    assert left_in(tmp_path) == before


def test_missing_file_is_added(tmp_path, small, serve):
    write_cifar10(tmp_path / "data", train=4, test=2, top=TOP)
    (tmp_path / "data" / TOP / "data_batch_4.bin").unlink()
    kept = (tmp_path / "data" / TOP / "test_batch.bin").stat().st_ino
    download_cifar10(tmp_path / "data", serve(sends(small)))
    assert fingerprints(tmp_path / "data") == fingerprints(tmp_path / "original")
    assert (tmp_path / "data" / TOP / "test_batch.bin").stat().st_ino == kept


def test_archive_with_wrong_hash_is_not_opened(tmp_path, small, serve, monkeypatch):
    opened = []
    monkeypatch.setattr(
        model_zoo.data.download,
        "CIFAR10",
        model_zoo.data.download.CIFAR10._replace(unpack=lambda *arguments: opened.append(arguments)),
    )
    # The planted fault: one bit, in the time that gzip's header has.
    wrong = small[:5] + bytes([small[5] ^ 1]) + small[6:]
    message = error_of(serve(sends(wrong)), tmp_path, error=DataError)
    assert hashlib.sha256(wrong).hexdigest() in message and f"({len(wrong)} bytes)" in message and opened == []


@pytest.mark.parametrize("kept", [0, 1, 5000, -1])
def test_truncated_body_is_rejected(tmp_path, small, serve, kept):
    error_of(serve(sends(small[:kept], announced=False)), tmp_path)


def test_html_page_and_endless_body_are_rejected(tmp_path, small, serve):
    assert "SHA-256" in error_of(serve(sends(b"<html>moved</html>")), tmp_path, error=DataError)
    assert "it is longer than" in error_of(serve(sends(bytes(4 << 20), announced=False)), tmp_path, error=OSError)


def test_archive_with_known_hash_but_other_files_is_rejected(tmp_path, small, serve, monkeypatch):
    files = {name: bytes(5) for name in CIFAR10.files}
    body = tarred(entries(files))
    known = model_zoo.data.download.CIFAR10._replace(sha256=hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(model_zoo.data.download, "CIFAR10", known)
    assert "contain 12292 bytes of" in error_of(serve(sends(body)), tmp_path, error=DataError)


def test_files_of_another_size_are_not_replaced(tmp_path, small):
    other = tmp_path / "data" / TOP / "data_batch_5.bin"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"mine")
    with pytest.raises(DataError, match="which does not belong to CIFAR-10"):
        download_cifar10(tmp_path / "data", NOBODY)
    assert other.read_bytes() == b"mine"


def test_files_of_right_size_and_wrong_content_are_rejected(tmp_path, small, serve):
    other = tmp_path / "data" / TOP / "data_batch_5.bin"
    other.parent.mkdir(parents=True)
    other.write_bytes(bytes(4 * 3073))
    with pytest.raises(DataError, match="which does not belong to CIFAR-10"):
        download_cifar10(tmp_path / "data", serve(sends(small)))
    assert os.listdir(tmp_path / "data" / TOP) == ["data_batch_5.bin"] and other.read_bytes() == bytes(4 * 3073)


@pytest.mark.parametrize(("name", "value"), [("url", "file:///etc/passwd"), ("stall_seconds", 0), ("data_path", "")])
def test_invalid_arguments_are_rejected(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"^For 'download_cifar10', '{name}' must be"):
        download_cifar10(**{"data_path": tmp_path / "data", name: value})
