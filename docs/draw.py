"""Draw the pictures of the documents: python docs/draw.py

`images/window.svg` shows how micro-batches become an update, in English and Chinese; `images/badges.svg` has what
pyproject.toml requires.
"""

from __future__ import annotations

import re
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
PROJECT = Path(__file__).parents[1] / "pyproject.toml"

ROWS = (4, 4, 4, 2)  # of the micro-batches; the last one is short
COLOURS = (
    "#0072b2",
    "#009e73",
    "#d55e00",
    "#cc79a7",
)  # Okabe and Ito's, which colour-blind people tell apart
WORDS = {
    "": {
        "title": "A batch of 14 rows is split into four micro-batches; their weighted gradients add up to one update",
        "batch": "effective batch",
        "micro": "micro-batches",
        "rows": "{} rows",
        "forward": "forward, backward",
        "accumulator": "accumulator",
        "window": "a window of N = 4 micro-batches",
        "end": "at its end, once",
        "steps": ("divide by the weight", "clip", "optimizer"),
        "update": "update",
    },
    ".zh": {
        "title": "14 个样本的批次拆成四个微批次；各微批次的梯度加权累加后，更新一次参数",
        "batch": "有效批次",
        "micro": "微批次",
        "rows": "{} 个样本",
        "forward": "前向、反向",
        "accumulator": "累加器",
        "window": "一个更新窗口：N = 4 个微批次",
        "end": "窗口结束时一次",
        "steps": ("除以权重之和", "裁剪", "优化器"),
        "update": "参数更新",
    },
}
INK, PAPER, LINE = "#1f2933", "#ffffff", "#9aa5b1"
_FONT = "font-family='Helvetica, Arial, Noto Sans CJK SC, Microsoft YaHei, sans-serif'"
_WIDTH, _HEIGHT = 900, 300
_TOP, _ROW, _GAP = 62, 11, 10  # of the first micro-batch, of a row, between micro-batches


def window(words: dict) -> str:
    """Return the picture of a window."""
    parts = [_box(172, 22, 470, 262, "none", dash=True), _text(407, 16, words["window"], size=13)]
    parts += [
        _text(60, 46, words["batch"]),
        _text(232, 46, words["micro"]),
        _text(555, 108, words["accumulator"]),
    ]
    top = _TOP
    for number, (rows, colour) in enumerate(zip(ROWS, COLOURS), 1):
        high = rows * _ROW
        middle = top + high / 2
        # In the batch its rows are together; as a micro-batch they are on their own.
        parts += [
            _rows(25, _TOP + 14 + sum(ROWS[: number - 1]) * _ROW, rows, colour),
            _rows(197, top, rows, colour),
        ]
        parts += [_text(288, middle + 4, words["rows"].format(rows), anchor="start", size=12)]
        parts += [_arrow(336, middle, 424, middle), _formula(430, middle + 5, number, colour)]
        parts += [_arrow(474, middle, 508, 150 + (middle - 150) * 0.25)]
        top += high + _GAP
    parts += [_text(380, 46, words["forward"], size=12), _arrow(102, 150, 188, 150)]
    parts += [_box(508, 122, 96, 56, "#f0f4f8"), _sum(556, 156), _arrow(604, 150, 664, 150)]
    parts += [_text(755, 62, words["end"])]
    for place, step in enumerate(words["steps"]):
        parts += [
            _box(668, 78 + 52 * place, 174, 36, "#f0f4f8"),
            _text(755, 101 + 52 * place, step),
        ]
        parts += [_arrow(755, 114 + 52 * place, 755, 128 + 52 * place)]
    parts += [
        _box(690, 234, 130, 40, COLOURS[0]),
        _text(755, 259, words["update"], colour=PAPER, size=15, bold=True),
    ]
    return _svg(_WIDTH, _HEIGHT, words["title"], parts)


def _svg(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {_FONT}>"
    marker = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
        f"<path d='M0 0 8 4 0 8z' fill='{LINE}'/></marker></defs>"
    )
    paper = f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>"
    return "\n".join([head, f"<title>{title}</title>", marker, paper, *parts, "</svg>"]) + "\n"


