"""Helpers for tests of reports: what a page is about, and how to read one."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from ms_accum.app import report_page
from ms_accum.app.report_images import Answers, ImageData, image_sections
from ms_accum.app.report_page import Subject
from ms_accum.app.report_text import IGNORED, Sample, TextAnswers, text_sections
from ms_accum.app.series import Evaluation, Metrics

NAMES = ("ant", "bee", "cow")
VERSIONS = {"ms_accum": "0.1.0", "mindspore": "2.10.0"}
RECORD = {"version": 1, "model": "lenet5", "lr": 0.04, "clip_norm": None, "mean": [0.5, 0.25], "rows": 1437}
RECORD |= {"correct": 352, "total": 360, "updates": 300}
NONE = "there is no metrics.jsonl"
NASTY = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\u202e\udc80.ckpt"


def subject(**changes):
    fields = {"path": "out/a.ckpt", "model": "lenet5", "data": "360 test images", "record": RECORD, "same_data": True}
    return Subject(**{**fields, "versions": VERSIONS, **changes})


def images(**changes):
    return ImageData(**{"names": NAMES, "mean": 0.5, "std": 1, **changes})


def answers_of(rng, rows=60, classes=3, side=8, channels=1):
    labels = np.arange(rows) % classes
    scores = rng.randn(rows, classes)
    scores[np.arange(rows), labels] += 2
    answers = Answers(classes)
    answers.add(rng.rand(rows, channels, side, side) - 0.5, scores, labels)
    return answers


COUNTS = np.array([[8, 2, 0], [0, 0, 0], [0, 1, 1999]])


def counted(counts=COUNTS):
    answers = Answers(len(counts))
    answers.counts += counts
    return answers


def metrics_of(count, evaluation=None, **fields):
    windows = [
        {"update": n + 1, "loss": 2.0 / (n + 1), "lr": 0.04, "grad_norm": 1.0 + n, **fields} for n in range(count)
    ]
    return Metrics(Path("metrics.jsonl"), windows, [Evaluation(count, count, evaluation or {"accuracy": 0.9})])


def with_plain_spaces(text):
    """Return a page with plain spaces, if no line could end before a sign."""
    assert not re.search(r"[0-9] %[ <,.;]", text), "a line could end before the sign"
    return text.replace("\u00a0", " ")


def page_of(about, sections, metrics):
    """Return a page with plain spaces."""
    return with_plain_spaces(report_page.page(about, sections, metrics))


def image_page(about, answers, metrics, **changes):
    """Return the page about images with plain spaces."""
    return page_of(about, image_sections(about, images(**changes), answers), metrics)


# Texts

CHARACTERS = "\n !()0Aaeinot<é我"


def decode(tokens):
    return "".join(CHARACTERS[token] for token in tokens)


def encode(text):
    return np.array([CHARACTERS.index(character) for character in text])


def blocks_of(documents, context):
    """Return the blocks of documents of tokens, and the target after each token, by definition."""
    blocks = []
    for document in documents:
        for start in range(0, len(document) - 1, context):
            part = document[start : start + context + 1]
            padding = context - len(part) + 1
            tokens, targets = np.append(part[:-1], [0] * padding), np.append(part[1:], [IGNORED] * padding)
            blocks.append((tokens, targets))
    return tuple(np.array(column, np.int32) for column in zip(*blocks))


def text_answers(documents, losses_of, context=8, size=3, answers=None):
    """Return what a model with these losses has predicted of documents, from batches of `size` blocks."""
    tokens, targets = blocks_of([encode(document) for document in documents], context)
    answers = TextAnswers(decode, len(CHARACTERS)) if answers is None else answers
    losses = losses_of(targets)
    for start in range(0, len(tokens), size):
        answers.add(*(column[start : start + size] for column in (tokens, targets, losses)))
    return answers


def random_text(rng, length):
    return decode(rng.randint(0, len(CHARACTERS), length))


def text_page(about, answers, metrics, samples=(), entropy=None):
    """Return the page about a text with plain spaces."""
    return page_of(about, text_sections(about, answers, samples, entropy), metrics)


def samples_of(*texts, prompt="Ann:", how="temperature 0.8"):
    return [Sample(how, text, prompt) for text in texts]


# Reading a page


class Elements(HTMLParser):
    """Reads a page: its elements, the texts in them, and tags that do not fit."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.all, self.open, self.faults = [], [], []
        self.feed(text)
        self.faults += [f"<{name}> is not closed" for name, _ in self.open]

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.all.append(element)
        self.open += [] if tag in self.VOID else [(tag, element)]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        if not self.open or self.open[-1][0] != tag:
            self.faults.append(f"</{tag}> closes nothing")
        else:
            self.open.pop()

    def handle_data(self, data):
        for _, element in self.open:
            element["text"] += data

    def with_tag(self, *tags):
        return [element for element in self.all if element["tag"] in tags]


def cells(text, kind):
    """Return the texts of the rows of a table."""
    rows = re.findall(rf'<table class="{kind}">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)[0].split("</tr>")[:-1]
    return [[element["text"] for element in Elements(f"{row}</tr>").with_tag("th", "td")] for row in rows]


def heads(text):
    """Return the names of the columns of all tables, by the kind of the table."""
    tables = re.findall(r'<table class="(\w+)">.*?<thead>(.*?)</thead>', text, re.DOTALL)
    return {kind: [element["text"] for element in Elements(head).with_tag("th")] for kind, head in tables}
