"""How does a program run, and how does it end?"""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, Protocol

from .. import _check
from .signals import INTERRUPTED, SIGNALS, block_signals
from .streams import MINDSPORE_LOG, lasting_streams

OK, TRAINING, USAGE, DATA, CHECKPOINT, DISK = 0, 1, 2, 3, 4, 5


class Failure(Exception):
    """An error that ends a program: one line for the user, and an exit code."""

    def __init__(self, message: object, code: int):
        # MindSpore's errors contain a C++ call stack after the first line.
        text = message if isinstance(message, str) else _check.first_words(str(message))
        super().__init__(_check.one_line(text.strip(), _check.LINE) or type(message).__name__)
        self.code = code


@contextmanager
def exit_code(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds inside the block to a `Failure` with this exit code."""
    try:
        yield
    except Failure:
        raise
    except kinds as error:
        raise Failure(error, code) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Disable MindSpore's log inside the block, whose errors the program prints itself in one line."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each warning as one line, without its place in the code."""
    kept = warnings.formatwarning
    warnings.formatwarning = lambda message, *place: f"warning: {_words_of(message)}\n"
    try:
        yield
    finally:
        warnings.formatwarning = kept


def _words_of(message: object) -> str:
    return _check.one_line(" ".join(str(message).split()), _check.LINE)


class ParsesFlags(Protocol):
    """Parses the flags of a program."""

    def parse(self, argv: Sequence[str]) -> Any:
        """Return the flags, including ``debug``, or raise a `Failure`."""

    def in_flags(self, message: str) -> str:
        """Return an error message about arguments of the library, with the names of the flags that set them."""


def begin(parser: ParsesFlags, version: str) -> None:
    """Check the flags before MindSpore is imported, and block signals before it starts threads. Call `run` afterwards.

    On a terminal it prints a line, because the import takes seconds.
    """
    block_signals()
    with lasting_streams():
        try:
            debug = parser.parse(sys.argv[1:]).debug
            _check_temporary_folder()
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            sys.exit(failure.code)
        if not debug:
            MINDSPORE_LOG.divert()
        if sys.stdout.isatty():  # otherwise programs read the output, or it is the log of a rank
            print(f"{'ms_accum':16} {version}, starting MindSpore ...", flush=True)


def _check_temporary_folder() -> None:
    """Raise a `Failure` if there is no usable temporary folder: MindSpore's import would end in a traceback."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise Failure(f"{error.strerror}; set TMPDIR to a folder that can be written to", DISK) from error


def run(main: Callable[[Any], None], parser: ParsesFlags, argv: Sequence[str] | None = None) -> int:
    """Parse the flags, run, and return the exit code. Errors are printed as one line, with --debug with a traceback."""
    debug = False
    with lasting_streams(), plain_warnings(), SIGNALS:
        try:
            SIGNALS.raise_pending()
            arguments = parser.parse(sys.argv[1:] if argv is None else argv)
            debug = arguments.debug
            with exit_code(TRAINING, Exception):
                main(arguments)
        except Failure as failure:
            if debug:
                traceback.print_exception(type(failure), failure, failure.__traceback__)
            print(f"error: {parser.in_flags(str(failure))}", file=sys.stderr)
            return failure.code
        except KeyboardInterrupt:
            print(f"error: {SIGNALS.words}", file=sys.stderr)
            return SIGNALS.code or INTERRUPTED
    return OK
