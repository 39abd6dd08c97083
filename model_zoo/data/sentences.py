"""The embedded text: sentences that a small grammar makes.

Each sentence is a sequence of independent choices that can be read off from it, so the entropy of the text is known:
no model can predict it with fewer bits per character. Verbs agree with their subjects, also over a relative clause, so
that a model must look further back than the last word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

SENTENCES = 3000
_SUBJECTS = ("teacher", "student", "driver", "painter", "farmer", "sailor", "singer", "dentist")
_OBJECTS = ("boat", "book", "horse", "letter", "table", "garden", "piano", "window")
_ADJECTIVES = ("young", "tall", "quiet", "clever", "hungry", "friendly", "tired", "careful")
_VERBS = ("see", "hear", "like", "need", "find", "draw", "paint", "want")
_PLACES = ("at home", "in the park", "near the lake", "on the hill", "at night", "in spring", "at school", "on Monday")


def sentences() -> str:
    """Return the text, a sentence in each line. It never changes, as NumPy's `RandomState` does not."""
    return _made()[0]


def entropy() -> float:
    """Return the entropy of the text in bits per character: that of the choices that were made."""
    text, bits = _made()
    return bits / len(text)


@lru_cache(1)
def _made() -> tuple[str, float]:
    """Return the text, and the bits of its choices."""
    choices = _Choices(iter(np.random.RandomState(0).random_sample(20 * SENTENCES).tolist()))
    return "".join(_sentence(choices) for _ in range(SENTENCES)), choices.bits


class _Choices:
    """Chooses, each option with the same probability, and counts the bits.

    Args:
        numbers (Iterator[float]): Random numbers from 0 to 1.
    """

    def __init__(self, numbers: Iterator[float]) -> None:
        self._numbers = numbers
        self.bits = 0.0

    def choose(self, options: Sequence[str]) -> str:
        """Return one of the options."""
        self.bits += math.log2(len(options))
        return options[int(next(self._numbers) * len(options))]

    def happens(self) -> bool:
        """Return True in one of two cases."""
        return self.choose("yn") == "y"


def _sentence(choices: _Choices) -> str:
    """Return a sentence: a subject, perhaps with a relative clause, a verb, an object, and perhaps a place."""
    many, subject = _noun(choices, _SUBJECTS)
    clause = f" who {_verb(choices, many)} {_noun(choices, _OBJECTS)[1]}" if choices.happens() else ""
    sentence = f"{subject}{clause} {_verb(choices, many)} {_noun(choices, _OBJECTS)[1]}"
    place = f" {choices.choose(_PLACES)}" if choices.happens() else ""
    return f"{sentence.capitalize()}{place}.\n"


def _noun(choices: _Choices, nouns: Sequence[str]) -> tuple[bool, str]:
    """Return whether it is plural, and a noun with its article and perhaps an adjective."""
    many = choices.happens()
    adjective = f"{choices.choose(_ADJECTIVES)} " if nouns is _SUBJECTS and choices.happens() else ""
    return many, f"{'two' if many else 'the'} {adjective}{choices.choose(nouns)}{'s' * many}"


def _verb(choices: _Choices, many: bool) -> str:
    return choices.choose(_VERBS) + "s" * (not many)
