"""How is a data pipeline measured?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Callable

from protocol import serve

BATCH = 32


def flags() -> argparse.Namespace:
    """Return what every loader is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder with train/ and test/")
    parser.add_argument("--size", type=int, default=32, help="side of the images")
    parser.add_argument("--workers", type=int, default=0, help="of PyTorch's DataLoader")
    return parser.parse_args()


def serve_loader(versions: dict[str, str], make: Callable[[], Callable[[], Iterable]]) -> None:
    """Answer how long it takes to get the first batch ("ready"), and then an "epoch".

    `make` reads the data and returns a function that returns an epoch's batches, (images, labels).
    """

    def ready() -> dict:
        started = time.perf_counter()
        kept[:] = [make()]
        images, labels = next(iter(kept[0]()))
        return {"seconds": time.perf_counter() - started, "images": list(images.shape), "labels": list(labels.shape)}

    def epoch() -> dict:
        started = time.perf_counter()
        rows = [labels.shape[0] for _, labels in kept[0]()]
        return {"seconds": time.perf_counter() - started, "batches": len(rows), "rows": sum(rows)}

    def mean() -> dict:
        """All loaders must yield the same images."""
        means = [float(images.mean()) for images, _ in kept[0]()]
        return {"mean": sum(means) / len(means)}

    kept: list[Callable[[], Iterable]] = []
    answers = {"ready": ready, "epoch": epoch, "mean": mean}
    serve(lambda: ({"versions": versions}, lambda what: answers[what]()))
