"""Reads the flags of a program, from the command line, a YAML file, and the run that it resumes."""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Callable, NamedTuple, NoReturn

from .. import __version__, _check
from ..engine.ends import TAILS
from .amounts import RULE, from_text
from .process import CHECKPOINT, USAGE, Failure, exit_code

AUTO = "auto"
MINI_STEPS = 4
# How the library words errors: For 'function', 'argument' must be RULE with other='value', but got VALUE.
_OWNER, _RULE = re.compile(r"^For '[\w.]+', "), re.compile(r"'(\w+)' (must .*)", re.DOTALL)
_ARGUMENT, _OTHER_ARGUMENT = re.compile(r"(?<=.)'(\w+)'"), re.compile(r"\b(\w+)='(\w+)'")
# Arguments of the library that are set by a flag of another name.
_FLAG_OF_ARGUMENT = {"epoch": "epochs", "micro_batch_size": "batch_size", "url": "download"}


class FlagsOfRun(NamedTuple):
    """The flags of a run that is resumed."""

    source: str
    """The path of the state that has them."""
    flags: Mapping[str, str]
    """Their texts by name, without those that were given again."""

    @property
    def arguments(self) -> list[str]:
        """list[str], the flags as on a command line."""
        return [f"--{name}={text}" if text else f"--{name}" for name, text in self.flags.items()]


