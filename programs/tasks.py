"""What the programs train: a network that classifies images, or one that predicts the next token of a text."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import amp, nn

from model_zoo import DOWNLOADS, MODELS, RECIPES, DataError, NextTokenLoss, create_dataset, create_text_dataset
from model_zoo.data.text import IGNORED, Lines
from model_zoo.gpt import sizes_of
from model_zoo.next_token import LossOfTokens, count_targets
from model_zoo.recipes import SIZES
from ms_accum import Group, TokenBatches, evaluate
from ms_accum._check import one_line
from ms_accum.network.training_mode import training_mode
from ms_accum.ranks.group import comes_first
from ms_accum.saving.files import states_in, write_bytes, write_whole
from ms_accum.saving.model_file import CheckpointError, kinds_in, load_common
from ms_accum.saving.training_state import kinds_of_arrays, shortened
from ms_accum.training.data import Data

from .command import FlagError, handled_by, interrupt, show
from .flags import RECORD, record_of
from .folder import STATES

# In a batch of an evaluation, which should not need more memory than training.
_MOST_TOKENS, _MOST_SCORES = 2**11, 2**23


class Images:
    """To classify images.

    Args:
        args (Namespace): the flags.
    """

    weight = None
    """The weight of a micro-batch; None for its rows, as the loss is their mean."""
    metrics = {"acc"}
    """Optional[set], MindSpore's metrics of an evaluation during training, in addition to the mean loss."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        # On CPU nn.CrossEntropyLoss takes as long as the rest of a small network.
        self.loss: nn.Cell = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def data(self, usage: str, rows: int = 100, group: Group | None = None) -> Any:
        """Return a split in batches; the training split is divided among the processes."""
        options = {"image_size": MODELS[self._args.model].image_size, "dataset": self._args.dataset}
        return _loaded(create_dataset, self._args, usage, rows, group, **options)

    @property
    def title(self) -> str:
        """str, which network is trained on which data."""
        return _title(self._args)

    def network(self) -> nn.Cell:
        """Return a new network."""
        return _mixed(MODELS[self._args.model].make(), self._args.amp)

    def evaluate(self, network: nn.Cell, test: Any) -> dict[str, float]:
        """Return the part of right answers, under the tutorial's name."""
        correct, rows = evaluate(network, test)
        return {"Accuracy": correct / rows}

    @property
    def record(self) -> dict[str, Any]:
        """dict, what `eval.py` needs to make the network again."""
        return {name: getattr(self._args, name) for name in RECORD}


