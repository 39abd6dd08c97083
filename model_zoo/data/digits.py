"""What are the embedded digits?

scikit-learn ships 1,797 handwritten digits of 8x8 pixels (the test set of UCI's "Optical
Recognition of Handwritten Digits"): real images that need no network.
"""

from __future__ import annotations

import numpy as np

from .images import Split

TEST_ROWS = 360
# Mean and standard deviation of the 1,437 training images. MNIST's constants would not do: these
# digits fill their frame and are 2.3 times as bright, so the inputs would average 0.57, not 0.
_MEAN, _STD = 0.3056, 0.3763


def load_digits_split(usage: str | None) -> Split:
    """Return the embedded digits' training split (1,437 images) or test split (360).

    The split never changes: `RandomState` is the one generator whose numbers NumPy has frozen.

    Args:
        usage (str): ``"train"`` or ``"test"``; None means train.

    Returns:
        Split, images of 8x8.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    try:
        # Here, not above: importing it takes half a second.
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "For 'create_dataset', 'data_path' must be given where scikit-learn, which holds the "
            "embedded digits, is not installed. Run: pip install scikit-learn"
        ) from error
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    rows = order[:TEST_ROWS] if usage == "test" else order[TEST_ROWS:]
    # Gray values are 0 to 16 there.
    images = np.rint(digits.images[rows] * (255 / 16)).astype(np.uint8)
    labels = digits.target[rows].astype(np.int32)
    return Split(usage or "train", images, labels, mean=_MEAN, std=_STD)
