"""The flags of the programs: their ranges, a YAML file of flags, and the flags of a run that is resumed."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Callable, NoReturn

from model_zoo.models import MODELS
from model_zoo.optimizers import OPTIMIZERS
from model_zoo.recipes import ADAPTIVE, EMBEDDED, RECIPES, SIZES
from ms_accum import _check

from .command import FlagError
from .folder import read_config, resumed_folder

PRECISIONS = ("off", "O1", "O2", "O3", "bf16")
ONE_START = ("config", "debug", "download", "output_dir", "overwrite", "resume")
"""tuple, the flags that a resumed run does not take from the run that it continues."""
MAY_CHANGE = ("ckpt_path", "data_path", "device_target", "epochs", "eval_every", "keep", "max_updates", "save_every")
"""tuple, the flags that may differ when a run is resumed."""


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are a `FlagError` with a hint."""

    def __init__(self, description: str, usage: str):
        super().__init__(description=description, usage=usage, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        unknown = message.partition("unrecognized arguments: ")[2]
        raise FlagError(message + (hint(unknown.split()[0], self._option_string_actions) if unknown else ""))

    def names(self) -> set[str]:
        """Return the names that a file of flags may have."""
        return {name[2:] for name in self._option_string_actions if name.startswith("--")} - {"help", "config"}


def training_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of `train.py`, with the data set's defaults for those that are not given.

    `saved` has those that a run keeps in its folder for `--resume`, and `fixed` those that may not change then.
    """
    parser = _training_parser()
    args = parser.parse_args(argv)
    if args.resume:
        folder = resumed_folder(args.output_dir)
        flags = as_arguments(read_config(folder), folder, parser.names())
        args = parser.parse_args([*flags, *argv])
        args.output_dir = folder
    elif args.config is not None:
        args = parser.parse_args([*as_arguments(read_yaml(args.config), args.config, parser.names()), *argv])
    if args.resume and args.overwrite:
        raise FlagError("argument --overwrite: can't be combined with --resume, which continues a run")
    _fill_in(args)
    args.saved = {name: value for name, value in vars(args).items() if name not in ONE_START and value is not None}
    args.fixed = {name: value for name, value in args.saved.items() if name not in MAY_CHANGE}
    args.mini_steps = _sizes_of(args.mini_steps)
    return args


def _training_parser() -> Parser:
    parser = Parser("Train LeNet5, an MLP, a ResNet or a GPT with gradient accumulation.", "%(prog)s [flags]")
    add = parser.add_argument_group("data and network").add_argument
    text = "folder of MNIST or CIFAR-10, or a text; without it small embedded data are used"
    add("--data_path", type=path, metavar="PATH", help=text)
    text = "download MNIST or CIFAR-10 into --data_path first, from URL if it is given"
    add("--download", nargs="?", const=True, metavar="URL", help=text)
    text = "the data set (default: what --model takes; without --model mnist with --data_path, else digits)"
    add("--dataset", choices=tuple(RECIPES), help=text)
    add("--model", choices=tuple(MODELS), help="the network (default: that of the data set)")
    add("--context", type=whole(1, 65536), metavar="N", help="tokens in a row of text (default: 64)")
    add("--layers", type=whole(1, 1000), metavar="N", help="layers of the GPT (default: 4)")
    add("--heads", type=whole(1, 1000), metavar="N", help="attention heads in a layer (default: 4)")
    add("--width", type=whole(1, 65536), metavar="N", help="size of a token's vector (default: 128)")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", "--epoch_size", type=whole(1), metavar="N", help="passes over the data (default: by data set)")
    add("--max_updates", type=whole(1), metavar="N", help="end after N updates, also inside an epoch")
    text = "seed of the weights, the order of the rows and the random crops (default: 1)"
    add("--seed", type=whole(0, 2**32 - 1), default=1, metavar="N", help=text)
    add("--batch_size", type=whole(1), metavar="N", help="rows of a micro-batch (default: by data set)")
    names = ("--mini_steps", "--accumulate_step", "--gradient_accumulation_steps")
    text = "micro-batches in a window; 0:1,100:4 makes windows of 1, and of 4 from update 100 (default: 4)"
    add(*names, type=sizes, default="4", metavar="N", help=text)
    text = "a last, shorter window: make an update of it, continue it in the next epoch, or discard it (default: flush)"
    add("--tail", choices=("flush", "carry", "drop"), default="flush", help=text)
    text = "largest norm of a window's gradient (default: no limit)"
    add("--clip_norm", type=number(0, above=True), metavar="X", help=text)
    text = "mixed precision: float16 at MindSpore's level, with a dynamic loss scale, or bfloat16 (default: off)"
    add("--amp", choices=PRECISIONS, default="off", help=text)
    text = "average the weights over the updates with the decay X, such as 0.999, and evaluate the average"
    add("--ema", type=number(0, below=1), metavar="X", help=text)
    text = "ZeRO stage with several processes: 1 shards the optimizer's state, 2 also the accumulators"
    add("--zero", type=int, choices=(1, 2), help=text)
    text = "evaluate every N updates (default: after each epoch)"
    add("--eval_every", type=whole(1), metavar="N", help=text)
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=OPTIMIZERS, help="(default: by data set)")
    add("--lr", type=number(0, above=True), metavar="X", help="learning rate (default: by data set)")
    add("--momentum", type=number(0), metavar="X", help="of momentum and sgd (default: 0.9)")
    add("--weight_decay", type=number(0), metavar="X", help="(default: by data set)")
    text = "decay of the second moment of adam and adamw (default: 0.999)"
    add("--beta2", type=number(0, above=True, below=1 - 2**-25), metavar="X", help=text)  # in float32
    add("--warmup_updates", type=whole(0), default=0, metavar="N", help="updates in which the rate rises from 0")
    text = "how the rate falls after the warm-up, until the end of the run (default: none)"
    add("--lr_decay", choices=("none", "linear", "cosine"), default="none", help=text)
    add("--min_lr", type=number(0, above=True), metavar="X", help="the rate at the end of --lr_decay (default: 0)")
    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=path, metavar="DIR", help="folder of the run (default: a new one, runs/001 and so on)")
    text = "path of the model, .ckpt or .safetensors (default: gradient_accumulation.ckpt in the folder of the run)"
    add("--ckpt_path", type=path, metavar="FILE", help=text)
    add("--overwrite", action="store_true", help="replace the files of another run in --output_dir")
    text = "continue the run in --output_dir, by default the newest in runs/, with its flags"
    add("--resume", action="store_true", help=text)
    text = "save the training state every N updates or X minutes, such as 100 or 5min (default: 10min); it is also "
    text += "saved at the end, and when a signal or an error stops the run"
    add("--save_every", type=interval, default="10min", metavar="N|Xmin", help=text)
    add("--keep", type=whole(1), default=1, metavar="N", help="number of training states to keep (default: 1)")
    add_program(parser)
    text = "read flags from a YAML file, a line 'flag: value' for each; those on the command line override them"
    parser.add_argument("--config", type=path, metavar="FILE", help=text)
    return parser


def evaluation_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of `eval.py`."""
    parser = Parser("Evaluate a model of train.py on the test split.", "%(prog)s [flags]")
    text = "the model (default: that of the newest run in runs/)"
    parser.add_argument("--ckpt_path", type=path, metavar="FILE", help=text)
    parser.add_argument("--data_path", type=path, metavar="PATH", help="its data; not for embedded data")
    text = "the data set, if there is no record beside the model"
    parser.add_argument("--dataset", choices=tuple(RECIPES), help=text)
    text = "the network, if there is no record beside the model"
    parser.add_argument("--model", choices=tuple(MODELS), help=text)
    text = "also write DIR/report.html: results by class, the confusion matrix, and the most certain wrong images"
    parser.add_argument("--report", type=path, metavar="DIR", help=text)
    parser.set_defaults(amp=None)  # that of the record
    add_program(parser)
    return parser.parse_args(argv)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all programs have."""
    text = "the device; auto is the default of this MindSpore (default: auto)"
    parser.add_argument("--device_target", choices=("auto", "CPU", "GPU", "Ascend"), default="auto", help=text)
    parser.add_argument("--debug", action="store_true", help="show tracebacks, and MindSpore's warnings")


# The defaults of the data set


def choose_data(args: argparse.Namespace) -> None:
    """Set the data set and the network that the flags select, or raise an error if they contradict each other."""
    embedded = args.data_path is None
    if args.dataset is None:
        args.dataset = _dataset_for(args.model, embedded)
    recipe = RECIPES[args.dataset]
    args.model = args.model or recipe.model
    if MODELS[args.model].channels != MODELS[recipe.model].channels:
        rows = "text" if recipe.text else f"the images of {args.dataset}"
        raise FlagError(f"argument --model: {args.model} does not take {rows}; {recipe.model} does")
    if args.dataset in EMBEDDED and not embedded:
        raise FlagError(f"argument --data_path: {args.dataset} are embedded; leave it out, or give another --dataset")
    if args.dataset not in EMBEDDED and embedded:
        what = "a text file, or a folder of .txt files" if recipe.text else f"the folder of {args.dataset}"
        raise FlagError(f"argument --data_path: must be given, {what}")
    if recipe.text and getattr(args, "report", None) is not None:
        raise FlagError("argument --report: is for networks that classify images")
    if not embedded and not recipe.text and os.path.isfile(args.data_path):
        raise FlagError(
            f"argument --data_path: '{args.data_path}' is a file, and {args.dataset} is a folder; "
            "for a text give --dataset text"
        )


def _dataset_for(model: str | None, embedded: bool) -> str:
    if model is not None and MODELS[model].takes_text:
        return "sentences" if embedded else "text"
    if model is not None and MODELS[model].channels == 3:
        return "cifar10"
    return "digits" if embedded else "mnist"


def _fill_in(args: argparse.Namespace) -> None:
    """Set the flags that are not given to the values of the data set's recipe, and check them together."""
    if args.download and args.data_path is None:
        raise FlagError("argument --download: needs --data_path, the folder to download into")
    choose_data(args)
    recipe = RECIPES[args.dataset]
    if args.download and recipe.text:
        raise FlagError("argument --download: is for mnist and cifar10")
    args.optimizer = args.optimizer or recipe.optimizer
    if args.optimizer in ADAPTIVE and args.momentum is not None:
        raise FlagError(f"argument --momentum: {args.optimizer} has none")
    if args.optimizer not in ADAPTIVE and args.beta2 is not None:
        raise FlagError(f"argument --beta2: {args.optimizer} has none; adam and adamw have")
    lr, weight_decay = recipe.rates(args.optimizer)
    defaults: dict[str, Any] = {"batch_size": recipe.batch_size, "lr": lr, "weight_decay": weight_decay}
    defaults["epochs"] = recipe.epochs if args.max_updates is None else None
    defaults["momentum"] = None if args.optimizer in ADAPTIVE else 0.9
    defaults.update(recipe.text or {})
    for name in SIZES:
        if not recipe.text and getattr(args, name) is not None:
            raise FlagError(f"argument --{name}: is for text; {args.dataset} are images")
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.min_lr is not None and (args.lr_decay == "none" or args.min_lr > args.lr):
        raise FlagError(f"argument --min_lr: needs --lr_decay, and must be <= {args.lr:g}, the --lr")


# Files of flags


def read_yaml(config: str) -> Mapping[str, Any]:
    """Return the flags of a YAML file by name."""
    import yaml  # only --config needs it

    try:
        with open(config, encoding="utf-8") as file:
            flags = yaml.safe_load(file) or {}
    except OSError as error:
        raise FlagError(f"argument --config: '{config}' can't be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FlagError(f"argument --config: '{config}' is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(flags, dict):
        raise FlagError(f"argument --config: '{config}' must have lines of the form 'flag: value'")
    return flags


def as_arguments(flags: Mapping[str, Any], source: str, known: Iterable[str]) -> list[str]:
    """Return the flags of a file as arguments, so that they are checked like those of the command line."""
    arguments = []
    for name, value in flags.items():
        if name not in known:
            raise FlagError(f"'{source}' has the unknown flag '{_check.one_line(name)}'{hint(str(name), known)}")
        if isinstance(value, (list, dict)):
            raise FlagError(f"'{source}' must have one value for '{name}', but has a {type(value).__name__}")
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None and value is not False:
            arguments.append(f"--{name}={value}")
    return arguments


def hint(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant, as the end of an error message."""
    close = get_close_matches(name.partition("=")[0], known, 1)
    return f"; did you mean {close[0]}?" if close else ""


# The types of flags


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a flag's type: an int from `low` to `high`."""

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
    """Return a flag's text as a path; a shell does not expand the `~` of --flag=~/x."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, but got ''")
    return os.path.expanduser(text)


def sizes(text: str) -> str:
    """Check the micro-batches in a window: a number, or numbers by their first update."""
    if ":" not in text:
        return str(whole(1)(text))
    parts = [part.partition(":") for part in text.split(",")]
    updates = [whole(0)(update) for update, _, size in parts if whole(1)(size)]
    if updates[0] != 0 or updates != sorted(set(updates)):
        raise argparse.ArgumentTypeError(f"must begin with update 0 and rise, such as 0:1,100:4, but got '{text}'")
    return text


def _sizes_of(text: str) -> int | dict[int, int]:
    if ":" not in text:
        return int(text)
    return {int(update): int(size) for update, _, size in (part.partition(":") for part in text.split(","))}


def interval(text: str) -> str:
    """Check updates or minutes."""
    try:
        (number(0, above=True) if text.endswith("min") else whole(1))(text.removesuffix("min"))
    except argparse.ArgumentTypeError as error:
        rule = "must be a number of updates, such as 100, or of minutes, such as 5min"
        raise argparse.ArgumentTypeError(f"{rule}, but got '{text}'") from error
    return text


def interval_of(text: str) -> dict[str, Any]:
    """Return the arguments of `Checkpointer` for --save_every."""
    return {"minutes": float(text[:-3])} if text.endswith("min") else {"every": int(text)}
