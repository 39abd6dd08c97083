"""Unpacks an archive safely.

Only the expected files are unpacked, by name, exact size and, if it is published, SHA-256. All entries are checked
before the first is unpacked. No name in the archive is used as a path, and reading stops one byte after the expected
size.
"""

from __future__ import annotations

import gzip
import hashlib
import mmap
import os
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Callable, NamedTuple, Optional

from .._check import DataError, one_line

# The size and the SHA-256 of a file; None if the SHA-256 is not published.
Fingerprint = tuple[int, Optional[str]]
Files = dict[str, Fingerprint]

# An archive without compression is slightly longer than its files.
OVERHEAD = 1 << 20
TOP = "MNIST_Data/"
_PIECE_BYTES = 1 << 16
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
_FORMAT_ERRORS = (zipfile.BadZipFile, gzip.BadGzipFile, tarfile.TarError, zlib.error)
_DAMAGE_ERRORS = (*_FORMAT_ERRORS, EOFError, LookupError, OverflowError, RuntimeError, ValueError)


class _Entry(NamedTuple):
    """The facts that an archive states about a file, and a function that opens the file."""

    name: str
    shown: str
    size: int
    plain: bool
    open: Callable[[], Any]


def unpack_zip(archive: Path, folder: Path, files: Files) -> Files:
    """Unpack a zip archive with exactly the expected files, at its root or in `MNIST_Data/`; return fingerprints."""
    with _valid_archive("zip"), zipfile.ZipFile(archive) as source:
        return _unpack(list(_zip_entries(source, files)), folder, files)


def unpack_tar(archive: Path, folder: Path, files: Files) -> Files:
    """Unpack the expected files of a tar.gz archive, whose other entries are skipped; return fingerprints."""
    limit = bound_of(files)
    with _valid_archive("tar.gz"), tempfile.TemporaryFile(dir=archive.parent) as content:
        with gzip.open(archive) as packed:
            size, _ = copy(pieces_of(packed), content, limit=limit)
        if size > limit:
            raise rejected(f"unpack to at most {limit} bytes", "more")
        content.flush()
        # From a plain file, tarfile would allocate any size that an entry states; a memory map returns what it has.
        with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as unpacked:
            source = tarfile.open(fileobj=unpacked, mode="r:")
            return _unpack([entry for entry in _tar_entries(source) if entry.name in files], folder, files)


def bound_of(files: Files) -> int:
    """Return the maximum size of an archive of these files, compressed or not."""
    return sum(size for size, _ in files.values()) + OVERHEAD


def copy(pieces: Iterable[bytes], target: IO[bytes] | None = None, *, limit: int) -> Fingerprint:
    """Write at most `limit` + 1 bytes to the target, if there is one, and return their fingerprint."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        part = piece[: limit + 1 - size]
        size += len(part)
        digest.update(part)
        if target is not None:
            target.write(part)
        if size > limit:
            break
    return size, digest.hexdigest()


def pieces_of(file: Any) -> Iterator[bytes]:
    """Return an iterator over a file's content."""
    return iter(partial(file.read, _PIECE_BYTES), b"")


def rejected(rule: str, got: str) -> DataError:
    """Return the error for an invalid archive; the caller adds the name of its function."""
    return DataError(f"the archive must {rule}, but got {got}. Nothing was kept; try again, or give another 'url'.")


@contextmanager
def _valid_archive(kind: str) -> Iterator[None]:
    """Convert all errors of a damaged archive to a DataError."""
    try:
        yield
    except DataError:
        raise
    except _DAMAGE_ERRORS as error:
        raise rejected(f"be a valid {kind} archive", one_line(error)) from error


def _zip_entries(source: zipfile.ZipFile, files: Files) -> Iterator[_Entry]:
    """Yield the entries of a zip archive, rejecting all but the expected files and their folders."""
    folders = {"", *(f"{Path(name).parent.as_posix()}/" for name in files)}
    for member in source.infolist():
        name, shown = member.filename.removeprefix(TOP), repr(member.filename[:100])
        if name in folders and member.is_dir():
            continue
        if name not in files:
            raise rejected("contain only the expected files", shown)
        if member.flag_bits & _ENCRYPTED or member.compress_type not in _METHODS:
            raise rejected("be deflated and not encrypted", f"{shown}, which is not")
        plain = stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG)
        yield _Entry(name, shown, member.file_size, plain, partial(source.open, member))


def _tar_entries(source: tarfile.TarFile) -> Iterator[_Entry]:
    """Yield the entries of a tar archive."""
    end = 0
    for member in source:
        if source.offset <= end:  # a negative size would repeat an earlier entry without end
            raise rejected("be a valid tar.gz archive", f"{member.name[:100]!r} with a negative size")
        end = source.offset
        plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
        name, opened = member.name.removeprefix("./"), partial(source.extractfile, member)
        yield _Entry(name, repr(member.name[:100]), member.size, plain, opened)


def _unpack(entries: list[_Entry], folder: Path, files: Files) -> Files:
    """Unpack the files if there is exactly one regular entry of the right size for each."""
    by_name: dict[str, _Entry] = {}
    for entry in entries:
        size = files[entry.name][0]
        if entry.name in by_name:
            raise rejected("contain each file once", f"{entry.shown} twice")
        if not entry.plain:
            raise rejected("contain only regular files", f"{entry.shown}, a link or device")
        if entry.size != size:
            raise rejected(f"contain {size} bytes of {entry.shown}", f"{entry.size}")
        by_name[entry.name] = entry
    missing = sorted(set(files) - set(by_name))
    if missing:
        raise rejected("contain the expected files", f"none named {', '.join(missing)}")
    return {name: _write(entry, folder / name, files[name]) for name, entry in by_name.items()}


def _write(entry: _Entry, target: Path, expected: Fingerprint) -> Fingerprint:
    """Write one file, and reject it if its fingerprint is not the expected one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with entry.open() as packed, open(target, "xb") as unpacked:
        fingerprint = copy(pieces_of(packed), unpacked, limit=expected[0])
        unpacked.flush()
        os.fsync(unpacked.fileno())
    if fingerprint[0] != expected[0] or expected[1] not in (None, fingerprint[1]):
        raise rejected(f"contain the published {entry.shown}", f"SHA-256 {fingerprint[1]} ({fingerprint[0]} bytes)")
    return fingerprint
