"""The tables and the picture of docs/conformance.md, in two languages, from the results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ..plots import plot
from ..results import RESULTS, read
from ..tables import Lines, groups, markdown
from . import curves, verdicts
from .cases import cases
from .libraries import LIBRARIES, OURS, PROGRAMS, RIGHT_LOOP, Library, key_of
from .matrix import FILE
from .words import CASES, FAULTS, WORDS

_GITHUB, _TAIL = "https://github.com", "short last window"
SOURCES = "reference/conformance_programs.md"
BAD = (verdicts.OFF, verdicts.POISONED, verdicts.SILENT)
# What the columns of the summary count.
_COLUMNS = (
    (verdicts.RIGHT, verdicts.WARNS),
    BAD,
    ("design",),
    (verdicts.REFUSES, verdicts.DIED),
    (verdicts.CANNOT, verdicts.UNTRIED),
)

Row = Mapping[str, Any]


def tables() -> dict[str, str]:
    """Return the tables by the names of their marks."""
    record = read(RESULTS / FILE)
    made = {"conformance/programs": _programs(), "conformance/versions": _versions(record)}
    for language in ("", ".zh"):
        made[f"conformance/issues{language}"] = _issues((record["rows"], language))
        made[f"conformance/summary{language}"] = _summary((record["rows"], language))
        made[f"readme/conformance{language}"] = _readme((record["rows"], language))
        for name, rows in _by_case(record["rows"]).items():
            made[f"conformance/{_anchor(name)}{language}"] = _case((rows, language))
    return made


def _by_case(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: mine for (name,), mine in groups(rows, "case").items()}


def _anchor(name: str) -> str:
    """Return the anchor of a heading, as the site makes it."""
    return re.sub(r"[ -]+", "-", re.sub(r"[^\w -]", "", name.lower()))


@markdown
def _case(source: tuple[Sequence[Row], str]) -> Lines:
    """What became of one case: who is right, and who is off by how much, and why."""
    rows, language = source
    words = WORDS[language]
    yield [words["result"], words["libraries"]]
    outcomes: dict[str, list[str]] = {}
    for row in sorted(rows, key=_order):
        outcomes.setdefault(_outcome(row, language), []).append(_linked(row, language))
    for outcome, names in outcomes.items():
        yield [outcome, "; ".join(names)]


def _order(row: Row) -> tuple:
    order = (verdicts.RIGHT, verdicts.WARNS, verdicts.SILENT, verdicts.OFF, verdicts.POISONED, verdicts.REFUSES)
    kinds = (*order, verdicts.DIED, verdicts.CANNOT, verdicts.UNTRIED)
    return kinds.index(row["verdict"]), row.get("error", 0.0) if row["verdict"] != verdicts.RIGHT else 0.0


def _outcome(row: Row, language: str) -> str:
    """Return what became of a cell, in words."""
    words, verdict = WORDS[language], row["verdict"]
    if verdict == verdicts.OFF:
        text = f"**{percent(row['error'])}**"
        if row.get("fault"):
            text += f" {words['comma'].join(FAULTS[language].get(f, f) for f in row['fault'].split(', '))}"
    elif verdict in (verdicts.WARNS, verdicts.SILENT):
        text = f"{words[verdict]}{words['comma']}{percent(row['error'])}"
    else:
        text = words[verdict]
    if row.get("updates") is not None and row["updates"] != row["expected_updates"] and verdict == verdicts.OFF:
        text += words["updates"].format(row["updates"], row["expected_updates"])
    return text + (words["by_design"] if "by_design" in row else "")


def _linked(row: Row, language: str) -> str:
    name = key_of(row["library"], row["way"])
    text = f"[{name}]({SOURCES}#{_anchor(name)})"
    if row["verdict"] in (verdicts.CANNOT, verdicts.REFUSES, verdicts.DIED) and row.get("words"):
        text += f" ({_cell(row['words'])})" if not language or row["verdict"] != verdicts.CANNOT else ""
    if "by_design" in row and not language:
        text += f" ({_cell(row['by_design'])})"
    if row.get("reductions") is not None:
        text += WORDS[language]["reductions"].format(f"{row['reductions']:g}")
    return text


def _cell(text: str) -> str:
    """Return text that does not end a cell of a table."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def percent(error: float) -> str:
    """Return an error as a table shows it."""
    return "> 1000%" if error > 10 else f"{error:.1%}" if error < 0.1 else f"{error:.0%}"


@markdown
def _summary(source: tuple[Sequence[Row], str]) -> Lines:
    """How many cases each library has right, and what becomes of the others."""
    rows, language = source
    words = WORDS[language]
    yield [words[column] for column in ("library", "right", "wrong", "design", "stops", "not expressed")]
    lines = []
    for (name, way), mine in groups(rows, "library", "way").items():
        kinds = ["design" if "by_design" in row else row["verdict"] for row in mine]
        counts = [sum(map(kinds.count, group)) for group in _COLUMNS]
        lines.append([key_of(name, way), *counts])
    yield from sorted(lines, key=lambda line: (-line[1], line[2]))


