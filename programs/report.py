"""Writes the report of a network that classifies images: one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from mindspore import nn

from ms_accum.network.training_mode import training_mode
from ms_accum.saving.files import write_bytes

_SHOWN = 30
_STYLE = "body{font-family:sans-serif;max-width:60em;margin:2em auto}figure{display:inline-block;margin:.5em}"


def write_report(folder: str, model: str, network: nn.Cell, test: Iterable[Any]) -> str:
    """Write report.html, and return its path.

    Args:
        folder (str): the folder, which is created.
        model (str): the path of the model, for the heading.
        network (Cell): from images to scores.
        test (Iterable): batches of (image, label).
    """
    from sklearn.metrics import classification_report

    images, scores, labels = _predicted(network, test)
    probabilities = np.exp(scores - scores.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    guesses, certain = probabilities.argmax(1), probabilities.max(1)
    wrong = np.flatnonzero(guesses != labels)
    wrong = wrong[np.argsort(-certain[wrong], kind="stable")][:_SHOWN]
    figures = [
        f"<figure>{_picture(images[row])}<figcaption>{labels[row]}, taken for {guesses[row]} ({certain[row]:.0%})"
        for row in wrong
    ]
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(model)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(model)}</h1>
<p>{(guesses == labels).mean():.2%} of {len(labels):,} images are classified correctly.</p>
<pre>{html.escape(classification_report(labels, guesses, digits=4, zero_division=0))}</pre>
<h2>Confusion matrix</h2>
{_confusion(labels, guesses)}
<h2>The most certain wrong answers</h2>
{"</figcaption></figure>".join([*figures, ""]) or "<p>There are none.</p>"}
</body></html>
"""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "report.html")
    write_bytes(path, page.encode())
    return path


def _predicted(network: nn.Cell, test: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the images, the network's scores and the labels."""
    with training_mode(network, False):
        batches = [
            (image.asnumpy(), network(image).asnumpy().astype(np.float64), label.asnumpy())
            for image, label in test.create_tuple_iterator(num_epochs=1)
        ]
    images, scores, labels = (np.concatenate(column) for column in zip(*batches))
    return images, scores, labels


def _confusion(labels: np.ndarray, guesses: np.ndarray) -> str:
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    figure = Figure(figsize=(6, 6), layout="constrained")
    ConfusionMatrixDisplay.from_predictions(labels, guesses, ax=figure.subplots(), colorbar=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return _tag(picture, "a matrix with a row for each label and a column for each answer")


def _picture(image: np.ndarray) -> str:
    """Return an image, of any scale, as an HTML tag."""
    from PIL import Image

    low, high = image.min(), image.max()
    pixels: np.ndarray = (255 * (image - low) / max(high - low, 1e-9)).astype(np.uint8).transpose(1, 2, 0)
    picture = io.BytesIO()
    Image.fromarray(pixels.squeeze()).resize((96, 96), Image.Resampling.NEAREST).save(picture, "PNG")
    return _tag(picture, "a wrongly classified image")


def _tag(picture: io.BytesIO, text: str) -> str:
    return f'<img alt="{text}" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'
