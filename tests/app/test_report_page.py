"""The page about an evaluation: accessibility, escaping of untrusted text, the curves, the settings, the file."""

from __future__ import annotations

import functools
import os
import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest

from ms_accum.app import report_page
from ms_accum.app.plots import draw
from ms_accum.app.report_page import MARK, STYLE, report_path, write_page
from ms_accum.app.series import Evaluation
from report_pages import (
    NASTY,
    NONE,
    RECORD,
    Elements,
    answers_of,
    cells,
    counted,
    image_page,
    metrics_of,
    random_text,
    samples_of,
    subject,
    text_answers,
    text_page,
)

pytestmark = pytest.mark.host


@pytest.fixture
def answers(rng):
    return answers_of(rng)


# What each page must be; each rule gets a page that breaks it.


def is_well_formed(text, elements):
    return elements.faults + [
        f"{len(elements.with_tag(tag))} <{tag}>" for tag in ("title", "main", "h1") if len(elements.with_tag(tag)) != 1
    ]


def loads_nothing(text, elements):
    """Say what the page runs, or would load."""
    wrong = [
        element["tag"]
        for element in elements.with_tag("script", "link", "iframe", "object", "embed", "base", "form", "use")
    ]
    for element in elements.all:
        for name, value in element.items():
            loads = name in ("src", "href", "srcset", "action", "poster") and not value.startswith("data:image/png;")
            wrong += [f"{name}={value}"] if loads or name.startswith("on") else []
    return wrong + re.findall(r"@import|url\(|https?:", text)


def has_language(text, elements):
    return [] if elements.with_tag("html")[0].get("lang") == "en" else ["no lang"]


def has_headings_in_order(text, elements):
    levels = [int(element["tag"][1]) for element in elements.with_tag("h1", "h2", "h3", "h4", "h5", "h6")]
    return [f"h{b} after h{a}" for a, b in zip([0, *levels], levels) if b > a + 1]


def has_alt_texts(text, elements):
    return [element for element in elements.with_tag("img") if not (element.get("alt") or "").strip()]


def tables_have_headers(text, elements):
    scopes = [
        element["text"] for element in elements.with_tag("th") if element.get("scope") not in ("col", "row", "colgroup")
    ]
    return scopes + (["a caption"] if len(elements.with_tag("caption")) != len(elements.with_tag("table")) else [])


