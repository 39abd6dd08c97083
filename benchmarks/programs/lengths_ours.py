"""Ours: the zoo's GPT on samples of different lengths, in micro-batches of one shape or of several."""

from __future__ import annotations

from typing import Any, Callable, Literal

import mindspore as ms
import numpy as np

from benchmarks.programs import networks_ms
from benchmarks.programs.ours import VERSIONS, LastLoss, driver
from benchmarks.programs.protocol import flags_of, serve, timed
from model_zoo import GPT, NextTokenLoss
from ms_accum import TokenBatches

try:
    from mindspore.graph import api as graph_api
except ImportError:  # before MindSpore 2.9
    from mindspore.common import api as graph_api

Distribution = Literal["uniform", "lognormal", "two peaks"]
LONGEST, VOCABULARY, IGNORED = 128, 64, -100
_MEDIAN, _SPREAD = 48, 0.5  # of the lognormal lengths
_PEAKS, _PART = ((24, 6), (110, 8)), 0.8  # a mean and a deviation for each, and how many samples are short


def lengths_of(distribution: Distribution, number: int) -> np.ndarray:
    """Return the lengths of samples, from 2 to `LONGEST`."""
    rng = np.random.RandomState(number)
    drawn = {
        "uniform": lambda: rng.randint(2, LONGEST + 1, number),
        "lognormal": lambda: rng.lognormal(np.log(_MEDIAN), _SPREAD, number),
        "two peaks": lambda: np.where(rng.rand(number) < _PART, *(rng.normal(*peak, number) for peak in _PEAKS)),
    }
    lengths = np.clip(drawn[distribution](), 2, LONGEST).astype(int)
    lengths[0] = LONGEST  # so that all are padded to this
    return lengths


def samples_of(lengths: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each length its tokens, and the token after each."""
    rng = np.random.RandomState(0)
    texts = [rng.randint(0, VOCABULARY, length + 1).astype(np.int32) for length in lengths]
    return [(text[:-1], text[1:]) for text in texts]


def build(distribution: Distribution, samples: int, tokens: int, window: int) -> tuple[dict, Callable[..., dict]]:
    """Draw the samples; a driver is made when it is asked for."""
    lengths = lengths_of(distribution, samples)
    drawn, made, compiled = samples_of(lengths), {}, _Compiled()

    def make(shapes: int) -> tuple[Any, TokenBatches, LastLoss]:
        ms.set_seed(1)
        network = networks_ms.tuned(GPT(VOCABULARY, context=LONGEST))
        loss_fn = NextTokenLoss()
        data = TokenBatches(drawn, tokens, pad=(0, IGNORED), shapes=shapes, longest=LONGEST, seed=1)
        return driver(network, loss_fn=loss_fn, weight=loss_fn.weight, check="off"), data, LastLoss()

    def run(shapes: int, epochs: int) -> dict[str, Any]:
        if shapes not in made:
            made[shapes] = make(shapes)
        model, data, last = made[shapes]
        before = compiled.graphs
        seconds, _ = timed(model.train_process, epochs, data, window, report=last, ckpt_path=None)
        found = {
            "seconds": seconds,
            "tokens": epochs * int(lengths.sum()),
            "loss": last.loss,
            "graphs": compiled.graphs - before,
        }
        return {**found, "padding": data.padding, "shapes": [list(shape) for shape in data.shapes]}

    return {"versions": VERSIONS}, run


class _Compiled:
    """Counts the graphs that MindSpore compiles: it asks something just before each, and has no counter of its own."""

    def __init__(self) -> None:
        self.graphs = 0
        asked = graph_api._check_recompile

        def count(*arguments: Any) -> Any:
            self.graphs += 1
            return asked(*arguments)

        graph_api._check_recompile = count


if __name__ == "__main__":
    serve(build, **flags_of(build))
