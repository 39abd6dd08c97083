"""How does a program speak to whoever started it?"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Callable, NoReturn

import mindspore as ms
import yaml

from ._bytes import RULE, from_text
from ._files import remove_leftovers
from ._streams import lasting_streams
from .checkpoint import check_folder
from .report import show
from .signals import INTERRUPTED, SIGNALS

AUTO = "auto"
OK, TRAINING, USAGE, DATA, CHECKPOINT, DISK = 0, 1, 2, 3, 4, 5
_TINY, _HUGE = 2.0**-126, 2.0**127
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "timestamp")}


class Failure(Exception):
    """The end of a program: one line for the user, and an exit code."""

    def __init__(self, message: object, code: int):
        # MindSpore's errors go on with a C++ call stack.
        super().__init__(str(message).strip().split("\n")[0] or type(message).__name__)
        self.code = code


@contextmanager
def exit_code(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds inside the block into a `Failure` with this exit code."""
    try:
        yield
    except Failure:
        raise
    except kinds as error:
        raise Failure(error, code) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep MindSpore's log out of what our own line says better."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings as one line each, like errors: where they come from in the code is of no use to a user."""
    kept = warnings.formatwarning
    warnings.formatwarning = lambda message, *place: f"warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = kept


def run(main: Callable[[argparse.Namespace], None], parser: Parser, argv: Sequence[str] | None = None) -> int:
    """Parse, run and return the exit code; errors become one line unless --debug is among the flags."""
    debug = False
    with SIGNALS, lasting_streams(), plain_warnings():
        try:
            arguments = parse(parser, sys.argv[1:] if argv is None else argv)
            debug = arguments.debug
            with exit_code(TRAINING, Exception):
                main(arguments)
        except Failure as failure:
            if debug:
                traceback.print_exception(type(failure), failure, failure.__traceback__)
            print(f"error: {failure}", file=sys.stderr)
            return failure.code
        except KeyboardInterrupt:
            print(f"error: {SIGNALS.words}", file=sys.stderr)
            return SIGNALS.code or INTERRUPTED
    return OK


class Parser(argparse.ArgumentParser):
    """Flags that are read in one way only, whose errors are one line, and two that all programs have."""

    def __init__(self, description: str = "", *, add_help: bool = True):
        super().__init__(description=description, add_help=add_help, allow_abbrev=False)
        self.add_argument(
            "--config", type=place, metavar="FILE", help="YAML file of flags; those on the command line win"
        )
        self.add_argument("--debug", action="store_true", help="show tracebacks")

    def add_device(self) -> None:
        """Add the flags that say where to compute."""
        targets, shown = ("auto", "CPU", "GPU", "Ascend"), "default: %(default)s"
        self.add_argument("--device_target", choices=targets, default="auto", help=shown)
        runtime = f"of MindSpore on CPU, {shown}"
        self.add_argument("--runtime", choices=("tuned", "default"), default="tuned", help=runtime)

    def add_states(self) -> None:
        """Add the flags of training states."""
        add = self.add_argument
        what = "go on from a training state; auto, or no value: from the newest one in --output_dir that is whole"
        add("--resume", nargs="?", const=AUTO, type=place, metavar="FILE|auto", help=what)
        what = "save the training state so often, beside the end and whatever stops the run: 100 (updates) or 5min"
        add("--save_every", type=interval, default={}, metavar="N|Xmin", help=what)
        add("--keep", type=whole(1), default=1, metavar="N", help="training states that are kept, default: %(default)s")
        what = "evaluate at each of these moments, keep the best state too, and its model as *.best.ckpt"
        add("--keep_best", action="store_true", help=what)
        add("--allow_config_change", action="store_true", help="resume with other flags than the state was saved with")

    def error(self, message: str) -> NoReturn:
        """Refuse flags in one line."""
        raise Failure(message, USAGE)


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags, after those of the --config file if there is one."""
    path = Parser(add_help=False).parse_known_args(argv)[0].config
    return parser.parse_args([*(_flags_of(path, parser) if path else ()), *argv])


def _flags_of(path: str, parser: Parser) -> list[str]:
    """Return what a YAML file says as flags, so that it is checked as they are."""
    known = {name[2:]: action for name, action in parser._option_string_actions.items() if name.startswith("--")}
    del known["config"], known["help"]
    flags = []
    for key, value in _read_yaml(path).items():
        if key not in known:
            raise Failure(f"'{path}' has the unknown key '{key}'; known are {', '.join(sorted(known))}", USAGE)
        if value.tag == f"{_TAG}bool" and known[key].nargs in (0, "?"):
            flags += [f"--{key}"] if yaml.SafeLoader.bool_values[value.value.lower()] else []
        elif value.tag != f"{_TAG}null":
            flags.append(f"--{key}={value.value}")
    return flags


def _read_yaml(path: str) -> dict[str, yaml.ScalarNode]:
    """Return what stands behind each key, as it is written: a flag's type makes of it what YAML would, or refuses it.

    Lists in lists, which a few lines can make endless, and Python objects are never made.
    """
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except OSError as error:
        raise Failure(f"'{path}' can't be read: {error.strerror}", USAGE) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise Failure(f"'{path}' is not YAML: {' '.join(str(error).split())}", USAGE) from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise Failure(f"'{path}' must hold lines of the form 'flag: value', but has {_shown(root)}", USAGE)
    settings: dict[str, yaml.ScalarNode] = {}
    for key, value in root.value if root else ():
        for node in (key, value):
            if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
                row = node.start_mark.line + 1
                rule = f"'{path}' must hold lines of the form 'flag: value'"
                raise Failure(f"{rule}, but line {row} has {_shown(node)}", USAGE)
        if value.tag == f"{_TAG}int" and not _DECIMAL.fullmatch(value.value):
            row = value.start_mark.line + 1
            what = f"'{path}' has {value.value[:99]} in line {row}"
            raise Failure(f"{what}, which YAML counts otherwise: use decimals", USAGE)
        if key.value in settings:
            raise Failure(f"'{path}' has the key '{key.value}' twice", USAGE)
        settings[key.value] = value
    return settings


def _shown(node: yaml.Node) -> str:
    return node.tag.replace(_TAG, "!!")


def or_auto(convert: Callable[[str], int]) -> Callable[[str], int | str]:
    """Return a flag's type: what `convert` takes, or "auto"."""
    return lambda text: AUTO if text == AUTO else convert(text)


