"""The embedded text: sentences that a small grammar makes.

Verbs agree with their subjects, also over a relative clause, so that a model must look further back than the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Callable

import numpy as np

SENTENCES = 3000
_SUBJECTS = ("teacher", "student", "driver", "painter", "farmer", "sailor", "singer", "dentist")
_OBJECTS = ("boat", "book", "horse", "letter", "table", "garden", "piano", "window")
_ADJECTIVES = ("young", "tall", "quiet", "clever", "hungry", "friendly", "tired", "careful")
_VERBS = ("see", "hear", "like", "need", "find", "draw", "paint", "want")
_PLACES = ("at home", "in the park", "near the lake", "on the hill", "at night", "in spring", "at school", "on Monday")

Choose = Callable[[Sequence[str]], str]


@lru_cache(1)
def sentences() -> str:
    """Return the text, a sentence in each line. It never changes, as NumPy's `RandomState` does not."""
    numbers = iter(np.random.RandomState(0).random_sample(20 * SENTENCES).tolist())

    def choose(options: Sequence[str]) -> str:
        return options[int(next(numbers) * len(options))]

    return "".join(_sentence(choose) for _ in range(SENTENCES))


def _sentence(choose: Choose) -> str:
    """Return a sentence: a subject, perhaps with a relative clause, a verb, an object, and perhaps a place."""
    many, subject = _noun(choose, _SUBJECTS)
    clause = f" who {_verb(choose, many)} {_noun(choose, _OBJECTS)[1]}" if choose("yn") == "y" else ""
    sentence = f"{subject}{clause} {_verb(choose, many)} {_noun(choose, _OBJECTS)[1]}"
    place = f" {choose(_PLACES)}" if choose("yn") == "y" else ""
    return f"{sentence.capitalize()}{place}.\n"


def _noun(choose: Choose, nouns: Sequence[str]) -> tuple[bool, str]:
    """Return whether it is plural, and a noun with its article and perhaps an adjective."""
    many = choose("yn") == "y"
    adjective = f"{choose(_ADJECTIVES)} " if nouns is _SUBJECTS and choose("yn") == "y" else ""
    return many, f"{'two' if many else 'the'} {adjective}{choose(nouns)}{'s' * many}"


def _verb(choose: Choose, many: bool) -> str:
    return choose(_VERBS) + "s" * (not many)
