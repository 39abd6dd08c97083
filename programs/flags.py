"""The flags of `train.py` and `eval.py`: tables of them, files of them, and what they become."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, Callable, NamedTuple, NoReturn

from model_zoo.models import MODELS
from model_zoo.optimizers import OPTIMIZERS
from model_zoo.recipes import ADAPTIVE, EMBEDDED, RECIPES, SIZES
from ms_accum._check import one_line, quantity
from ms_accum.saving.files import read_file
from ms_accum.training.sizes import TAILS, Sizes, planned, windows_by_epoch

from .command import FlagError, show
from .folder import CONFIG, MODEL, is_inside, model_to_evaluate, resumed_folder


class Kind(NamedTuple):
    """What the text of a flag becomes, and which values are valid."""

    metavar: str
    rule: str
    convert: Callable[[str], Any]
    is_valid: Callable[[Any], object]

    def __call__(self, text: str) -> Any:
        """Return the value of a text."""
        with contextlib.suppress(ValueError):
            value = self.convert(text)
            if self.is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {self.rule}, but got '{text}'")


def sizes_of(text: str) -> int | dict[int, int]:
    """Return the micro-batches in a window: a number, or numbers by their first update."""
    parts = [part.partition(":") for part in text.split(",")]
    return {int(update): int(size) for update, _, size in parts} if ":" in text else int(text)


def interval_of(text: str) -> dict[str, Any]:
    """Return the arguments of `Checkpointer` for updates or minutes."""
    return {"minutes": float(text[:-3])} if text.endswith("min") else {"every": int(text)}


def is_interval(text: str) -> bool:
    """Return whether it is a number of updates or minutes above 0."""
    return all(0 < value < math.inf for value in interval_of(text).values())


COUNT = Kind("N", "an int >= 1", int, lambda value: value >= 1)
MOST_EPOCHS, MOST_UPDATES = 10**6, 10**7  # more would take minutes to plan
EPOCHS = Kind("N", f"an int >= 1 and <= {MOST_EPOCHS}", int, lambda value: 1 <= value <= MOST_EPOCHS)
LENGTH = Kind("N", f"an int >= 1 and <= {MOST_UPDATES}", int, lambda value: 1 <= value <= MOST_UPDATES)
UPDATES = Kind("N", "an int >= 0", int, lambda value: value >= 0)
SIZE = Kind("N", "an int >= 1 and <= 65536", int, lambda value: 1 <= value <= 2**16)
SEED = Kind("N", "an int >= 0 and <= 4294967295", int, lambda value: 0 <= value < 2**32)
STAGE = Kind("{1,2}", "1 or 2", int, (1, 2).__contains__)
POSITIVE = Kind("X", "a number > 0", float, lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Kind("X", "a number >= 0", float, lambda value: 0 <= value < math.inf)
DECAY = Kind("X", "a number >= 0 and < 1", float, lambda value: 0 <= value < 1)
BETA = Kind("X", "a number > 0 and < 1", float, lambda value: 0 < value < 1 - 2**-25)  # in float32
CHARACTERS = Kind(
    "TEXT",
    "a text that has each character once",
    str,
    lambda text: len(set(text)) == len(text.encode("utf-32-le")) / 4 > 0,
)
_SUFFIXES = (".ckpt", ".safetensors")
PATH = Kind("PATH", "a path", os.path.expanduser, bool)  # a shell does not expand the ~ of --flag=~/x
FILE = Kind("PATH", "a path that ends with .ckpt or .safetensors", PATH.convert, lambda path: path.endswith(_SUFFIXES))
WINDOWS = Kind("N", "an int >= 1, or such as 0:1,100:4", str, lambda text: Sizes("", "", sizes_of(text)))
INTERVAL = Kind("N|Xmin", "a number of updates, such as 100, or of minutes, such as 5min", str, is_interval)
LEVELS = ("off", "O1", "O2", "O3", "bf16")


class Flag(NamedTuple):
    """A flag: the kind of its value, or the words that it may be, or None for a switch."""

    kind: Kind | Sequence[str] | None
    help: str = ""
    default: Any = None
    others: tuple[str, ...] = ()
    """Its other names."""


PROGRAM = {
    "device_target": Flag(("auto", "CPU", "GPU", "Ascend"), "the device; auto is that of this MindSpore", "auto"),
    "debug": Flag(None, "show tracebacks, and MindSpore's errors and warnings", False),
}
DATA = {
    "data_path": Flag(PATH, "folder of MNIST or CIFAR-10, or a text; without it small embedded data are used"),
    "dataset": Flag(tuple(RECIPES), "the data set (default: what --model takes; digits, or mnist with --data_path)"),
    "model": Flag(tuple(MODELS), "the network (default: that of the data set)"),
}
TRAINING = {
    **DATA,
    "download": Flag(None, "download MNIST or CIFAR-10 into --data_path first", False),
    "epochs": Flag(EPOCHS, "passes over the data (default: by data set)", others=("epoch_size",)),
    "max_updates": Flag(LENGTH, "end after N updates, also inside an epoch"),
    "seed": Flag(SEED, "seed of the weights, the order of the rows and the random crops", 1),
    "batch_size": Flag(COUNT, "rows of a micro-batch, on each rank (default: by data set)"),
    "mini_steps": Flag(
        WINDOWS,
        "micro-batches in a window; 0:1,100:4 makes windows of 1, and of 4 from update 100 (default: 4)",
        others=("accumulate_step", "gradient_accumulation_steps"),
    ),
    "effective_batch_size": Flag(
        COUNT, "rows per update, of all ranks, instead of --mini_steps; a multiple of the ranks times --batch_size"
    ),
    "tail": Flag(TAILS, "a last, shorter window: update with it, continue it in the next epoch, or drop it", "flush"),
    "clip_norm": Flag(POSITIVE, "largest norm of a window's gradient (default: no limit)"),
    "amp": Flag(LEVELS, "mixed precision: float16 with a dynamic loss scale, at MindSpore's level, or bfloat16", "off"),
    "ema": Flag(DECAY, "average the weights over the updates with the decay X, such as 0.999, and evaluate that"),
    "zero": Flag(STAGE, "ZeRO stage of several processes: 1 shards the optimizer's state, 2 the accumulators, too"),
    "optimizer": Flag(OPTIMIZERS, "(default: by data set)"),
    "lr": Flag(POSITIVE, "learning rate (default: by data set)"),
    "momentum": Flag(NOT_NEGATIVE, "of momentum and sgd (default: 0.9)"),
    "weight_decay": Flag(NOT_NEGATIVE, "(default: by data set)"),
    "warmup_updates": Flag(UPDATES, "updates in which the rate rises from 0", 0),
    "lr_decay": Flag(("none", "linear", "cosine"), "how the rate falls after that, until the run ends", "none"),
    "eval_every": Flag(COUNT, "evaluate every N updates (default: after each epoch)"),
    "output_dir": Flag(PATH, "folder of the run (default: a new one, runs/001 and so on)"),
    "ckpt_path": Flag(FILE, f"save the model there, .ckpt or .safetensors (default: {MODEL} in the folder of the run)"),
    "save_every": Flag(INTERVAL, "save the training state so often, and at the end, a signal or an error", "10min"),
    "init_from": Flag(PATH, "begin with the weights of this model, .ckpt or .safetensors, such as to fine-tune it"),
    "resume": Flag(None, "continue the run in --output_dir, by default the newest in runs/, with its flags", False),
}
LENGTHS = {"tokens": Flag(SIZE), "window_weight": Flag(COUNT)}
"""dict[str, Flag], for lines of different lengths: the most positions of a micro-batch, and the tokens of a window."""
IN_FILES = {**dict.fromkeys(SIZES, Flag(SIZE)), **LENGTHS, "beta2": Flag(BETA), "min_lr": Flag(POSITIVE)}
"""dict[str, Flag], what only a file of flags has: the sizes of a network that takes text, details of its recipe."""
EVALUATION = {
    "ckpt_path": Flag(PATH, "the model (default: that of the newest run in runs/)"),
    **DATA,
    "report": Flag(PATH, "also write results by class and the confusion matrix into this folder"),
}
RECORD = {"model": DATA["model"], "dataset": DATA["dataset"], "amp": TRAINING["amp"]}
"""dict[str, Flag], what is in the record beside a model."""
OF_TEXT = {**{name: IN_FILES[name] for name in (*SIZES, "tokens")}, "vocabulary": Flag(CHARACTERS)}
"""dict[str, Flag], what is in the record of a network that takes text in addition."""
_CHOOSE_OURS = ("data_path", "dataset", "model", "download", "amp")
"""tuple, the flags that choose our networks and data, and how they are made."""
_WINDOW = ("mini_steps", "effective_batch_size")  # one of them says how large a window is
ONE_START = ("config", "debug", "download", "output_dir", "resume")
"""tuple, the flags that a resumed run does not take from the run that it continues."""
MAY_CHANGE = ("ckpt_path", "data_path", "device_target", "epochs", "eval_every", "max_updates", "save_every")
"""tuple, the flags that may differ when a run is resumed."""


_ALL = {**TRAINING, **IN_FILES, **PROGRAM}
IN_CONFIG = {name: flag for name, flag in _ALL.items() if name not in ("debug", "resume")}
"""dict[str, Flag], what the file of --config may have."""
IN_RUN = {name: flag for name, flag in _ALL.items() if name not in ONE_START}
"""dict[str, Flag], what a run writes into its folder, which may be a stranger's."""
MOST = 2**20
"""int, the bytes that a file of flags may have."""
OTHER_WORDS = {
    **dict.fromkeys(("accum", "accum_iter", "accumulation_steps", "grad_accum", "grad_accum_steps"), "mini_steps"),
    **dict.fromkeys(("clip_grad", "max_grad_norm"), "clip_norm"),
    **dict.fromkeys(("arch", "net", "network"), "model"),
    "learning_rate": "lr",
    **dict.fromkeys(("finetune", "pretrained", "weights"), "init_from"),
    "max_steps": "max_updates",
    **dict.fromkeys(("global_batch_size", "total_batch_size", "train_batch_size"), "effective_batch_size"),
    "data_dir": "data_path",
}
"""dict[str, str], what flags are called elsewhere."""


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are a `FlagError` with a hint."""

    def __init__(self, description: str, usage: str):
        super().__init__(description=description, usage=usage, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        unknown = message.partition("unrecognized arguments: ")[2].partition("=")[0].split()
        raise FlagError(message + (hint(unknown[0], self._option_string_actions) if unknown else ""))

    def add(self, flags: Mapping[str, Flag]) -> None:
        """Add flags."""
        for name, flag in flags.items():
            options: dict[str, Any] = {"choices": flag.kind}
            if isinstance(flag.kind, Kind):
                options = {"type": flag.kind, "metavar": flag.kind.metavar}
            elif flag.kind is None:
                options = {"action": "store_true"}
            names = [f"--{each}" for each in (name, *flag.others)]
            text = f"{flag.help} (default: {flag.default})" if flag.default else flag.help
            self.add_argument(*names, default=flag.default, help=text, **options)


def training_flags(argv: Sequence[str], *, own: bool = False) -> argparse.Namespace:
    """Return the flags of `train.py`, with the data set's defaults for those that are not given.

    `saved` has those that a run keeps in its folder for `--resume`, and `fixed` those that may not change then;
    `model_of_run` is where the resumed run saves its model, if that is not its folder. With `own`, for a copy that
    trains another network on other data, what chooses ours can't be given, and is not saved.
    """
    ours = "Train LeNet5, an MLP, a ResNet or a GPT with gradient accumulation."
    parser = Parser("Train with gradient accumulation." if own else ours, "%(prog)s [flags]")
    more = "" if own else f", and {', '.join(IN_FILES)}"
    text = f"read flags from a YAML file, a line 'flag: value' for each{more}"
    flags = {name: flag for name, flag in TRAINING.items() if not (own and name in _CHOOSE_OURS)}
    parser.add({**flags, "config": Flag(PATH, text), **PROGRAM})
    given = parser.parse_args(argv)
    folder = resumed_folder(given.output_dir) if given.resume else None
    if folder is not None and given.config is not None:
        raise FlagError(f"argument --config: the run in '{folder}' has its flags there; leave it out")
    known = {name: flag for name, flag in IN_CONFIG.items() if not (own and name in _CHOOSE_OURS)}
    in_file = _in_file(given.config, known) if folder is None else _of_run(folder)
    model_of_run = in_file.ckpt_path
    for name, other in (_WINDOW, _WINDOW[::-1]):
        if getattr(given, name) is not None:
            setattr(in_file, other, None)
    args = parser.parse_args(argv, in_file)  # those of the command line override them
    vars(args).update(dict.fromkeys(_CHOOSE_OURS if own else ()))
    if folder is not None:
        args.output_dir = folder
        if given.ckpt_path is None and args.ckpt_path is not None and not is_inside(args.ckpt_path, folder):
            fault = f"the run saves its model outside of '{folder}', to '{one_line(args.ckpt_path)}'"
            raise FlagError(f"argument --ckpt_path: {fault}; if it is yours, give it once more")
    _fill_in(args, own)
    args.saved = {name: value for name, value in vars(args).items() if name not in ONE_START and value is not None}
    args.fixed = {name: value for name, value in args.saved.items() if name not in MAY_CHANGE}
    args.mini_steps = None if args.mini_steps is None else sizes_of(args.mini_steps)
    args.model_of_run = model_of_run
    args.mini_steps = mini_steps_of(args, 1)  # if this is an error, it is one on several ranks, too
    return args


def evaluation_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of `eval.py`, with those of the record beside the model.

    Raises:
        ValueError: If it is not a record; a crafted one could name a network of any size.
    """
    text = "Evaluate a model of train.py on the test split. What is not given is that of the record beside the model."
    parser = Parser(text, "%(prog)s [flags]")
    parser.add({**EVALUATION, **PROGRAM})
    path = model_to_evaluate(parser.parse_args(argv).ckpt_path)
    args = parser.parse_args(argv, record_of(path))
    args.ckpt_path = path
    if args.report is not None and os.path.exists(args.report) and not os.path.isdir(args.report):
        raise FlagError(f"argument --report: must be a folder, but '{one_line(args.report)}' is a file")
    if args.data_path is None and args.dataset not in (None, *EMBEDDED):
        args.data_path = _trained_on(path, args.dataset)
    assumed = [name for name in ("model", "dataset") if getattr(args, name) is None]
    choose_data(args)
    if RECIPES[args.dataset].text and None in [getattr(args, name) for name in (*SIZES, "vocabulary")]:
        fault = f"the record of a network that takes text is missing, or has no sizes, '{path}.json'"
        raise FlagError(f"argument --ckpt_path: {fault}")
    if assumed:
        flags = " ".join(f"--{name} {getattr(args, name)}" for name in assumed)
        show("assumed", f"{flags}: there is no record beside the model, or it does not say")
    return args


