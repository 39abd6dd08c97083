"""The rows of the tables of docs/conformance.md, from the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ..results import RESULTS, groups, read
from . import verdicts
from .cases import cases
from .libraries import LIBRARIES, OURS, RIGHT_LOOP, TUTORIALS, key_of
from .matrix import FILE

_SAYS_NOTHING = (verdicts.OFF, verdicts.POISONED, verdicts.SILENT)
OFF = (*_SAYS_NOTHING, verdicts.WARNS)
# What the columns of the summary count.
_COLUMNS = (
    (verdicts.RIGHT,),
    _SAYS_NOTHING,
    (verdicts.WARNS,),
    ("design",),
    (verdicts.REFUSES, verdicts.DIED),
    (verdicts.CANNOT, verdicts.UNTRIED),
)
_SIGNS = {
    verdicts.RIGHT: "✓",
    verdicts.POISONED: "NaN",
    verdicts.REFUSES: "✗",
    verdicts.DIED: "✗",
    verdicts.CANNOT: "–",
    verdicts.UNTRIED: "–",
}
_WIDE = 10  # cases side by side
POLICY = "NaN"
"""str, the case that no large batch can be compared with: what a library does is its policy, in a table of its own."""
README = (
    "even windows",
    "short last window",
    "ragged rows",
    "padded tokens",
    "clip",
    "two terms",
    "resume",
    "BatchNorm",
)
# Issues that a cell reproduces, and that were open on 25 November 2026, in the copy that was read: library, way, case.
ISSUES = {
    "Lightning-AI/pytorch-lightning/issues/19987": ("Lightning", "", "short last window"),
    "Lightning-AI/pytorch-lightning/issues/20350": ("Lightning", "", "padded tokens"),
    "modelscope/ms-swift/pull/5823": ("Transformers", "with num_items_in_batch", "two terms"),
    "pytorch/pytorch/issues/46516": ("PyTorch", "loop with a last step", "BatchNorm"),
}

_FAMILIES = {(library.name, library.way): library.family for library in LIBRARIES}

Row = Mapping[str, Any]
Rows = Sequence[Row]
Lines = Iterable[Sequence[Any]]


def tables() -> dict[str, Lines]:
    """Return the rows by the names of their marks."""
    record = read(RESULTS / FILE)
    names = [name for name in cases() if name != POLICY]
    of_cases = {name: mine for (name,), mine in groups(record["rows"], "case").items()}
    measured = [row for name in names for row in of_cases[name]]
    best, others = _best_first(measured)
    return {
        "conformance": _readme(of_cases),
        "conformance/summary": best,
        "conformance/summary-ways": others,
        "conformance/all-1": _all(measured, names[:_WIDE]),
        "conformance/all-2": _all(measured, names[_WIDE:]),
        "conformance/sums": _sums(of_cases["two ranks"]),
        "conformance/issues": _issues(measured),
        "conformance/losses": _losses(measured),
        "conformance/versions": _versions(record["libraries"]),
        "conformance/faults": [[name, *line] for name in names for line in _faults(of_cases[name])],
        "conformance/nan": _faults(of_cases[POLICY]),
    }


def percent(error: float) -> str:
    """Return an error as a table shows it."""
    return "> 1000%" if error > 10 else f"{error:.1%}" if error < 0.1 else f"{error:.0%}"


def _sign(row: Row) -> str:
    """Return what became of a cell: * is by design, ! is a warning."""
    sign = _SIGNS.get(row["verdict"]) or percent(row["error"])
    return sign + (" \\*" if "by_design" in row else " !" if row["verdict"] == verdicts.WARNS else "")


def _best_first(measured: Rows) -> tuple[Lines, Lines]:
    """Return how many cases a way has right, and what becomes of the others: each library's best, and its other ways.

    The best has most cases right; of those with equally many, the fewest and the smallest errors; then our order.
    """
    ranked = []
    for way, mine in groups(measured, "library", "way").items():
        kinds = ["design" if "by_design" in row else row["verdict"] for row in mine]
        counts = [sum(map(kinds.count, group)) for group in _COLUMNS]
        errors = round(sum(row.get("error", 0) for row in mine), 3)
        ranked.append((-counts[0], counts[1], errors, way, counts))
    best: dict[str, Any] = {}
    others = []
    for *_, way, counts in sorted(ranked, key=lambda line: line[:3]):
        line, family = [key_of(*way), *counts], _FAMILIES[way]
        others += [line] if family in best else []
        best.setdefault(family, line)
    return iter(best.values()), iter(others)


def _losses(measured: Rows) -> Lines:
    """The cases that a way of ours does not have right."""
    for row in measured:
        if row["library"] == OURS and row["verdict"] != verdicts.RIGHT:
            yield [row["case"], key_of(row["library"], row["way"]), _sign(row), _why(row)]


def _all(measured: Rows, names: Sequence[str]) -> Lines:
    """Each library in these cases."""
    cells = {(row["library"], row["way"], row["case"]): row for row in measured}
    for library in LIBRARIES:
        if not library.missing:
            found = [cells[library.name, library.way, name] for name in names]
            yield [library.short, *map(_sign, found)]


def _faults(measured: Rows) -> Lines:
    """Those that do not have a case right, by how much and why."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for row in sorted(measured, key=_error):
        if row["case"] == POLICY or row["verdict"] not in (verdicts.RIGHT, verdicts.CANNOT, verdicts.UNTRIED):
            outcomes.setdefault((_sign(row), _why(row)), []).append(key_of(row["library"], row["way"]))
    for (sign, why), libraries in outcomes.items():
        yield [f"**{sign}**", why, "; ".join(libraries)]


