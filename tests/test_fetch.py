"""Does a fetch end in bounded time, whatever the server does, and keep to TLS?"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

import model_zoo.fetch
from loopback import sends, serving
from model_zoo.fetch import fetch

# Long enough for a busy machine; what must stall is given less.
PATIENCE, BOUND = 60.0, 20


def fetched(url, folder, *, stall_seconds=PATIENCE, max_bytes=1 << 20):
    """Return what was fetched."""
    fetch(url, folder / "x.zip", stall_seconds=stall_seconds, max_bytes=max_bytes, caller="download_mnist")
    return (folder / "x.zip").read_bytes()


def unfetched(url, folder, *, error=OSError, **kwargs):
    """Return the message of a failure, after seeing that it took the form of one line."""
    with pytest.raises(error) as caught:
        fetched(url, folder, **kwargs)
    message = str(caught.value)
    start = f"For 'download_mnist', 'url' must be a file that can be fetched, but got {url!r}: "
    assert message.startswith(start) and message.endswith("or give a mirror's address.")
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("announced", [True, False])
def test_a_file_comes_as_it_is(tmp_path, announced):
    body = bytes(range(256)) * 1000
    with serving(sends(body, announced=announced)) as url:
        assert fetched(url, tmp_path) == body


def test_a_server_that_never_answers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, start = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip", time.monotonic()
        message = unfetched(url, tmp_path, error=TimeoutError, stall_seconds=1)
        assert "nothing came for 1 seconds, after 0 bytes" in message
        assert time.monotonic() - start < BOUND


def test_a_server_that_stalls_in_the_body(tmp_path):
    over = threading.Event()

    def stall(handler):
        sends(b"x" * 10_000, length=20_000)(handler)
        handler.wfile.flush()
        over.wait(30)

    with serving(stall) as url:
        start = time.monotonic()
        message = unfetched(url, tmp_path, error=TimeoutError, stall_seconds=2)
        over.set()
        assert "nothing came for 2 seconds" in message
        assert time.monotonic() - start < BOUND


def test_a_body_without_end(tmp_path):
    def pour(handler):
        sends(b"", announced=False)(handler)
        for _ in range(100_000):
            handler.wfile.write(b"x" * 65536)

    with serving(pour) as url:
        assert "it is longer than 1048576 bytes" in unfetched(url, tmp_path)


def test_a_body_shorter_than_announced(tmp_path):
    with serving(sends(b"x" * 100, length=200)) as url:
        assert "100" in unfetched(url, tmp_path)


def test_an_error_page(tmp_path):
    with serving(lambda handler: handler.send_error(404)) as url:
        assert "404" in unfetched(url, tmp_path)


def test_nobody_listens(tmp_path):
    assert "refused" in unfetched("http://127.0.0.1:1/x.zip", tmp_path)


def test_tls_is_not_given_up_on_a_redirect(monkeypatch):
    installed = []
    monkeypatch.setattr(urllib.request, "install_opener", installed.append)
    model_zoo.fetch._keep_tls()
    handlers = [handler for handler in installed[0].handlers if hasattr(handler, "redirect_request")]
    assert len(handlers) == 1

    def redirect(old, new):
        request = urllib.request.Request(old)
        return handlers[0].redirect_request(request, None, 302, "Found", {}, new)

    for new in ("http://b/x", "ftp://b/x", "HTTP://b/x"):
        with pytest.raises(urllib.error.URLError, match="from https"):
            redirect("https://a/x", new)
    assert redirect("https://a/x", "https://b/x").full_url == "https://b/x"
    assert redirect("http://a/x", "http://b/x").full_url == "http://b/x"


def test_the_child_ends_with_its_parent(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip"
        program = [sys.executable, "-c", model_zoo.fetch._START, model_zoo.fetch.__file__]
        with subprocess.Popen([*program, url, str(tmp_path / "x.zip")], stdin=subprocess.PIPE) as child:
            silent.settimeout(PATIENCE)
            connection, _ = silent.accept()
            # The pipe closes as it does when a parent is killed.
            child.stdin.close()
            assert child.wait(timeout=PATIENCE) == 1
            connection.close()
