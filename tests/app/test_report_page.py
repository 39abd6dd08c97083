"""The page about an evaluation: its figures, accessibility, and escaping of untrusted text."""

from __future__ import annotations

import functools
import os
import re
from base64 import b64decode
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ms_accum.app import report_images, report_page
from ms_accum.app.plots import draw
from ms_accum.app.report_images import Answers, ImageData, Wrong, image_sections
from ms_accum.app.report_page import MARK, STYLE, Subject, report_path, write_page
from ms_accum.app.series import Evaluation, Metrics

pytestmark = pytest.mark.host

NAMES = ("ant", "bee", "cow")
VERSIONS = {"ms_accum": "0.1.0", "mindspore": "2.10.0"}
RECORD = {"version": 1, "model": "lenet5", "lr": 0.04, "clip_norm": None, "mean": [0.5, 0.25], "rows": 1437}
RECORD |= {"correct": 352, "total": 360, "updates": 300}
NONE = "there is no metrics.jsonl"
NASTY = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\u202e\udc80.ckpt"


def subject(names=NAMES, mean=0.5, std=1, **changes):
    """Return what was evaluated, and the images."""
    fields = {"path": "out/a.ckpt", "model": "lenet5", "data": "360 test images"}
    fields |= {"record": RECORD, "same_data": True, "versions": VERSIONS, **changes}
    return Subject(**fields), ImageData(names, mean, std)


def answers_of(rng, rows=60, classes=3, side=8, channels=1):
    labels = np.arange(rows) % classes
    scores = rng.randn(rows, classes)
    scores[np.arange(rows), labels] += 2
    answers = Answers(classes)
    answers.add(rng.rand(rows, channels, side, side) - 0.5, scores, labels)
    return answers


def metrics_of(count, **fields):
    windows = [
        {"update": n + 1, "loss": 2.0 / (n + 1), "lr": 0.04, "grad_norm": 1.0 + n, **fields} for n in range(count)
    ]
    return Metrics(Path("metrics.jsonl"), windows, [Evaluation(count, count, {"accuracy": 0.9})])


@pytest.fixture
def answers(rng):
    return answers_of(rng)


def page(about, answers, metrics):
    """Return the page with plain spaces."""
    text = report_page.page(about[0], image_sections(*about, answers), metrics)
    assert not re.search(r"[0-9] %[ <,.;]", text), "a line could end before the sign"
    return text.replace("\u00a0", " ")


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

    def of(self, *tags):
        return [element for element in self.all if element["tag"] in tags]


# What each page must be; each rule gets a page that breaks it.


def is_well_formed(text, elements):
    return elements.faults + [
        f"{len(elements.of(tag))} <{tag}>" for tag in ("title", "main", "h1") if len(elements.of(tag)) != 1
    ]


def loads_nothing(text, elements):
    """Say what the page runs, or would load."""
    wrong = [
        element["tag"] for element in elements.of("script", "link", "iframe", "object", "embed", "base", "form", "use")
    ]
    for element in elements.all:
        for name, value in element.items():
            loads = name in ("src", "href", "srcset", "action", "poster") and not value.startswith("data:image/png;")
            wrong += [f"{name}={value}"] if loads or name.startswith("on") else []
    return wrong + re.findall(r"@import|url\(|https?:", text)


def has_language(text, elements):
    return [] if elements.of("html")[0].get("lang") == "en" else ["no lang"]


def has_headings_in_order(text, elements):
    levels = [int(element["tag"][1]) for element in elements.of("h1", "h2", "h3", "h4", "h5", "h6")]
    return [f"h{b} after h{a}" for a, b in zip([0, *levels], levels) if b > a + 1]


def has_alt_texts(text, elements):
    return [element for element in elements.of("img") if not (element.get("alt") or "").strip()]


def tables_have_headers(text, elements):
    scopes = [
        element["text"] for element in elements.of("th") if element.get("scope") not in ("col", "row", "colgroup")
    ]
    return scopes + (["a caption"] if len(elements.of("caption")) != len(elements.of("table")) else [])


def tables_scroll(text, elements):
    boxes = [element for element in elements.of("div") if element.get("class") == "scroll"]
    lost = [element for element in boxes if element.get("tabindex") != "0" or not element.get("aria-label")]
    return lost + (["a box"] if len(boxes) != len(elements.of("table")) else [])


RULES = {
    is_well_formed: [("</main>", ""), ("<h1>", "<h1></h1><h1>")],
    loads_nothing: [
        ("<main>", "<main><script></script>"),
        ('src="data:image/png;', 'src="http://x/'),
        ("<main>", '<main onclick="x">'),
        ("<style>", "<style>@import 'x';"),
        ("<h1>", '<a href="a">'),
    ],
    has_language: [('<html lang="en">', "<html>")],
    has_headings_in_order: [("<h2>", "<h3>"), ("<h1>", "<h2>")],
    has_alt_texts: [("alt=", "data-alt=")],
    tables_have_headers: [('scope="row"', ""), ("<caption>", "<p>"), ('scope="col"', 'scope="x"')],
    tables_scroll: [('tabindex="0"', ""), ('class="scroll"', "")],
}