class ShowVersions(argparse.Action):
    """Show the versions, and end the program. MindSpore is not imported for that: it takes seconds."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        del namespace, values, option_string
        print(f"ms_accum {__version__}, MindSpore {version_of('mindspore')}, Python {platform.python_version()}")
        parser.exit()


def version_of(package: str) -> str:
    """Return the version of an installed package without importing it."""
    from importlib import metadata  # takes longer than all other imports of this module

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are a `Failure` of one line.

    Args:
        description (str): what the program does, for --help.
        finish (Optional[Callable]): makes the result of `parse` from the flags, a dict. Default: ``None``, a Namespace.
        resumed (Optional[Callable]): gets the texts of the given flags by name, and returns the flags of the run that
            they resume. Given flags override these. `finish` gets them as ``resumed_flags``, and the texts of all flags
            as ``flag_texts``. Default: ``None``.
        prog (Optional[str]): the name of the program. Default: ``None``, that of its file.
        usage (Optional[str]): the first line of --help. Default: ``None``, made from the flags.
    """

    def __init__(
        self,
        description: str,
        *,
        finish: Callable[[dict[str, Any]], Any] | None = None,
        resumed: Callable[[Mapping[str, Any]], FlagsOfRun | None] | None = None,
        prog: str | None = None,
        usage: str | None = None,
    ):
        super().__init__(prog, usage, description, allow_abbrev=False)
        text = "show the versions of ms_accum, MindSpore and Python, and exit"
        self.add_argument("--version", action=ShowVersions, nargs=0, dest=argparse.SUPPRESS, help=text)
        self._finish = finish
        self._load_resumed = resumed
        self._values: dict[str, Any] = {}

    def error(self, message: str) -> NoReturn:
        """Raise a `Failure` of one line for wrong flags."""
        unknown = message.partition("unrecognized arguments: ")[2]
        hint = _hint(unknown.split()[0], self._option_string_actions) if unknown else ""
        raise Failure(f"{message}{hint}", USAGE)

    def add_program(self) -> None:
        """Add the flags of a program that trains or evaluates, and those for the device."""
        add = self.add_argument_group("program").add_argument
        text = "read flags from a YAML file, a line 'flag: value' for each; those on the command line override them"
        add("--config", type=path, metavar="FILE", help=text)
        text = "the device; auto is the default of this MindSpore (default: auto)"
        add("--device_target", choices=("auto", "CPU", "GPU", "Ascend"), default="auto", help=text)
        text = "environment variables of MindSpore on CPU: tuned for speed, or its own defaults (default: tuned)"
        add("--runtime", choices=("tuned", "default"), default="tuned", help=text)
        text = "show tracebacks, MindSpore's log, and the environment variables that are set"
        add("--debug", action="store_true", help=text)

    def add_text(self, defaults: Mapping[str, str]) -> None:
        """Add the flags for networks that predict the next token of a text, with their defaults as texts."""
        add = self.add_argument_group("text").add_argument
        text = f"what the tokens of a text are (default: {defaults['vocabulary']})"
        add("--vocabulary", choices=("characters", "bytes"), help=text)
        meanings = {
            "context": "number of tokens in a block; a prediction depends on this many tokens at most",
            "layers": "number of layers, each with attention and a feed-forward network",
            "width": "size of the vector of a token",
            "heads": "number of attention heads in a layer",
        }
        for name, meaning in meanings.items():
            add(f"--{name}", type=whole(1), metavar="N", help=f"{meaning} (default: {defaults[name]})")
        text = "give the output layer its own weights, instead of those of the vectors of the tokens"
        add("--untied_head", action="store_true", help=text)

    def add_sample(self) -> None:
        """Add the flags for text that a network writes."""
        add = self.add_argument_group("a model of text").add_argument
        text = "write a text of N tokens; without --data_path the model is not evaluated"
        add("--sample", type=whole(1), metavar="N", help=text)
        add("--prompt", metavar="TEXT", help="the beginning of the text (default: a line break)")
        text = "how random the text is: with 0 each token is the most probable one, with 1 tokens are drawn with the "
        text += "model's probabilities (default: 0.8)"
        add("--temperature", type=number(0), metavar="X", help=text)
        text = "seed of the text (default: %(default)s)"
        add("--seed", type=whole(0, 2**32 - 1), default=1, metavar="N", help=text)

    def add_evaluations(self) -> None:
        """Add the flags for evaluations during the run."""
        add = self.add_argument_group("evaluation").add_argument
        text = "evaluate after every N updates, after each epoch, or only at the end of the run (default: %(default)s)"
        every = or_word("epoch", or_word("end", whole(1)))
        add("--eval_every", type=every, default="epoch", metavar="N|epoch|end", help=text)
        text = "evaluate each time that --save_every saves the training state, and keep the best state, and its model "
        text += "as *.best.ckpt"
        add("--keep_best", action="store_true", help=text)

    def add_states(self) -> None:
        """Add the flags for training states."""
        add = self.add_argument_group("stop and resume").add_argument
        text = "continue from a training state, with the flags of its run; auto, or no value, takes the newest "
        text += "complete state in --output_dir, or of the newest run in runs/"
        add("--resume", nargs="?", const=AUTO, type=path, metavar="FILE|auto", help=text)
        text = "save the training state every N updates or every X minutes, such as 100 or 5min; it is also saved at "
        text += "the end, and when a signal or an error stops the run"
        add("--save_every", type=interval, default={}, metavar="N|Xmin", help=text)
        text = "number of training states to keep (default: %(default)s)"
        add("--keep", type=whole(1), default=1, metavar="N", help=text)
        text = "resume although flags or data differ from those of the saved state"
        add("--allow_config_change", action="store_true", help=text)

    def add_window(self, batch_size: str) -> None:
        """Add the flags for the window and its gradient; `batch_size` is the default rows of a micro-batch, as text."""
        add = self.add_argument_group("window").add_argument
        text = f"rows of a micro-batch; auto finds the fastest number that fits into memory (default: {batch_size})"
        add("--batch_size", type=or_word(AUTO, whole(1)), metavar="N|auto", help=text)
        names = ("--mini_steps", "--accumulate_step", "--gradient_accumulation_steps")
        text = "micro-batches in a window; 0:1,100:4 makes windows of 1, and of 4 from update 100 "
        text += f"(default: {MINI_STEPS})"
        add(*names, type=sizes, metavar="N", help=text)
        text = "rows of a window, instead of --mini_steps; the last micro-batch of each window may be shorter"
        add("--effective_batch", type=whole(1), metavar="N", help=text)
        text = "memory that the process may use with --batch_size auto, such as 2GiB; must be given on CPU"
        add("--memory_budget", type=memory, metavar="SIZE", help=text)
        text = "whether a window's gradient is the mean over its rows, of text over its tokens, or the sum over its "
        text += "micro-batches (default: %(default)s)"
        add("--reduction", choices=("mean", "sum"), default="mean", help=text)
        text = "what happens to a last, shorter window: flush makes an update of it, carry continues it in the next "
        text += "epoch, drop discards it (default: %(default)s)"
        add("--tail", choices=TAILS, default="flush", help=text)
        text = "largest norm of a window's gradient; a larger one is scaled down (default: no limit)"
        add("--clip_norm", type=number(0, above=True), metavar="X", help=text)

    def add_rates(self) -> None:
        """Add the flags for how the learning rate depends on the window, and changes during the run."""
        add = self.add_argument_group("learning rate").add_argument
        text = "multiply --lr by the rows of a window divided by --base_batch, or by the square root of that "
        text += "(default: %(default)s)"
        add("--lr_scaling", choices=("none", "linear", "sqrt"), default="none", help=text)
        text = "the rows of a window for which --lr is right; must be given with --lr_scaling"
        add("--base_batch", type=whole(1), metavar="N", help=text)
        text = "number of updates in which the rate rises from 0 (default: %(default)s)"
        add("--warmup_updates", type=whole(0), default=0, metavar="N", help=text)
        text = "how the rate falls after the warm-up, until the end of the run (default: %(default)s)"
        add("--lr_decay", choices=("none", "linear", "cosine"), default="none", help=text)
        text = "the rate at the end of --lr_decay (default: 0)"
        add("--min_lr", type=number(0, above=True), metavar="X", help=text)

    def add_numerics(self) -> None:
        """Add the flags for mixed precision, gradients that are not finite, averages and checks."""
        add = self.add_argument_group("numerics").add_argument
        text = "mixed precision: a level of MindSpore in float16, O1 to O3, or bfloat16 (default: %(default)s)"
        add("--amp", choices=("off", "O1", "O2", "O3", "bf16"), default="off", help=text)
        text = "multiply the loss by X before the gradients are computed; a dynamic scale is lowered where gradients "
        text += "overflow (default: 1, with O1 to O3 dynamic)"
        add("--loss_scale", type=or_word("dynamic", number(0, above=True)), metavar="X|dynamic", help=text)
        text = "what happens if gradients are not finite: the window or the micro-batch is skipped, or the run stops "
        text += "with an error (default: %(default)s)"
        add("--nonfinite", choices=("skip_window", "skip_micro", "raise"), default="skip_window", help=text)
        text = "average the weights over the updates with the decay X, such as 0.999, and evaluate the average"
        add("--ema", type=number(0, below=1), metavar="X", help=text)
        text = "do not train, but compare the gradient of micro-batches with that of one large batch; the exit code is "
        text += "1 if they differ"
        add("--verify", action="store_true", help=text)

    def add_output(self) -> None:
        """Add the flags for the output files."""
        add = self.add_argument_group("output").add_argument
        text = "folder of the files that the run writes (default: a new one, runs/001, runs/002 and so on)"
        add("--output_dir", type=path, metavar="DIR", help=text)
        text = "path of the model, a .ckpt or .safetensors file (default: gradient_accumulation.ckpt in --output_dir)"
        add("--ckpt_path", type=path, metavar="FILE", help=text)
        text = "replace the files that another run has written there"
        add("--overwrite", action="store_true", help=text)
        text = "if the output is not a terminal, print a line every N updates (default: about 20 lines per epoch)"
        add("--log_every", type=whole(1), metavar="N", help=text)
        text = "also write the curves for TensorBoard, to the folder tensorboard in --output_dir"
        add("--tensorboard", action="store_true", help=text)

    def parse(self, argv: Sequence[str]) -> Any:
        """Parse the flags; those of the run that is resumed come first, then those of a --config file."""
        values = vars(self.parse_args(argv))
        if values.get("config") is not None:
            argv = [*_flags_of(values["config"], self._flags()), *argv]
            values = vars(self.parse_args(argv))
        resumed = None
        with exit_code(USAGE, ValueError, OSError):
            if self._load_resumed is not None:
                texts = self._texts(argv)
                resumed = self._load_resumed(texts)
                if resumed is not None:
                    values = self._with_resumed_flags(resumed, argv)
                    texts = {**resumed.flags, **texts}
                values = {**values, "flag_texts": texts, "resumed_flags": resumed}
        self._values = values
        try:
            with exit_code(USAGE, ValueError, OSError):
                return argparse.Namespace(**values) if self._finish is None else self._finish(values)
        except Failure as failure:
            if resumed is None or not any(f"--{name}" in str(failure) for name in resumed.flags):
                raise
            message = f"{failure} (the run that is resumed has {' '.join(resumed.arguments)})"
            raise Failure(message, failure.code) from failure

    def _with_resumed_flags(self, resumed: FlagsOfRun, argv: Sequence[str]) -> dict[str, Any]:
        """Parse the flags of the run that is resumed, which may be crafted, and those that override them."""
        try:
            self.parse_args(resumed.arguments)
        except Failure as failure:
            raise Failure(f"'{resumed.source}' has flags that can't be used: {failure}", CHECKPOINT) from failure
        return vars(self.parse_args([*resumed.arguments, *argv]))

    def _flags(self) -> dict[str, argparse.Action]:
        """Return the flags by all their names, without dashes, except --help, --version and --config."""
        names = {name[2:]: action for name, action in self._option_string_actions.items() if name.startswith("--")}
        own = ("help", "version", "config")
        return {name: action for name, action in names.items() if name not in own}

    def _texts(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the flags that were given by name: their texts, empty for those without a value."""
        plain = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        for action in dict.fromkeys(self._flags().values()):  # once, whatever the number of its names
            if action.nargs == 0:
                plain.add_argument(*action.option_strings, dest=action.dest, action="store_const", const="")
            else:
                plain.add_argument(*action.option_strings, dest=action.dest, nargs=action.nargs, const=action.const)
        return vars(plain.parse_known_args(argv)[0])

    def in_flags(self, message: str) -> str:
        """Return an error message about arguments of the library as one about the flags that set them."""
        if not _OWNER.match(message):
            return message
        rule, got, value = _OWNER.sub("", message).partition("but got ")
        argument = _RULE.match(rule)
        if argument and self._flag_of(argument[1]):
            rule = f"argument {self._flag_of(argument[1])}: {argument[2]}"
        rule = _ARGUMENT.sub(lambda match: self._flag_of(match[1]) or match[0], rule)
        rule = _OTHER_ARGUMENT.sub(self._as_flag, rule)
        return f"{rule}{got}{value}"

    def _as_flag(self, match: re.Match[str]) -> str:
        """Return ``argument='value'`` as a flag with its value; unchanged if no flag sets the argument."""
        flag = self._flag_of(match[1])
        return f"{flag} {match[2]}" if flag else match[0]

    def _flag_of(self, argument: str) -> str | None:
        """Return the flag that sets an argument of the library, if there is one."""
        name = _FLAG_OF_ARGUMENT.get(argument, argument)
        if argument == "batch_size" and self._values.get("effective_batch"):
            name = "effective_batch"
        return f"--{name}" if name in self._flags() else None


def _hint(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant, as the end of an error message."""
    close = get_close_matches(name.partition("=")[0], known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _flags_of(config: str, known: Mapping[str, argparse.Action]) -> list[str]:
    """Return the settings of a YAML file as arguments, so that they are checked like those of the command line."""
    arguments: list[str] = []
    for name, text in _read_yaml(config).items():
        if name not in known:
            hint = _hint(name, known) or f"; known are {', '.join(sorted(known))}"
            raise Failure(f"'{config}' has the unknown key '{_check.one_line(name)}'{hint}", USAGE)
        word = text.lower()
        if known[name].nargs in (0, "?") and word in ("true", "yes", "on"):
            arguments.append(f"--{name}")
        elif word not in ("", "~", "null") and not (known[name].nargs in (0, "?") and word in ("false", "no", "off")):
            arguments.append(f"--{name}={text}")
    return arguments


def _read_yaml(config: str) -> dict[str, str]:
    """Return the settings of a YAML file as texts; PyYAML's BaseLoader makes no objects but texts, lists and dicts."""
    try:
        import yaml  # only --config needs it
    except ImportError as error:
        raise Failure("argument --config: needs PyYAML. Run: pip install PyYAML", USAGE) from error
    if os.path.exists(config) and not os.path.isfile(config):  # a pipe would be waited for, with signals blocked
        raise Failure(f"argument --config: '{config}' is not a file", USAGE)
    try:
        with open(config, encoding="utf-8") as file:
            settings = yaml.BaseLoader(file).get_single_data() or {}
    except OSError as error:
        raise Failure(f"'{config}' can't be read: {error.strerror}", USAGE) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise Failure(f"'{config}' is not YAML: {' '.join(str(error).split())}", USAGE) from error
    rule = f"'{config}' must hold lines of the form 'flag: value'"
    if not isinstance(settings, dict):
        raise Failure(f"{rule}, but has a {type(settings).__name__}", USAGE)
    for name, value in settings.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise Failure(f"{rule}, but '{_check.one_line(name)}' has a {type(value).__name__}", USAGE)
    return settings


# The types of flags


def or_word(word: str, convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a flag's type: a word, or what `convert` accepts."""
    return lambda text: word if text == word else convert(text)


def sizes(text: str) -> int | dict[int, int]:
    """Convert a flag's text (micro-batches in a window, or such numbers by their first update) to `mini_steps`."""
    if ":" not in text:
        return whole(1)(text)
    by_update: dict[int, int] = {}
    for part in text.split(","):
        update, _, size = part.partition(":")
        by_update[whole(0)(update)] = whole(1)(size)
    if 0 not in by_update or len(by_update) <= text.count(","):
        raise argparse.ArgumentTypeError(
            f"must begin with update 0, such as 0:1,100:4, and have each update once, but got '{text}'"
        )
    return dict(sorted(by_update.items()))


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
            upper_limit = f" and <= {high}" if value > high else ""
            raise argparse.ArgumentTypeError(f"must be an int >= {low}{upper_limit}, but got '{text}'")
        return value

    return convert


def number(low: float, *, above: bool = False, below: float = math.inf) -> Callable[[str], float]:
    """Return a flag's type: a finite number >= `low` (with `above`: > `low`)."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        rule = f"a number {'>' if above else '>='} {low:g}{'' if below == math.inf else f' and < {below:g}'}"
        if not low <= value < below or (above and value == low):
            raise argparse.ArgumentTypeError(f"must be {rule}, but got '{text}'")
        return value

    return convert


def path(text: str) -> str:
    """Convert a flag's text to a path; a shell does not expand the `~` of --flag=~/x. A variable may be not set."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, but got ''")
    return os.path.expanduser(text)


def memory(text: str) -> int:
    """Convert a flag's text to bytes."""
    size = from_text(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"must be {RULE}, but got '{text}'")
    return size
