"""The names of the classes of each data set."""

from __future__ import annotations

_DIGITS = tuple("0123456789")
# In the order of the labels, as in the archive's batches.meta.txt.
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def class_names(dataset: str) -> tuple[str, ...]:
    """Return the names of the classes of ``"mnist"``, ``"digits"`` or ``"cifar10"``, in the order of the labels."""
    return {"mnist": _DIGITS, "digits": _DIGITS, "cifar10": _CIFAR10}[dataset]
