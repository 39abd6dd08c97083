"""What the programs train: networks that classify images, and networks that predict the next token of a text.

A task has its data, its network, its loss, its evaluation, and the facts about them in a record. A result has its
numbers for the logs, its score for the best model, and its text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Callable, NamedTuple, Protocol

import numpy as np
from mindspore import nn

from model_zoo import MODELS, NextTokenLoss, create_dataset, create_text_dataset
from model_zoo.data.text import BYTES, Vocabulary
from model_zoo.next_token import LossOfTokens, count_targets
from model_zoo.recipes import TextSizes

from ..network.compiled import compiled
from ..network.restoring import training_mode
from ..network.state import attached
from ..ranks.group import Group, total
from ..saving.checkpointer import Stopped
from ..training.evaluation import UntilStopped, evaluate_together
from .sampling import continued
from .settings import Settings

# The results of evaluations


class Result(Protocol):
    """The result of an evaluation."""

    @property
    def score(self) -> float:
        """float, higher is better."""

    @property
    def numbers(self) -> dict[str, int | float]:
        """dict, its numbers by name, for logs."""

    @property
    def record(self) -> Mapping[str, int | float | None]:
        """Mapping, its fields in the record of a model."""

    @property
    def name(self) -> str:
        """str, the name of what was measured."""

    @property
    def text(self) -> str:
        """str, what was measured, for people."""

    @property
    def more(self) -> str:
        """str, what else was measured, for people; may be empty."""

    @property
    def printed(self) -> dict[str, int | float]:
        """dict, what the last line prints for programs."""


class Accuracy(NamedTuple):
    """The right answers of a network that classifies."""

    correct: int
    total: int

    @property
    def name(self) -> str:
        """str, what was measured."""
        return "accuracy"

    @property
    def score(self) -> float:
        """float, the fraction of right answers."""
        return self.correct / self.total

    @property
    def numbers(self) -> dict[str, int | float]:
        """dict, for logs."""
        return {"accuracy": self.score, **self.record}

    @property
    def record(self) -> dict[str, int | float]:
        """dict, its fields in the record of a model."""
        return {"correct": self.correct, "total": self.total}

    @property
    def text(self) -> str:
        """str, in percent, with the counts."""
        return f"{self.score:.2%} ({self.correct:,}/{self.total:,})".replace("%", " %")

    @property
    def more(self) -> str:
        """str, nothing."""
        return ""

    @property
    def printed(self) -> dict[str, int | float]:
        """dict, the tutorial's."""
        return {"Accuracy": self.score}


class TextLoss(NamedTuple):
    """The loss of a network that predicts the next token."""

    loss: float
    """float, the mean of -ln p over the tokens."""
    tokens: int
    """int, the number of tokens that were predicted."""
    characters: int
    """int, the number of characters in them: fewer if tokens are bytes."""

    @property
    def name(self) -> str:
        """str, what was measured."""
        return "loss"

    @property
    def score(self) -> float:
        """float, higher for a smaller loss."""
        return -self.loss

    @property
    def bits(self) -> float:
        """float, the bits per character; per byte if no character begins in the tokens."""
        return self.loss / math.log(2) * self.tokens / (self.characters or self.tokens)

    @property
    def perplexity(self) -> float:
        """float, of a token; infinite where it is too large for a float."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def numbers(self) -> dict[str, int | float]:
        """dict, for logs."""
        values = {"eval_loss": self.loss, "bits_per_character": self.bits, "perplexity": self.perplexity}
        return {**values, "tokens": self.tokens}

    @property
    def record(self) -> dict[str, int | float | None]:
        """dict, its fields in the record of a model."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"loss": loss, "predicted": self.tokens, "characters": self.characters}

    @property
    def text(self) -> str:
        """str, with the bits per character."""
        return f"{self.loss:.4f}, {self.bits:.3f} bits per character"

    @property
    def more(self) -> str:
        """str, the perplexity of a token, and the number of tokens."""
        return f"perplexity {self.perplexity:,.2f}, {self.tokens:,} tokens"

    @property
    def printed(self) -> dict[str, int | float]:
        """dict, in the form of the tutorial's."""
        return {"Loss": self.loss, "Bits per character": self.bits, "Tokens": self.tokens}


def result_in(record: Mapping[str, Any]) -> Result | None:
    """Return the result in the record of a model; None if it was not evaluated."""
    if "vocabulary" in record:
        loss = math.nan if record["loss"] is None else record["loss"]
        return TextLoss(loss, record["predicted"], record["characters"]) if record["predicted"] else None
    return Accuracy(record["correct"], record["total"]) if record["total"] else None


# The tasks

