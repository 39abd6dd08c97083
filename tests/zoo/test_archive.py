"""Only the four expected files are unpacked from a zip archive."""

from __future__ import annotations

import random
import stat
import zipfile

import pytest

from idx_files import fingerprints, left_in, pairs, write_mnist, zipped
from model_zoo import DataError
from model_zoo.data.archive import TOP, unpack_zip


@pytest.fixture
def small(tmp_path):
    """Four small files that are expected, by their names."""
    folder = write_mnist(tmp_path / "original", train=20, test=10)
    return {name: (folder / name).read_bytes() for name in fingerprints(folder)}


HOSTILE = {
    "zip-slip": ([("../../evil", b"x")], "'../../evil'"),
    "zip-slip under the top": ([(TOP + "../evil", b"x")], "'MNIST_Data/../evil'"),
    "absolute": ([("/evil", b"x")], "'/evil'"),
    "windows": ([("C:\\evil", b"x")], "evil"),
    "another file": ([(TOP + "train/extra", b"x")], "extra"),
    "another folder": ([(TOP + "more/", b"")], "more/"),
    "a file named as the folder": ([("train", b"x")], "'train'"),
}


@pytest.mark.parametrize(("extra", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("first", [True, False])
def test_hostile_names_are_rejected(tmp_path, small, extra, reason, first):
    good = pairs(small)
    assert reason in unpack_error(zipped(extra + good if first else good + extra), tmp_path)
    # Rejected before anything is unpacked, at any position of the hostile entry.
    assert left_in(tmp_path) == set()


def _linked(name):
    link = zipfile.ZipInfo(name)
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    return link


def test_link_entry_is_rejected(tmp_path, small):
    (first, _), *rest = pairs(small)
    message = unpack_error(zipped([(_linked(first), b"/etc/passwd"), *rest]), tmp_path)
    assert "a link or device" in message


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("top", ["", TOP])
def test_duplicate_name_is_rejected(tmp_path, small, top):
    name, content = next(iter(small.items()))
    assert "twice" in unpack_error(zipped([*pairs(small), (top + name, content)]), tmp_path)


@pytest.mark.parametrize("top", ["", TOP])
def test_four_files_are_unpacked(tmp_path, small, top):
    entries = [(TOP + folder, b"") for folder in ("", "train/", "test/")]
    (tmp_path / "original.zip").write_bytes(zipped(entries + pairs(small, top=top)))
    unpack_zip(tmp_path / "original.zip", tmp_path / "out", fingerprints(tmp_path / "original"))
    assert fingerprints(tmp_path / "out") == fingerprints(tmp_path / "original")


def test_missing_name_is_rejected(tmp_path, small):
    message = unpack_error(zipped(pairs(small)[1:]), tmp_path)
    assert f"none named {next(iter(small))}" in message


def test_zip_bomb_is_rejected_by_size(tmp_path, small, monkeypatch):
    """Nothing of the archive is unpacked."""
    bomb = zipped(pairs({**small, "train/train-images-idx3-ubyte": bytes(50_000_000)}))
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *arguments: pytest.fail("an entry was opened"))
    assert "but got 50000000" in unpack_error(bomb, tmp_path)


def test_zip_bomb_with_false_size_is_not_written(tmp_path, small):
    name = "test/t10k-labels-idx1-ubyte"
    honest = zipped(pairs({**small, name: bytes(5_000_000)}))
    lie = honest.replace((5_000_000).to_bytes(4, "little"), len(small[name]).to_bytes(4, "little"))
    assert lie != honest
    unpack_error(lie, tmp_path)
    written = tmp_path / "unpacked" / name
    assert not written.exists() or written.stat().st_size <= len(small[name]) + 1


def test_other_compression_method_is_rejected(tmp_path, small):
    assert "deflated" in unpack_error(zipped(pairs(small), method=zipfile.ZIP_LZMA), tmp_path)


def test_encrypted_file_is_rejected(tmp_path, small):
    body = bytearray(zipped(pairs(small)))
    body[body.index(b"PK\x01\x02") + 8] |= 1
    assert "not encrypted" in unpack_error(bytes(body), tmp_path)


def unpack_error(body, tmp_path):
    """Return the message of the error about an archive."""
    archive = tmp_path / "original.zip"
    archive.write_bytes(body)
    with pytest.raises(DataError) as caught:
        unpack_zip(archive, tmp_path / "unpacked", fingerprints(tmp_path / "original"))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_damaged_archives_raise_one_line_error(tmp_path, small):
    body, pick = zipped(pairs(small)), random.Random(0)
    archive, expected = tmp_path / "original.zip", fingerprints(tmp_path / "original")
    rejections = 0
    for number in range(400):
        damaged = bytearray(body)
        if number % 2:
            del damaged[pick.randrange(len(body)) :]
        else:
            # The directory at the end is where a flip does most.
            damaged[-pick.randrange(1, 600)] ^= 1 << pick.randrange(8)
        archive.write_bytes(damaged)
        try:
            unpack_zip(archive, tmp_path / f"unpacked{number}", expected)
        except (DataError, OSError) as error:
            rejections += 1
            assert len(str(error).splitlines()) == 1
        else:
            # Dates, comments and the like may differ; the files may not.
            assert fingerprints(tmp_path / f"unpacked{number}") == expected
    assert rejections > 200
