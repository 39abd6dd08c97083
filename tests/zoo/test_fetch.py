"""A download ends in bounded time, whatever the server does, and keeps TLS."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import model_zoo
from loopback import sends, serving
from model_zoo.data import transfer
from model_zoo.data.fetch import fetch

ROOT = Path(model_zoo.__file__).parents[1]
# Long enough for a busy machine; what must stall is given less.
PATIENCE, BOUND = 60.0, 20


def fetched(url, folder, *, stall_seconds=PATIENCE, max_bytes=1 << 20):
    """Return what was fetched."""
    fetch(url, folder / "x.zip", stall_seconds=stall_seconds, max_bytes=max_bytes, caller="download_mnist")
    return (folder / "x.zip").read_bytes()


def fetch_error(url, folder, *, error=OSError, **kwargs):
    """Return the message of a failure, after seeing that it took the form of one line."""
    with pytest.raises(error) as caught:
        fetched(url, folder, **kwargs)
    message = str(caught.value)
    start = f"For 'download_mnist', 'url' must be a file that can be downloaded, but got {url!r}: "
    assert message.startswith(start) and message.endswith("or give a mirror's address.")
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(("announced", "seconds"), [(True, PATIENCE), (False, PATIENCE), (True, 1e10)])
def test_file_is_downloaded_unchanged(tmp_path, announced, seconds):
    """Also with more patience than a socket has."""
    body = bytes(range(256)) * 1000
    with serving(sends(body, announced=announced)) as url:
        assert fetched(url, tmp_path, stall_seconds=seconds) == body


@pytest.mark.slow
def test_silent_server_times_out(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, start = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip", time.monotonic()
        message = fetch_error(url, tmp_path, error=TimeoutError, stall_seconds=1)
        assert "no data arrived for 1 seconds, after 0 bytes" in message
        assert time.monotonic() - start < BOUND


@pytest.mark.slow
def test_server_stalling_in_body_times_out(tmp_path):
    over = threading.Event()

    def stall(handler):
        sends(b"x" * 10_000, length=20_000)(handler)
        handler.wfile.flush()
        over.wait(30)

    with serving(stall) as url:
        start = time.monotonic()
        message = fetch_error(url, tmp_path, error=TimeoutError, stall_seconds=2)
        over.set()
        assert "no data arrived for 2 seconds" in message
        assert time.monotonic() - start < BOUND


def test_endless_body_is_rejected(tmp_path):
    def pour(handler):
        sends(b"", announced=False)(handler)
        for _ in range(100_000):
            handler.wfile.write(b"x" * 65536)

    with serving(pour) as url:
        assert "it is longer than 1048576 bytes" in fetch_error(url, tmp_path)


def test_body_shorter_than_announced_is_rejected(tmp_path):
    with serving(sends(b"x" * 100, length=200)) as url:
        assert "100" in fetch_error(url, tmp_path)


def test_http_error_is_reported(tmp_path):
    with serving(lambda handler: handler.send_error(404)) as url:
        assert "404" in fetch_error(url, tmp_path)


def test_refused_connection_is_reported(tmp_path):
    assert "refused" in fetch_error("http://127.0.0.1:1/x.zip", tmp_path)


def test_chunked_body(tmp_path):
    def chunked(handler, end=b"0\r\n\r\n"):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"4e20\r\n" + bytes(20_000) + b"\r\n" + end)

    with serving(chunked) as url:
        assert fetched(url, tmp_path) == bytes(20_000)
    (tmp_path / "x.zip").unlink()
    with serving(lambda handler: chunked(handler, end=b"4e20\r\n" + bytes(100))) as url:
        assert "IncompleteRead" in fetch_error(url, tmp_path)


@pytest.mark.parametrize("part", [pytest.param("header", marks=pytest.mark.slow), "body"])
def test_slow_server_times_out(tmp_path, part):
    """It always sends something, and would take an hour."""

    def drip(handler):
        if part == "body":
            sends(b"", length=10_000)(handler)
        for _ in range(10_000):
            handler.wfile.write(b"X")
            time.sleep(0.4)

    with serving(drip) as url:
        start = time.monotonic()
        assert "no data arrived for 2 seconds" in fetch_error(url, tmp_path, error=TimeoutError, stall_seconds=2)
        assert time.monotonic() - start < BOUND


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Let the processes that this one starts run a source first."""

    def patch(source):
        (tmp_path / "patches").mkdir()
        (tmp_path / "patches" / "sitecustomize.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "patches"))

    return patch


@pytest.mark.slow
@pytest.mark.parametrize("step", ["getaddrinfo", "create_connection"])
def test_slow_name_lookup_or_connection_times_out(tmp_path, patched, step):
    patched(f"import socket, time\nsocket.{step} = lambda *args, **kwargs: time.sleep(60)\n")
    start = time.monotonic()
    message = fetch_error("http://host.invalid/x.zip", tmp_path, error=TimeoutError, stall_seconds=1)
    assert "no data arrived for 1 seconds, after 0 bytes" in message and time.monotonic() - start < BOUND


@pytest.mark.parametrize(("count", "max_bytes"), [(2_000, 1 << 20), (20_000, 1_000)], ids=["stalled", "too long"])
def test_failed_transfer_leaves_no_process_or_connection(tmp_path, count, max_bytes):
    """Neither a process nor a connection stays, although the server would continue."""
    over, ended = threading.Event(), []

    def pause(handler):
        sends(bytes(count), length=1 << 22)(handler)
        handler.wfile.flush()
        over.wait(30)
        handler.connection.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            while handler.connection.recv(65536):
                pass
        ended.append(True)

    with serving(pause) as url:
        fetch_error(url, tmp_path, stall_seconds=1, max_bytes=max_bytes)
        over.set()
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    assert ended and set(ended) == {True} and (tmp_path / "x.zip.part").stat().st_size <= max_bytes


def test_stale_partial_file_is_not_used(tmp_path):
    """`download` would ask the server for the rest of it."""
    (tmp_path / "x.zip.part").write_bytes(b"stale")
    with serving(sends(b"fresh")) as url:
        assert "File exists" in fetch_error(url, tmp_path)
    assert (tmp_path / "x.zip.part").read_bytes() == b"stale" and not (tmp_path / "x.zip").exists()


@pytest.mark.parametrize("page", ["https://www.dropbox.com/s/x/a.zip?dl=0", "https://drive.google.com/file/d/x/view"])
def test_links_to_file_store_pages_are_rejected(tmp_path, page):
    assert "a link to a page of a file store is not the address of a file" in fetch_error(page, tmp_path)


# The package


def test_transfer_uses_download_package(tmp_path, patched):
    """With another package of that name there is another file."""
    patched("")
    (tmp_path / "patches" / "download.py").write_text(
        "def download(url, path, **how):\n    open(path, 'w').write(repr((url, sorted(how.items()))))\n"
    )
    content = fetched("http://host.invalid/x.zip", tmp_path, stall_seconds=7).decode()
    options = "[('kind', 'file'), ('progressbar', False), ('replace', True), ('timeout', 14), ('verbose', False)]"
    assert content == f"('http://host.invalid/x.zip', {options})"


def test_missing_download_package_is_reported_in_one_line(tmp_path, patched):
    patched("")
    (tmp_path / "patches" / "download.py").write_text("raise ModuleNotFoundError(\"No module named 'download'\")")
    with pytest.raises(ImportError) as caught:
        fetched("http://host.invalid/x.zip", tmp_path)
    problem = "but got the error: No module named 'download'. Run: pip install download"
    assert str(caught.value) == f"For 'download_mnist', 'url' must come with the package download installed, {problem}"


def test_user_module_named_download_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "download.py").write_text("raise AssertionError('it is the user's own')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with serving(sends(b"x")) as url:
        assert fetched(url, tmp_path) == b"x"


def test_progress_bar_is_shown_on_terminal_only(tmp_path):
    """Without a terminal there is no bar."""
    program = (
        "from pathlib import Path\nfrom model_zoo.data.fetch import fetch\n"
        "fetch({!r}, Path({!r}), stall_seconds=60, max_bytes=1 << 20, caller='x')\nprint('done')"
    )
    shown, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # tqdm shows none on one without rows
    with serving(sends(bytes(500_000))) as url:
        command = [sys.executable, "-c", program.format(url, str(tmp_path / "x.zip"))]
        subprocess.run(command, cwd=ROOT, stdout=terminal, check=True, timeout=PATIENCE)
        (tmp_path / "x.zip").unlink()
        piped = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=PATIENCE)
    os.close(terminal)
    text = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while piece := os.read(shown, 65536):
            text += piece
    os.close(shown)
    assert b"file_sizes" in text and b"100%" in text and b"500k/500k" in text and text.endswith(b"done\r\n")
    assert (piped.stdout, piped.stderr) == (b"done\n", b"")


