"""What the programs train: a network that classifies images, or one that predicts the next token of a text."""

from __future__ import annotations

import argparse
import atexit
import json
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
from model_zoo.next_token import LossOfTokens, count_targets
from model_zoo.recipes import SIZES
from ms_accum import _check
from ms_accum.network.training_mode import training_mode
from ms_accum.ranks.group import Group, comes_first
from ms_accum.saving.files import write_bytes
from ms_accum.saving.model_file import CheckpointError
from ms_accum.training.evaluation import evaluate

from .command import FlagError, interruptible
from .flags import PRECISIONS

_RECORDED = ("model", "dataset", "amp")  # beside a model
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
        args = self._args
        size = MODELS[args.model].image_size
        return _loaded(
            create_dataset, args, rows, usage=usage, image_size=size, dataset=args.dataset, **_shard(args, usage, group)
        )

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
        return {name: getattr(self._args, name) for name in _RECORDED}


class Text:
    """To predict the next token of a text: tokens are characters.

    Args:
        args (Namespace): the flags; with `vocabulary`, the characters of a trained network.
    """

    weight = staticmethod(count_targets)
    """The weight of a micro-batch: the tokens that count, over which the loss is a mean."""
    metrics = None

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._vocabulary: str | None = getattr(args, "vocabulary", None)
        self.loss: nn.Cell = NextTokenLoss()

    def data(self, usage: str, rows: int | None = None, group: Group | None = None) -> Any:
        """Return a split in batches of rows of --context tokens; the training split is divided among the processes."""
        args = self._args
        rows = rows or max(1, min(_MOST_TOKENS, _MOST_SCORES // len(self._vocabulary or " ")) // args.context)
        options = {"context": args.context, "vocabulary": self._vocabulary, **_shard(args, usage, group)}
        data = _loaded(create_text_dataset, args, rows, usage=usage, **options)
        self._vocabulary = data.source.data.vocabulary.characters
        return data

    def network(self) -> nn.Cell:
        """Return a new network for the characters of the text that was read."""
        sizes = {name: getattr(self._args, name) for name in SIZES}
        network = MODELS[self._args.model].make(vocab_size=len(self._vocabulary or ""), tie_weights=True, **sizes)
        return _mixed(network, self._args.amp)

    def evaluate(self, network: nn.Cell, test: Any) -> dict[str, float]:
        """Return the mean loss of a token, and the same in bits."""
        losses_of = LossOfTokens(network)
        loss, tokens = 0.0, 0
        with training_mode(network, False):
            for batch, targets in test.create_tuple_iterator(num_epochs=1):
                loss += float(losses_of(batch, targets).asnumpy().sum(dtype=np.float64))
                tokens += count_targets(batch, targets)
        return {"Loss": loss / tokens, "Bits per character": loss / tokens / math.log(2)}

    @property
    def record(self) -> dict[str, Any]:
        """dict, what `eval.py` needs to make the network again."""
        return {**{name: getattr(self._args, name) for name in (*_RECORDED, *SIZES)}, "vocabulary": self._vocabulary}


def _mixed(network: nn.Cell, level: str | None) -> nn.Cell:
    """Return a network in MindSpore's mixed precision: O1 to O3 in float16, "bf16" in bfloat16, "off" unchanged.

    Raises:
        ValueError: If the device does not support it.
    """
    if level in ("off", None):
        return network
    if level != "bf16":
        return _rewritten(network, level, ms.float16)
    if ms.get_context("device_target") == "CPU":
        remedy, got = "Use O1 to O3, which compute in float16.", "bf16, which its matrix product does not support"
        _check.raise_invalid(ValueError, "train.py", "amp", "off or O1 to O3 on CPU", got, remedy)
    return _rewritten(network, "O1", ms.bfloat16)


def _rewritten(network: nn.Cell, level: str, dtype: Any) -> nn.Cell:
    """Return the result of `auto_mixed_precision`.

    O1 writes source code into the current folder, and reads it again when it compiles. So the current folder is changed
    to a temporary one, which is removed at the end of the process.
    """
    current, temporary = os.getcwd(), tempfile.mkdtemp(prefix="ms_accum-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    os.chdir(temporary)
    try:
        return amp.auto_mixed_precision(network, level, dtype)
    finally:
        os.chdir(current)


def task_of(args: argparse.Namespace) -> Images | Text:
    """Return what the flags train."""
    return Text(args) if RECIPES[args.dataset].text else Images(args)


def facts_of(data: Any) -> dict[str, Any]:
    """Return what must be equal when a run is resumed, for the data sets of `model_zoo`."""
    source = getattr(data, "source", None)
    return {} if source is None else {"rows": source.rows, "data": source.fingerprint}


def download(args: argparse.Namespace) -> None:
    """Download the data set in one process; the others wait for it when they join their group."""
    if args.download and comes_first():
        with interruptible():
            DOWNLOADS[args.dataset](args.data_path, **({} if args.download is True else {"url": args.download}))


def _shard(args: argparse.Namespace, usage: str, group: Group | None) -> dict[str, int]:
    if usage == "test":
        return {}
    rank, size = group or (0, 1)
    return {"seed": args.seed, "num_shards": size, "shard_id": rank}


def _loaded(create: Any, args: argparse.Namespace, rows: int, **options: Any) -> Any:
    """Return a data set; an argument that does not fit it, such as a batch larger than it, is that of a flag."""
    try:
        return create(args.data_path, rows, **options)
    except DataError:
        raise
    except ValueError as error:
        raise FlagError(str(error)) from error


# The record of a model


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Write what `eval.py` needs beside a model."""
    write_bytes(f"{path}.json", json.dumps(record, indent=1).encode() + b"\n")


def read_record(path: str) -> dict[str, Any] | None:
    """Return the record beside a model, None if there is none.

    Raises:
        CheckpointError: If it is not a record; a crafted one could name a network of any size.
    """
    name = f"{path}.json"
    if not os.path.isfile(name):
        return None
    try:
        with open(name, encoding="utf-8") as file:
            record = json.load(file)
        is_text = RECIPES[record["dataset"]].text is not None
        known = MODELS[record["model"]].takes_text == is_text and record["amp"] in PRECISIONS
        sizes = [record[name] for name in SIZES] if is_text else []
        valid = known and all(type(size) is int and 0 < size < 2**16 for size in sizes)
        valid = valid and isinstance(record.get("vocabulary", ""), str)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        valid = False
    if not valid:
        raise CheckpointError(f"'{_check.one_line(name)}' is not the record of a model; remove it, and give --model.")
    return record