README = ("short last window", "ragged rows", "padded tokens", "clip", "NaN", "two terms", "resume")


@markdown
def _readme(source: tuple[Sequence[Row], str]) -> Lines:
    """Some cases: how many ways of other libraries are right, and the least and largest error of the others."""
    rows, language = source
    words = WORDS[language]
    yield [words["case"], "ms_accum", words["others right"], words["others off"]]
    for name, mine in _by_case(rows).items():
        if name not in README:
            continue
        ours = max(row["error"] for row in mine if row["library"] == OURS and "error" in row)
        others = [row for row in mine if row["library"] not in (OURS, RIGHT_LOOP)]
        right = [row for row in others if row["verdict"] == verdicts.RIGHT]
        bad = [row for row in others if row["verdict"] in BAD and "by_design" not in row]
        errors = sorted(row["error"] for row in bad if "error" in row)
        span = "–".join(dict.fromkeys(percent(error) for error in (*errors[:1], *errors[-1:])))
        lost = sum(row["verdict"] == verdicts.POISONED for row in bad)
        span += (words["comma"] if span and lost else "") + (words["all NaN"].format(lost) if lost else "")
        yield [CASES[language].get(name, name), f"{ours:.0e}", f"{len(right)} / {len(right) + len(bad)}", span]


class Issue(NamedTuple):
    """A public issue that a cell reproduces; it was open on 25 November 2026, in the copy that was read."""

    address: str
    library: str
    way: str
    case: str


# By what the tables call it.
ISSUES = {
    "Lightning #19987": Issue(f"{_GITHUB}/Lightning-AI/pytorch-lightning/issues/19987", "Lightning", "", _TAIL),
    "Lightning #20350": Issue(
        f"{_GITHUB}/Lightning-AI/pytorch-lightning/issues/20350", "Lightning", "", "padded tokens"
    ),
    "DeepSpeed #7439": Issue(f"{_GITHUB}/deepspeedai/DeepSpeed/issues/7439", "DeepSpeed", "managed", _TAIL),
    "ms-swift #5823": Issue(
        f"{_GITHUB}/modelscope/ms-swift/pull/5823", "Transformers", "with num_items_in_batch", "two terms"
    ),
    "PyTorch #46516": Issue(f"{_GITHUB}/pytorch/pytorch/issues/46516", "PyTorch", "usual loop", "BatchNorm"),
    "pet #36": Issue(f"{_GITHUB}/timoschick/pet/issues/36", "PyTorch", "usual loop", _TAIL),
}


@markdown
def _issues(source: tuple[Sequence[Row], str]) -> Lines:
    """Open issues, and the cells that reproduce them."""
    rows, language = source
    cells = {(row["library"], row["way"], row["case"]): row for row in rows}
    yield [WORDS[language][column] for column in ("issue", "case", "run with", "result")]
    for name, issue in ISSUES.items():
        row = cells[issue.library, issue.way, issue.case]
        case = f"[{CASES[language].get(issue.case, issue.case)}](#{_anchor(issue.case)})"
        about = f"{WORDS[language]['colon']}{WORDS[language]['issues'][name]}"
        run_with = key_of(issue.library, issue.way)
        yield [f"[{name}]({issue.address}){about}", case, run_with, _outcome(row, language)]


@markdown
def _versions(record: Mapping[str, Any]) -> Lines:
    """What was measured, when, and with which documentation."""
    yield ["library", "versions", "measured", "follows"]
    for library in LIBRARIES:
        if library.missing:
            yield [library.key, library.missing, "-", ""]
            continue
        about = record["libraries"][library.key]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        follows = f"[documentation]({library.documentation})" if library.documentation else ""
        yield [library.key, versions, about["date"], follows]


def _programs() -> str:
    """Return the source of each library's program, under a heading for each way."""
    parts = []
    for program in dict.fromkeys(library.program for library in LIBRARIES if not library.missing):
        ways = [library for library in LIBRARIES if library.program == program]
        parts += [f"## {library.key}\n" for library in ways]
        flags = ", ".join(f"`{' '.join(library.flags)}`" for library in ways if library.flags)
        parts += [f"`{program}`" + (f", with {flags}\n" if flags else "\n")]
        parts += [f"```py\n{(PROGRAMS / program).read_text(encoding='utf-8')}```\n"]
    for shared in sorted(path.name for path in PROGRAMS.glob("*.py")):
        if shared not in {library.program for library in LIBRARIES}:
            parts += [f"## {shared}\n", f"```py\n{(PROGRAMS / shared).read_text(encoding='utf-8')}```\n"]
    return "\n".join(parts)


