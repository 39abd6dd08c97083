"""A local HTTP server with given answers."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Callable, ClassVar

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class _Handler(http.server.BaseHTTPRequestHandler):
    answer: ClassVar[Answer]

    def do_GET(self) -> None:
        # The client closes as soon as it knows enough.
        with contextlib.suppress(ConnectionError):
            self.answer()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Run a server on loopback that answers every request by `answer`; yields an address on it."""
    handler = type("Handler", (_Handler,), {"answer": answer})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/MNIST_Data.zip"
        server.shutdown()


def sends(body: bytes, *, length: int | None = None, announced: bool = True) -> Answer:
    """Answer with a body; `length` is what the header claims, where there is one."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if announced:
            handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer
