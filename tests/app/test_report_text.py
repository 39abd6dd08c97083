"""The figures and the sections of a report about text."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from ms_accum.app import report_page
from ms_accum.app.report_page import Subject
from ms_accum.app.report_text import Sample, TextAnswers, text_sections

pytestmark = pytest.mark.host
CHARACTERS = "\nabcdefghij <&"
NASTY = "</title><script>alert(1)</script>\x1b[2J\u202e"


def decode(tokens):
    return "".join(CHARACTERS[token] for token in tokens)


def rows_of(text, bits, context):
    """Return targets and losses of the blocks of a document."""
    targets = np.full((math.ceil(len(text) / context), context), -100)
    losses = np.zeros(targets.shape)
    for place, (character, value) in enumerate(zip(text, bits)):
        targets[place // context, place % context] = CHARACTERS.index(character)
        losses[place // context, place % context] = value * math.log(2)
    return targets, losses


def answers_of(*documents, context=6, keep=3):
    answers = TextAnswers(decode, 0, context, keep)
    for text, bits in documents:
        targets, losses = rows_of(text, bits, context)
        answers.add(None, targets[:1], losses[:1])  # lines go over the ends of blocks and of batches
        answers.add(None, targets[1:], losses[1:])
    return answers


def subject(**changes):
    fields = {"path": "out/a.ckpt", "model": "gpt", "data": "a text", "record": None, "same_data": True, "versions": {}}
    return Subject(**{**fields, **changes})


def line(character, bits, length=24):
    return character * length + "\n", [bits] * (length + 1)


def joined(*lines):
    return "".join(text for text, _ in lines), [value for _, bits in lines for value in bits]


def test_most_surprising_lines_come_first():
    document = joined(line("a", 1), line("b", 3), line("c", 2), line("d", 9, length=5), line("e", 4), line("f", 0.5))
    lines = answers_of(document).lines
    assert [(kept.text[0], kept.number, kept.surprise) for kept in lines] == [
        ("e", 5, pytest.approx(4)),
        ("b", 2, pytest.approx(3)),
        ("c", 3, pytest.approx(2)),
    ]
    assert lines[0].text == "e" * 24 and len(lines[0].bits) == 25


def test_line_ends_with_its_document():
    lines = answers_of(("a" * 23, [1.0] * 23), line("b", 2)).lines
    assert [kept.text for kept in lines] == ["b" * 24, "a" * 23]


def test_long_line_is_cut():
    (kept,) = answers_of(("a" * 5000 + "\n", [1.0] * 5001)).lines
    assert len(kept.text) == 400


def test_loss_is_the_mean_over_tokens_of_blocks_of_any_length(rng):
    bits = rng.rand(100) * 4
    answers = answers_of(("a" * 40, bits[:40]), ("b" * 60, bits[40:]), context=7)
    assert answers.loss / math.log(2) == pytest.approx(bits.mean()) and answers.tokens == 100


def test_interval_is_that_of_the_ratio_of_sums(rng):
    """With blocks of one length it is the usual one of a mean; with more of the same blocks it shrinks."""
    bits = np.repeat(rng.rand(50), 6) * math.log(2)
    answers = TextAnswers(decode, 0, 6)
    answers.add(None, np.ones((50, 6)), bits.reshape(50, 6))
    means = bits.reshape(50, 6).mean(1)
    assert answers.half_interval == pytest.approx(1.96 * means.std() / math.sqrt(50), rel=1e-3)
    for _ in range(3):
        answers.add(None, np.ones((50, 6)), bits.reshape(50, 6))
    assert answers.half_interval == pytest.approx(1.96 * means.std() / math.sqrt(200), rel=1e-3)


def test_positions_are_grouped():
    targets, losses = np.ones((2, 6)), np.tile(np.arange(6.0), (2, 1)) * math.log(2)
    answers = TextAnswers(decode, 0, 6)
    answers.add(None, targets, losses)
    assert answers.by_position() == [
        (1, 1, 0.0),
        (2, 3, pytest.approx(1.5)),
        (4, 6, pytest.approx(4.0)),
    ]


def test_line_that_is_not_finite_is_left_out():
    assert answers_of(line("a", math.nan), line("b", 1)).lines[0].text[0] == "b"


def test_page_has_no_scripts_and_escapes_texts():
    document = joined(line("<", 3), line("&", 2))
    samples = [Sample(NASTY, NASTY)]
    sections = text_sections(subject(path=NASTY), answers_of(document), samples, entropy=0.5)
    text = report_page.page(subject(path=NASTY), sections, "there is none")
    assert "<script" not in text and "\x1b" not in text and "\u202e" not in text
    assert "&lt;script&gt;" in text and "\\x1b[2J\\u202e" in text
    assert re.search(r'(<b style="--s:0\.25">&lt;</b>){24}', text)
    assert "line 1: 3.00 bits per token, up to 3.0 for “&lt;” after 0 characters" in text
    assert "The text itself has 0.500 bits per character" in text


def test_recorded_loss_is_shown():
    record = {"loss": 1.25, "predicted": 1000, "updates": 3}
    sections = text_sections(subject(record=record, same_data=False), answers_of(line("a", 1)), [])
    assert "Recorded after training: 1.2500 (1,000 tokens), on another text." in sections["Loss"]
    assert "95\u00a0% interval of the loss: " in sections["Loss"] and "text itself" not in sections["Loss"]


def test_lines_of_bytes_are_not_shaded_by_byte():
    answers = TextAnswers(lambda tokens: bytes(tokens).decode(errors="replace"), 10, 8)
    text = "梯度累积 micro-batches 梯度\n".encode()
    targets = np.frombuffer(text + b"x" * (-len(text) % 8), np.uint8).reshape(-1, 8).astype(np.int32)
    answers.add(None, targets, np.ones(targets.shape))
    assert answers.lines[0].text == "梯度累积 micro-batches 梯度"
    assert "<b" not in text_sections(subject(), answers, [])["Most surprising lines"]