def test_stale_file_is_not_used(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"stale")
    with serving(sends(b"fresh")) as url:
        assert "File exists" in fetch_error(url, tmp_path)
    assert (tmp_path / "x.zip").read_bytes() == b"stale"


def test_proxy_is_used(tmp_path, monkeypatch):
    asked = []

    def answer(handler):
        asked.append(handler.path)
        sends(b"by proxy")(handler)

    with serving(answer) as url:
        monkeypatch.setenv("http_proxy", url.rpartition("/")[0])
        monkeypatch.setenv("no_proxy", "")
        assert fetched("http://host.invalid/x.zip", tmp_path) == b"by proxy"
    assert set(asked) == {"http://host.invalid/x.zip"}


def test_redirect_from_https_to_http_is_rejected():
    def redirect(old, new, proxy=None):
        request = urllib.request.Request(old)
        if proxy:
            request.set_proxy("proxy", proxy)
        return transfer.KeepTls().redirect_request(request, io.BytesIO(), 302, "Found", {}, new)

    for new in ("http://b/x", "ftp://b/x", "HTTP://b/x"):
        for old in ("https://a/x", "HTTPS://a/x"):
            with pytest.raises(urllib.error.URLError, match="from https"):
                redirect(old, new)
            with pytest.raises(urllib.error.URLError, match="from https"):
                redirect(old, new, proxy="http")
    with pytest.raises(urllib.error.URLError, match="an address that is not of the web"):
        redirect("http://a/x", "ftp://b/x")
    assert redirect("https://a/x", "https://b/x").full_url == "https://b/x"
    assert redirect("http://a/x", "http://b/x").full_url == "http://b/x"
    assert redirect("http://a/x", "http://b/x", proxy="https").full_url == "http://b/x"


