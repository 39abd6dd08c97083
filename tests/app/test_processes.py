"""The output of a process is shown line by line and logged completely, and each byte is searched once."""

from __future__ import annotations

import os

import pytest

from ms_accum.app import processes


@pytest.fixture
def relay(tmp_path):
    """Return a function that relays chunks, and returns the shown and the logged bytes."""

    def relay_chunks(*chunks):
        shown, kept = (os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) for name in ("shown", "kept"))
        stream = processes._Stream(None, kept, shown, processes.LastErrors())
        for chunk in chunks:
            stream._receive(chunk)
        stream._flush()
        os.close(shown)
        os.close(kept)
        return (tmp_path / "shown").read_bytes(), (tmp_path / "kept").read_bytes()

    return relay_chunks


TEXT = b"one\ntwo\r\nthree\r 10%\r 20%\rfour\n\nfive"


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(TEXT)])
def test_output_does_not_depend_on_chunks(relay, size):
    chunks = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    assert relay(*chunks) == (b"[0] one\n[0] two\n[0] four\n[0] \n[0] five\n", TEXT)


class Counted:
    """A pattern that counts the bytes that it searches."""

    def __init__(self, pattern):
        self.pattern, self.bytes = pattern, 0

    def finditer(self, text, start=0):
        self.bytes += len(text) - start
        return self.pattern.finditer(text, start)


@pytest.mark.parametrize(("chunk", "times"), [(b".", 90_000), (b"\r\r\r\r", 20_000), (b"x" * 1000 + b"\r", 100)])
def test_each_byte_is_searched_once(relay, monkeypatch, chunk, times):
    """Dots without a line end, for minutes: searching all of them again for each new one would take hours."""
    counted = Counted(processes._LINE_END)
    monkeypatch.setattr(processes, "_LINE_END", counted)
    relay(*[chunk] * times)
    assert len(chunk) * times <= counted.bytes <= 2 * len(chunk) * times