# The defaults of the data set


def choose_data(args: argparse.Namespace) -> None:
    """Set the data set and the network that the flags select, or raise an error if they contradict each other."""
    embedded = args.data_path is None
    if args.dataset is None:
        model = MODELS[args.model or "lenet5"]
        images = "cifar10" if model.channels == 3 else "digits" if embedded else "mnist"
        args.dataset = images if not model.takes_text else "sentences" if embedded else "text"
    recipe = RECIPES[args.dataset]
    args.model = args.model or recipe.model
    if MODELS[args.model].channels != MODELS[recipe.model].channels:
        raise FlagError(f"argument --model: {args.model} does not take {args.dataset}; {recipe.model} does")
    if embedded != (args.dataset in EMBEDDED):
        rule = "be given" if embedded else "be left out, or another --dataset be given"
        raise FlagError(f"argument --data_path: for {args.dataset} it must {rule}")
    if recipe.text and getattr(args, "report", None) is not None:
        raise FlagError("argument --report: is for networks that classify images")


def _fill_in(args: argparse.Namespace, own: bool) -> None:
    """Set the flags that are not given to the values of the data set's recipe, and check them together."""
    if not own:
        choose_data(args)
    recipe = RECIPES[args.dataset or "digits"]
    if args.download and (args.data_path is None or recipe.text):
        raise FlagError("argument --download: needs --data_path, the folder to download mnist or cifar10 into")
    args.optimizer = args.optimizer or recipe.optimizer
    adaptive = args.optimizer in ADAPTIVE
    for name in ("momentum" if adaptive else "beta2", *(() if recipe.text else (*SIZES, *LENGTHS))):
        if getattr(args, name) is not None:
            raise FlagError(f"'{name}' must be left out: {args.model or 'training'} by {args.optimizer} has none")
    lr, weight_decay = recipe.rates(args.optimizer)
    defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    by_tokens = args.tokens is not None
    defaults["batch_size"] = None if by_tokens else recipe.batch_size
    defaults["epochs"] = recipe.epochs if args.max_updates is None or by_tokens else None
    defaults["momentum"] = None if adaptive else 0.9
    defaults.update(recipe.text or {})
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.init_from is not None and not args.resume and not os.path.exists(args.init_from):
        meant = "does not exist; where to save the model is --ckpt_path"
        raise FlagError(f"argument --init_from: '{one_line(args.init_from)}' {meant}")
    place = os.path.dirname(os.path.realpath(args.ckpt_path or MODEL))  # the target of a link
    if not os.path.isdir(place) and place != os.path.realpath(args.output_dir or ""):
        raise FlagError(f"argument --ckpt_path: its folder must exist, but got '{one_line(args.ckpt_path)}'")
    if args.mini_steps is not None and args.effective_batch_size is not None:
        raise FlagError("argument --effective_batch_size: replaces --mini_steps, so give one of them")
    if args.effective_batch_size is None and args.mini_steps is None and not by_tokens:
        args.mini_steps = "4"
    if args.min_lr is not None and (args.lr_decay == "none" or args.min_lr > args.lr):
        raise FlagError(f"'min_lr' needs --lr_decay, and must be <= {args.lr:g}, the --lr")
    if by_tokens or args.window_weight is not None:
        _check_lengths(args)


