"""What a report shows of a model: the answers on images, or the predictions and samples of a text."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from model_zoo.data.classes import class_names
from model_zoo.data.sentences import entropy
from model_zoo.data.text import BYTES

from .report_images import Answers, ImageData, image_sections
from .report_page import Subject
from .report_text import Sample, TextAnswers, text_sections
from .tasks import Text
from .trained import Trained

_SAMPLES, _TOKENS, _TEMPERATURE = 3, 300, 0.8


class Reported(NamedTuple):
    """What is collected in an evaluation for the report."""

    see: Callable[..., None]
    """Gets the arrays of each batch."""
    sections: Callable[[Subject], dict[str, str]]
    """Returns the sections of the page, by heading, after the evaluation."""


def answers_of(trained: Trained, test: Any) -> Reported:
    """Return what collects the answers of a model on its test split."""
    if isinstance(trained.task, Text):
        return _of_text(trained, trained.task)
    facts = test.source.facts
    answers, images = Answers(facts["classes"]), ImageData(class_names(trained.dataset), facts["mean"], facts["std"])
    return Reported(answers.add, lambda subject: image_sections(subject, images, answers))


def _of_text(trained: Trained, task: Text) -> Reported:
    vocabulary = task.vocabulary
    answers = TextAnswers(vocabulary.decode, vocabulary.size, is_bytes=vocabulary.level == BYTES)
    known = entropy() if trained.dataset == "sentences" else None

    def sections(subject: Subject) -> dict[str, str]:
        return text_sections(subject, answers, _samples(trained, task), known)

    return Reported(answers.add, sections)


def _samples(trained: Trained, task: Text) -> list[Sample]:
    characters = task.vocabulary.characters
    prompt = characters[0] if characters and "\n" not in characters else "\n"
    samples = []
    for seed in range(1, _SAMPLES + 1):
        pieces = task.sample(trained.network, prompt, _TOKENS, temperature=_TEMPERATURE, seed=seed)
        samples.append(Sample(f"{_TOKENS} tokens, temperature {_TEMPERATURE}, seed {seed}", "".join(pieces)))
    return samples
