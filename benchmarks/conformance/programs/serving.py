"""The protocol of a program: it gets cases, one in a line of JSON, and answers with what each came to."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Callable

from benchmarks.conformance.case import CannotExpress, Case, Result
from benchmarks.programs.protocol import serve

LONGEST = 240


def serve_cases(
    train: Callable[[Case], Result], packages: Sequence[str], can: Sequence[str] = (), cannot: Mapping[str, str] = {}
) -> None:
    """Train with the cases that are asked for.

    Args:
        train (Callable): trains as the library's documentation says, and returns the result. An error that it raises
            counts as the library's refusal, with its words.
        packages (Sequence[str]): whose versions are recorded.
        can (Sequence[str]): of what cases need, what is available.
        cannot (Mapping[str, str]): by the need why the library can't express it.
    """

    def answer(**fields: Any) -> dict[str, Any]:
        case = Case.of(fields)
        missing = [need for need in case.needs if need not in can]
        if missing:
            return {"cannot": cannot.get(missing[0], f"no documented way: {missing[0]}")}
        with _recorded() as words:
            try:
                made = train(case)
            except CannotExpress as reason:
                return {"cannot": str(reason)}
            except Exception as error:  # noqa: BLE001  (each library has errors of its own)
                traceback.print_exc()
                lines = " ".join(str(error).split())
                return {"refuses": f"{type(error).__name__}: {lines}"[:LONGEST]}
        made.words += words()
        return made.as_json()

    serve(lambda: ({"versions": {name: version(name) for name in packages}}, answer))


@contextmanager
def _recorded() -> Iterator[Callable[[], str]]:
    """Record what is printed, also by C, and what is warned of; the function returns it afterwards."""
    with tempfile.TemporaryFile() as file, warnings.catch_warnings():
        warnings.simplefilter("always")
        kept = os.dup(2)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 2)  # stdout goes there, too
        os.dup2(file.fileno(), 1)
        text: list[str] = []
        try:
            yield lambda: text[0]
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os.dup2(kept, 2)
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            text.append(re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode(errors="replace")))
            print(text[0], file=sys.stderr)