class Text:
    """To predict the next token of a text: tokens are characters.

    Args:
        args (Namespace): the flags; with `vocabulary`, the characters of a trained network.
    """

    weight = staticmethod(count_targets)
    """The weight of a micro-batch: the tokens that count, over which the loss is a mean."""
    metrics = None

    def __init__(self, args: argparse.Namespace):
        self._args, self._sizes = args, {name: getattr(args, name) for name in SIZES}
        self._vocabulary: str | None = getattr(args, "vocabulary", None)
        self.loss: nn.Cell = NextTokenLoss()

    def data(self, usage: str, rows: int | None = None, group: Group | None = None) -> Any:
        """Return a split in batches of rows of `context` tokens; the training split is divided among the processes.

        With `tokens` each line is a sample, and micro-batches have that number of positions at most.
        """
        context, tokens = self._sizes["context"], getattr(self._args, "tokens", None)
        most = min(_MOST_TOKENS, _MOST_SCORES // len(self._vocabulary or " "))
        rows = rows or max(1, most // context)
        options = {"context": context, "vocabulary": self._vocabulary}
        if tokens is not None:
            options["tokens"] = tokens if usage == "train" else max(context, most)
        create = create_text_dataset if tokens is None else _in_token_batches
        data = _loaded(create, self._args, usage, rows, group, **options)
        self._vocabulary = source_of(data).data.vocabulary.characters
        return data

    @property
    def title(self) -> str:
        """str, which network is trained on which data."""
        return _title(self._args)

    def network(self) -> nn.Cell:
        """Return a new network for the characters of the text that was read, or of the model that is evaluated."""
        sizes = {"vocab_size": len(self._vocabulary or ""), **self._sizes}
        _check_sizes(sizes, self._args)
        _check_characters(self._vocabulary, self._args)
        return _mixed(MODELS[self._args.model].make(tie_weights=True, **sizes), self._args.amp)

    def evaluate(self, network: nn.Cell, test: Any) -> dict[str, float]:
        """Return the mean loss of a token, and the same in bits."""
        losses_of = LossOfTokens(network)
        loss, tokens = 0.0, 0
        with training_mode(network, False):
            for batch, targets in next(Data(test).epochs(1)):
                loss += float(losses_of(batch, targets).asnumpy().sum(dtype=np.float64))
                tokens += count_targets(batch, targets)
        return {"Loss": loss / tokens, "Bits per character": loss / tokens / math.log(2)}

    @property
    def record(self) -> dict[str, Any]:
        """dict, what `eval.py` needs to make the network again."""
        record = {**{name: getattr(self._args, name) for name in RECORD}, **self._sizes}
        return {**record, "tokens": self._args.tokens, "vocabulary": self._vocabulary}


def _in_token_batches(
    data_path: str | None, rows: int | None, *, tokens: int, context: int, seed: int | None = None, **options: Any
) -> TokenBatches:
    """Return the lines of a text in micro-batches of at most this number of positions, of few shapes."""
    del rows
    lines = Lines(data_path, context=context, **options)
    packing: Any = {"pad": (0, IGNORED), "lengths": lines.lengths.tolist(), "longest": context, "seed": seed}
    return TokenBatches(lines, tokens, **packing)


def _check_sizes(sizes: Mapping[str, int], args: argparse.Namespace) -> None:
    """Compare the sizes of a network with the file that will be loaded into it: a stranger chose both.

    This is done before the network is made, which may take any memory and time.

    Raises:
        CheckpointError: If they differ.
    """
    path, shapes = _shapes_to_load(args)
    for name, size in sizes_of(shapes).items() if path else ():
        if sizes[name] != size:
            fault = f"its '{name}' is {size}, and {sizes[name]} in the file beside it or the flags"
            raise CheckpointError(f"'{path}' is of another architecture: {fault}.")


def _check_characters(vocabulary: str | None, args: argparse.Namespace) -> None:
    """Raise an error if the model of --init_from, by the record beside it, has numbered other characters."""
    path = None if getattr(args, "resume", True) else args.init_from
    known = None if path is None else record_of(path).vocabulary
    if known is not None and known != vocabulary:
        fault = f"its text had {len(known)} characters, this one has {len(vocabulary or '')}, not all the same"
        raise FlagError(f"argument --init_from: '{one_line(path)}' is for other tokens: {fault}")


def _shapes_to_load(args: argparse.Namespace) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return the model that is evaluated, or the newest state to resume from, and the shapes of its parameters."""
    if getattr(args, "vocabulary", None) is not None:
        return args.ckpt_path, {name: shape for name, (_, shape) in kinds_in(args.ckpt_path).items()}
    if getattr(args, "resume", False):
        for path in states_in(os.path.join(args.output_dir, STATES)):
            with contextlib.suppress(CheckpointError):  # a damaged one, which is passed over
                kinds = kinds_of_arrays(str(path)).items()
                return str(path), {
                    name.partition(".")[2]: shape for name, (_, shape) in kinds if name.startswith("network.")
                }
    return "", {}


def begin_with(network: nn.Cell, path: str) -> None:
    """Load the weights of a model into a network that may have other layers, and print what came from it."""
    begun = load_common(network, path)
    show("init_from", f"{path}, {len(begun.loaded)} of {len([*network.get_parameters()])} parameters")
    if begun.new:
        show("  new", f"{shortened(begun.new)}: not in the file")
    if begun.other_classes:
        show("  new", f"{shortened(begun.other_classes)}: of another number of classes in the file")
    if begun.left_over:
        show("  left over", f"{shortened(begun.left_over)}: in the file only")


def task_of(args: argparse.Namespace) -> Images | Text:
    """Return what the flags train."""
    return Text(args) if RECIPES[args.dataset].text else Images(args)


# Data


def _title(args: argparse.Namespace) -> str:
    return f"{args.model} on {args.data_path or f'embedded {args.dataset}'}"


def download(args: argparse.Namespace) -> None:
    """Download the data set in one process; the others wait for it when they join their group."""
    if args.download and comes_first():
        with handled_by(interrupt):
            DOWNLOADS[args.dataset](args.data_path)


def _loaded(create: Any, args: argparse.Namespace, usage: str, rows: int, group: Group | None, **options: Any) -> Any:
    """Return a data set; an argument that does not fit it, such as a batch larger than it, is that of a flag."""
    if usage != "test":
        options.update(seed=args.seed, num_shards=group.size if group else 1, shard_id=group.rank if group else 0)
    try:
        return create(args.data_path, rows, usage=usage, **options)
    except FileNotFoundError as error:
        if not os.path.isdir(args.data_path):
            raise
        page = "docs/how-to/programs.md#your-own-network-and-data"
        raise FileNotFoundError(f"{error} Other data need a copy of train.py: {page}") from error
    except DataError:
        raise
    except ValueError as error:
        raise FlagError(str(error)) from error


def facts_of(data: Any) -> dict[str, Any]:
    """Return what must be equal when a run is resumed, of the data sets of `model_zoo`; of others nothing is known."""
    source = source_of(data)
    return {"rows": source.rows, "data": source.fingerprint} if hasattr(source, "fingerprint") else {}


def source_of(data: Any) -> Any:
    """Return the source of a data set: what makes its batches, or the samples that were packed."""
    return data.samples if isinstance(data, TokenBatches) else getattr(data, "source", None)


# Mixed precision


def _mixed(network: nn.Cell, level: str) -> nn.Cell:
    """Return a network in MindSpore's mixed precision: O1 to O3 in float16, "bf16" in bfloat16, "off" unchanged.

    O1 writes source code into the current folder, and reads it again when it compiles. So the current folder is changed
    to a temporary one, which is removed at the end of the process.

    Raises:
        FlagError: If the device does not support it.
    """
    if level == "off":
        return network
    if level == "bf16" and ms.get_context("device_target") == "CPU":
        raise FlagError("argument --amp: bf16 is not supported on CPU by MindSpore's matrix product; O1 to O3 are")
    current, temporary = os.getcwd(), tempfile.mkdtemp(prefix="ms_accum-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    os.chdir(temporary)
    try:
        if level == "bf16":
            return amp.auto_mixed_precision(network, "O1", ms.bfloat16)
        return amp.auto_mixed_precision(network, level)
    finally:
        os.chdir(current)


# The report


def write_report(folder: str, network: nn.Cell, test: Any) -> str:
    """Write precision and recall by class as report.txt, the confusion matrix as a picture, and return the folder."""
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay, classification_report

    with training_mode(network, False):
        batches = test.create_tuple_iterator(num_epochs=1)
        pairs = [(label.asnumpy(), network(image).asnumpy().argmax(1)) for image, label in batches]
    labels, guesses = (np.concatenate(column) for column in zip(*pairs))
    os.makedirs(folder, exist_ok=True)
    text = classification_report(labels, guesses, digits=4, zero_division=0)
    write_bytes(os.path.join(folder, "report.txt"), text.encode())
    figure = Figure(figsize=(6, 6), layout="constrained")
    ConfusionMatrixDisplay.from_predictions(labels, guesses, ax=figure.subplots(), colorbar=False)
    write_whole(os.path.join(folder, "confusion_matrix.png"), 0, figure.savefig)
    return folder