# The picture

_LABEL, _CELL, _HIGH, _HEAD, _TOP = 122, 24, 15, 76, 22
_INK = "#1f2933"
_FILL = {
    verdicts.RIGHT: "#b7e4c7",
    verdicts.WARNS: "#b7e4c7",
    verdicts.OFF: "#f4a582",
    verdicts.SILENT: "#f4a582",
    verdicts.POISONED: "#ca5c5c",
    verdicts.REFUSES: "#ffe8a3",
    verdicts.DIED: "#ffe8a3",
    verdicts.CANNOT: "#e4e7eb",
    verdicts.UNTRIED: "#f5f7fa",
    "by_design": "#b3cde3",
}
_SIGNS = {
    verdicts.RIGHT: "✓",
    verdicts.WARNS: "✓",
    verdicts.POISONED: "NaN",
    verdicts.REFUSES: "✗",
    verdicts.DIED: "✗",
    verdicts.CANNOT: "–",
    verdicts.UNTRIED: "–",
}
_PANEL = 11  # cases side by side: what 390 pixels hold


def pictures() -> dict[str, str]:
    """Return the picture in both languages, by the names of the files."""
    rows = read(RESULTS / FILE)["rows"]
    return {f"conformance{language}.svg": _picture(rows, language) for language in ("", ".zh")}


def _picture(rows: Sequence[Row], language: str) -> str:
    """Return the matrix: a line for each way, a square for each case, in two panels, for narrow screens."""
    words, names = WORDS[language], list(cases())
    cells = {(row["library"], row["way"], row["case"]): row for row in rows}
    ways = [library for library in LIBRARIES if any(key[:2] == (library.name, library.way) for key in cells)]
    width = _LABEL + _PANEL * _CELL + 6
    parts, top = [], 0.0
    for first in range(0, len(names), _PANEL):
        shown = names[first : first + _PANEL]
        for number, name in enumerate(shown):
            x, y = _LABEL + number * _CELL + 14, top + _HEAD + _TOP - 8
            label = escape(CASES[language].get(name, name))
            parts.append(f"<text transform='translate({x:g} {y:g}) rotate(-55)' font-size='9'>{label}</text>")
        top += _HEAD + _TOP
        for library in ways:
            parts += _line(library, [cells.get((library.name, library.way, name)) for name in shown], top)
            top += _HIGH
        top += 4
    parts += _legend(words, top + 8)
    height = top + 50
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height:g}' role='img' fill='{_INK}' "
    head += "font-family='Helvetica, Arial, Noto Sans CJK SC, Microsoft YaHei, sans-serif'>"
    paper = f"<rect width='{width}' height='{height:g}' rx='4' fill='#ffffff'/>"
    return "\n".join([head, f"<title>{escape(words['title'])}</title>", paper, *parts, "</svg>"]) + "\n"


def _line(library: Library, rows: Sequence[Row | None], top: float) -> Iterator[str]:
    bold = " font-weight='bold'" if library.name == OURS else ""
    place = f"x='{_LABEL - 4}' y='{top + 11:g}' text-anchor='end' font-size='8.4'"
    yield f"<text {place}{bold}>{escape(library.short)}</text>"
    for number, row in enumerate(rows):
        if row is None:
            continue
        x = _LABEL + number * _CELL
        fill = _FILL["by_design" if "by_design" in row else row["verdict"]]
        yield f"<rect x='{x}' y='{top:g}' width='{_CELL - 1.5}' height='{_HIGH - 1.5}' rx='2' fill='{fill}'/>"
        yield (
            f"<text x='{x + _CELL / 2 - 0.75:g}' y='{top + 10:g}' text-anchor='middle' font-size='8.4'>"
            f"{_sign(row)}</text>"
        )


def _sign(row: Row) -> str:
    """Return the few letters that a square has room for."""
    return _SIGNS.get(row["verdict"]) or ("≫" if row["error"] > 10 else percent(row["error"]))


def _legend(words: Mapping[str, str], top: float) -> Iterator[str]:
    kinds = (verdicts.RIGHT, verdicts.OFF, verdicts.POISONED, "by_design", verdicts.REFUSES, verdicts.CANNOT)
    for number, kind in enumerate(kinds):
        x, y = 8 + (number % 3) * 128, top + (number // 3) * 17
        yield f"<rect x='{x}' y='{y:g}' width='12' height='12' rx='2' fill='{_FILL[kind]}'/>"
        yield f"<text x='{x + 16}' y='{y + 10:g}' font-size='9'>{escape(words['legend'][kind])}</text>"


def plot_curves(folder: Path) -> None:
    """Plot the loss curves of five faults into a folder."""
    made = read(RESULTS / FILE)["curves"]
    plot(folder / curves.FILE, lambda figure: curves.draw(figure, made), curves.SIZE)
