"""The sections of a report about a text: loss, surprise by place and kind, samples, the most surprising lines.

The surprise of a character is -log2 of the probability that the model gave to it, in bits. Does not import MindSpore.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import _check
from .report_page import Subject, head, percent, shown, table

# What a model has predicted

IGNORED = -100
"""int, the target of padding."""
_SHORTEST, _LONGEST = 16, 200  # characters of a line that may be shown; longer lines are divided
_STRETCHES, _FEWEST_STRETCHES = 32, 8
_MOST_SUMS = 4096


class Line(NamedTuple):
    """A line of the text, or a part of a long one."""

    number: int
    """The number of the line in the split, from 1."""
    tokens: np.ndarray
    """Its tokens, without the line end."""
    bits: np.ndarray
    """The surprise of each token; NaN for the first one of a document, which is not predicted."""
    mean: float
    """The mean surprise of a character."""


class TextAnswers:
    """What a model has predicted of a text, collected batch by batch: sums, and the most surprising lines.

    Args:
        decode (Callable): returns the text of tokens.
        tokens (int): the number of different tokens.
        is_bytes (bool): whether tokens are the bytes of UTF-8, and not characters. Default: ``False``.
        keep (int): the number of lines that are kept. Default: ``12``.
    """

    def __init__(
        self, decode: Callable[[np.ndarray], str], tokens: int, *, is_bytes: bool = False, keep: int = 12
    ) -> None:
        self._decode = decode
        self.is_bytes = is_bytes
        """bool, whether tokens are bytes."""
        self.texts = [decode(np.array([token])) for token in range(tokens)]
        """list[str], the text of each token."""
        self.counts = np.zeros(tokens, np.int64)
        """numpy.ndarray, how often each token was predicted."""
        self.bits = np.zeros(tokens)
        """numpy.ndarray, the sum of the surprises of each token."""
        self.counts_by_position = np.zeros(0, np.int64)
        """numpy.ndarray, the tokens that were predicted at each position of a block."""
        self.bits_by_position = np.zeros(0)
        """numpy.ndarray, the sum of the surprises at each position of a block."""
        self.not_finite = 0
        """int, the number of losses that are not finite."""
        # The later bytes of a character in UTF-8 are 10xxxxxx.
        self._starts_character = np.array([not is_bytes or token & 0xC0 != 0x80 for token in range(tokens)])
        self._sums = np.zeros((0, 3))  # of consecutive blocks: bits, tokens, characters
        self._last = IGNORED  # the last token that was predicted; IGNORED after a document's end
        self._lines = _Lines(np.array([text == "\n" for text in self.texts]), self._starts_character, keep)

    def add(self, tokens: Any, targets: Any, losses: Any) -> None:
        """Add a batch of blocks, which follow each other in the text.

        Args:
            tokens (ndarray): the inputs of the network, of shape (blocks, context).
            targets (ndarray): the token after each; -100 for padding, at the end of a document.
            losses (ndarray): the loss of each target, -ln p.

        Raises:
            ValueError: If a token is out of range.
        """
        tokens, targets = np.asarray(tokens), np.asarray(targets)
        bits = np.asarray(losses, np.float64).reshape(targets.shape) / math.log(2)
        is_target = targets != IGNORED
        for name, numbers in (("tokens", tokens), ("targets", targets[is_target])):
            outside = numbers[(numbers < 0) | (numbers >= len(self.counts))]
            if len(outside):
                raise ValueError(
                    f"For 'TextAnswers', '{name}' must be 0 to {len(self.counts) - 1}, but got {outside[0]}."
                )
        self.not_finite += int((~np.isfinite(bits[is_target])).sum())
        self._add_sums(targets, bits, is_target)
        self._add_lines(tokens, targets, bits, is_target)

    @property
    def lines(self) -> list[Line]:
        """list[Line], the lines with the largest mean surprise of a character, the largest first."""
        return self._lines.best

    @property
    def total(self) -> int:
        """int, the number of tokens that were predicted."""
        return int(self.counts.sum())

    @property
    def characters(self) -> int:
        """int, the number of characters that were predicted."""
        return int(self.counts[self._starts_character].sum())

    def bits_per(self, unit: str) -> tuple[float, tuple[float, float] | None]:
        """Return the mean surprise of a ``"token"`` or a ``"character"``, and its 95 % interval.

        The interval is Student's, of the means of consecutive stretches of the text; None for fewer than 8 stretches.
        """
        return mean_and_interval(self.stretches()[:, [0, 1 if unit == "token" else 2]])

    def stretches(self) -> np.ndarray:
        """Return bits, tokens and characters of up to 32 consecutive stretches of about equally many tokens."""
        middle = np.cumsum(self._sums[:, 1]) - self._sums[:, 1] / 2
        numbers = (middle / max(1, self.total) * _STRETCHES).astype(np.int64)
        sums = np.zeros((_STRETCHES, 3))
        np.add.at(sums, numbers, self._sums)
        return sums[sums[:, 1] > 0]

    def characters_of(self, line: Line) -> list[tuple[str, float]]:
        """Return the characters of a line, and the surprise of each; NaN for one that is not predicted."""
        starts = np.flatnonzero(self._starts_character[line.tokens])
        starts = np.append(0, starts[starts > 0])
        ends = np.append(starts[1:], len(line.tokens))
        texts = (self._decode(line.tokens[start:end]) for start, end in zip(starts, ends))
        return list(zip(texts, np.add.reduceat(line.bits, starts).tolist()))

    def _add_sums(self, targets: np.ndarray, bits: np.ndarray, is_target: np.ndarray) -> None:
        np.add.at(self.counts, targets[is_target], 1)
        np.add.at(self.bits, targets[is_target], bits[is_target])
        if not len(self.bits_by_position):
            self.counts_by_position, self.bits_by_position = (
                np.zeros(targets.shape[1], np.int64),
                np.zeros(len(bits[0])),
            )
        self.counts_by_position += is_target.sum(axis=0)
        self.bits_by_position += np.where(is_target, bits, 0.0).sum(axis=0)
        starts = is_target & self._starts_character[np.where(is_target, targets, 0)]
        columns = [np.where(is_target, bits, 0.0).sum(axis=1), is_target.sum(axis=1), starts.sum(axis=1)]
        self._sums = np.concatenate([self._sums, np.stack(columns, axis=1)])
        while len(self._sums) > _MOST_SUMS:  # memory stays bounded
            self._sums = np.add.reduceat(self._sums, np.arange(0, len(self._sums), 2))

    def _add_lines(self, tokens: np.ndarray, targets: np.ndarray, bits: np.ndarray, is_target: np.ndarray) -> None:
        """Join the blocks; the first token of a document is not predicted, but part of a line."""
        last = np.where(is_target[:, -1], targets[:, -1], IGNORED)
        begins = tokens[:, 0] != np.append(self._last, last[:-1])
        self._last = int(last[-1])
        tokens = np.concatenate([tokens[:, :1], targets], axis=1)
        bits = np.concatenate([np.full((len(bits), 1), math.nan), bits], axis=1)
        is_shown = np.concatenate([begins[:, np.newaxis], is_target], axis=1)
        is_first = np.zeros(tokens.shape, bool)
        is_first[:, 0] = True
        self._lines.add(tokens[is_shown], bits[is_shown], is_first[is_shown])


class _Lines:
    """Divides a text that comes in parts into lines, and keeps those with the largest mean surprise, each text once.

    Args:
        ends_line (ndarray): for each token, whether it ends a line.
        starts_character (ndarray): for each token, whether it begins a character.
        keep (int): the number of lines that are kept.
    """

    def __init__(self, ends_line: np.ndarray, starts_character: np.ndarray, keep: int):
        self._ends_line, self._starts_character, self._keep = ends_line, starts_character, keep
        self._tokens, self._bits = np.zeros(0, np.int64), np.zeros(0)  # the last line, which may not have ended
        self._number = 0
        self._best: list[Line] = []

    @property
    def best(self) -> list[Line]:
        """list[Line], with the last line of the text."""
        if not len(self._tokens):
            return self._best
        return self._better(self._tokens, self._bits, np.array([0]), np.array([self._number]))

    def add(self, tokens: np.ndarray, bits: np.ndarray, begins: np.ndarray) -> None:
        """Add tokens, their surprises, and whether each begins a document."""
        begins = np.append(np.zeros(len(self._tokens), bool), begins)
        tokens, bits = np.append(self._tokens, tokens), np.append(self._bits, bits)
        begins[1:] |= self._ends_line[tokens[:-1]]
        positions = np.arange(len(tokens))
        since = positions - np.maximum.accumulate(np.where(begins, positions, 0))
        starts = np.flatnonzero(since % _LONGEST == 0)
        numbers = self._number + np.cumsum(begins)[starts]
        end = starts[-1]
        self._best = self._better(tokens[:end], bits[:end], starts[:-1], numbers[:-1])
        self._tokens, self._bits, self._number = tokens[end:], bits[end:], int(numbers[-1])

    def _better(self, tokens: np.ndarray, bits: np.ndarray, starts: np.ndarray, numbers: np.ndarray) -> list[Line]:
        """Return the best of the lines so far and of those that begin at these positions."""
        if not len(starts):
            return self._best
        is_counted = np.isfinite(bits) & ~self._ends_line[tokens]
        sums = np.add.reduceat(np.where(is_counted, bits, 0.0), starts)
        characters = np.add.reduceat((is_counted & self._starts_character[tokens]).astype(np.int64), starts)
        means = np.where(characters >= _SHORTEST, sums / np.maximum(characters, 1), -1.0)
        ends = np.append(starts[1:], len(tokens))
        best = {line.tokens.tobytes(): line for line in self._best}
        chosen: set[bytes] = set()
        for index in np.argsort(-means, kind="stable"):
            if means[index] < 0 or len(chosen) == self._keep:
                break
            start, end = starts[index], ends[index]
            end -= self._ends_line[tokens[end - 1]]
            line = Line(int(numbers[index]), tokens[start:end].copy(), bits[start:end].copy(), float(means[index]))
            text = line.tokens.tobytes()
            chosen.add(text)
            if text not in best or line.mean > best[text].mean:
                best[text] = line
        return sorted(best.values(), key=lambda line: (-line.mean, line.number))[: self._keep]


def mean_and_interval(sums: np.ndarray) -> tuple[float, tuple[float, float] | None]:
    """Return a mean, and its 95 % interval from the sums and the counts of stretches; None for fewer than 8 of them."""
    sums, counts = sums.T
    if not counts.sum():
        return math.nan, None
    mean = sums.sum() / counts.sum()
    stretches = len(counts)
    if stretches < _FEWEST_STRETCHES or not math.isfinite(mean):
        return float(mean), None
    deviations = sums - mean * counts  # that of a ratio: stretches have different lengths
    error = math.sqrt(stretches / (stretches - 1) * np.square(deviations).sum()) / counts.sum()
    half = student(stretches - 1) * error
    return float(mean), (float(max(0.0, mean - half)), float(mean + half))


def student(degrees: int) -> float:
    """Return the factor of a 95 % interval with so many degrees of freedom, 7 or more, to 3 digits."""
    z = 1.959964
    terms = [
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    ]
    return sum(term / degrees**power for power, term in enumerate(terms))


# The sections

_MOST_OF_A_SAMPLE = 2000
_LEVELS = (1, 2, 4, 8)  # bits from which a character is marked more
_KINDS = (
    ("lowercase letters", str.islower),
    ("capital letters", str.isupper),
    ("other letters", str.isalpha),
    ("digits", str.isdigit),
    ("spaces", lambda text: text.isspace() and text != "\n"),
    ("line ends", lambda text: text == "\n"),
    ("punctuation and other characters", lambda text: True),
)


class Sample(NamedTuple):
    """A text that a model has written."""

    how: str
    """How tokens were drawn, in words."""
    text: str
    prompt: str = ""
    """The given beginning, which is not in `text`."""


def text_sections(
    subject: Subject, answers: TextAnswers, samples: Sequence[Sample], entropy: float | None = None
) -> dict[str, str]:
    """Return the sections of the page about a model that predicts the next token of a text.

    Args:
        subject (Subject): what was evaluated, and on what.
        answers (TextAnswers): what the model has predicted.
        samples (Sequence[Sample]): what it has written.
        entropy (Optional[float]): the bits per character of what has made the text, if they are known. Default:
            ``None``.
    """
    sections = {
        "Loss": _loss(subject, answers, entropy),
        "Samples": "\n".join(map(_sample, samples)),
        "Most surprising lines": _lines(answers),
        "By kind of character": _kinds(answers),
        "By position in the block": _positions(answers),
    }
    return {heading: content for heading, content in sections.items() if content}


def _unit(answers: TextAnswers) -> str:
    return "byte" if answers.is_bytes else "character"


def _loss(subject: Subject, answers: TextAnswers, entropy: float | None) -> str:
    unit, (bits, _) = _unit(answers), answers.bits_per("character")
    counts = f"{answers.total:,} {unit}s"
    lines = [f'<p class="big">{_number(bits, ".3f")} bits per character <small>({counts})</small></p>']
    if answers.not_finite:
        lines.append(f"<p>The losses of {answers.not_finite:,} of {counts} are not finite.</p>")
    lines += [_figures(answers), _references(answers)]
    if entropy is not None:
        lines.append(f"<p>The text has {entropy:.3f} bits per character: no model has less on average.</p>")
    lines.append(_about_intervals(answers))
    record = subject.record
    if record and record.get("predicted"):
        loss, predicted = record.get("loss"), record["predicted"]
        split = "" if subject.same_data else ", on another text"
        lines.append(f"<p>Recorded after training: loss {_number(loss, '.4f')} ({predicted:,} {unit}s){split}.</p>")
    return "\n".join(lines)


def _number(value: float | None, digits: str) -> str:
    return "not finite" if value is None or not math.isfinite(value) else format(value, digits)


def _figures(answers: TextAnswers) -> str:
    """Return the table of the loss in three units."""
    unit = _unit(answers)
    bits, loss = answers.bits_per("character"), answers.bits_per("token")
    nats = math.log(2)
    figures = [
        ("Bits per character", bits, lambda value: value, ".3f"),
        (f"Loss: mean of −ln p of a {unit}", loss, lambda value: value * nats, ".4f"),
        (f"Perplexity of a {unit}", loss, _perplexity, ",.3f"),
    ]
    rows = []
    for name, (value, ends), convert, digits in figures:
        interval = "none" if ends is None else " to ".join(_number(convert(end), digits) for end in ends)
        cells = f"<td>{_number(convert(value), digits)}</td><td>{interval}</td>"
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    names = head("Figure", "Value", "95\u00a0% interval")
    return table("figures", "Figures", "The loss in three units", names, rows)


def _perplexity(bits: float) -> float:
    return math.inf if bits > 1000 else 2.0**bits


def _references(answers: TextAnswers) -> str:
    """Return what models without any context would reach."""
    kinds, per_character = len(answers.counts), answers.total / max(1, answers.characters)
    frequencies = answers.counts[answers.counts > 0] / max(1, answers.total)
    entropy = -float((frequencies * np.log2(frequencies)).sum()) * per_character
    equal = math.log2(kinds) * per_character
    return (
        f"<p>For comparison: {equal:.3f} bits per character if all {kinds:,} {_unit(answers)}s are equally probable, "
        f"{entropy:.3f} with their frequencies in this split.</p>"
    )


def _about_intervals(answers: TextAnswers) -> str:
    stretches = len(answers.stretches())
    if stretches < _FEWEST_STRETCHES:
        return '<p class="note">The split is too short for an interval.</p>'
    return (
        f'<p class="note">The intervals are Student\'s, from the means of {stretches} consecutive stretches of the '
        "split, because neighbouring characters depend on each other. They are for other stretches of the same text. "
        "They do not cover other texts or other seeds.</p>"
    )


def _sample(sample: Sample) -> str:
    prompt = f"<b>{_text_in_lines(sample.prompt)}</b>" if sample.prompt else ""
    how = shown(sample.how) + ("; bold: the given beginning" if prompt else "")
    if len(sample.text) > _MOST_OF_A_SAMPLE:
        how += f"; the first {_MOST_OF_A_SAMPLE:,} of {len(sample.text):,} characters"
    text = _text_in_lines(sample.text[:_MOST_OF_A_SAMPLE])
    return f'<p class="note">{how}</p>\n<pre class="sample">{prompt}{text}</pre>'


def _text_in_lines(text: str) -> str:
    """Return a text that is safe between tags, with its line ends."""
    return escape(_check.visible(text, allowed="\n"))


def _lines(answers: TextAnswers) -> str:
    lines = answers.lines
    if not lines:
        return f"<p>There is no line of {_SHORTEST} characters or more.</p>"
    items = []
    for line in lines:
        characters = answers.characters_of(line)
        known = [(bits, position) for position, (_, bits) in enumerate(characters) if math.isfinite(bits)]
        most = sorted(known, key=lambda pair: (-pair[0], pair[1]))[:3]
        named = ", ".join(f"{_quoted(characters[position][0])}\u00a0{bits:.1f}" for bits, position in most)
        note = f"line {line.number:,}: {line.mean:.2f} bits per character; most: {named}"
        items.append(f'<li><p class="line">{_marked(characters)}</p><p class="note">{note}</p></li>')
    description = (
        f"{len(lines)} lines of the split: those with the largest mean surprise of a character, the largest first. The "
        "surprise is −log2 of the probability that the model gave to the character, in bits. Lines of fewer than "
        f"{_SHORTEST} characters are left out, and lines of more than {_LONGEST} are divided. A repeated line is shown "
        "once."
    )
    body = "\n".join(items)
    return f'<p class="note">{description}</p>\n{_legend()}\n<ol class="lines">\n{body}\n</ol>'


def _legend() -> str:
    names = [f"under {_LEVELS[0]}", *(f"{low}\u00a0to\u00a0{high}" for low, high in zip(_LEVELS, _LEVELS[1:]))]
    names.append(f"{_LEVELS[-1]} bits or more")
    marks = ", ".join(f'<span class="b{level}">{name}</span>' for level, name in enumerate(names))
    return f'<p class="line">Marks: {marks}; <span class="given">not predicted</span></p>'


def _marked(characters: Sequence[tuple[str, float]]) -> str:
    """Return characters with their surprise as a mark; neighbours with the same mark share an element."""
    runs: list[tuple[str, str]] = []
    for text, bits in characters:
        mark = f"b{sum(bits >= level for level in _LEVELS)}" if math.isfinite(bits) else "given"
        if runs and runs[-1][0] == mark:
            text = runs.pop()[1] + text
        runs.append((mark, text))
    return "".join(f'<span class="{mark}">{escape(_check.visible(text, allowed=""))}</span>' for mark, text in runs)


def _quoted(text: str) -> str:
    return "space" if text == " " else f"“{escape(_check.visible(text, allowed=''))}”"


def _kinds(answers: TextAnswers) -> str:
    """Return the table of the kinds of characters, those with the largest part of the loss first."""
    numbers = np.array([_kind(text, answers.is_bytes) for text in answers.texts])
    counts = np.bincount(numbers, answers.counts, len(_KINDS) + 1)
    bits = np.bincount(numbers, answers.bits, len(_KINDS) + 1)
    kinds = [*(name for name, _ in _KINDS), "bytes of characters beyond ASCII"]
    order = sorted(np.flatnonzero(counts), key=lambda number: -np.nan_to_num(bits[number]))
    rows = []
    for number in order:
        count, sum_of_bits = counts[number], bits[number]
        part_of_loss = sum_of_bits / bits.sum() if bits.sum() else 0.0
        cells = [f"{count:,.0f}", percent(count / counts.sum(), 1), _number(sum_of_bits / count, ".2f")]
        cells.append(percent(part_of_loss, 1) if math.isfinite(part_of_loss) else "not finite")
        columns = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{kinds[number]}</th>{columns}</tr>')
    unit = _unit(answers)
    names = head("Kind", f"{unit.capitalize()}s", "Part of the split", f"Bits per {unit}", "Part of the loss")
    return table("kinds", "Figures by kind", f"Mean surprise of a {unit} of each kind", names, rows)


def _kind(text: str, is_bytes: bool) -> int:
    """Return the number of the kind of a token."""
    if is_bytes and not text.isascii():
        return len(_KINDS)
    return next(number for number, (_, is_of_it) in enumerate(_KINDS) if is_of_it(text))


def _positions(answers: TextAnswers) -> str:
    """Return the table of positions, in groups that double: the first tokens of a block have less context."""
    context = len(answers.counts_by_position)
    groups = []
    start, end = 0, 1
    while start < context:
        part = slice(start, min(end, context))
        groups.append((part, answers.counts_by_position[part].sum(), answers.bits_by_position[part].sum()))
        start, end = end, 2 * end
    groups = [group for group in groups if group[1]]
    means = [bits / count for _, count, bits in groups]
    most = max((mean for mean in means if math.isfinite(mean)), default=1.0) or 1.0
    rows = []
    for (part, count, _), mean in zip(groups, means):
        name = f"{part.start + 1:,}" if part.stop - part.start == 1 else f"{part.start + 1:,} to {part.stop:,}"
        width = f"{100 * mean / most:.1f}%" if math.isfinite(mean) else "0"
        bar = f'<td class="bar" aria-hidden="true"><span style="width:{width}"></span></td>'
        rows.append(f'<tr><th scope="row">{name}</th><td>{count:,}</td><td>{_number(mean, ".3f")}</td>{bar}</tr>')
    unit = _unit(answers)
    caption = f"Mean surprise of a {unit} by its position in a block of {context:,}: the first ones have less context"
    names = head("Position", f"{unit.capitalize()}s", f"Bits per {unit}", "Bar from 0")
    return table("positions", "Figures by position", caption, names, rows)
