"""What may come out of an archive?

Only files that are expected, by name, exact size and, where it is known, SHA-256. The archive names nothing
on disk and its sizes are believed nowhere: reading stops one byte past the size that is known.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
import zlib
from pathlib import Path
from typing import IO, Optional

from model_zoo._check import DataError

# What to expect of a file: its bytes and the SHA-256 over them, None where nobody has published it.
Fingerprint = tuple[int, Optional[str]]
Files = dict[str, Fingerprint]

# An archive that compresses nothing is as long as its files, and a little.
OVERHEAD = 1 << 20
TOP = "MNIST_Data/"
_CHUNK = 1 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1


def unpack_zip(archive: Path, folder: Path, files: Files) -> Files:
    """Unpack exactly the expected files, at the archive's root or under `MNIST_Data/`.

    Args:
        archive (Path): A zip file, not trusted.
        folder (Path): Where the files go, under their expected names.
        files (Mapping): Name, with `/`, to size and SHA-256.

    Returns:
        The files with the SHA-256 that they have.

    Raises:
        DataError: If the archive is damaged or holds anything else.
        OSError: If a file can't be written.
    """
    try:
        with zipfile.ZipFile(archive) as source:
            members = _members(source, files)
            return {name: _unpack_member(source, members[name], folder / name, files[name]) for name in members}
    except DataError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise refused("be a sound zip archive", " ".join(str(error).split())) from error


def _unpack_member(
    source: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, expected: Fingerprint
) -> Fingerprint:
    with source.open(member) as packed:
        return keep(packed, target, member.filename, expected)


def keep(packed: IO[bytes], target: Path, name: str, expected: Fingerprint) -> Fingerprint:
    """Write one file of an archive to the disk, refusing it if it is not what is expected."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") as unpacked:
        found = _copy(packed, unpacked, limit=expected[0])
    if not agree(found, expected):
        raise refused(f"hold the known {_shown(name)}", f"SHA-256 {found[1]} ({found[0]} bytes)")
    return found


def agree(found: Fingerprint, expected: Fingerprint) -> bool:
    """Compare two fingerprints by what is known of both."""
    return found[0] == expected[0] and expected[1] in (None, found[1])


def fingerprint(path: Path, *, limit: int) -> Fingerprint:
    """Return the size and SHA-256 of a file, of at most `limit` + 1 bytes of it."""
    with open(path, "rb") as file:
        return _copy(file, None, limit=limit)


def _copy(source: IO[bytes], target: IO[bytes] | None, *, limit: int) -> Fingerprint:
    """Copy at most `limit` + 1 bytes to the disk, returning their fingerprint."""
    digest, size = hashlib.sha256(), 0
    while size <= limit:
        chunk = source.read(min(_CHUNK, limit + 1 - size))
        if not chunk:
            break
        size += len(chunk)
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    if target is not None:
        target.flush()
        os.fsync(target.fileno())
    return size, digest.hexdigest()


def _members(source: zipfile.ZipFile, files: Files) -> dict[str, zipfile.ZipInfo]:
    """Return the archive's entry for each expected file, refusing every other entry."""
    folders = {""} | {f"{Path(name).parent.as_posix()}/" for name in files}
    members: dict[str, zipfile.ZipInfo] = {}
    for member in source.infolist():
        name = member.filename
        name = name[len(TOP) :] if name.startswith(TOP) else name
        if name in folders and member.is_dir():
            continue
        if name not in files:
            raise refused("hold the known files only", _shown(member.filename))
        if name in members:
            raise refused("hold each file once", f"{_shown(member.filename)} twice")
        _check_member(member, size=files[name][0])
        members[name] = member
    absent = sorted(set(files) - set(members))
    if absent:
        raise refused("hold the known files", f"none named {', '.join(absent)}")
    return members


def _check_member(member: zipfile.ZipInfo, *, size: int) -> None:
    """Refuse an entry that is no plain file, or announces another size."""
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
        raise refused("hold plain files only", f"{_shown(member.filename)}, a link or device")
    if member.flag_bits & _ENCRYPTED or member.compress_type not in _METHODS:
        raise refused("be deflated and not encrypted", f"{_shown(member.filename)}, which is not")
    if member.file_size != size:
        raise refused(f"hold {size} bytes of {_shown(member.filename)}", f"{member.file_size}")


def _shown(name: str) -> str:
    return repr(name[:100])


def refused(rule: str, got: str) -> DataError:
    """Word what an archive must do; whose archive it is, the caller adds."""
    return DataError(f"the archive must {rule}, but got {got}. Nothing was kept; try again, or give another 'url'.")
