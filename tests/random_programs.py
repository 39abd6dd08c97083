"""Random programs of training: the settings, and the calls of a user. A seed draws the same program anywhere."""

from __future__ import annotations

import numpy as np

from simulator import OPTIMIZERS, WIDTH, Settings

WAYS = ("driver", "step", "model", "accumulator", "loop", "cells")
PLENTY = 400  # learning rates, one for each update


class Draws:
    """What a seed draws."""

    def __init__(self, seed):
        self.generator = np.random.RandomState(seed)

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
        way (str): the way in which it trains.
        seed (int): what draws it.
        compiled (bool): whether it is compiled: then all micro-batches have one shape. Default: ``False``.
        ranks (int): the ranks that train together. Default: 1.
    """

    def __init__(self, way, seed, compiled=False, ranks=1):
        self.draws, self.compiled = Draws(seed), compiled
        self.settings = self.drawn_settings(way, ranks)
        if way == "cells":
            self.settings = self.settings._replace(policy="skip_window", scale=None, stages=())
        self.even = compiled or self.draws.integer(0, 3) == 0
        self.sync, self.zero = (bool(self.draws.integer(0, 2)) and ranks > 1 for _ in range(2))
        runs_again = self.settings.weight == "terms" and self.settings.policy == "skip_micro"  # on one rank alone
        self.sync = self.sync and not runs_again and way != "cells"
        if self.zero:
            self.settings = self.settings._replace(stages=())  # a rank has only its parts of the gradients
        self.calls = [self.training()]
        for _ in range(self.draws.one_of(0, 1, 1, 2)):
            between, training = self.between(), self.training()
            if way in ("driver", "step") and self.settings.tail == "carry" and training[-1]:
                between.append(("clear",))  # states are those of windows' ends, and this run can't read what waits
            self.calls += [*between, training]
        self.calls += self.between()

    def drawn_settings(self, way, ranks):
        one_of = self.draws.one_of
        reduction = one_of("mean", "mean", "sum")
        half = one_of(False, False, False, True)
        weights = ["rows", "column", 4e4 if half else 2.5] if reduction == "mean" else ["rows"]
        if reduction == "mean" and way != "cells" and (ranks == 1 or way in ("driver", "step", "model")):
            weights.append("terms")
        weight = one_of(*weights)
        by_user = weight == "terms" and way in ("accumulator", "loop")
        policies = ["skip_window"] if by_user else ["skip_window", "skip_micro"]
        policies += ["raise"] if way in ("driver", "model") else []
        self.sizes = [2, 1, 3, 5, {0: 1, 2: 3, 5: 2}, cycling]
        self.sizes += [("split", 2), ("split", 3)] if way == "driver" and ranks == 1 else []
        return Settings(
            way=way,
            size=one_of(*self.sizes),
            tail="flush" if way == "model" else one_of("flush", "carry", "drop"),
            reduction=reduction,
            weight=weight,
            clip=one_of(None, 0.5, 2.0),
            policy=one_of(*policies),
            scale=one_of(None, 64.0, "dynamic"),
            ema=one_of(None, (0.75, 0), (0.9, 3)),
            optimizer=one_of(*(["SGD", "Momentum"] if half else OPTIMIZERS)),
            rates=one_of(0.05, tuple(0.1 * 0.95 ** (at % 20) for at in range(PLENTY))),
            ranks=ranks,
            # What float16 rounds must not decide whether a window is skipped.
            stages=one_of((), ("bound",)) if half else one_of((), ("bound",), (), ("spikes",), ("spikes", "bound")),
            groups=one_of(False, True),
            half=half,
        )

    def __repr__(self):
        shown = {**self.settings._asdict(), "rates": "one" if np.isscalar(self.settings.rates) else "decaying"}
        calls = "\n".join(f"  {name} {', '.join(map(_shown, arguments))}" for name, *arguments in self.calls)
        return f"Program({shown}\n{calls})"

    def between(self):
        calls = [[], [("flush",)], [("clear",)], [("shift",)], [("shift",), ("flush",)]]
        resizable = isinstance(self.settings.size, int) and self.settings.size > 1
        if resizable and self.settings.way in ("accumulator", "loop"):
            calls += [[("clear",), ("resize", self.draws.one_of(2, 3, 4))]]
        return self.draws.one_of(*calls)

    def training(self):
        """Return a call that trains, with at least as many micro-batches as the largest window has."""
        settings, draws = self.settings, self.draws
        batches = [tuple(self.micro_batch() for _ in range(settings.ranks)) for _ in range(draws.integer(5, 8))]
        for _ in range(draws.one_of(0, 1, 0, 1, 2)):
            self.spoil(batches[draws.integer(0, len(batches))][draws.integer(0, settings.ranks)])
        stops = draws.one_of(0, 0, 1, 2) if self.resumes else 0
        # A window that is open, because its tail is carried, has the size with which it began.
        another = settings.way == "driver" and settings.tail != "carry" and not settings.splits
        size = draws.one_of(None, *self.sizes[:6]) if another else None
        return ("train", batches, draws.integer(1, 3), size, [draws.integer(1, 9) for _ in range(stops)])

    @property
    def stops(self):
        """list[int], after which micro-batches runs are stopped."""
        return [stop for name, *arguments in self.calls if name == "train" for stop in arguments[3]]

    @property
    def resumes(self):
        """bool, whether runs can be stopped and resumed."""
        settings = self.settings
        if settings.weight == "terms" and settings.way in ("accumulator", "loop"):
            return False
        return settings.way != "cells" and settings.policy != "raise" and settings.ranks == 1

    def micro_batch(self):
        """Return three columns."""
        draws, settings = self.draws, self.settings
        rows = 4 if self.even else draws.integer(3, 9) if settings.splits else draws.one_of(1, 2, 3, 8, 16)
        x = np.random.RandomState(draws.integer(0, 1000)).randint(-8, 9, (rows, WIDTH)) / 4.0
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
