"""The benchmark `conformance`: each case with each library, and what became of it."""

from __future__ import annotations

import datetime
import json
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from ..environments import prepared
from ..options import check_names
from ..process import ContenderError
from ..results import code, read
from .cases import cases
from .libraries import LIBRARIES, Library, contender
from .verdicts import DIED, Judge

FILE = "conformance.json"
AT_ONCE = 2


def run(arguments: Namespace) -> None:
    """Run the cases, print the table and write it, with what has changed since the file was written."""
    asked = cases()
    check_names("--cases", arguments.cases, asked)
    check_names("--only", arguments.only, dict.fromkeys(library.name for library in LIBRARIES))
    judges = {name: Judge(case) for name, case in asked.items() if not arguments.cases or name in arguments.cases}
    libraries = [library for library in LIBRARIES if not library.missing]
    libraries = [library for library in libraries if not arguments.only or library.name in arguments.only]
    made = all_measured(with_environments(libraries), judges)
    path = Path(arguments.output, FILE)
    record = read(path) if path.exists() else {"rows": [], "libraries": {}}
    rows = merged(record["rows"], [row for rows, _ in made for row in rows])
    for line in changes(record["rows"], rows):
        print(line)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    measured_now = {"date": date, "commit": code()["commit"]}
    about = {library.key: {**measured_now, "versions": found} for library, (_, found) in zip(libraries, made)}
    about = {**record["libraries"], **about}
    about = {library.key: about[library.key] for library in LIBRARIES if library.key in about}
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": "conformance", "libraries": about, "rows": rows}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"results: {path}")


def with_environments(libraries: Sequence[Library]) -> list[Library]:
    """Make the environments of libraries, and note where that fails."""
    failed = {}
    for environment in dict.fromkeys(library.environment for library in libraries):
        try:
            prepared(environment)
        except subprocess.CalledProcessError as error:
            failed[environment] = f"can't be installed: {error}"
            print(failed[environment])
    return [library._replace(missing=failed.get(library.environment, "")) for library in libraries]


def all_measured(libraries: Sequence[Library], judges: dict[str, Judge]) -> list[tuple[list[dict], dict[str, str]]]:
    """Return what `measured` returns for each library, several at once; an interruption waits for the running cases."""
    stopped = Event()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            return list(pool.map(lambda library: measured(library, judges, stopped), libraries))
        except BaseException:
            stopped.set()
            raise


def measured(library: Library, judges: dict[str, Judge], stopped: Event) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row for each case until it is stopped, and the versions of the library's packages."""
    if library.missing:
        return [_row(library, name, judge, {DIED: library.missing}) for name, judge in judges.items()], {}
    rows, versions = [], {}
    waiting = dict(judges)
    while waiting and not stopped.is_set():
        try:
            with contender(library) as program:
                versions = program.about["versions"]
                for name, judge in dict(waiting).items():
                    if stopped.is_set():
                        break
                    del waiting[name]
                    rows.append(_row(library, name, judge, program.ask(**judge.case.as_json())))
        except ContenderError as error:
            if not versions:  # it did not even start
                return [_row(library, name, judge, {DIED: str(error)}) for name, judge in judges.items()], {}
            rows.append(_row(library, name, judge, {DIED: str(error)}))
    return rows, versions


def _row(library: Library, name: str, judge: Judge, answer: dict[str, Any]) -> dict[str, Any]:
    row = {"library": library.name, "way": library.way, "case": name, **judge.verdict(answer)}
    if name in library.by_design and row["verdict"] != "right":
        row["by_design"] = library.by_design[name]
    print(" | ".join(" ".join(str(value).split())[:150] for value in row.values()), flush=True)
    return row


def merged(earlier: Sequence[dict], now: Sequence[dict]) -> list[dict]:
    """Return the rows of now and those of earlier that were not measured again, in the order of the table."""
    rows = {_key(row): row for row in (*earlier, *now)}
    order = [(library.name, library.way, name) for library in LIBRARIES for name in cases()]
    return [rows[key] for key in order if key in rows]


def changes(earlier: Sequence[dict], now: Sequence[dict]) -> list[str]:
    """Return a line for each cell whose verdict or fault is another one now."""
    before = {_key(row): _shown(row) for row in earlier}
    return [
        f"changed: {', '.join(_key(row))}: {before[_key(row)]} -> {_shown(row)}"
        for row in now
        if before.get(_key(row), _shown(row)) != _shown(row)
    ]


def _key(row: dict) -> tuple[str, str, str]:
    return row["library"], row["way"], row["case"]


def _shown(row: dict) -> str:
    return " ".join(str(row[name]) for name in ("verdict", "fault", "updates") if row.get(name) is not None)