@pytest.fixture
def tls(tmp_path, monkeypatch):
    """The context of a server on 127.0.0.1, whose certificate clients trust."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True, timeout=PATIENCE)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def moved(url):
    """Answer with a redirect."""

    def answer(handler):
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.end_headers()

    return answer


def test_redirects_between_tls_and_plain_servers(tmp_path, tls):
    with serving(sends(b"secret"), tls=tls) as secret, serving(sends(b"open")) as plain:
        assert fetched(secret, tmp_path) == b"secret"
        with serving(moved(secret)) as url:
            (tmp_path / "x.zip").unlink()
            assert fetched(url, tmp_path) == b"secret"
        (tmp_path / "x.zip").unlink()
        with serving(moved(plain), tls=tls) as down:
            assert "redirects from https to an unencrypted connection" in fetch_error(down, tmp_path)
            assert not (tmp_path / "x.zip").exists()
            with serving(moved(down)) as up_and_down:
                assert "redirects from https to an unencrypted connection" in fetch_error(up_and_down, tmp_path)


def test_redirect_body_is_not_read(tmp_path):
    written = []

    def pour(handler):
        moved(there)(handler)
        for _ in range(2_000):
            written.append(handler.wfile.write(bytes(65536)))

    with serving(sends(b"x")) as there, serving(pour) as url:
        assert fetched(url, tmp_path) == b"x"
    assert len(written) < 1_000  # what fits into the buffers of two sockets


def test_untrusted_certificate_is_rejected(tmp_path, tls, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with serving(sends(b"secret"), tls=tls) as url:
        assert "CERTIFICATE_VERIFY_FAILED" in fetch_error(url, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_program_ends_transfer(tmp_path, number):
    program = (
        "from pathlib import Path\nfrom model_zoo.data.fetch import fetch\n"
        "fetch({!r}, Path({!r}), stall_seconds=600, max_bytes=9, caller='x')"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip"
        command = [sys.executable, "-c", program.format(url, str(tmp_path / "x.zip"))]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as child:
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(PATIENCE)
                child.send_signal(number)
                start = time.monotonic()
                assert child.wait(timeout=PATIENCE) == -number and time.monotonic() - start < BOUND
                while connection.recv(65536):  # the request, then the end
                    pass
            assert (b"KeyboardInterrupt" in child.stderr.read()) == (number == signal.SIGINT)