Stop = Callable[[], bool]
See = Callable[..., None]
# Of a batch for evaluations, which should not need more memory than a micro-batch.
_MOST_TOKENS, _MOST_SCORES = 2**11, 2**23
# Sums over ranks are of ints below 2**60: a loss is rounded to this part of 1, and sent as two.
_PARTS, _HIGH = 2**20, 2**40
_MOST_LOSS = 1e20  # a sum that is larger counts as not finite


def never() -> bool:
    """Return False."""
    return False


class Task(Protocol):
    """What a program trains."""

    weight: Callable | None
    """Optional[Callable], the weight of a micro-batch from its columns; None for what the loss averages over."""
    no_result: Mapping[str, None]
    """Mapping, the fields of a result in the record of a model that was not evaluated."""
    must_agree: tuple[str, ...]
    """tuple[str, ...], the facts about the data that must be equal when a trained model is evaluated."""
    path: str | None
    """Optional[str], the path of the data; None for embedded ones."""

    def data(self, usage: str, rows: int, **options: Any) -> Any:
        """Return a split in batches of `rows` rows."""

    def description(self, data: Any) -> str:
        """Return the text about the training split that is printed before a run; it may be empty."""

    def test_description(self, data: Any) -> str:
        """Return the test split in words."""

    def test_rows(self, train: Any) -> int:
        """Return the rows of a batch for evaluations; the training split is not needed for a trained model."""

    def network(self, data: Any) -> nn.Cell:
        """Return a new network for the data."""

    def loss(self) -> nn.Cell:
        """Return the loss."""

    def evaluate(
        self, network: nn.Cell, data: Any, group: Group | None, stop: Stop = never, see: See | None = None
    ) -> Result:
        """Evaluate on all ranks.

        Args:
            network (Cell): the network.
            data (Iterable): the batches of the test split.
            group (Optional[Group]): the processes that evaluate together, each on its shard.
            stop (Callable): called before each batch; if it returns true on any of the ranks, all raise `Stopped`.
            see (Optional[Callable]): gets arrays of each batch: the inputs of the network, then its scores and the
                labels, or the targets of a text and the loss of each. Default: ``None``.
        """


class Images:
    """To classify images.

    Args:
        dataset (str): one of `RECIPES`.
        model (str): one of `MODELS`.
        data_path (Optional[str]): the folder of the data set; ``None`` for an embedded one.
    """

    weight: Callable | None = None
    no_result: Mapping[str, None] = {"correct": None, "total": None}
    must_agree: tuple[str, ...] = ("image_size", "channels", "classes", "mean", "std")

    def __init__(self, dataset: str, model: str, data_path: str | None):
        self.dataset = dataset
        """str, the name of the data set."""
        self.path = data_path
        self._model = model

    def data(self, usage: str, rows: int, **options: Any) -> Any:
        """Return a split in batches of `rows` rows."""
        size = MODELS[self._model].image_size
        return create_dataset(self.path, rows, usage=usage, image_size=size, dataset=self.dataset, **options)

    def description(self, data: Any) -> str:
        """Return nothing: the data sets are well known."""
        return ""

    def test_description(self, data: Any) -> str:
        """Return the number and the size of the images."""
        facts = data.source.facts
        return f"{facts['rows']:,} test images of {facts['image_size']}x{facts['image_size']}"

    def test_rows(self, train: Any) -> int:
        """Return the rows of a batch for evaluations."""
        return 100

    def network(self, data: Any) -> nn.Cell:
        """Return a new network."""
        return MODELS[self._model].make()

    def loss(self) -> nn.Cell:
        """Return the loss. On CPU nn.CrossEntropyLoss takes as long as the rest of a small network."""
        return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def evaluate(
        self, network: nn.Cell, data: Any, group: Group | None, stop: Stop = never, see: See | None = None
    ) -> Accuracy:
        """Count the right answers."""
        return Accuracy(*evaluate_together(network, data, group, stop, see))


