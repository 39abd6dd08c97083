"""The sections of a report about text: the loss, samples, the most surprising lines, and the loss by position."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from html import escape
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import _check
from .report_page import Subject, head, shown, table

_BIT = math.log(2)
_LONGEST = 400  # tokens of a line: a longer one is cut, so that memory is bounded
_SHORTEST = 20  # tokens of a line that is compared with others
_HARDEST = 12.0  # bits from which a character has the strongest shade

# What a model predicts


class Line(NamedTuple):
    """A line of the text."""

    surprise: float
    """The mean of -log2 p over its tokens."""
    number: int
    """The number of the line, from 1."""
    text: str
    bits: Sequence[float]
    """-log2 p of each token; one for each character of `text`, unless tokens are bytes."""


class TextAnswers:
    """What a model predicts on a split, collected batch by batch; of the text only the most surprising lines.

    Args:
        decode (Callable): from tokens to text.
        line_end (int): the token that ends a line; -1 for none.
        context (int): tokens in a block.
        keep (int): the lines that are kept. Default: ``20``.
    """

    def __init__(self, decode: Callable[[Any], str], line_end: int, context: int, keep: int = 20):
        self._decode, self._line_end, self._keep = decode, line_end, keep
        self._tokens: list[int] = []
        self._bits: list[float] = []
        self._number = 1
        self._heap: list[Line] = []
        self._block_sums: list[tuple[float, int]] = []
        self._by_position = np.zeros(context)
        self._counts = np.zeros(context, np.int64)

    @property
    def lines(self) -> list[Line]:
        """list[Line], the most surprising ones, the most surprising first."""
        return sorted(self._heap, reverse=True)

    @property
    def loss(self) -> float:
        """float, the mean of -ln p."""
        return float(self._by_position.sum() / self._counts.sum())

    @property
    def tokens(self) -> int:
        """int, the tokens that were predicted."""
        return int(self._counts.sum())

    @property
    def half_interval(self) -> float:
        """float, half of the 95 % interval of the loss: blocks are seen as independent samples of the text."""
        sums = np.array(self._block_sums, np.float64).reshape(-1, 2)
        residuals = sums[:, 0] - self.loss * sums[:, 1]
        return float(1.959964 * math.sqrt(float((residuals**2).sum())) / sums[:, 1].sum())

    def by_position(self) -> list[tuple[int, int, float]]:
        """Return the mean of -log2 p by position in the block: first and last position, from 1, and the mean."""
        rows, first = [], 0
        while first < len(self._counts):
            last = min(2 * first + 1, len(self._counts))  # 1, 2-3, 4-7, ...
            count = self._counts[first:last].sum()
            if count:
                rows.append((first + 1, last, float(self._by_position[first:last].sum() / count / _BIT)))
            first = last
        return rows

    def add(self, tokens: Any, targets: Any, losses: Any) -> None:
        """Add a batch of blocks in their order: tokens, targets (below 0: padding), and -ln p of each target."""
        del tokens
        targets, losses = np.asarray(targets), np.asarray(losses, np.float64)
        for row, values in zip(targets, losses):
            counts = row >= 0
            self._by_position += np.where(counts, values, 0)
            self._counts += counts
            self._block_sums.append((float(values[counts].sum()), int(counts.sum())))
            self._read(row[counts].tolist(), (values[counts] / _BIT).tolist(), ends=not counts.all())

    def _read(self, tokens: list[int], bits: list[float], *, ends: bool) -> None:
        """Read the tokens of a block; `ends`: its document ends with it."""
        for token, surprise in zip(tokens, bits):
            if len(self._tokens) < _LONGEST:
                self._tokens.append(token)
                self._bits.append(surprise)
            if token == self._line_end:
                self._end_line()
        if ends:
            self._end_line()

    def _end_line(self) -> None:
        tokens, bits = self._tokens, self._bits
        if len(tokens) >= _SHORTEST and np.isfinite(bits).all():
            line = Line(sum(bits) / len(bits), self._number, self._decode(tokens).rstrip("\n"), tuple(bits))
            (heapq.heappush if len(self._heap) < self._keep else heapq.heappushpop)(self._heap, line)
        self._tokens, self._bits = [], []
        self._number += 1


# The sections


class Sample(NamedTuple):
    """A text of the model."""

    how: str
    """How it was made, in words."""
    text: str


def text_sections(
    subject: Subject, answers: TextAnswers, samples: Sequence[Sample], entropy: float | None = None
) -> dict[str, str]:
    """Return the sections of the page, by heading.

    Args:
        subject (Subject): what was evaluated, and on what.
        answers (TextAnswers): what the model predicts.
        samples (Sequence[Sample]): texts of the model.
        entropy (Optional[float]): of the text in bits per character, if it is known. Default: ``None``.
    """
    return {
        "Loss": _loss(subject, answers, entropy),
        "Samples": "\n".join(f'<p class="note">{shown(how)}</p>\n{_block(text)}' for how, text in samples),
        "Most surprising lines": _lines(answers),
        "Loss by position": _positions(answers),
    }


def _loss(subject: Subject, answers: TextAnswers, entropy: float | None) -> str:
    loss, half = answers.loss, answers.half_interval
    low, high = loss - half, loss + half
    lines = [
        f'<p class="big">{loss:.4f} <small>({loss / _BIT:.3f} bits per token, {answers.tokens:,} tokens)</small></p>',
        f"<p>Perplexity {math.exp(min(loss, 700)):,.2f}. 95\u00a0% interval of the loss: {low:.3f} to {high:.3f}.</p>",
        '<p class="note">The interval is from the spread between blocks, as if they were independent. It does not '
        "cover other texts, nor other seeds.</p>",
    ]
    if entropy is not None:
        lines.append(f"<p>The text itself has {entropy:.3f} bits per character: no model can do better.</p>")
    record = subject.record
    if record and record["predicted"] and record["loss"] is not None:
        text = "" if subject.same_data else ", on another text"
        lines.append(f"<p>Recorded after training: {record['loss']:.4f} ({record['predicted']:,} tokens){text}.</p>")
    return "\n".join(lines)


def _block(text: str) -> str:
    return f'<div class="text">{escape(_check.visible(text))}</div>'


def _lines(answers: TextAnswers) -> str:
    """Return the lines, in which surprising characters are shaded; the hardest is also named."""
    if not answers.lines:
        return "<p>No line is long enough.</p>"
    items = []
    for line in answers.lines:
        note = f"line {line.number:,}: {line.surprise:.2f} bits per token"
        if len(line.text) in (len(line.bits), len(line.bits) - 1):  # one token for each character
            place = int(np.argmax(line.bits[: len(line.text)]))
            note += f", up to {line.bits[place]:.1f} for \u201c{line.text[place]}\u201d after {place:,} characters"
            content = "".join(map(_shaded, line.text, line.bits))
        else:
            content = escape(_check.visible(line.text))
        items.append(f'<li><div class="text">{content}</div><span class="note">{shown(note)}</span></li>')
    introduction = "Lines with the largest mean of -log2 p. A stronger shade is a character that was less expected."
    listed = "\n".join(items)
    return f'<p class="note">{introduction}</p>\n<ol class="lines">\n{listed}\n</ol>'


def _shaded(character: str, bits: float) -> str:
    text = escape(_check.visible(character))
    shade = min(bits / _HARDEST, 1.0)
    return text if shade < 0.1 else f'<b style="--s:{shade:.2f}">{text}</b>'


def _positions(answers: TextAnswers) -> str:
    rows = [
        f'<tr><th scope="row">{first}{f" to {last}" if last > first else ""}</th><td>{bits:.3f}</td></tr>'
        for first, last, bits in answers.by_position()
    ]
    caption = "The first tokens of a block have little before them. Bits per token, by position in the block"
    return table("positions", "Loss by position", caption, head("Position", "Bits per token"), rows)
