"""What may come out of a compressed tar archive?

As of a zip archive: expected files, by name and exact size. Its other entries are passed over, not written;
reading stops a little past what the expected files hold, however long the archive says that it is.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from pathlib import Path
from typing import IO, Any

from model_zoo._check import DataError
from model_zoo.archive import OVERHEAD, Files, keep, refused

_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


def unpack_tar(archive: Path, folder: Path, files: Files) -> Files:
    """Unpack exactly the expected files.

    Args:
        archive (Path): A tar.gz file, not trusted.
        folder (Path): Where the files go, under their expected names.
        files (Mapping): Name, with `/`, to size and SHA-256, which may be None.

    Returns:
        The files with the SHA-256 that they have.

    Raises:
        DataError: If the archive is damaged, or an expected file is not what it must be.
        OSError: If a file can't be written.
    """
    try:
        with gzip.open(archive) as content:
            bounded: Any = _Bounded(content, files)
            source = tarfile.open(fileobj=bounded, mode="r|")
            return _unpack_members(source, folder, files)
    except DataError:
        raise
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise refused("be a sound tar.gz archive", " ".join(str(error).split())) from error


class _Bounded:
    """What tarfile reads from: the unpacked bytes, up to a bound, so that a bomb is not unpacked to its end."""

    def __init__(self, content: gzip.GzipFile, files: Files) -> None:
        self._content = content
        self._bound = self._left = sum(size for size, _ in files.values()) + OVERHEAD

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        chunk = self._content.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise refused(f"unpack to at most {self._bound} bytes", "more")
        return chunk


def _unpack_members(source: tarfile.TarFile, folder: Path, files: Files) -> Files:
    """Unpack the expected files in the order in which they come."""
    found: Files = {}
    for member in source:
        name = member.name[2:] if member.name.startswith("./") else member.name
        if name not in files:
            continue
        if name in found:
            raise refused("hold each file once", f"{name!r} twice")
        packed = _plain_file(source, member, size=files[name][0])
        found[name] = keep(packed, folder / name, name, files[name])
    absent = sorted(set(files) - set(found))
    if absent:
        raise refused("hold the known files", f"none named {', '.join(absent)}")
    return found


def _plain_file(source: tarfile.TarFile, member: tarfile.TarInfo, *, size: int) -> IO[bytes]:
    """Return an entry's content, refusing one that is no plain file, or announces another size."""
    shown = repr(member.name[:100])
    packed = source.extractfile(member) if member.type in _PLAIN and not member.issparse() else None
    if packed is None:
        raise refused("hold plain files only", f"{shown}, a link or device")
    if member.size != size:
        raise refused(f"hold {size} bytes of {shown}", f"{member.size}")
    return packed