def _check_lengths(args: argparse.Namespace) -> None:
    """Check the flags for lines of different lengths: the number of updates is not known then."""
    if None in (args.tokens, args.window_weight):
        raise FlagError("'tokens' and 'window_weight' must be given together, or none of them")
    if args.tokens < args.context:
        raise FlagError(f"'tokens' must be >= {args.context}, the context, but got {args.tokens}")
    windows = dict.fromkeys(_WINDOW, "window_weight")
    for name, instead in {"batch_size": "tokens", **windows}.items():
        if getattr(args, name) is not None:
            raise FlagError(f"argument --{name}: must be left out with '{instead}'")
    if args.max_updates is None and (args.lr_decay != "none" or args.warmup_updates):
        raise FlagError("argument --max_updates: must be given with 'window_weight' and a learning rate that changes")


# Files of flags


def _of_run(folder: str) -> argparse.Namespace:
    """Return the flags of a run."""
    return _in_file(os.path.join(folder, CONFIG), IN_RUN)


def record_of(model: str) -> argparse.Namespace:
    """Return the flags in the record beside a model, if there is one.

    Raises:
        ValueError: If it is not a record; a crafted one could name a network of any size.
    """
    record = f"{model}.json"
    try:
        return _in_file(record if os.path.lexists(record) else None, {**RECORD, **OF_TEXT})
    except FlagError as error:
        raise ValueError(f"'{record}' is not the record of a model; remove it") from error