def tables_scroll(text, elements):
    boxes = [element for element in elements.with_tag("div") if element.get("class") == "scroll"]
    lost = [element for element in boxes if element.get("tabindex") != "0" or not element.get("aria-label")]
    return lost + (["a box"] if len(boxes) != len(elements.with_tag("table")) else [])


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
    of_text = text_answers([random_text(rng, 900)], lambda targets: rng.exponential(3, targets.shape))
    strange = subject(path=NASTY, data=NASTY, model=NASTY, record={**RECORD, NASTY: NASTY})
    return [
        image_page(subject(), answers, metrics_of(5)),
        image_page(subject(record=None), answers, NONE),
        image_page(strange, answers, NASTY, names=[NASTY] * 3),
        image_page(subject(), answers_of(rng, channels=3), metrics_of(800)),
        text_page(subject(), of_text, metrics_of(5, {"eval_loss": 1.0}), samples_of("x\n")),
        text_page(strange, of_text, NASTY, samples_of(NASTY, prompt=NASTY, how=NASTY)),
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_page_follows_the_rules(rule):
    assert [faults(text, rule) for text in examples()] == [[]] * 6


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
    strange = subject(path=f"x/{NASTY}", record={**RECORD, "model": NASTY})
    elements = Elements(image_page(strange, answers, NASTY, names=[NASTY] * 3))
    plain = Elements(image_page(subject(), answers, NONE))
    assert [element["tag"] for element in elements.all] == [element["tag"] for element in plain.all]
    shown = NASTY.replace("\x00", r"\x00").replace("\u202e", r"\u202e").replace("\udc80", r"\udc80")
    assert elements.with_tag("title")[0]["text"] == f"Evaluation of {shown.rpartition('/')[2]}"
    assert shown in [element["text"] for element in elements.with_tag("td")]
    assert shown in elements.with_tag("img")[0]["alt"]


def test_policy_forbids_loading_and_scripts(answers):
    (policy,) = (
        element["content"]
        for element in Elements(image_page(subject(), answers, NONE)).with_tag("meta")
        if "http-equiv" in element
    )
    assert "default-src 'none'" in policy and "script" not in policy and "http" not in policy


# What is shown


def test_settings_are_those_of_record():
    facts = dict(cells(image_page(subject(), counted(), NONE), "facts"))
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
    assert "has no record" in image_page(subject(record=None), counted(), NONE)


def test_curves_of_run():
    text = image_page(subject(record={**RECORD, "updates": 3}), counted(), metrics_of(5, skipped=True))
    assert cells(text, "curves") == [
        ["loss", "2 at 1", "0.4 at 5", "0.4 at 5", "2 at 1"],
        ["learning rate", "0.04 at 1", "0.04 at 5", "0.04 at 1", "0.04 at 1"],
        ["gradient norm", "1 at 1", "5 at 5", "1 at 1", "5 at 5"],
        ["test accuracy", "0.9 at 5", "0.9 at 5", "0.9 at 5", "0.9 at 5"],
        ["skipped windows", "1 at 1", "5 at 5", "1 at 1", "5 at 5"],
    ]
    assert "up to update 5. Windows skipped: 5. The dashed line is this model, at update 3." in text
    assert "dashed" not in image_page(subject(), counted(), metrics_of(300))


def test_curves_equal_those_of_plot_command():
    metrics = metrics_of(5)
    (image,) = Elements(image_page(subject(record={**RECORD, "updates": 3}), counted(), metrics)).with_tag("img")
    content = b64decode(image["src"].partition("base64,")[2])
    assert content == draw([metrics], ["png"], mark=3)["png"] != draw([metrics], ["png"])["png"]


def test_curves_scroll_on_a_narrow_screen():
    (box,) = (
        element
        for element in Elements(image_page(subject(), counted(), metrics_of(5))).with_tag("div")
        if element["class"] == "scroll wide"
    )
    assert box["tabindex"] == "0" and box["aria-label"] and "img.curves{width:100%;min-width:44rem" in STYLE


def test_page_without_matplotlib_has_numbers_and_install_hint(monkeypatch):
    def missing():
        raise ImportError("matplotlib is not installed. Run: pip install matplotlib")

    monkeypatch.setattr(report_page, "check_installed", missing)
    text = image_page(subject(record={**RECORD, "updates": 3}), counted(), metrics_of(5))
    assert "The curves are not drawn: matplotlib is not installed. Run: pip install matplotlib<" in text
    assert "<img" not in text and "dashed" not in text and cells(text, "curves")[0][1] == "2 at 1"


def test_run_without_curves_gives_reason():
    assert "There are no curves of the run: there is no metrics.jsonl.<" in image_page(subject(), counted(), NONE)


@pytest.mark.parametrize("value", [None, float("nan"), 1e308, -1e308, 10**400])
def test_curves_that_cannot_be_drawn_are_left_out(value):
    rows = cells(image_page(subject(), counted(), metrics_of(5, grad_norm=value)), "curves")
    assert [row[0] for row in rows] == ["loss", "learning rate", "test accuracy", "skipped windows"]
    metrics = metrics_of(5)._replace(evaluations=[Evaluation(5, 10**400, {"accuracy": 1.0}), Evaluation(5, 5, {})])
    rows = cells(image_page(subject(), counted(), metrics), "curves")
    assert [row[0] for row in rows] == ["loss", "learning rate", "gradient norm", "skipped windows"]


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
    write_page(path, image_page(subject(), answers, NONE))
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
