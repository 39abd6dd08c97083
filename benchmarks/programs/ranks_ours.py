"""Ours: one of several ranks, or the process that is compared with them, training in each way in turn.

All ways are trained in turn by one process, on one network, so that the state of the machine affects all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Callable

from mindspore import nn

from benchmarks.programs import networks_ms
from benchmarks.programs.ours import VERSIONS, LastLoss, driver
from benchmarks.programs.protocol import flags_of, peak_mib, serve
from benchmarks.programs.workload import Network, micro_batches
from ms_accum import Group, ZeroOptimizer, total
from ms_accum.ranks.group import AUTO, group_of


def _adam(parameters: list) -> nn.Optimizer:
    return nn.Adam(parameters, 1e-4)


_OFTEN = {"sync_every_micro_batch": True}
# The optimizer, and the options of the driver.
WAYS: dict[str, tuple[Callable[[list], Any], dict[str, Any]]] = {
    "apart": (_adam, {"group": None}),
    "window's end": (_adam, {}),
    "every micro-batch": (_adam, _OFTEN),
    "ZeRO-1": (partial(ZeroOptimizer, _adam), {}),
    "ZeRO-2": (partial(ZeroOptimizer, _adam), _OFTEN),
}


class Timed(list):
    """Micro-batches of one epoch; the clock starts when all ranks have come for the first."""

    group: Group | None = None
    began = 0.0

    def __iter__(self) -> Iterator[Any]:
        total([0], self.group)
        self.began = time.perf_counter()
        return super().__iter__()


class Rank:
    """The network, each way to train it, and the answers about them."""

    def __init__(self, network: str, ways: Sequence[str]):
        self._name, self._network = network, networks_ms.tuned(networks_ms.make(network))
        self.group = group_of("benchmarks", AUTO)
        parameters, made = self._network.trainable_params(), {way: WAYS[way] for way in ways}
        self._models = {way: driver(self._network, make(parameters), **more) for way, (make, more) in made.items()}
        self._data = lru_cache(1)(self._window)
        self._answers: dict[str, Callable[..., dict]] = {"train": self._train, "memory": self._memory}
        own = {"rank": self.group.rank if self.group else 0, "parameters": networks_ms.size(self._network)}
        self.about = {"versions": VERSIONS, **own}

    def __call__(self, what: str, **request: Any) -> dict[str, Any]:
        return self._answers[what](**request)

    def _train(self, way: str, window: int, batch: int, windows: int) -> dict[str, float]:
        """Train some windows; what ranks exchange before the first is not measured."""
        data, last = Timed(self._data(window, batch) * windows), LastLoss()
        data.group = self.group
        self._models[way].train_process(1, data, window, report=(last,), ckpt_path=None)
        seconds = time.perf_counter() - data.began
        total([0], self.group)  # what the others still send counts too
        return {"seconds": seconds, "loss": last.loss}

    def _window(self, window: int, batch: int) -> list[Any]:
        """Return this rank's window: the ranks' windows together are that of one process."""
        rank, ranks = (self.group.rank, self.group.size) if self.group else (0, 1)
        return networks_ms.tensors(micro_batches(self._name, batch, window * ranks)[rank::ranks])

    def _memory(self, way: str) -> dict[str, float]:
        """Return the peak of this process, and the bytes of the Parameters that it keeps."""
        model = self._models[way]
        optimizer = getattr(model._step.optimizer, "inner", model._step.optimizer)
        own = {id(parameter) for parameter in self._network.get_parameters()}
        return {
            "peak_mib": peak_mib(),
            "parameters": _bytes_of(self._network.get_parameters()),
            "accumulators": _bytes_of(model._step._runner([]).window.state.values()),
            "optimizer": _bytes_of(parameter for parameter in optimizer.get_parameters() if id(parameter) not in own),
        }


def _bytes_of(parameters: Any) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def build(network: Network, ways: list, address: str = "") -> tuple[dict, Callable[..., dict]]:
    """Make the ways, outside the measured time. `address` is the socket where requests come from, default: stdin."""
    rank = Rank(network, ways)
    return rank.about, rank


serve(build, **flags_of(build))