def faults(text, rule):
    return rule(text, Elements(text))


@functools.cache
def examples():
    """Return pages of all kinds; the first has everything that a rule is about."""
    rng = np.random.RandomState(1)
    answers = answers_of(rng)
    strange = subject(names=[NASTY] * 3, path=NASTY, data=NASTY, model=NASTY, record={**RECORD, NASTY: NASTY})
    return [
        page(subject(), answers, metrics_of(5)),
        page(subject(record=None), answers, NONE),
        page(strange, answers, NASTY),
        page(subject(), answers_of(rng, channels=3), metrics_of(800)),
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_page_follows_the_rules(rule):
    assert [faults(text, rule) for text in examples()] == [[]] * 4


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [(rule, old, new) for rule, planted in RULES.items() for old, new in planted],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_fault_is_detected(rule, old, new):
    text = examples()[0]
    assert old in text and faults(text.replace(old, new), rule)


# Untrusted text


def test_crafted_texts_are_escaped(answers):
    strange = subject(names=[NASTY] * 3, path=f"x/{NASTY}", record={**RECORD, "model": NASTY})
    elements = Elements(page(strange, answers, NASTY))
    plain = Elements(page(subject(), answers, NONE))
    assert [element["tag"] for element in elements.all] == [element["tag"] for element in plain.all]
    shown = NASTY.replace("\x00", r"\x00").replace("\u202e", r"\u202e").replace("\udc80", r"\udc80")
    assert elements.of("title")[0]["text"] == f"Evaluation of {shown.rpartition('/')[2]}"
    assert shown in [element["text"] for element in elements.of("td")]
    assert shown in elements.of("img")[0]["alt"]


def test_policy_forbids_loading_and_scripts(answers):
    (policy,) = (
        element["content"] for element in Elements(page(subject(), answers, NONE)).of("meta") if "http-equiv" in element
    )
    assert "default-src 'none'" in policy and "script" not in policy and "http" not in policy


# What is shown


def cells(text, kind):
    """Return the texts of the rows of a table."""
    rows = re.findall(rf'<table class="{kind}">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)[0].split("</tr>")[:-1]
    return [[element["text"] for element in Elements(f"{row}</tr>").of("th", "td")] for row in rows]


COUNTS = np.array([[8, 2, 0], [0, 0, 0], [0, 1, 1999]])


def counted(counts=COUNTS):
    answers = Answers(len(counts))
    answers.counts += counts
    return answers


def test_accuracy_and_interval():
    text = page(subject(), counted(), NONE)
    assert "99.85 % <small>(2,007 of 2,010 images)</small>" in text
    assert "95 % interval: 99.6 % to 99.9 %." in text
    assert "Recorded after training: 97.78 % (352 of 360).<" in text
    assert "(352 of 360), on other images.<" in page(subject(same_data=False), counted(), NONE)
    assert "Recorded" not in page(subject(record=None), counted(), NONE)


def test_table_by_class():
    assert cells(page(subject(), counted(), NONE), "classes") == [
        ["ant", "10", "8", "80.0 %", "bee (2)"],
        ["bee", "0", "0", "no images", "none"],
        ["cow", "2,000", "1,999", "100.0 %", "bee (1)"],
    ]


def test_confusion_matrix():
    text = page(subject(), counted(), NONE)
    assert cells(text, "matrix") == [["ant", "8", "2", "0"], ["bee", "0", "0", "0"], ["cow", "0", "1", "1,999"]]
    kinds = re.findall(r'<td class="(right|wrong|zero)"(?: style="--s:([0-9.]+)")?>', text)
    right, wrong, zero = "right", "wrong", ("zero", "")
    first = [(right, "0.80"), (wrong, "1.00"), zero]  # mistakes: 2 of 10 is the largest part of a class
    assert kinds == [*first, zero, (right, "0.00"), zero, zero, (wrong, "0.05"), (right, "1.00")]


def test_model_without_mistakes():
    text = page(subject(), counted(np.diag([3, 4, 5])), NONE)
    assert "There is no wrong answer." in text and "<img" not in text and 'class="wrong"' not in text


@pytest.mark.parametrize(
    ("probability", "words"),
    [(0.98, "98.0 %"), (0.504, "50.4 %"), (0.9949, "99.5 %"), (0.99999, "over 99.9 %"), (1.0, "over 99.9 %")]
    + [(float("nan"), "no probability")],
)
def test_most_certain_wrong_answers(probability, words, answers):
    answers.worst = [Wrong(1234, 2, 0, probability, np.zeros((1, 4, 6)))]
    (image,) = Elements(page(subject(), answers, NONE)).of("img")
    assert image["alt"] == f"Test image 1,234: is cow, predicted ant, {words}"
    assert (image["width"], image["height"]) == ("6", "4")


def test_pictures_are_those_of_wrong_answers(answers):
    images = Elements(page(subject(), answers, NONE)).of("img")
    assert len(images) == len(answers.worst) > 3
    assert f">{len(images)} of {answers.total - answers.right} wrong answers: those" in page(subject(), answers, NONE)
    for image, answer in zip(images, answers.worst):
        picture = Image.open(BytesIO(b64decode(image["src"].partition("base64,")[2])))
        expected = np.rint((answer.image[0] + 0.5) * 255)
        assert np.array_equal(np.array(picture), expected)
        assert f"is {NAMES[answer.label]}, predicted {NAMES[answer.guess]}" in image["alt"]


def picture_of(image, mean, std):
    return np.array(Image.open(BytesIO(report_images._picture(image, mean, std))))


def test_picture_is_input_before_normalization(rng):
    for shape, mean, std in (((3, 5, 4), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), ((1, 5, 4), 0.3, 0.4)):
        expected = rng.randint(0, 256, shape).astype(np.uint8)
        scale = [np.reshape(np.array(value, np.float32), (-1, 1, 1)) for value in (mean, std)]
        image = ((expected / 255 - scale[0]) / scale[1]).astype(np.float32)
        shown = expected.transpose(1, 2, 0) if shape[0] == 3 else expected[0]
        assert np.array_equal(picture_of(image, mean, std), shown)


def test_picture_of_nan_is_black():
    assert np.array_equal(picture_of(np.full((1, 2, 2), np.nan), 0.5, 1), np.zeros((2, 2)))
    assert picture_of(np.array([[[-9.0, 9.0, np.inf, -np.inf]]]), 0.5, 1).tolist() == [[0, 255, 255, 0]]


def test_settings_are_those_of_record():
    facts = dict(cells(page(subject(), counted(), NONE), "facts"))
    assert facts == {
        "model": "lenet5",
        "lr": "0.04",
        "clip norm": "none",
        "mean": "0.5, 0.25",
        "rows": "1,437",
        "updates": "300",
        "ms accum of the evaluation": "0.1.0",
        "mindspore of the evaluation": "2.10.0",
    }
    assert "has no record" in page(subject(record=None), counted(), NONE)


def test_curves_of_run():
    text = page(subject(record={**RECORD, "updates": 3}), counted(), metrics_of(5, skipped=True))
    assert cells(text, "curves") == [
        ["loss", "2 at 1", "0.4 at 5", "0.4 at 5", "2 at 1"],
        ["learning rate", "0.04 at 1", "0.04 at 5", "0.04 at 1", "0.04 at 1"],
        ["gradient norm", "1 at 1", "5 at 5", "1 at 1", "5 at 5"],
        ["test accuracy", "0.9 at 5", "0.9 at 5", "0.9 at 5", "0.9 at 5"],
        ["skipped windows", "1 at 1", "5 at 5", "1 at 1", "5 at 5"],
    ]
    assert "up to update 5. Windows skipped: 5. The dashed line is this model, at update 3." in text
    assert "dashed" not in page(subject(), counted(), metrics_of(300))


def test_curves_equal_those_of_plot_command():
    metrics = metrics_of(5)
    (image,) = Elements(page(subject(record={**RECORD, "updates": 3}), counted(), metrics)).of("img")
    content = b64decode(image["src"].partition("base64,")[2])
    assert content == draw([metrics], ["png"], mark=3)["png"] != draw([metrics], ["png"])["png"]


def test_page_without_matplotlib_has_numbers_and_install_hint(monkeypatch):
    def missing():
        raise ImportError("matplotlib is not installed. Run: pip install matplotlib")

    monkeypatch.setattr(report_page, "check_installed", missing)
    text = page(subject(record={**RECORD, "updates": 3}), counted(), metrics_of(5))
    assert "The curves are not drawn: matplotlib is not installed. Run: pip install matplotlib<" in text
    assert "<img" not in text and "dashed" not in text and cells(text, "curves")[0][1] == "2 at 1"


def test_run_without_curves_gives_reason():
    assert "There are no curves of the run: there is no metrics.jsonl.<" in page(subject(), counted(), NONE)


@pytest.mark.parametrize("value", [None, float("nan"), 1e308, -1e308, 10**400])
def test_curves_that_cannot_be_drawn_are_left_out(value):
    rows = cells(page(subject(), counted(), metrics_of(5, grad_norm=value)), "curves")
    assert [row[0] for row in rows] == ["loss", "learning rate", "test accuracy", "skipped windows"]
    metrics = metrics_of(5)._replace(evaluations=[Evaluation(5, 10**400, {"accuracy": 1.0}), Evaluation(5, 5, {})])
    rows = cells(page(subject(), counted(), metrics), "curves")
    assert [row[0] for row in rows] == ["loss", "learning rate", "gradient norm", "skipped windows"]


@pytest.mark.slow
def test_cifar_page_is_small(rng):
    answers = answers_of(rng, rows=10_000, classes=10, side=32, channels=3)  # noise: no image is larger
    assert len(answers.worst) == 24
    text = page(subject(names=NAMES + tuple("abcdefg"), mean=[0.5] * 3, std=[1] * 3), answers, metrics_of(10_000))
    assert len(text.encode()) < 500_000


# Colours


def contrast(first, second):
    """Return the contrast of two colours as WCAG 2 defines it."""
    channels = [
        [c / 255 / 12.92 if c <= 10.3 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        for colour in (first, second)
    ]
    light, dark = sorted((0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in channels), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def colours_of(style):
    """Return the colours of a style sheet by name, as red, green and blue."""
    colours = re.findall(r"--(\w+):(#\w{6}|\d+ \d+ \d+)[;}]", style)
    return {
        name: bytes.fromhex(text[1:]) if text[0] == "#" else tuple(map(int, text.split())) for name, text in colours
    }


def weak_pairs(colours):
    """Return the texts whose contrast with a background behind them is too weak."""
    colour = {name: np.array(list(value), float) for name, value in colours.items()}
    backgrounds_by_text = {"text": [colour["page"], colour["soft"]], "muted": [colour["page"], colour["soft"]]}
    for shade in ("right", "wrong"):
        backgrounds_by_text["text"] += [colour["page"] * (1 - s) + colour[shade] * s for s in np.linspace(0, 1, 21)]
    return [
        (name, background.tolist())
        for name, backgrounds in backgrounds_by_text.items()
        for background in backgrounds
        if contrast(colour[name], background) < 4.5
    ]


def test_all_texts_have_enough_contrast():
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert weak_pairs(colours_of(STYLE)) == []


@pytest.mark.parametrize(
    ("name", "colour"), [("muted", (139, 148, 158)), ("right", (11, 92, 173)), ("text", (119, 119, 119))]
)
def test_weak_colour_is_detected(name, colour):
    assert weak_pairs({**colours_of(STYLE), name: colour})


# The file


def test_report_replaces_report(tmp_path):
    path = report_path(str(tmp_path / "a" / "b"))
    write_page(path, f"{MARK}\nold")
    assert report_path(str(tmp_path / "a" / "b")) == path
    write_page(path, f"{MARK}\nnew \udc80")
    assert Path(path).read_text(encoding="utf-8") == f"{MARK}\nnew \\udc80"
    assert os.listdir(tmp_path / "a" / "b") == ["report.html"]


@pytest.mark.parametrize("content", ["", "mine", MARK[:-1], f" {MARK}"])
def test_other_file_is_not_replaced(content, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(content)
    for write in (lambda: report_path(str(tmp_path)), lambda: write_page(str(path), MARK)):
        with pytest.raises(ValueError, match="report.html' exists and is no report of eval.py; give another folder"):
            write()
    assert path.read_text() == content


def test_folder_named_like_report_is_not_replaced(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ValueError, match="exists and is no report"):
        report_path(str(tmp_path))


def test_every_page_is_recognized(answers, tmp_path):
    path = report_path(str(tmp_path))
    write_page(path, page(subject(), answers, NONE))
    assert report_path(str(tmp_path)) == path


def test_file_at_folder_path_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/x"):
        with pytest.raises(OSError, match=r"^'.*' can't be made: "):
            report_path(str(tmp_path / folder))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder in which nobody can write")
def test_unwritable_folder_is_an_error():
    with pytest.raises(OSError, match=r"^'/proc/self' can't be written to: "):
        report_path("/proc/self")


def test_failed_write_keeps_earlier_page(tmp_path, monkeypatch):
    path = report_path(str(tmp_path))
    write_page(path, f"{MARK}\nold")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="can't be written: .*No space left"):
        write_page(path, f"{MARK}\nnew")
    assert Path(path).read_text() == f"{MARK}\nold" and os.listdir(tmp_path) == ["report.html"]


def test_link_out_of_folder_is_not_followed(tmp_path):
    (tmp_path / "out").mkdir()
    for target in ("report of another run", "not there"):
        (tmp_path / "report of another run").write_text(MARK)
        (tmp_path / "out" / "report.html").symlink_to(tmp_path / target)
        with pytest.raises(OSError, match="can't be written: it leads to .*, out of its folder. Remove the link.$"):
            report_path(str(tmp_path / "out"))
        (tmp_path / "out" / "report.html").unlink()
