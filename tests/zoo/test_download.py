"""A data set is downloaded completely or not at all, whatever the server sends."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import socket
import time
import urllib.request
import zipfile

import pytest

import model_zoo.data.download
from cifar_files import entries, tarred, write_cifar10
from idx_files import fingerprints, left_in, pairs, write_mnist, zipped
from loopback import sends, serving
from model_zoo import DataError, create_dataset, download_cifar10, download_mnist
from model_zoo.data.cifar import TOP
from model_zoo.data.download import CIFAR10, MNIST

pytestmark = pytest.mark.usefixtures("eager")
NOBODY = "http://127.0.0.1:1/nobody-listens"
LABELS = "train/train-labels-idx1-ubyte"


def facts_of(folder):
    """Return the SHA-256 and the size of each file, as a `Source` has them."""
    return {name: (sha256, size) for name, (size, sha256) in fingerprints(folder).items()}


@pytest.fixture
def serve():
    """Start servers that answer every request with one function, and return their address."""
    with contextlib.ExitStack() as servers:
        yield lambda answer: servers.enter_context(serving(answer))


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Four small files that are taken for MNIST, by their names."""
    folder = write_mnist(tmp_path / "original", train=20, test=10)
    files = {name: facts_of(folder)[name] for name in MNIST.files}
    monkeypatch.setattr(model_zoo.data.download, "MNIST", MNIST._replace(files=files))
    return {name: (folder / name).read_bytes() for name in files}


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """An archive of six small files that is taken for CIFAR-10's."""
    folder = write_cifar10(tmp_path / "original", train=4, test=2, top=TOP)
    body = tarred(entries({name: (folder / name).read_bytes() for name in CIFAR10.files}))
    files = {name: facts_of(folder)[name] for name in CIFAR10.files}
    source = CIFAR10._replace(files=files, sha256=hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(model_zoo.data.download, "CIFAR10", source)
    return body


def error_of(download, url, tmp_path, error):
    """Return the message of a failed download, after seeing that nothing is left."""
    with pytest.raises(error) as caught:
        download(tmp_path / "data", url)
    assert left_in(tmp_path) == set()
    message = str(caught.value)
    assert message.startswith(f"For '{download.__name__}', ") and len(message.splitlines()) == 1
    return message


def downloads_mnist(folder, url):
    download_mnist(folder, url)
    return facts_of(folder) == model_zoo.data.download.MNIST.files


@pytest.mark.parametrize("top", ["MNIST_Data/", ""])
def test_mnist(tmp_path, small, serve, top):
    folders = [(f"{top}{name}", b"") for name in ("train/", "test/")]
    assert downloads_mnist(tmp_path / "a b" / "数据", serve(sends(zipped(folders + pairs(small, top=top)))))
    assert create_dataset(tmp_path / "a b" / "数据", 10).get_dataset_size() == 2
    assert not [name for name in left_in(tmp_path) if not name.startswith("a b")]


def test_cifar10(tmp_path, small_cifar10, serve):
    assert download_cifar10(tmp_path / "data", serve(sends(small_cifar10))) == str(tmp_path / "data")
    assert fingerprints(tmp_path / "data") == fingerprints(tmp_path / "original")
    assert create_dataset(tmp_path / "data", 10, dataset="cifar10").get_dataset_size() == 2


# What is there already


@pytest.mark.parametrize("layout", ["split", "flat", "torchvision", "dots"])
def test_existing_files_are_not_downloaded_again(tmp_path, small, layout):
    write_mnist(tmp_path / "data", train=20, test=10, layout=layout)
    before = left_in(tmp_path)
    download_mnist(tmp_path / "data", NOBODY)
    assert left_in(tmp_path) == before


def test_missing_file_is_added(tmp_path, small, serve):
    write_mnist(tmp_path / "data", train=20, test=10)
    (tmp_path / "data/test/t10k-labels-idx1-ubyte").unlink()
    (tmp_path / "data/notes.txt").write_text("mine")
    download_mnist(tmp_path / "data", serve(sends(zipped(pairs(small)))))
    assert fingerprints(tmp_path / "data").keys() == {*MNIST.files, "notes.txt"}


def test_files_of_another_data_set_are_not_replaced(tmp_path, small):
    other = tmp_path / "data" / LABELS
    other.parent.mkdir(parents=True)
    other.write_bytes(b"Fashion-MNIST")
    with pytest.raises(DataError, match="which does not belong to MNIST") as caught:
        download_mnist(tmp_path / "data", NOBODY)
    assert str(other) in str(caught.value) and other.read_bytes() == b"Fashion-MNIST"


# Downloads that fail


def test_wrong_file_is_rejected(tmp_path, small, serve):
    wrong = {**small, LABELS: small[LABELS][:-1] + b"\x01"}
    assert f"the SHA-256 of {LABELS} is not" in error_of(
        download_mnist, serve(sends(zipped(pairs(wrong)))), tmp_path, DataError
    )
    longer = {**small, LABELS: small[LABELS] + b"\x01"}
    assert f"it has no file {LABELS} of 28 bytes" in error_of(
        download_mnist, serve(sends(zipped(pairs(longer)))), tmp_path, DataError
    )


def test_entries_with_other_names_are_never_written(tmp_path, small, serve):
    """Neither beside the folder nor in it, whatever they are: names in an archive are no paths."""
    link = zipfile.ZipInfo("MNIST_Data/link")
    link.external_attr = 0o120777 << 16
    others = [("../evil", b"x"), ("/evil", b"x"), ("MNIST_Data/../../evil", b"x"), (link, b"/etc")]
    assert downloads_mnist(tmp_path / "data", serve(sends(zipped([*others, *pairs(small)]))))
    assert {name for name in left_in(tmp_path) if "evil" in name or "link" in name} == set()


def test_archive_with_wrong_hash_is_not_opened(tmp_path, small_cifar10, serve, monkeypatch):
    monkeypatch.setattr(model_zoo.data.download, "_entries", lambda archive: pytest.fail("it was opened"))
    # The planted fault: one bit, in the time that gzip's header has.
    wrong = small_cifar10[:5] + bytes([small_cifar10[5] ^ 1]) + small_cifar10[6:]
    assert "its SHA-256 is not" in error_of(download_cifar10, serve(sends(wrong)), tmp_path, DataError)


@pytest.mark.parametrize("kept", [0, 1, 2000, -1])
@pytest.mark.parametrize("announced", [True, False])
def test_truncated_body_is_rejected(tmp_path, small, serve, kept, announced):
    body = zipped(pairs(small))
    url = serve(sends(body[:kept], length=len(body), announced=announced))
    error_of(download_mnist, url, tmp_path, (OSError, DataError))


def test_unreachable_and_silent_servers_are_errors(tmp_path, small, monkeypatch):
    message = error_of(download_mnist, NOBODY, tmp_path, OSError)
    assert "Connection refused" in message and message.endswith("Try again, or give a mirror's address.")
    monkeypatch.setattr(model_zoo.data.download, "TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip"
        assert "timed out" in error_of(download_mnist, url, tmp_path, OSError)
    assert "unknown url type" in error_of(download_mnist, "MNIST_Data.zip", tmp_path, OSError)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # `download` leaves its connection open
def test_server_that_stops_sending_is_an_error(tmp_path, small, serve, monkeypatch):
    monkeypatch.setattr(model_zoo.data.download, "TIMEOUT", 0.3)
    body = zipped(pairs(small))

    def stalls(handler):
        sends(body[:1000], length=len(body))(handler)
        handler.wfile.flush()
        time.sleep(1)

    assert "timed out" in error_of(download_mnist, serve(stalls), tmp_path, OSError)
    assert socket.getdefaulttimeout() is None
    gc.collect()


@pytest.mark.parametrize("announced", [True, False])
def test_server_that_sends_more_than_there_can_be_is_left(tmp_path, small, serve, monkeypatch, announced):
    """Its body has no end."""
    monkeypatch.setattr(model_zoo.data.download, "_MORE", 1000)
    sent = []

    def endless(handler):
        sends(b"", length=2**60, announced=announced)(handler)
        with contextlib.suppress(OSError):
            while len(sent) < 1000:
                handler.wfile.write(bytes(2**16))
                sent.append(1)

    most = 1000 + sum(size for _, size in model_zoo.data.download.MNIST.files.values())
    message = error_of(download_mnist, serve(endless), tmp_path, OSError)
    assert f"it is larger than {most:,} bytes" in message and len(sent) < 1000
    assert urllib.request._opener is None
    assert "it is not one of http or https" in error_of(download_mnist, "ftp://127.0.0.1/x.zip", tmp_path, OSError)


def test_what_is_no_zip_archive_is_rejected(tmp_path, small, small_cifar10, serve):
    for body in (b"<html>moved</html>", small_cifar10):
        message = error_of(download_mnist, serve(sends(body)), tmp_path, DataError)
        assert "the archive must be that of MNIST, but got another one: it is not a zip archive." in message


def test_interrupt_leaves_no_files(tmp_path, small, monkeypatch):
    def interrupted(caller, url, archive, most):
        archive.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model_zoo.data.download, "_fetch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download_mnist(tmp_path / "data")
    assert left_in(tmp_path) == set()