def _trained_on(model: str, dataset: str) -> str | None:
    """Return the path of the data that a model was trained on, if its run names it, and it is still there."""
    folder = os.path.dirname(model)
    with contextlib.suppress(FlagError):  # there is no run beside it
        run = _of_run(folder)
        if run.dataset == dataset and run.data_path is not None and os.path.exists(run.data_path):
            show("data_path", f"{run.data_path}, as in {os.path.join(folder, CONFIG)}")
            return run.data_path
    return None


def _in_file(source: str | None, known: Mapping[str, Flag]) -> argparse.Namespace:
    """Return the flags of a file, checked like those of the command line, and the defaults of all others."""
    parser, arguments = Parser("", ""), []
    given: dict[str, str] = {}
    parser.add(known)
    for name, value in [] if source is None else _read(source):
        action = parser._option_string_actions.get(f"--{name}")
        if action is None or name == "help":
            raise FlagError(f"'{source}' has the unknown flag '{one_line(name)}'{hint(str(name), known)}")
        if action.dest in given:
            same = "" if given[action.dest] == name else f", the first time as '{given[action.dest]}'"
            raise FlagError(f"'{source}' must have '{name}' once, but has it twice{same}")
        given[action.dest] = name
        if isinstance(value, (list, tuple)):
            raise FlagError(f"'{source}' must have one value for '{name}', but has several")
        if action.nargs == 0 and not (value is None or isinstance(value, bool)):
            raise FlagError(f"'{source}': '{name}' must be true or false, but got '{one_line(value)}'")
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None and value is not False:
            arguments.append(f"--{name}={value}")
    try:
        return parser.parse_args(arguments)
    except FlagError as error:
        raise FlagError(f"'{source}': {error}") from error


