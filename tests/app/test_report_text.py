"""What a report shows of a model that predicts the next token of a text."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import numpy as np
import pytest

from ms_accum.app import report_text
from ms_accum.app.report_page import STYLE
from ms_accum.app.report_text import IGNORED, TextAnswers, mean_and_interval, student
from programs import ROOT
from report_pages import (
    CHARACTERS,
    NASTY,
    NONE,
    RECORD,
    Elements,
    cells,
    decode,
    heads,
    random_text,
    samples_of,
    subject,
    text_answers,
    text_page,
)

pytestmark = pytest.mark.host
LN2 = math.log(2)
NAN = float("nan")


# By definition


def lines_by_definition(documents, bits, keep=12):
    """Return the number, the text and the mean of the most surprising lines; `bits` has a list for each document."""
    lines, number = {}, 0
    for document, surprises in zip(documents, bits):
        values = [NAN, *surprises]
        place = 0
        for line in document.splitlines(keepends=True):
            number += 1
            text = line.rstrip("\n")
            for start in range(0, len(line), 200):
                part = text[start : start + 200]
                known = [value for value in values[place + start : place + start + len(part)] if not math.isnan(value)]
                mean = sum(known) / max(1, len(known))
                if len(known) >= 16 and mean > lines.get(part, (0, -1.0))[1]:
                    lines[part] = number, mean
            place += len(line)
    order = sorted(lines.items(), key=lambda item: (-item[1][1], item[1][0]))[:keep]
    return [(number, text, pytest.approx(mean)) for text, (number, mean) in order]


def documents_of(rng):
    """Return documents of which some end with a block, some inside one, and some in a line; one has a long line."""
    weights = np.where(np.arange(len(CHARACTERS)) == 0, 1.0, 1.5)
    texts = [decode(rng.choice(len(CHARACTERS), n, p=weights / weights.sum())) for n in (400, 65, 17, 2, 321)]
    texts.append(random_text(rng, 700).replace("\n", "o"))
    return [*texts, texts[0]]  # each line of the first document twice


def check_collected(kind, rng):
    documents = documents_of(rng)
    bits = [rng.exponential(3, len(document) - 1) for document in documents]
    flat = np.concatenate(bits)

    def losses_of(targets):
        losses = np.full(targets.shape, NAN)  # of padding: not used
        losses[targets != IGNORED] = flat * LN2
        return losses

    predicted = "".join(document[1:] for document in documents)
    for size in (1, 3, 1000):
        answers = text_answers(documents, losses_of, size=size, answers=kind(decode, len(CHARACTERS)))
        assert [(line.number, decode(line.tokens), line.mean) for line in answers.lines] == lines_by_definition(
            documents, bits
        )
        assert answers.total == answers.characters == len(flat) == len(predicted)
        assert answers.counts.tolist() == [predicted.count(character) for character in CHARACTERS]
        np.testing.assert_allclose(answers.bits.sum(), flat.sum())
        place = predicted.index("我")
        assert answers.bits[CHARACTERS.index("我")] >= flat[place]
        positions = np.concatenate([np.arange(len(part)) % 8 for part in bits])
        np.testing.assert_allclose(answers.bits_by_position, np.bincount(positions, flat))
        assert answers.counts_by_position.tolist() == np.bincount(positions).tolist()
        assert answers.bits_per("token")[0] == pytest.approx(flat.mean()) == answers.bits_per("character")[0]
        assert answers.not_finite == 0


def test_answers_equal_their_definition(rng):
    check_collected(TextAnswers, rng)


class EndsLinesWithBlocks(TextAnswers):
    def _add_lines(self, tokens, *others):
        self._last = IGNORED
        for number in range(len(tokens)):
            self._last = IGNORED
            super()._add_lines(tokens[number : number + 1], *(column[number : number + 1] for column in others))


class CountsPadding(TextAnswers):
    def _add_sums(self, targets, bits, is_target):
        super()._add_sums(np.where(is_target, targets, 0), np.nan_to_num(bits), np.ones_like(is_target))


class KeepsTheFirstLines(TextAnswers):
    @property
    def lines(self):
        return sorted(super().lines, key=lambda line: line.number)


@pytest.mark.parametrize("kind", [EndsLinesWithBlocks, CountsPadding, KeepsTheFirstLines])
def test_wrong_answers_are_detected(kind, rng):
    with pytest.raises(AssertionError):
        check_collected(kind, rng)


def test_bytes_of_a_character_are_counted_together():
    text = "Stratford-é我-upon-Avon"
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    answers = TextAnswers(
        lambda part: np.asarray(part, np.uint8).tobytes().decode(errors="replace"), 256, is_bytes=True
    )
    answers.add(tokens[:-1].reshape(1, -1), tokens[1:].reshape(1, -1), np.full((1, len(tokens) - 1), 2 * LN2))
    assert (answers.total, answers.characters) == (len(tokens) - 1, len(text) - 1)
    assert answers.bits_per("token")[0] == pytest.approx(2)
    assert answers.bits_per("character")[0] == pytest.approx(2 * (len(tokens) - 1) / (len(text) - 1))
    (line,) = answers.lines
    first, *rest = answers.characters_of(line)
    assert first[0] == "S" and math.isnan(first[1])
    assert rest == [(c, pytest.approx(2 * len(c.encode()))) for c in text[1:]]
    page = text_page(subject(), answers, NONE)
    assert '<th scope="row">bytes of characters beyond ASCII</th><td>5</td>' in page
    assert "Perplexity of a byte" in page and "8.00 bits if" not in page


@pytest.mark.parametrize(("column", "name"), [(0, "tokens"), (1, "targets")])
@pytest.mark.parametrize("token", [-1, len(CHARACTERS)])
def test_token_out_of_range_is_an_error(column, name, token):
    columns = [np.zeros((1, 4), int), np.zeros((1, 4), int), np.zeros((1, 4))]
    columns[column][0, 2] = token
    with pytest.raises(ValueError, match=f"For 'TextAnswers', '{name}' must be 0 to .*, but got {token}."):
        TextAnswers(decode, len(CHARACTERS)).add(*columns)


def test_sums_of_long_text_stay_few(rng):
    answers = TextAnswers(decode, len(CHARACTERS))
    bits = rng.exponential(3, (9001, 2))
    targets = np.full((1000, 2), 5)
    for start in range(0, 9001, 1000):
        part = bits[start : start + 1000]
        answers.add(targets[: len(part)], targets[: len(part)], part * LN2)
    assert len(answers._sums) <= 4096
    stretches = answers.stretches()
    assert len(stretches) == 32 and stretches[:, 1].min() > 0.95 * stretches[:, 1].max()
    np.testing.assert_allclose(stretches.sum(axis=0), [bits.sum(), 18002, 18002])


# Intervals


def correlated(rng, runs, length, part=0.95):
    """Return series with mean 3 in which each value depends on the one before."""
    series = np.zeros((runs, length))
    value = rng.randn(runs) / math.sqrt(1 - part**2)
    for place in range(length):
        series[:, place] = value
        value = part * value + rng.randn(runs)
    return series + 3


def coverage(series, stretches):
    parts = series.reshape(len(series), stretches, -1)
    counts = np.full(stretches, parts.shape[-1])
    ends = [mean_and_interval(np.stack([sums, counts], axis=1))[1] for sums in parts.sum(axis=-1)]
    return np.mean([low <= 3 <= high for low, high in ends])


def test_interval_covers_mean_of_correlated_values_in_95_percent(rng):
    series = correlated(rng, 1000, 4096)
    assert 0.92 < coverage(series, 32) < 0.98
    assert coverage(series, 4096) < 0.5  # as if neighbours did not depend on each other


def test_interval_is_that_of_a_ratio(rng):
    counts = rng.randint(1, 9, (500, 32))
    sums = counts * 3 + rng.randn(500, 32)
    ends = [mean_and_interval(np.stack(pair, axis=1))[1] for pair in zip(sums, counts)]
    assert 0.92 < np.mean([low <= 3 <= high for low, high in ends]) < 0.98


@pytest.mark.parametrize(("degrees", "factor"), [(7, 2.3646), (10, 2.2281), (31, 2.0395), (10**9, 1.9600)])
def test_factor_is_students(degrees, factor):
    assert student(degrees) == pytest.approx(factor, abs=2e-3)


def test_few_stretches_have_no_interval():
    table = np.ones((7, 2))
    assert mean_and_interval(table) == (1, None) and mean_and_interval(np.ones((8, 2))) == (1, (1, 1))
    assert math.isnan(mean_and_interval(np.zeros((0, 2)))[0])
    assert mean_and_interval(np.full((8, 2), NAN))[1] is None


# The sections


def constant(bits):
    return lambda targets: np.full(targets.shape, bits * LN2)


def test_figures():
    answers = text_answers(["ae" * 200], constant(2))
    record = {**RECORD, "loss": 1.5, "predicted": 400, "characters": 400}
    text = text_page(subject(record=record), answers, NONE)
    assert "2.000 bits per character <small>(399 characters)</small>" in text
    assert cells(text, "figures") == [
        ["Bits per character", "2.000", "2.000 to 2.000"],
        ["Loss: mean of −ln p of a character", "1.3863", "1.3863 to 1.3863"],
        ["Perplexity of a character", "4.000", "4.000 to 4.000"],
    ]
    assert "4.000 bits per character if all 16 characters are equally probable, 1.000 with their frequencies" in text
    assert "from the means of 32 consecutive stretches" in text
    assert "Recorded after training: loss 1.5000 (400 characters).<" in text
    assert "(400 characters), on another text.<" in text_page(subject(record=record, same_data=False), answers, NONE)
    assert "Recorded" not in text_page(subject(record=None), answers, NONE)
    assert "loss" not in dict(cells(text, "facts"))


def test_short_text_has_no_interval():
    text = text_page(subject(), text_answers(["ae" * 20], constant(2)), NONE)
    assert cells(text, "figures")[0] == ["Bits per character", "2.000", "none"]
    assert "too short for an interval" in text and "consecutive stretches" not in text


def test_losses_that_are_not_finite(rng):
    losses = [NAN, math.inf, *[LN2] * 38]
    text = text_page(subject(), text_answers(["ae" * 20 + "a"], lambda targets: np.array(losses).reshape(5, 8)), NONE)
    assert "not finite bits per character" in text and "The losses of 2 of 40 characters are not finite." in text
    assert cells(text, "positions")[2] == ["3 to 4", "10", "1.000", ""]
    assert "nan" not in text.lower() and ">inf" not in text


def test_infinite_perplexity_is_shown():
    text = text_page(subject(), text_answers(["ae" * 20], constant(5000)), NONE)
    assert cells(text, "figures")[2] == ["Perplexity of a character", "not finite", "none"]


def test_most_surprising_lines_are_marked():
    line = "ae(tin)o! aeinoé"

    def losses_of(targets):
        bits = np.full(targets.shape, 0.5)
        places = {"(": 1.0, "t": 2.0, "!": 4.0, "é": 8.0, " ": 9.0}
        for character, value in places.items():
            bits[targets == CHARACTERS.index(character)] = value
        return bits * LN2

    text = text_page(subject(), text_answers([f"\n{line}\n"], losses_of), NONE)
    (item,) = Elements(text).with_tag("ol")
    mean = (11 * 0.5 + 1 + 2 + 4 + 8 + 9) / 16
    assert item["text"].strip() == (f"{line}line 2: {mean:.2f} bits per character; most: space 9.0, “é” 8.0, “!” 4.0")
    marked = re.findall(r'<span class="(\w+)">([^<]*)</span>', text[text.index("<ol") :])
    assert marked == [
        *(("b0", "ae"), ("b1", "("), ("b2", "t"), ("b0", "in)o"), ("b3", "!"), ("b4", " "), ("b0", "aeino")),
        ("b4", "é"),
    ]


def borders_of(style):
    """Return the line below each mark: each rule changes the one before."""
    rules = re.findall(r"^(\.(?:b\d|given)[^{]*)\{([^}]*)\}", style, re.MULTILINE)
    borders = {name: {} for name in ("b1", "b2", "b3", "b4", "given")}
    for selectors, rule in rules:
        for name in re.findall(r"\w+", selectors):
            borders[name].update(part.split(":") for part in rule.split(";") if part.startswith("border"))
    return [tuple(border.items()) for border in borders.values()]


def test_marks_differ_without_colours():
    assert len(set(borders_of(STYLE))) == 5 and all(borders_of(STYLE))
    assert len(set(borders_of(STYLE.replace("border-bottom-width:4px", "")))) == 4


def test_first_token_of_document_is_not_predicted():
    answers = text_answers(["aeinot" * 4, "taeino" * 4], constant(1))
    text = text_page(subject(), answers, NONE)
    assert '<span class="given">a</span>' in text and '<span class="given">t</span>' in text


def test_text_of_short_lines_has_none():
    text = text_page(subject(), text_answers(["aei\n" * 9], constant(1)), NONE)
    assert "There is no line of 16 characters or more." in text


def test_figures_by_kind():
    bits = {"a": 1.0, "A": 3.0, "0": 2.0, " ": 0.5, "\n": 0.25, "(": 4.0, "我": 6.0}

    def losses_of(targets):
        return np.vectorize(lambda token: bits.get(CHARACTERS[token] if token >= 0 else "", 0.0))(targets) * LN2

    text = text_page(subject(), text_answers(["a" + "aA0 \n(我aa"], losses_of), NONE)
    total = 3 + 3 + 2 + 0.5 + 0.25 + 4 + 6
    rows = {name: columns for name, *columns in cells(text, "kinds")}
    assert [*rows][:2] == ["other letters", "punctuation and other characters"]
    assert rows == {
        name: [f"{count}", f"{100 * count / 9:.1f} %", f"{mean:.2f}", f"{100 * count * mean / total:.1f} %"]
        for name, (count, mean) in {
            "other letters": (1, 6),
            "punctuation and other characters": (1, 4),
            "lowercase letters": (3, 1),
            "capital letters": (1, 3),
            "digits": (1, 2),
            "spaces": (1, 0.5),
            "line ends": (1, 0.25),
        }.items()
    }


def test_tables_have_names_of_columns():
    columns = heads(text_page(subject(), text_answers(["ae" * 20], constant(1)), NONE))
    assert columns == {
        "figures": ["Figure", "Value", "95 % interval"],
        "kinds": ["Kind", "Characters", "Part of the split", "Bits per character", "Part of the loss"],
        "positions": ["Position", "Characters", "Bits per character", "Bar from 0"],
        "facts": ["Name", "Value"],
    }


def test_figures_by_position():
    def losses_of(targets):
        return (8.0 - np.arange(11))[np.newaxis] ** 2 / 64 * LN2 * np.ones(targets.shape)

    text = text_page(subject(), text_answers(["aeint" * 20], losses_of, context=11), NONE)
    means = [1, 49 / 64, (36 + 25) / 128, (16 + 9 + 4 + 1) / 256, (0 + 1 + 4) / 192]
    assert [row[:3] for row in cells(text, "positions")] == [
        [name, f"{count}", f"{mean:.3f}"]
        for name, count, mean in zip(("1", "2", "3 to 4", "5 to 8", "9 to 11"), (9, 9, 18, 36, 27), means)
    ]
    widths = [float(width) for width in re.findall(r'"width:([0-9.]+)%"', text)]
    assert widths == pytest.approx([100 * mean for mean in means], abs=0.06)


def test_samples_keep_their_lines():
    answers = text_answers(["ae" * 20], constant(1))
    text = text_page(subject(), answers, NONE, samples_of(" I am\n  here", "b" * 2001))
    assert '<pre class="sample"><b>Ann:</b> I am\n  here</pre>' in text
    assert text.count(">temperature 0.8; bold: the given beginning<") == 1
    assert f"{'b' * 2000}</pre>" in text and "beginning; the first 2,000 of 2,001 characters<" in text
    assert "Samples" not in text_page(subject(), answers, NONE)
    without = text_page(subject(), answers, NONE, samples_of("x", prompt=""))
    assert ">temperature 0.8<" in without and "<b>" not in without


def test_known_entropy_is_shown():
    answers = text_answers(["ae" * 20], constant(1))
    assert "The text has 0.600 bits per character: no model has less on average." in text_page(
        subject(), answers, NONE, entropy=0.6
    )
    assert "on average" not in text_page(subject(), answers, NONE)


def test_crafted_text_is_escaped():
    characters = sorted(set(NASTY) - {"\n"})

    def decode_nasty(tokens):
        return "".join(characters[token] for token in tokens)

    tokens = np.array([characters.index(character) for character in NASTY])
    answers = TextAnswers(decode_nasty, len(characters))
    answers.add(tokens[np.newaxis, :-1], tokens[np.newaxis, 1:], np.ones((1, len(tokens) - 1)))
    elements = Elements(text_page(subject(), answers, NONE, samples_of(NASTY, prompt=NASTY, how=NASTY)))
    shown = NASTY.replace("\x00", r"\x00").replace("\u202e", r"\u202e").replace("\udc80", r"\udc80")
    assert not elements.faults and not elements.with_tag("script", "img")
    assert elements.with_tag("pre")[0]["text"] == shown * 2
    assert "".join(element["text"] for element in elements.with_tag("p") if element.get("class") == "line").endswith(
        shown
    )


def test_page_needs_no_mindspore():
    code = "import sys; sys.modules['mindspore'] = None; import ms_accum.app.report_text, ms_accum.app.report_images"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_size_of_page_is_bounded(rng):
    answers = text_answers(
        [random_text(rng, 20_000).replace("\n", "o")], lambda t: rng.exponential(3, t.shape), size=99
    )
    assert len(answers.lines) == 12 and all(len(line.tokens) == 200 for line in answers.lines)
    assert len(text_page(subject(), answers, NONE, samples_of("x" * 10**6))) < 100_000


def test_module_says_how_lines_are_chosen():
    assert (report_text._SHORTEST, report_text._LONGEST) == (16, 200)
    text = text_page(subject(), text_answers(["aeinot" * 9], constant(1)), NONE)
    assert "Lines of fewer than 16 characters are left out, and lines of more than 200 are divided." in text