def make_folders(output_dir: str, *paths: str) -> None:
    """Make the folders of what a run writes, or refuse now what would fail at its end."""
    with exit_code(DISK, OSError, ValueError):
        os.makedirs(output_dir, exist_ok=True)
        for path in paths:
            folder = os.path.dirname(os.path.abspath(path))
            os.makedirs(folder, exist_ok=True)
            check_folder("train.py", path)
            remove_leftovers(folder, age=3600)


def interval(text: str) -> dict[str, float]:
    """Convert a flag's text, updates or minutes, to what a `Checkpointer` is given."""
    try:
        if text.endswith("min"):
            return {"minutes": number(0, above=True)(text[:-3])}
        return {"every": whole(1)(text)}
    except argparse.ArgumentTypeError as error:
        rule = "must be a number of updates, such as 100, or of minutes, such as 5min"
        raise argparse.ArgumentTypeError(f"{rule}, but got '{text}'") from error


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a flag's type: an int of at least `low` and at most `high`, which few will meet."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            most = f" and <= {high}" if value > high else ""
            raise argparse.ArgumentTypeError(f"must be an int >= {low}{most}, but got '{text}'")
        return value

    return convert


def number(low: float, *, above: bool = False) -> Callable[[str], float]:
    """Return a flag's type: a number of at least, or `above`, `low`, that float32, in which it is used, holds."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        rule = f"a number {'>' if above else '>='} {low:g}"
        if math.isnan(value) or value < low or (above and value == low):
            raise argparse.ArgumentTypeError(f"must be {rule}, but got '{text}'")
        if value and not _TINY <= abs(value) <= _HUGE:
            raise argparse.ArgumentTypeError(f"must be {rule} that float32 holds, but got '{text}'")
        return value

    return convert


def place(text: str) -> str:
    """Convert a flag's text to a path; a shell leaves the `~` of --flag=~/x alone."""
    return os.path.expanduser(text)


def memory(text: str) -> int:
    """Convert a flag's text to bytes."""
    size = from_text(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"must be {RULE}, but got '{text}'")
    return size


def choose_device(target: str) -> str:
    """Set MindSpore up for graph mode on the device, and return which that is; "auto" takes MindSpore's choice."""
    ms.set_context(mode=ms.GRAPH_MODE)
    here = ms.get_context("device_target")
    if target not in ("auto", here):
        try:
            with quiet():
                ms.set_device(target)
        except Exception as error:
            raise Failure(f"argument --device_target: {target} is not available here, {here} is", USAGE) from error
    return ms.get_context("device_target")


def show_runtime(settings: dict[str, str]) -> None:
    """Say what was set for the CPU runtime, and how to leave it alone."""
    if settings:
        shown = " ".join(f"{name}={value}" for name, value in settings.items())
        show("runtime", f"{shown} (left alone with --runtime default)")


def show_accuracy(correct: int, total: int) -> None:
    """Print the tutorial's closing line, and the integers behind it."""
    print(f"============== {{'Accuracy': {correct / total}}} ==============")
    print(f"correct/total: {correct}/{total}")