def _why(row: Row) -> str:
    """Return the fault, and updates of updates that there should be; or the words of an error."""
    if "words" in row:
        return row["words"].strip().partition("\n")[0].replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    missed = row["verdict"] == verdicts.OFF and row["updates"] != row["expected_updates"]
    counts = f"{row['updates']} / {row['expected_updates']}" if missed else ""
    return ", ".join(filter(None, [row.get("fault"), counts]))


def _sums(measured: Rows) -> Lines:
    """How often ranks sum, gradients or numbers, for an update."""
    counted = [row for row in measured if row.get("reductions") is not None]
    for (count,), mine in sorted(groups(counted, "reductions").items()):
        yield [f"{count:g}", "; ".join(key_of(row["library"], row["way"]) for row in mine)]


def _readme(of_cases: Mapping[str, Rows]) -> Lines:
    """Some cases: how many libraries are off in their best way, the median of their errors, and ours."""
    for name in README:
        ours = [row for row in of_cases[name] if row["library"] == OURS]
        best = _best_of_libraries(of_cases[name])
        errors = [_error(row) for row in best if row["verdict"] in OFF]
        shown = percent(median(errors)) if errors else "-"
        yield [name, f"{len(errors)} / {len(best)}", shown, _ours(ours)]


def _ours(mine: Rows) -> str:
    """Return the largest error of our ways, as the table of all cases shows it if it is off; and which have none."""
    worst = max((row for row in mine if "error" in row), key=lambda row: row["error"])
    without = [row["way"] for row in mine if "error" not in row]
    shown = f"{worst['error']:.0e}" if worst["verdict"] == verdicts.RIGHT else _sign(worst)
    return "; ".join([shown, *(f"{way} –" for way in without)])


def _error(row: Row) -> float:
    """Return the error of a cell; infinite without a number."""
    return row.get("error", float("inf"))


def _best_of_libraries(mine: Rows) -> Rows:
    """Return each other library's best way in a case, of those that run it and do what their documentation says."""
    run = [row for row in mine if row["verdict"] in (verdicts.RIGHT, *OFF) and "by_design" not in row]
    # By its library; of several the last, which is the best.
    best = {_FAMILIES[row["library"], row["way"]]: row for row in sorted(run, key=_error, reverse=True)}
    return [row for family, row in best.items() if family not in (OURS, RIGHT_LOOP, TUTORIALS)]


def _issues(measured: Rows) -> Lines:
    """Open issues, and the cells that reproduce them."""
    cells = {(row["library"], row["way"], row["case"]): row for row in measured}
    for address, (name, way, case) in ISSUES.items():
        _, project, _, number = address.split("/")
        row = cells[name, way, case]
        link = f"[{project} #{number}](https://github.com/{address})"
        yield [link, case, key_of(name, way), f"**{_sign(row)}**", _why(row)]


def _versions(about: Mapping[str, Mapping[str, Any]]) -> Lines:
    """What was measured, when, and with which documentation."""
    for library in LIBRARIES:
        if library.missing:
            yield [library.key, "", library.missing, "-", "", ""]
            continue
        versions = ", ".join(f"{name} {version}" for name, version in about[library.key]["versions"].items())
        follows = f"[documentation]({library.documentation})" if library.documentation else ""
        run, program = about[library.key], f"`{' '.join([library.program, *library.flags])}`"
        yield [library.key, program, versions, run["date"], run["commit"], follows]
