"""Only the expected files are unpacked from a tar archive."""

from __future__ import annotations

import contextlib
import gzip
import random
import tarfile

import pytest

from cifar_files import entries, tarred, write_cifar10
from idx_files import fingerprints, left_in
from model_zoo import DataError
from model_zoo.data.archive import OVERHEAD, unpack_tar
from model_zoo.data.cifar import TOP

NAME = f"{TOP}/data_batch_2.bin"


@pytest.fixture
def small(tmp_path):
    """Six small files that are expected, by their names."""
    folder = write_cifar10(tmp_path / "original", train=2, test=1, top=TOP)
    return {name: (folder / name).read_bytes() for name in fingerprints(folder)}


def expected(tmp_path, *, known=True):
    """Return what is known of the files: their size, and perhaps their SHA-256."""
    files = fingerprints(tmp_path / "original")
    return files if known else {name: (size, None) for name, (size, _) in files.items()}


def unpack(body, tmp_path, *, known=False):
    archive = tmp_path / "original.tar.gz"
    archive.write_bytes(body)
    return unpack_tar(archive, tmp_path / "out", expected(tmp_path, known=known))


def unpack_error(body, tmp_path, **options):
    """Return the message of the error about an archive."""
    with pytest.raises(DataError) as caught:
        unpack(body, tmp_path, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("known", [True, False])
def test_only_six_expected_files_are_unpacked(tmp_path, small, known):
    unpacked = unpack(tarred(entries(small)), tmp_path, known=known)
    assert unpacked == fingerprints(tmp_path / "out") == fingerprints(tmp_path / "original")


@pytest.mark.parametrize("start", ["", "./"])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_formats(tmp_path, small, start, form, monkeypatch):
    monkeypatch.setattr(tarfile.TarFile, "format", form)
    unpack(tarred([(start + name, content) for name, content in small.items()]), tmp_path)
    assert fingerprints(tmp_path / "out") == fingerprints(tmp_path / "original")


def _member(name, kind, target=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


UNEXPECTED = {
    "slip": ("../../evil", b"x"),
    "slip under the top": (f"{TOP}/../../evil", b"x"),
    "absolute": ("/evil", b"x"),
    "a link": (_member("evil", tarfile.SYMTYPE, "/etc"), None),
    "the folder as a link": (_member(TOP, tarfile.SYMTYPE, "/"), None),
    "a device": (_member("evil", tarfile.CHRTYPE), None),
    "a pipe": (_member("evil", tarfile.FIFOTYPE), None),
}


@pytest.mark.parametrize("entry", UNEXPECTED.values(), ids=UNEXPECTED)
@pytest.mark.parametrize("first", [True, False])
def test_other_entries_are_not_written(tmp_path, small, entry, first):
    good = entries(small)
    unpack(tarred([entry, *good] if first else [*good, entry]), tmp_path)
    assert fingerprints(tmp_path / "out") == fingerprints(tmp_path / "original")
    assert {name.split("/")[0] for name in left_in(tmp_path)} == {"out"}
    assert not (tmp_path / "out" / TOP).is_symlink()


@pytest.mark.parametrize("kind", ["SYMTYPE", "LNKTYPE", "CHRTYPE", "BLKTYPE", "FIFOTYPE", "DIRTYPE", "GNUTYPE_SPARSE"])
def test_entries_other_than_files_are_rejected(tmp_path, small, kind):
    wrong = _member(NAME, getattr(tarfile, kind), f"{TOP}/data_batch_1.bin")
    others = [(name, content) for name, content in small.items() if name != NAME]
    wrong.size = len(small[NAME])  # as a file would announce; what is behind it does not matter
    body = tarred([*others, (wrong, None)])
    assert f"contain only regular files, but got '{NAME}', a link or device" in unpack_error(body, tmp_path)
    assert not (tmp_path / "out" / NAME).exists()


@pytest.mark.parametrize("change", [-1, 1, 50_000])
def test_wrong_size_is_rejected(tmp_path, small, change):
    wrong = {**small, NAME: bytes(len(small[NAME]) + change)}
    reason = f"contain {len(small[NAME])} bytes of '{NAME}', but got {len(wrong[NAME])}"
    assert reason in unpack_error(tarred(entries(wrong)), tmp_path)


def test_wrong_content_is_rejected_if_hash_is_known(tmp_path, small):
    wrong = {**small, NAME: bytes(len(small[NAME]))}
    assert f"contain the published '{NAME}', but got SHA-256" in unpack_error(
        tarred(entries(wrong)), tmp_path, known=True
    )


def test_duplicate_name_is_rejected(tmp_path, small):
    twice = [*entries(small), (NAME, small[NAME])]
    assert f"'{NAME}' twice" in unpack_error(tarred(twice), tmp_path)


def test_missing_name_is_rejected(tmp_path, small):
    del small[NAME]
    assert f"none named {NAME}" in unpack_error(tarred(entries(small)), tmp_path)


def test_tar_bomb_is_not_fully_unpacked(tmp_path, small, monkeypatch):
    unpacked, read = [], gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda file, size=-1: unpacked.append(read(file, size)) or unpacked[-1])
    assert "unpack to at most" in unpack_error(tarred([("bomb", bytes(50_000_000)), *entries(small)]), tmp_path)
    assert OVERHEAD < sum(map(len, unpacked)) < 2 * OVERHEAD and left_in(tmp_path) == set()


@pytest.mark.parametrize("kind", ["REGTYPE", "LNKTYPE", "GNUTYPE_LONGNAME", "GNUTYPE_SPARSE", "XHDTYPE", "XGLTYPE"])
@pytest.mark.parametrize("size", [1 << 64, 1 << 62, 1 << 40, -1, -512, -4096])
@pytest.mark.parametrize("first", [True, False])
def test_false_sizes_in_headers(tmp_path, small, kind, size, first):
    """They make tarfile read past the end, read the same block again, or allocate that much memory."""
    liar = bytearray(_member("liar", getattr(tarfile, kind)).tobuf(tarfile.GNU_FORMAT))
    liar[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    liar[482] = kind == "GNUTYPE_SPARSE"  # more of its map is to follow
    liar[148:156] = b" " * 8
    liar[148:156] = b"%06o\0 " % sum(liar)
    good = tarred(entries(small), mode="w")
    place = 0 if first else (len(good.rstrip(b"\0")) + 511) // 512 * 512  # the end of an archive is zeros
    (tmp_path / "original.tar.gz").write_bytes(gzip.compress(good[:place] + liar + good[place:], 1))
    with contextlib.suppress(DataError):
        unpack_tar(tmp_path / "original.tar.gz", tmp_path / "out", expected(tmp_path))
        assert fingerprints(tmp_path / "out") == expected(tmp_path, known=True)


def test_files_other_than_tar_gz_are_rejected(tmp_path, small):
    for body in (b"", b"<html>moved</html>", gzip.compress(b"no tar" * 1000), tarred(entries(small), mode="w")):
        assert "be a valid tar.gz archive" in unpack_error(body, tmp_path)


def test_damaged_archives_raise_one_line_error(tmp_path, small):
    """The packed bytes are damaged, or, with valid checksums of gzip, those of tar."""
    plain, pick, rejections = tarred(entries(small), mode="w"), random.Random(0), 0
    packed = gzip.compress(plain)
    for number in range(400):
        damaged = bytearray(packed if number % 2 else plain)
        if number % 4 < 2:
            del damaged[pick.randrange(len(damaged)) :]
        else:
            damaged[pick.randrange(min(len(damaged), 6000))] ^= 1 << pick.randrange(8)
        body = bytes(damaged) if number % 2 else gzip.compress(bytes(damaged), 1)
        (tmp_path / "original.tar.gz").write_bytes(body)
        try:
            unpack_tar(tmp_path / "original.tar.gz", tmp_path / f"out{number}", expected(tmp_path))
        except DataError as error:
            rejections += 1
            assert len(str(error).splitlines()) == 1
        else:
            # Dates, other entries and the like may differ; the files may not.
            assert fingerprints(tmp_path / f"out{number}") == expected(tmp_path)
    assert rejections > 200
