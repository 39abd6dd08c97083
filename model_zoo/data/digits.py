"""The embedded digits.

scikit-learn contains 1,797 handwritten digits of 8x8 pixels (the test set of UCI's "Optical Recognition of Handwritten
Digits"): real images that need no download.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .images import Split

TEST_ROWS = 360
# Mean and standard deviation of the 1,437 training images. MNIST's constants are not suitable: these digits fill their
# frame and are 2.3 times as bright, so the inputs would have a mean of 0.57 instead of 0.
_MEAN, _STD = 0.3056, 0.3763


def load_digits_split(root: None, usage: str | None) -> Split:
    """Return the embedded digits' training split (1,437 images) or test split (360).

    The split never changes, because NumPy guarantees that the numbers of `RandomState` stay the same.

    Args:
        root (None): Not used; for a data set of files it is the folder.
        usage (str): ``"train"`` or ``"test"``; None means train.

    Returns:
        Split, images of 8x8.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    digits = _digits()
    order = np.random.RandomState(0).permutation(len(digits))
    rows = digits[order[:TEST_ROWS] if usage == "test" else order[TEST_ROWS:]]
    # scikit-learn's gray values are 0 to 16.
    images = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Split(usage or "train", images, rows[:, -1].astype(np.int32), mean=_MEAN, std=_STD)


@lru_cache(1)
def _digits() -> np.ndarray:
    """Return the rows of scikit-learn's file: 64 gray values, and the digit."""
    spec = find_spec("sklearn")  # imports nothing: `load_digits` would import all of SciPy, which takes a second
    if spec is None or spec.origin is None:
        raise ImportError(
            "For 'create_dataset', 'data_path' must be given if scikit-learn, which contains the embedded digits, is "
            "not installed. Run: pip install scikit-learn"
        )
    return np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
