"""Where does a folder keep MNIST, and do its files belong together?"""

from __future__ import annotations

from pathlib import Path

from model_zoo._check import DataError, check_folder, quote
from model_zoo.cifar import holds_cifar10
from model_zoo.idx import read_images, read_labels
from model_zoo.images import Split

# The constants of MindSpore's tutorials: mean and standard deviation of MNIST's training pixels.
_MEAN, _STD = 0.1307, 0.3081
_PREFIX = {"train": "train", "test": "t10k"}


def load_mnist(root: Path, usage: str | None) -> Split:
    """Read one split of MNIST from a folder in any of the usual layouts.

    Args:
        root (Path): The folder.
        usage (str): ``"train"``, ``"test"``, or None for the split it holds (of both, train).

    Returns:
        Split, checked.

    Raises:
        FileNotFoundError: If the folder or a file of the split is missing.
        DataError: If `root` is a file, or a file is damaged, or the two do not belong together.
    """
    check_folder("create_dataset", root, fetch="fetch MNIST into it, for example with 'train.py --download'")
    images_path, labels_path, usage = _locate(root, usage)
    images, labels = read_images(images_path), read_labels(labels_path)
    if len(images) != len(labels):
        raise DataError(
            f"For 'create_dataset', the files {quote(images_path)} and {quote(labels_path)} must "
            f"hold equally many items, but got {len(images)} images and {len(labels)} labels. "
            "One of them belongs to another data set: fetch both again."
        )
    return Split(usage, images, labels, mean=_MEAN, std=_STD)


def find_split(root: Path, usage: str) -> tuple[Path, Path] | None:
    """Return the split's image and label file, or None where one of them is missing."""
    for folder in _folders(root, usage):
        images, labels = _find(folder, usage, "images-idx3"), _find(folder, usage, "labels-idx1")
        if images and labels:
            return images, labels
    return None


def _locate(root: Path, usage: str | None) -> tuple[Path, Path, str]:
    """Return the files and the split's name, or raise an error that says what is missing."""
    wanted = ("train", "test") if usage is None else (usage,)
    for candidate in wanted:
        found = find_split(root, candidate)
        if found:
            return (*found, candidate)
    raise FileNotFoundError(_missing(root, wanted))


def _missing(root: Path, wanted: tuple[str, ...]) -> str:
    """Word what is missing: one file of a pair, unpacked files, or everything."""
    folders = [(folder, usage) for usage in wanted for folder in _folders(root, usage)]
    for folder, usage in folders:
        for there, absent in (("images-idx3", "labels-idx1"), ("labels-idx1", "images-idx3")):
            present = _find(folder, usage, there)
            if present:
                path = folder / f"{_PREFIX[usage]}-{absent}-ubyte"
                return (
                    f"For 'create_dataset', the file {quote(path)} is missing beside "
                    f"'{present.name}'. Fetch MNIST again, for example with 'train.py --download'."
                )
    for folder, usage in folders:
        packed = folder / f"{_PREFIX[usage]}-images-idx3-ubyte.gz"
        if packed.is_file():
            return (
                f"For 'create_dataset', the files of 'data_path' must be unpacked, but got "
                f"{quote(packed)}. Run gunzip on the .gz files in that folder."
            )
    if holds_cifar10(root):
        return (
            f"For 'create_dataset', 'data_path' must hold MNIST, but got {quote(root)} with CIFAR-10. "
            "Say so: dataset='cifar10', or '--dataset cifar10'."
        )
    names = " or ".join(f"{_PREFIX[usage]}-images-idx3-ubyte" for usage in wanted)
    return (
        f"For 'create_dataset', 'data_path' must hold MNIST's {names} (in the folder itself, in "
        f"train/ and test/, or in MNIST/raw/), but got {quote(root)} without it. "
        "Fetch MNIST, for example with 'train.py --download'."
    )


def _folders(root: Path, usage: str) -> tuple[Path, ...]:
    """Return where a split may be: tutorial, flat, torchvision (three ways in), unzipped here."""
    places = (usage, "", "raw", "MNIST/raw", f"MNIST_Data/{usage}")
    return tuple(root / place for place in places)


def _find(folder: Path, usage: str, kind: str) -> Path | None:
    """Return the file under its name with a dash (the original) or a dot (some unpackers)."""
    stem = f"{_PREFIX[usage]}-{kind}-ubyte"
    for name in (stem, stem.replace("-idx", ".idx")):
        if (folder / name).is_file():
            return folder / name
    return None
