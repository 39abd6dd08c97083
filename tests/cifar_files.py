"""Write small files in CIFAR-10's format."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np

from model_zoo.data.cifar import FILES, RECORD, TOP


def make_records(rows: int, seed: int) -> np.ndarray:
    """Return learnable records: noise, and a bright square whose place and channel are the label's."""
    records = np.random.RandomState(seed).randint(0, 128, (rows, RECORD)).astype(np.uint8)
    records[:, 0] = np.arange(rows) % 10
    images = records[:, 1:].reshape(rows, 3, 32, 32)
    for image, label in zip(images, records[:, 0]):
        top, left = 8 + 8 * (label % 2), 2 + 4 * label // 2
        image[label % 3, top : top + 8, left : left + 8] = 255
    return records


def write_cifar10(folder: Path | str, train: int = 20, test: int = 10, *, top: str = "") -> Path:
    """Write the six files, `train` records in each of five and `test` in one, and return the folder."""
    place = Path(folder, top)
    place.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate((*FILES["train"], *FILES["test"])):
        rows = test if name in FILES["test"] else train
        if rows:
            (place / name).write_bytes(make_records(rows, seed).tobytes())
    return Path(folder)


def tarred(files: list, *, mode: str = "w:gz") -> bytes:
    """Return an archive of (name or TarInfo, content) pairs; content None is for what holds none."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for entry, content in files:
            member = entry if isinstance(entry, tarfile.TarInfo) else tarfile.TarInfo(entry)
            if content is not None:
                member.size = len(content)
            archive.addfile(member, None if content is None else io.BytesIO(content))
    return buffer.getvalue()


def entries(files: dict[str, bytes]) -> list:
    """Return files as the entries of the official archive: the folder, two texts, and the six."""
    folder = tarfile.TarInfo(TOP)
    folder.type = tarfile.DIRTYPE
    texts = [(f"{TOP}/readme.html", b"<html>"), (f"{TOP}/batches.meta.txt", b"airplane\n")]
    return [(folder, None), *texts, *[(f"{TOP}/{Path(name).name}", content) for name, content in files.items()]]
