"""Write small files in MNIST's format."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from pathlib import Path

import numpy as np

PREFIX = {"train": "train", "test": "t10k"}
SEPARATORS = {"dots": "."}
FOLDERS = {
    "split": {"train": "train", "test": "test"},
    "flat": {"train": "", "test": ""},
    "dots": {"train": "", "test": ""},
    "torchvision": {"train": "MNIST/raw", "test": "MNIST/raw"},
}


def idx_images(images: np.ndarray) -> bytes:
    """Return uint8 images (N, rows, columns) as the bytes of an IDX file."""
    return struct.pack(">4I", 2051, *images.shape) + images.astype(np.uint8).tobytes()


def idx_labels(labels: np.ndarray) -> bytes:
    """Return labels (N,) as the bytes of an IDX file."""
    return struct.pack(">2I", 2049, len(labels)) + labels.astype(np.uint8).tobytes()


def make_digits(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return learnable images: noise, and a bright square whose place is the label."""
    random = np.random.RandomState(seed)
    labels = np.arange(rows) % 10
    images = random.randint(0, 64, (rows, 28, 28))
    for image, label in zip(images, labels):
        top, left = 2 + 12 * (label // 5), 1 + 5 * (label % 5)
        image[top : top + 10, left : left + 5] = 255
    return images.astype(np.uint8), labels.astype(np.uint8)


def write_mnist(folder: Path | str, train: int = 64, test: int = 32, *, layout: str = "split") -> Path:
    """Write the four files as small as wanted, and return the folder.

    Args:
        folder (Path): The data path; made if needed.
        train (int): Training rows; 0 leaves the split out. Default: ``64``.
        test (int): Test rows; 0 leaves the split out. Default: ``32``.
        layout (str): ``"split"`` (train/, test/), ``"flat"``, ``"dots"`` (flat, `.idx3-ubyte`) or
            ``"torchvision"`` (MNIST/raw, with .gz files beside). Default: ``"split"``.
    """
    for seed, (usage, rows) in enumerate((("train", train), ("test", test))):
        if rows:
            place = Path(folder, FOLDERS[layout][usage])
            place.mkdir(parents=True, exist_ok=True)
            images, labels = make_digits(rows, seed)
            for kind, content in (("images", idx_images(images)), ("labels", idx_labels(labels))):
                _write(place, f"{PREFIX[usage]}-{kind}", kind, content=content, layout=layout)
    return Path(folder)


def _write(place: Path, stem: str, kind: str, *, content: bytes, layout: str) -> None:
    dims = {"images": 3, "labels": 1}[kind]
    name = f"{stem}{SEPARATORS.get(layout, '-')}idx{dims}-ubyte"
    (place / name).write_bytes(content)
    if layout == "torchvision":
        (place / f"{name}.gz").write_bytes(b"\x1f\x8b, never read")


def fingerprints(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of every file, by its name relative to the folder."""
    result = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            result[name] = (len(content), hashlib.sha256(content).hexdigest())
    return result


def rows_of(dataset):
    """Return one fresh epoch as comparable rows: the bytes of each image with its label."""
    return [
        (image.tobytes(), int(label))
        for images, labels in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True)
        for image, label in zip(images, labels)
    ]


def zipped(files: list, *, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return an archive of (name or ZipInfo, content) pairs."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return buffer.getvalue()


def pairs(files: dict[str, bytes], *, top: str = "MNIST_Data/") -> list[tuple[str, bytes]]:
    """Return files as the entries of the tutorials' archive."""
    return [(top + name, content) for name, content in files.items()]


def left_in(folder: Path) -> set[str]:
    """Return everything below a folder but the originals."""
    names = {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")}
    return {name for name in names if not name.startswith("original")}
