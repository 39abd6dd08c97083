"""Random programs of training: the settings, and the calls of a user.

What draws is given: `Hypothesis`, which shrinks what fails to the smallest program that does, or `Seed`, which draws
the same on every rank.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies

from simulator import OPTIMIZERS, Fails, Settings, Simulator

WAYS = ("driver", "step", "model", "accumulator", "loop", "cells")
PLENTY = 400  # learning rates, one for each update


class Hypothesis:
    """Draws by a strategy's function `draw`."""

    def __init__(self, draw):
        self.draw = draw

    def one_of(self, *choices):
        return self.draw(strategies.sampled_from(choices))

    def integer(self, first, stop):
        return self.draw(strategies.integers(first, stop - 1))


class Seed:
    """Draws from a generator with this seed."""

    def __init__(self, number):
        self.generator = np.random.RandomState(number)

    def one_of(self, *choices):
        return choices[self.generator.randint(len(choices))]

    def integer(self, first, stop):
        return int(self.generator.randint(first, stop))


def cycling(updates):
    """A window size, on the host and in a graph."""
    return updates % 3 + 1


class Program:
    """A random program: the settings, and the calls.

    Args:
        draws (Union[Hypothesis, Seed]): draws.
        way (str): the way in which it trains.
        compiled (bool): whether it is compiled: then all micro-batches have one shape. Default: ``False``.
        ranks (int): the ranks that train together. Default: 1.
    """

    def __init__(self, draws, way, compiled=False, ranks=1):
        self.draws, self.compiled = draws, compiled
        self.settings = self.drawn_settings(way, ranks)
        self.even = compiled or bool(draws.integer(0, 3) == 0)
        self.calls = [self.training()]
        for _ in range(draws.one_of(0, 1, 1, 2)):
            self.calls += [*self.between(), self.training()]
        self.calls += self.between()

    def drawn_settings(self, way, ranks):
        one_of = self.draws.one_of
        driver = way == "driver" and ranks == 1
        reduction = one_of("mean", "sum")
        sizes = [2, 1, 3, 5, {0: 1, 2: 3, 5: 2}, cycling, *([("split", 2), ("split", 3)] if driver else [])]
        weights = ["rows", "column", 2.5, *(["terms"] if driver else [])] if reduction == "mean" else ["rows"]
        weight = one_of(*weights)
        tails = ["flush"] if way == "model" else ["flush", "drop"] if weight == "terms" else ["flush", "carry", "drop"]
        raises = ["raise"] if way in ("driver", "model") else []
        return Settings(
            way=way,
            size=one_of(*sizes),
            tail=one_of(*tails),
            reduction=reduction,
            weight=weight,
            clip=one_of(None, 0.5, 2.0),
            policy=one_of("skip_window", "skip_micro", *raises),
            scale=one_of(None, 64.0, "dynamic"),
            ema=one_of(None, (0.75, 0), (0.9, 3)),
            optimizer=one_of(*OPTIMIZERS),
            rates=one_of(0.05, tuple(0.1 * 0.95 ** (at % 20) for at in range(PLENTY))),
            ranks=ranks,
            stages=one_of((), ("bound",), (), ("spikes",), ("spikes", "bound")),
        )

    def __repr__(self):
        shown = {**self.settings._asdict(), "rates": "one" if np.isscalar(self.settings.rates) else "decaying"}
        calls = "\n".join(f"  {name} {', '.join(map(_shown, arguments))}" for name, *arguments in self.calls)
        return f"Program({shown}\n{calls})"

    @property
    def stops(self):
        """list[int], after which micro-batches runs are stopped."""
        return [stop for name, *arguments in self.calls if name == "train" for stop in arguments[2]]

    def shifts_inside(self):
        """Return whether weights change while a window is open, which ends afterwards with an update."""
        simulator, shifted = Simulator(self.settings), False
        for name, *arguments in self.calls:
            shifted = shifted or (name == "shift" and bool(simulator.open))
            updates = simulator.updates
            try:
                getattr(simulator, name)(*arguments[:2])
            except Fails:
                return False
            if shifted and simulator.updates > updates:
                return True
        return False

    def between(self):
        return self.draws.one_of([], [("flush",)], [("clear",)], [("shift",)], [("shift",), ("flush",)])

    def training(self):
        """Return a call that trains, with at least as many micro-batches as the largest window has."""
        settings, draws = self.settings, self.draws
        batches = [tuple(self.micro_batch() for _ in range(settings.ranks)) for _ in range(draws.integer(5, 8))]
        for _ in range(draws.one_of(0, 1, 0, 1, 2)):
            self.spoil(batches[draws.integer(0, len(batches))][draws.integer(0, settings.ranks)])
        resumes = settings.way != "cells" and settings.policy != "raise" and settings.ranks == 1
        stops = draws.one_of(0, 0, 1, 2) if resumes else 0
        return ("train", batches, draws.integer(1, 3), [draws.integer(1, 9) for _ in range(stops)])

    def micro_batch(self):
        """Return three columns."""
        draws, settings = self.draws, self.settings
        rows = 4 if self.even else draws.integer(3, 9) if settings.splits else draws.one_of(1, 2, 3, 8, 16)
        x = np.random.RandomState(draws.integer(0, 1000)).randint(-8, 9, (rows, 2)) / 4.0
        x += 0.003  # or a gradient can be 0 in all elements, which is warned of
        z, weight = np.ones((rows, 1)), draws.one_of(1.0, 0.0, 0.5, 3.0, 8.0)
        return tuple(column.astype(np.float32) for column in (x, z, np.full(rows, weight)))

    def spoil(self, micro_batch):
        """Let the loss of a micro-batch, or its gradient alone, not be finite."""
        settings, (x, z, counts) = self.settings, micro_batch
        # A product of 0 and NaN is NaN in the ways to which the user gives gradients or Cells.
        by_us = settings.weight != "column" or settings.way in ("driver", "step", "model")
        if counts[0] or by_us or settings.policy == "skip_micro":
            kind = self.draws.one_of("gradient", "nan", "inf")
            if kind == "gradient":
                z[0] = 0.0
            else:
                x[0, 1] = {"nan": np.nan, "inf": np.inf}[kind]


def _shown(argument):
    """Return an argument of a call as text: of batches the rows, and what the third column says, on each rank."""
    if not isinstance(argument, list) or not argument or not isinstance(argument[0], tuple):
        return str(argument)
    rows = [
        [f"{len(x)}x{c[0]:g}{'' if np.isfinite(x).all() and z.all() else '!'}" for x, z, c in one] for one in argument
    ]
    return " ".join("|".join(of_ranks) for of_ranks in rows)


@strategies.composite
def programs(draw, way, compiled=False):
    """A strategy for programs of one process."""
    return Program(Hypothesis(draw), way, compiled)