class Text:
    """To predict the next token of a text.

    Args:
        model (str): one of `MODELS`.
        data_path (Optional[str]): a file, or a folder of text files; ``None`` for the embedded sentences.
        sizes (TextSizes): of the network, and what its tokens are.
        untied_head (bool): whether the output layer has weights of its own.
        characters (Optional[str]): the characters of a trained network. Default: ``None``, those of the text.
    """

    no_result: Mapping[str, None] = {"loss": None, "predicted": None, "characters": None}
    must_agree: tuple[str, ...] = ()  # an unknown character is an error when the text is read

    def __init__(
        self, model: str, data_path: str | None, sizes: TextSizes, *, untied_head: bool, characters: str | None = None
    ):
        self.path = data_path
        self.weight: Callable | None = count_targets
        self.context = sizes.context
        """int, the tokens in a block."""
        self._model, self._sizes, self._characters, self._untied_head = model, sizes, characters, untied_head

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary, the tokens; without characters if these are to be those of the text."""
        return Vocabulary(self._sizes.vocabulary, self._characters or "")

    def sample(self, network: nn.Cell, prompt: str, count: int, *, temperature: float, seed: int) -> Iterator[str]:
        """Yield the text that a network adds to a prompt, character by character.

        Raises:
            ValueError: If the prompt has a character that the network does not have, or scores are not finite.
        """
        tokens, decode = self.vocabulary.encode(prompt).tolist(), self.vocabulary.decoder()
        context = self._sizes.context
        return map(decode, continued(network, tokens, count, context=context, temperature=temperature, seed=seed))

    def data(self, usage: str, rows: int, **options: Any) -> Any:
        """Return a split in batches of `rows` blocks of `context` tokens."""
        return create_text_dataset(
            self.path,
            rows,
            usage=usage,
            context=self._sizes.context,
            level=self._sizes.vocabulary,
            vocabulary=self._characters,
            **options,
        )

    def description(self, data: Any) -> str:
        """Return the numbers of its tokens and blocks."""
        facts, kinds = data.source.facts, data.source.data.vocabulary.size
        blocks = f"{facts['rows']:,} blocks of {self._sizes.context}"
        return f"{facts['tokens']:,} tokens of {kinds:,} {self._sizes.vocabulary} in {blocks}"

    def test_description(self, data: Any) -> str:
        """Return the number of its tokens."""
        return f"{data.source.facts['tokens']:,} tokens for validation"

    def test_rows(self, train: Any) -> int:
        """Return the rows of a batch for evaluations: fewer if a row has many tokens or scores."""
        tokens = self.vocabulary.size or train.source.data.vocabulary.size
        context = self._sizes.context
        return max(1, min(_MOST_TOKENS // context, _MOST_SCORES // (context * tokens)))

    def network(self, data: Any) -> nn.Cell:
        """Return a new network for the vocabulary of the data."""
        return self.network_for(data.source.data.vocabulary.size)

    def network_for(self, tokens: int) -> nn.Cell:
        """Return a new network for so many different tokens."""
        sizes = {name: getattr(self._sizes, name) for name in ("context", "layers", "width", "heads")}
        return MODELS[self._model].make(vocab_size=tokens, tie_weights=not self._untied_head, **sizes)

    def loss(self) -> nn.Cell:
        """Return the loss."""
        return NextTokenLoss()

    def evaluate(
        self, network: nn.Cell, data: Any, group: Group | None, stop: Stop = never, see: See | None = None
    ) -> TextLoss:
        """Return the mean loss over all tokens."""
        losses_of = compiled("evaluate", attached(network, "_losses_of_tokens", lambda: LossOfTokens(network)), True)
        loss, tokens, characters = 0.0, 0, 0
        batches = UntilStopped(data, stop)
        with training_mode(network, False):
            for batch, targets in batches:
                losses, answers = losses_of(batch, targets).asnumpy(), targets.asnumpy()
                if see is not None:
                    see(batch.asnumpy(), answers, losses)
                predicted = answers[answers >= 0]
                loss += float(losses.sum(dtype=np.float64))
                tokens += predicted.size
                characters += self._characters_in(predicted)
        finite = abs(loss) < _MOST_LOSS  # False for NaN
        high, low = divmod(round(loss * _PARTS) if finite else 0, _HIGH)
        counts = [high, low, tokens, characters, not finite, batches.is_cut]
        high, low, tokens, characters, not_finite, stopped = total(counts, group)  # also if cut off: other ranks wait
        if stopped:
            raise Stopped("the evaluation is not finished")
        return TextLoss(math.nan if not_finite else (high * _HIGH + low) / _PARTS / tokens, tokens, characters)

    def _characters_in(self, tokens: np.ndarray) -> int:
        """Return the number of characters in tokens: in UTF-8, all but the first byte of one begin with the bits 10."""
        return int((tokens & 0xC0 != 0x80).sum()) if self._sizes.vocabulary == BYTES else tokens.size


def task_of(settings: Settings, characters: str | None = None) -> Task:
    """Return what a run trains; a run of text that is resumed has the characters of the former one."""
    if settings.vocabulary is None:
        return Images(settings.dataset, settings.model, settings.data_path)
    sizes = TextSizes(**{name: getattr(settings, name) for name in TextSizes._fields})
    return Text(settings.model, settings.data_path, sizes, untied_head=settings.untied_head, characters=characters)