_SWITCHES = {"true": True, "false": False, "null": None, "~": None, "": None}


def _read(source: str) -> Sequence[tuple[Any, Any]]:
    """Return the names and values in a file of flags, JSON or YAML; what has no single value is a list or a tuple."""
    try:
        text = read_file(source, MOST).decode()
        content = json.loads(text, object_pairs_hook=tuple) if source.endswith(".json") else _pairs_of_yaml(text)
    except ImportError:
        raise
    except Exception as error:  # of the system, of JSON, of YAML
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise FlagError(f"'{source}' can't be read: {reason}") from error
    if not isinstance(content, tuple):
        raise FlagError(f"'{source}' must have lines of the form 'flag: value'")
    return content


def _pairs_of_yaml(text: str) -> Any:
    """Return the names and values of a mapping.

    All values are texts, as on the command line: no 1:30, 0x1F, or off, and no objects. Nothing is made of lists, which
    a few lines of aliases make as large as the memory.
    """
    import yaml  # only --config needs it

    node = yaml.BaseLoader(text).get_single_node()
    text_node = yaml.ScalarNode
    if node is None:
        return ()
    if not isinstance(node, yaml.MappingNode) or not all(isinstance(name, text_node) for name, _ in node.value):
        return None
    return tuple(
        (name.value, _SWITCHES.get(value.value.lower(), value.value) if isinstance(value, text_node) else [])
        for name, value in node.value
    )