def _rows(x: float, y: float, count: int, colour: str) -> str:
    bars = [
        f"<rect x='{x}' y='{y + n * _ROW:g}' width='76' height='9' rx='2' fill='{colour}'/>"
        for n in range(count)
    ]
    return "".join(bars)


def _box(x: float, y: float, width: float, height: float, fill: str, dash: bool = False) -> str:
    style = "stroke-dasharray='5 4'" if dash else ""
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='{fill}' stroke='{LINE}' {style}/>"


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "middle",
    size: int = 14,
    colour: str = INK,
    bold: bool = False,
) -> str:
    weight = " font-weight='bold'" if bold else ""
    return f"<text x='{x}' y='{y:g}' text-anchor='{anchor}' font-size='{size}' fill='{colour}'{weight}>{words}</text>"


def _formula(x: float, y: float, number: int, colour: str) -> str:
    low = f"<tspan font-size='10' dy='3'>{number}</tspan>"
    return (
        f"<text x='{x}' y='{y:g}' font-size='16' font-style='italic' fill='{colour}'>"
        f"w{low}<tspan dy='-3'>g</tspan>{low}</text>"
    )


def _sum(x: float, y: float) -> str:
    style = f"text-anchor='middle' font-size='19' fill='{INK}'"
    return f"<text x='{x}' y='{y}' {style}>Σ <tspan font-style='italic'>w g</tspan></text>"


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f"<path d='M{x} {y:g}L{to_x} {to_y:g}' stroke='{LINE}' stroke-width='1.6' marker-end='url(#tip)'/>"


def badges(project: str) -> str:
    """Return badges of what pyproject.toml says."""
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    low, high = re.search(r'"mindspore>=([\d.]+),<([\d.]+)"', project).groups()  # type: ignore[union-attr]
    licence = re.search(r'^license = "(.+)"', project, re.MULTILINE)[1]  # type: ignore[index]
    pairs = [
        ("Python", f"{pythons[0]} to {pythons[-1]}"),
        ("MindSpore", f"{low} to below {high}"),
    ]
    pairs += [("tested on", "CPU, Linux"), ("license", licence)]
    x, parts = 0.0, []
    for name, value in pairs:
        left, right = 7.0 * len(name) + 14, 6.6 * len(value) + 14
        parts += [f"<rect x='{x:g}' width='{left:g}' height='20' fill='#3e4c59'/>"]
        parts += [f"<rect x='{x + left:g}' width='{right:g}' height='20' fill='{COLOURS[0]}'/>"]
        parts += [_text(x + left / 2, 14, name, size=11, colour=PAPER)]
        parts += [_text(x + left + right / 2, 14, value, size=11, colour=PAPER)]
        x += left + right + 6
    words = ", ".join(f"{name}: {value}" for name, value in pairs)
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{x:g}' height='20' role='img' {_FONT}>"
    )
    head += f"<title>{words}</title>"
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def logo(background: str | None) -> str:
    """Return micro-batches that add up to an update: four bars above one. On the header it has no background."""
    square = (
        []
        if background is None
        else [f"<rect width='64' height='64' rx='12' fill='{background}'/>"]
    )
    colours = COLOURS if background is not None else (PAPER,) * 4
    bars = [
        f"<rect x='{8 + 12.6 * number:g}' y='{32 - 6 * rows}' width='10' height='{6 * rows}' rx='2' fill='{colour}'/>"
        for number, (rows, colour) in enumerate(zip(ROWS, colours))
    ]
    sum_of_all = f"<rect x='8' y='40' width='47.8' height='16' rx='3' fill='{PAPER}'/>"
    head = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 64 64' role='img'><title>ms_accum</title>"
    return "\n".join([head, *square, *bars, sum_of_all, "</svg>"]) + "\n"


def pictures() -> dict[str, str]:
    """Return all pictures by the names of their files."""
    drawn = {f"window{language}.svg": window(words) for language, words in WORDS.items()}
    logos = {"logo.svg": logo(None), "favicon.svg": logo("#1f2933")}
    return {**drawn, **logos, "badges.svg": badges(PROJECT.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")
        print(IMAGES / name)
