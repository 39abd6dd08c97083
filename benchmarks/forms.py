"""The benchmark `forms`: ways to write a block of a network that compute the same, and what each takes on CPU."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple

from . import plots
from .contenders import OURS, Entry
from .options import reject_options
from .process import Contender
from .results import rows as rows_of
from .runner import Session, alternate, ratio, repeats, summary
from .tables import Lines, markdown

ENTRY = Entry(OURS, "mindspore", "forms_ours.py")
TABLES = {"": ("", "block form ms:.3f ratio:.2f difference:.0e")}
NOTE = "ms: forward and backward, median; ratio: to the first form; difference: of the outputs, relative to the first's"
BLOCKS = (
    "attention",
    "norm",
    "feed-forward",
    "cross-entropy",
    "division",
    "product",
    "narrow-product",
    "standardized",
    "pooling",
)
_BURST, _ROUNDS = 0.2, 11  # seconds of a form in a round


def run(arguments: Namespace) -> None:
    """Measure, print the table, write JSON and plot."""
    reject_options("forms", networks=arguments.networks, windows=arguments.windows, contenders=arguments.contenders)
    rounds = 2 if arguments.short else arguments.rounds or _ROUNDS
    session = Session("forms", arguments, {"rounds": rounds, "burst_s": _BURST})
    for block in BLOCKS:
        print(f"{block} ...", flush=True)
        # A process for each: what makes convolutions fast must be set before the first kernel runs.
        with session.start(ENTRY, block=block, rows=64 if arguments.short else 512) as contender:
            forms = contender.about["forms"]
            measured = alternate(rounds, {form: _burst(contender, form, arguments.short) for form in forms})
            session.rows += [_row(block, form, measured, contender.ask(form=form)) for form in forms]
    session.finish(TABLES, draw, note=NOTE, size=(13.0, 6.5))


def _burst(contender: Contender, form: str, short: bool) -> Callable[[], float]:
    """Compile a form, and return the function that runs a burst of it and returns its milliseconds."""

    def seconds(count: int) -> float:
        return contender.ask(form=form, count=count)["seconds"]

    count = repeats(seconds, _BURST / (10 if short else 1))
    return lambda: 1000 * seconds(count) / count


def _row(block: str, form: str, measured: Any, checked: Any) -> dict[str, Any]:
    """Return a form's row, with the largest difference of its output from the first form's, in parts of that."""
    first = next(iter(measured))
    return {
        "block": block,
        "form": form,
        **summary(measured[form], "ms"),
        "ratio": ratio(measured[form], measured[first]),
        "difference": checked["difference"],
    }


class Words(NamedTuple):
    """The words of a table in a language."""

    head: Sequence[str]
    names: Mapping[str, str]
    """Names of blocks and forms that are not as in the results."""


WORDS = {
    "": Words(("block", "form", "ms", "ratio to the first"), {}),
    ".zh": Words(
        ("模块", "写法", "毫秒", "与第一种写法之比"),
        {
            "attention": "注意力",
            "norm": "归一化",
            "feed-forward": "前馈网络",
            "cross-entropy": "交叉熵",
            "division": "除法",
            "product": "矩阵乘法",
            "narrow-product": "窄矩阵乘法",
            "standardized": "标准化",
            "pooling": "池化",
            "indexed": "索引",
            "split": "拆分（split）",
            "three projections": "三次投影",
            "of primitives": "用基本算子编写",
            "GELU of Erf": "用 Erf 编写的 GELU",
            "nn.GELU(), by tanh": "nn.GELU()，使用 tanh",
            "by 3": "除以 3",
            "times 1/3": "乘以 1/3",
            "weight (out, in)": "权重 (out, in)",
            "weight (in, out)": "权重 (in, out)",
            "by means": "用均值计算",
            "by products with ones": "与全 1 矩阵相乘",
        },
    ),
}


def tables(machines: Iterable[str]) -> dict[str, str]:
    """Return the tables of docs/fast_networks.md by the names of their marks, for the machines that were measured."""
    results = {machine: rows for machine in machines if (rows := rows_of(machine, "forms"))}
    return {
        f"{machine}/forms{language}": _table((rows, words))
        for machine, rows in results.items()
        for language, words in WORDS.items()
    }


@markdown
def _table(source: tuple[Sequence[Mapping[str, Any]], Words]) -> Lines:
    rows, words = source
    yield list(words.head)
    for row in rows:
        block, form = (words.names.get(row[key], row[key]) for key in ("block", "form"))
        yield [block, form, f"{row['ms']:.2f}", f"{row['ratio']:.2f}"]


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw each block's forms as bars."""
    for axes, (block,), mine in plots.panels(figure, rows, "block", wide=3):
        plots.bars(axes, mine, "form", "ms", "ms", color=plots.COLOURS[OURS])
        axes.set_title(block)
        plots.bare(axes)