def hint(name: str, known: Iterable[str]) -> str:
    """Return what was probably meant, as the end of an error message."""
    word = name.lstrip("-").replace("-", "_")
    if word in IN_FILES and word not in known:
        return f"; {word} is for the file of --config"
    names = {option.lstrip("-"): option for option in known}
    alike = [each for each in names if each[:1] == word[:1]]  # "export" is not "report"
    meant = OTHER_WORDS.get(word)
    close = [meant] if meant in names else get_close_matches(word, alike, 1, 0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""


# What flags become


def length_of(args: argparse.Namespace, batches: int) -> tuple[int, int]:
    """Return the epochs and the updates of a run with so many micro-batches in an epoch.

    Windows by weight end the run with the first of both; the updates are then those of `max_updates`, or 0, unknown.
    """
    if args.window_weight is not None:
        return args.epochs, args.max_updates or 0

    def updates_of(epochs: int) -> int:
        return planned("train.py", batches, args.mini_steps, args.tail, epochs) or 0

    epochs = args.epochs or 1
    if args.epochs is None:
        while updates_of(epochs) < args.max_updates:
            epochs *= 2
            if epochs > 2 * MOST_EPOCHS:
                raise FlagError(f"argument --max_updates: needs more than {MOST_EPOCHS:,} epochs, give fewer")
        by_epoch = windows_by_epoch(batches, Sizes("train.py", "mini_steps", args.mini_steps), args.tail, epochs)
        epochs = bisect_left(list(accumulate(by_epoch)), args.max_updates) + 1
    updates = updates_of(epochs)
    if args.max_updates is None:
        return epochs, updates
    return epochs + (args.epochs is None), min(updates, args.max_updates)  # one to spare: a skipped window is no update


def mini_steps_of(args: argparse.Namespace, ranks: int) -> int | dict[int, int]:
    """Return the micro-batches in a window of each rank: a number, or numbers by their first update."""
    if args.effective_batch_size is None:
        return args.mini_steps
    rows = args.batch_size * ranks
    if args.effective_batch_size % rows:
        what = "the --batch_size" if ranks == 1 else f"the --batch_size {args.batch_size} of {ranks} ranks"
        fault = f"must be a multiple of {rows}, {what}, but got {args.effective_batch_size}"
        raise FlagError(f"argument --effective_batch_size: {fault}")
    return args.effective_batch_size // rows


def window_of(args: argparse.Namespace, ranks: int) -> str:
    """Return what a window is, in words, such as "128 rows per update (4 micro-batches of 32)"."""
    if args.window_weight is not None:
        return f"{args.window_weight:,} tokens per update (micro-batches of at most {args.tokens:,} positions)"
    sizes = args.mini_steps if isinstance(args.mini_steps, dict) else {0: args.mini_steps}
    each = f" of {args.batch_size:,}" + (f" on each of {ranks} ranks" if ranks > 1 else "")
    parts = [
        f"{size * args.batch_size * ranks:,} rows per update ({quantity(size, 'micro-batch')}{each})"
        + (f" from update {update:,}" if update else "")
        for update, size in sizes.items()
    ]
    return ", ".join(parts)


def learning_rate(args: argparse.Namespace, updates: int) -> Any:
    """Return the optimizer's `learning_rate`: a number, or a list with one number for each update."""
    if args.lr_decay == "none" and not args.warmup_updates:
        return args.lr
    if updates > MOST_UPDATES:
        fault = f"a learning rate that changes is for at most {MOST_UPDATES:,} updates, but the run has {updates:,}"
        raise FlagError(f"argument --epochs: {fault}")
    lowest = (args.min_lr or 0.0) / args.lr
    return [args.lr * _part(args, update, updates, lowest) for update in range(updates)]


def _part(args: argparse.Namespace, update: int, updates: int, lowest: float) -> float:
    """Return the part of the rate that an update has: it grows first, and may fall then."""
    if update < args.warmup_updates:
        return (update + 1) / args.warmup_updates
    progress = (update - args.warmup_updates) / max(1, updates - args.warmup_updates)
    part = {"none": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[args.lr_decay]
    return lowest + (1 - lowest) * part
