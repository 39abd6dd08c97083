"""How are the flags of a program read, and which flags do the programs share?"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, NoReturn

from .. import _check
from ..app.amounts import RULE, from_text
from ..window.ends import TAILS
from .main import CHECKPOINT, USAGE, Failure, exit_code

if TYPE_CHECKING:
    import yaml

AUTO = "auto"
MINI_STEPS = 4
_TINY, _HUGE = 2.0**-126, 2.0**127
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
# How the library words errors: For 'function', 'argument' must be RULE with other='value', but got VALUE.
_OWNER, _RULE = re.compile(r"^For '[\w.]+', "), re.compile(r"'(\w+)' (must .*)", re.DOTALL)
_NAME, _SET = re.compile(r"(?<=.)'(\w+)'"), re.compile(r"\b(\w+)='(\w+)'")
# Its arguments that are set by a flag of another name.
_FLAGS = {"epoch": "epochs", "micro_batch_size": "batch_size", "url": "download"}
_TAG = "tag:yaml.org,2002:"
_TRUE = ("yes", "true", "on")
_SCALARS = {f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "timestamp")}


class Before(NamedTuple):
    """The flags of a run that is resumed."""

    source: str
    """The path of the state that has them."""
    flags: Mapping[str, str]
    """Their texts by name, without those that were given again."""

    @property
    def shown(self) -> str:
        """str, the flags as on a command line."""
        return " ".join(f"--{name}={text}" if text else f"--{name}" for name, text in self.flags.items())


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, with errors of one line and the two flags of all programs.

    Args:
        description (str): what the program does, for --help.
        finish (Optional[Callable]): makes the result of `parse` from the flags, a dict. Default: ``None``, a Namespace.
        before (Optional[Callable]): returns, from the texts of the flags that were given, by name, the flags of the run
            that they resume. They come first, so that those that were given override them; `finish` gets them as
            ``before``, and all texts as ``given``. Default: ``None``.
        add_help (bool): whether there is --help. Default: ``True``.
    """

    def __init__(
        self,
        description: str = "",
        *,
        finish: Callable[[dict[str, Any]], Any] | None = None,
        before: Callable[[Mapping[str, Any]], Before | None] | None = None,
        add_help: bool = True,
    ):
        super().__init__(description=description, add_help=add_help, allow_abbrev=False)
        self._finish, self._before = finish, before
        self._given: dict[str, Any] = {}
        add = self.add_argument
        add("--config", type=place, metavar="FILE", help="YAML file of flags; those on the command line win")
        add("--debug", action="store_true", help="show tracebacks, and MindSpore's log")

    def add_device(self) -> None:
        """Add the flags for the device."""
        targets, shown = ("auto", "CPU", "GPU", "Ascend"), "default: %(default)s"
        self.add_argument("--device_target", choices=targets, default="auto", help=shown)
        runtime = f"of MindSpore on CPU, {shown}"
        self.add_argument("--runtime", choices=("tuned", "default"), default="tuned", help=runtime)

    def add_states(self) -> None:
        """Add the flags for training states."""
        add = self.add_argument
        what = "continue from a training state; auto, or no value: the newest complete one, of the newest run without "
        what += "--output_dir"
        add("--resume", nargs="?", const=AUTO, type=place, metavar="FILE|auto", help=what)
        what = "save the training state so often, beside the end and whatever stops the run: 100 (updates) or 5min"
        add("--save_every", type=interval, default={}, metavar="N|Xmin", help=what)
        add("--keep", type=whole(1), default=1, metavar="N", help="training states that are kept, default: %(default)s")
        what = "evaluate at each of these moments, keep the best state too, and its model as *.best.ckpt"
        add("--keep_best", action="store_true", help=what)
        add("--allow_config_change", action="store_true", help="resume with other flags than the state was saved with")

    def add_window(self, batch_size: str) -> None:
        """Add the flags for the window and its gradient.

        Args:
            batch_size (str): the default rows of a micro-batch, as text.
        """
        add = self.add_argument
        what = f"rows of a micro-batch, default: {batch_size}; auto: the fastest that fit into memory"
        add("--batch_size", type=or_auto(whole(1)), metavar="N|auto", help=what)
        names = ("--mini_steps", "--accumulate_step", "--gradient_accumulation_steps")
        what = f"micro-batches in a window, default: {MINI_STEPS}; 0:1,100:4 changes it at update 100"
        add(*names, type=sizes, metavar="N", help=what)
        what = "rows of a window, instead of --mini_steps; its last micro-batch may be shorter"
        add("--effective_batch", type=whole(1), metavar="N", help=what)
        what = "for --batch_size auto: what the process may take, such as 2GiB; on CPU it is required"
        add("--memory_budget", type=memory, metavar="SIZE", help=what)
        add("--reduction", choices=("mean", "sum"), default="mean", help="of the gradients, default: %(default)s")
        add("--tail", choices=TAILS, default="flush", help="of a last, shorter window, default: %(default)s")
        add("--clip_norm", type=number(0, above=True), metavar="X", help="bound of the gradient, default: none")

    def add_numerics(self) -> None:
        """Add the flags for mixed precision, gradients that are not finite, averages and learning rates."""
        add = self.add_argument
        what = "mixed precision of MindSpore, O1 to O3 in float16, bf16 in bfloat16, default: %(default)s"
        add("--amp", choices=("off", "O1", "O2", "O3", "bf16"), default="off", help=what)
        what = "what the loss is multiplied by, default: 1, with O1 to O3 dynamic: it is lowered where it overflows"
        add("--loss_scale", type=or_auto(number(0, above=True), "dynamic"), metavar="X|dynamic", help=what)
        what = "what happens to gradients that are not finite, default: %(default)s"
        add("--nonfinite", choices=("skip_window", "skip_micro", "raise"), default="skip_window", help=what)
        add("--save_bad_batches", type=place, metavar="DIR", help="a folder for micro-batches that are not finite")
        what = "average the weights over the updates with this decay, such as 0.999, and evaluate the average"
        add("--ema", type=number(0, below=1), metavar="X", help=what)
        add("--noise_scale", action="store_true", help="at the end print how many rows a window should have")
        what = "compare the gradient of micro-batches with that of one large batch, and end; 1 if they differ"
        add("--verify", action="store_true", help=what)
        what = "multiply --lr by window/--base_batch, or its root, default: %(default)s"
        add("--lr_scaling", choices=("none", "linear", "sqrt"), default="none", help=what)
        add("--base_batch", type=whole(1), metavar="N", help="for --lr_scaling: the rows of a window that --lr is for")
        add("--warmup_updates", type=whole(0), default=0, metavar="N", help="updates over which the rate grows from 0")
        what = "how the rate falls to 0 over the updates after that, default: %(default)s"
        add("--lr_decay", choices=("none", "linear", "cosine"), default="none", help=what)

    def add_output(self) -> None:
        """Add the flags for the output files."""
        add = self.add_argument
        what = "for what is written, default: a new one, runs/001 and so on"
        add("--output_dir", type=place, metavar="DIR", help=what)
        what = "off a terminal, updates from one line to the next, default: about 20 lines an epoch"
        add("--log_every", type=whole(1), metavar="N", help=what)
        add("--tensorboard", action="store_true", help="also write the curves for TensorBoard, to a folder tensorboard")
        what = "the model: .ckpt or .safetensors, default: gradient_accumulation.ckpt in --output_dir"
        add("--ckpt_path", type=place, metavar="FILE", help=what)
        add("--overwrite", action="store_true", help="replace what another run has written there")

    def error(self, message: str) -> NoReturn:
        """Raise a `Failure` of one line for wrong flags."""
        raise Failure(message, USAGE)

    def parse(self, argv: Sequence[str]) -> Any:
        """Parse the flags; those of a --config file come first, so the command line overrides them."""
        path = Parser(add_help=False).parse_known_args(argv)[0].config
        argv = [*(_flags_of(path, self) if path else ()), *argv]
        found, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], self._option_string_actions)}")
        self._given = vars(found)
        with exit_code(USAGE, ValueError, OSError):
            if self._before is None:
                return found if self._finish is None else self._finish(vars(found))
            given = self._texts(argv)
            before = self._before(given)
            if before is None:
                return self._finished({**vars(found), "given": given})
            found, _ = self.parse_known_args([*self._checked(before), *argv])
            self._given = vars(found)
            try:
                with exit_code(USAGE, ValueError):
                    return self._finished({**vars(found), "given": {**before.flags, **given}, "before": before})
            except Failure as failure:
                if any(f"--{name}" in str(failure) for name in before.flags):
                    raise Failure(f"{failure} (the run that is resumed has {before.shown})", failure.code) from failure
                raise

    def _finished(self, flags: dict[str, Any]) -> Any:
        return argparse.Namespace(**flags) if self._finish is None else self._finish(flags)

    def _texts(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the flags that were given by name: their texts, empty for those without a value."""
        plain = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        for action in [action for action in self._actions if action.dest != "help"]:
            bare: dict[str, Any] = {"action": "store_const", "const": ""}
            how = bare if action.nargs == 0 else {"nargs": action.nargs, "const": action.const}
            plain.add_argument(*action.option_strings, dest=action.dest, **how)
        return vars(plain.parse_known_args(argv)[0])

    def _checked(self, before: Before) -> list[str]:
        """Return the flags of a run that is resumed as arguments, if they are flags of this program."""
        known = {action.dest: action for action in self._actions if action.dest != "help"}
        argv: list[str] = []
        for name, text in before.flags.items():
            if name not in known or (known[name].nargs == 0) != (text == ""):
                raise Failure(
                    f"'{before.source}' has a flag that this program does not have: --{name[:99]}", CHECKPOINT
                )
            argv.append(f"--{name}={text}" if text else f"--{name}")
        try:
            self.parse_known_args(argv)
        except Failure as failure:
            raise Failure(f"'{before.source}' has flags that can't be used: {failure}", CHECKPOINT) from failure
        return argv

    def in_flags(self, message: str) -> str:
        """Return an error message about arguments of the library as one about the flags that set them."""
        if not _OWNER.match(message):
            return message
        rule, got, value = _OWNER.sub("", message).partition("but got ")
        of_flag = _RULE.match(rule)
        if of_flag and self._flag(of_flag[1]):
            rule = f"argument {self._flag(of_flag[1])}: {of_flag[2]}"
        rule = _NAME.sub(lambda found: self._flag(found[1]) or found[0], rule)
        rule = _SET.sub(lambda found: f"{self._flag(found[1])} {found[2]}" if self._flag(found[1]) else found[0], rule)
        return f"{rule}{got}{value}"

    def _flag(self, name: str) -> str | None:
        """Return the flag that sets an argument of the library, if there is one."""
        whole_batch = {"batch_size": "effective_batch"} if self._given.get("effective_batch") else {}
        flag = f"--{ {**_FLAGS, **whole_batch}.get(name, name) }"
        return flag if flag in self._option_string_actions else None


def _hint(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant, as the end of an error message."""
    close = get_close_matches(name.partition("=")[0], known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _flags_of(path: str, parser: Parser) -> list[str]:
    """Return the settings of a YAML file as flags, so that they are checked like flags."""
    known = {name[2:]: action for name, action in parser._option_string_actions.items() if name.startswith("--")}
    del known["config"], known["help"]
    flags: list[str] = []
    keys: dict[str, str] = {}  # by the flag that they set, which may have several names
    for key, value in _read_yaml(path).items():
        if key not in known:
            hint = _hint(key, known) or f"; known are {', '.join(sorted(known))}"
            raise Failure(f"'{path}' has the unknown key '{_check.one_line(key)}'{hint}", USAGE)
        other = keys.setdefault(known[key].dest, key)
        if other != key:
            raise Failure(f"'{path}' has the keys '{other}' and '{key}', which are the same flag", USAGE)
        if value.tag == f"{_TAG}bool" and known[key].nargs in (0, "?"):
            flags += [f"--{key}"] if value.value.lower() in _TRUE else []
        elif value.tag != f"{_TAG}null":
            flags.append(f"--{key}={value.value}")
    return flags


def _read_yaml(path: str) -> dict[str, yaml.ScalarNode]:
    """Return the value of each key as text: the flag's type converts it as YAML would, or rejects it.

    Nested lists, with which a few lines can fill the memory, and Python objects are never constructed.
    """
    try:
        import yaml  # only --config needs it
    except ImportError as error:
        raise Failure("argument --config: needs PyYAML. Run: pip install PyYAML", USAGE) from error
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for, with signals blocked
        raise Failure(f"argument --config: '{path}' is not a file", USAGE)
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
            raise Failure(f"'{path}' has the key '{_check.one_line(key.value)}' twice", USAGE)
        settings[key.value] = value
    return settings


def _shown(node: yaml.Node) -> str:
    return node.tag.replace(_TAG, "!!")


def or_auto(convert: Callable[[str], Any], word: str = AUTO) -> Callable[[str], Any]:
    """Return a flag's type: a word, or what `convert` accepts."""
    return lambda text: word if text == word else convert(text)


def sizes(text: str) -> int | dict[int, int]:
    """Convert a flag's text (micro-batches in a window, or such numbers by their first update) to `mini_steps`."""
    if ":" not in text:
        return whole(1)(text)
    found: dict[int, int] = {}
    for part in text.split(","):
        first, _, size = part.partition(":")
        if whole(0)(first) in found:
            raise argparse.ArgumentTypeError(f"must have each update once, but got '{text}'")
        found[whole(0)(first)] = whole(1)(size)
    if 0 not in found:
        raise argparse.ArgumentTypeError(f"must begin with update 0, such as 0:1,100:4, but got '{text}'")
    return dict(sorted(found.items()))


def interval(text: str) -> dict[str, float]:
    """Convert a flag's text (updates or minutes) to arguments of `Checkpointer`."""
    try:
        if text.endswith("min"):
            return {"minutes": number(0, above=True)(text[:-3])}
        return {"every": whole(1)(text)}
    except argparse.ArgumentTypeError as error:
        rule = "must be a number of updates, such as 100, or of minutes, such as 5min"
        raise argparse.ArgumentTypeError(f"{rule}, but got '{text}'") from error


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a flag's type: an int from `low` to `high`; errors mention `high` only if it is exceeded."""

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


def number(low: float, *, above: bool = False, below: float = math.inf) -> Callable[[str], float]:
    """Return a flag's type: a number >= `low` (with `above`: > `low`) in the range of float32, in which it is used."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        rule = f"a number {'>' if above else '>='} {low:g}{'' if below == math.inf else f' and < {below:g}'}"
        if math.isnan(value) or value < low or (above and value == low) or value >= below != math.inf:
            raise argparse.ArgumentTypeError(f"must be {rule}, but got '{text}'")
        if value and not _TINY <= abs(value) <= _HUGE:
            raise argparse.ArgumentTypeError(f"must be {rule} that float32 holds, but got '{text}'")
        return value

    return convert


def place(text: str) -> str:
    """Convert a flag's text to a path; a shell does not expand the `~` of --flag=~/x."""
    return os.path.expanduser(text)


def memory(text: str) -> int:
    """Convert a flag's text to bytes."""
    size = from_text(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"must be {RULE}, but got '{text}'")
    return size
