"""One of several ranks, or the process that is compared with them: how long do its windows take, one way and another?

All ways are trained in turn by one process, on one network, so that they share the machine's moods.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import mindspore as ms
import networks_ms
import numpy as np
from accum import LastLoss
from collectives import Alone, bytes_of, collectives_of, loopback_bytes
from mindspore import Tensor, nn
from protocol import peak_mib, serve, serve_at
from workload import NETWORKS, micro_batches

from ms_accum import GradientAccumulation, Group, ZeroOptimizer, __version__, own_group, tune_cpu
from ms_accum.parallel import wait_for_all

_RATE = 1e-4


def _adam(parameters: list) -> nn.Optimizer:
    return nn.Adam(parameters, _RATE)


def _driver(network: nn.Cell, optimizer: Any, **options: Any) -> GradientAccumulation:
    return GradientAccumulation(network, networks_ms.loss(), optimizer, **options)


def _plain(network: nn.Cell, **options: Any) -> GradientAccumulation:
    return _driver(network, _adam(network.trainable_params()), **options)


def _zero(network: nn.Cell, **options: Any) -> GradientAccumulation:
    return _driver(network, ZeroOptimizer(_adam, network.trainable_params()), **options)


WAYS: dict[str, Callable[[nn.Cell], GradientAccumulation]] = {
    "apart": lambda network: _plain(network, group=None),
    "window's end": _plain,
    "every micro-batch": lambda network: _plain(network, sync_every_micro_batch=True),
    "ZeRO-1": _zero,
    "ZeRO-2": lambda network: _zero(network, sync_every_micro_batch=True),
}


class Timed(list):
    """Micro-batches of one epoch; the clock starts when all ranks have come for the first."""

    group: Group | None = None
    began = 0.0
    sent = 0

    def __iter__(self) -> Iterator[Any]:
        self.sent = loopback_bytes()  # before any rank can have sent something
        wait_for_all(self.group)
        self.began = time.perf_counter()
        return super().__iter__()


class Rank:
    """The network, each way to train it, and the answers about them."""

    def __init__(self, network: str, ways: Sequence[str]):
        self._name, self._network = network, networks_ms.make(network)
        tune_cpu(self._network)
        self.group = own_group()
        self._models = {way: WAYS[way](self._network) for way in ways}
        self._key: tuple[int, int] | None = None
        self._window: list[Any] = []
        self._answers: dict[str, Callable[..., dict]] = {
            "train": self._train,
            "graphs": self._graphs,
            "memory": self._memory,
        }
        if self.group:
            self._answers["alone"] = Alone(self.group)
        self.about = {
            "versions": {"ms_accum": __version__, **networks_ms.VERSIONS},
            "rank": self.group.rank if self.group else 0,
            "parameters": networks_ms.size(self._network),
        }

    def __call__(self, what: str, **request: Any) -> dict[str, Any]:
        return self._answers[what](**request)

    def _train(self, way: str, window: int, batch: int, windows: int) -> dict[str, float]:
        """Train some windows; what ranks tell each other before the first is not measured."""
        data, last = Timed(self._data(window, batch) * windows), LastLoss()
        data.group = self.group
        self._models[way].train_process(1, data, window, report=(last,), ckpt_path=None)
        seconds = time.perf_counter() - data.began
        wait_for_all(self.group)  # what the others still send counts too
        return {"seconds": seconds, "loss": last.loss, "sent": loopback_bytes() - data.sent}

    def _data(self, window: int, batch: int) -> list[Any]:
        """Return this rank's window: the ranks' windows together are that of one process."""
        if self._key != (window, batch):
            rank, ranks = self.group or (0, 1)
            pool = micro_batches(self._name, batch, window * ranks)
            self._window = networks_ms.tensors(pool[rank::ranks])
            self._key = (window, batch)
        return self._window

    def _graphs(self, way: str, batch: int) -> dict[str, list]:
        """Compile a window's graphs one by one and return the collectives in them, those of a micro-batch and the rest.

        Neither loops nor branches are seen from outside: the graph of several micro-batches in one call, which loops,
        is looked at as that of one, and the optimizer, which is in a branch, as a graph of its own.
        """
        ranks = self.group.size if self.group else 1
        model, windows = self._models[way], self._models[way]._window._cells
        self._train(way, 1, batch, 1)
        windows._forward_backward(*self._data(1, batch)[0], weight=Tensor(1.0, ms.float32))
        windows.clear()
        update = [windows._optim]
        if isinstance(model._trained.optimizer, ZeroOptimizer):
            model._trained.optimizer(
                tuple(Tensor(np.zeros(p.shape, np.float32)) for p in model._trained.optimizer.parameters)
            )
            update.append(model._trained.optimizer)
        return {
            "micro_batch": collectives_of(windows._forward_backward, ranks),
            "update": [each for cell in update for each in collectives_of(cell, ranks)],
        }

    def _memory(self, way: str) -> dict[str, float]:
        """Return the peak of this process, and the bytes of the Parameters that it keeps."""
        model = self._models[way]
        optimizer = getattr(model._trained.optimizer, "inner", model._trained.optimizer)
        own = {id(parameter) for parameter in self._network.get_parameters()}
        return {
            "peak_mib": peak_mib(),
            "parameters": bytes_of(self._network.get_parameters()),
            "accumulators": bytes_of(model._window._cells._accumulators.values()),
            "optimizer": bytes_of(each for each in optimizer.get_parameters() if id(each) not in own),
        }


def build() -> tuple[dict, Callable[..., dict]]:
    """Make the ways, outside the measured time."""
    rank = Rank(arguments.network, arguments.ways)
    return rank.about, rank


parser = argparse.ArgumentParser()
parser.add_argument("--network", choices=NETWORKS, required=True)
parser.add_argument("--ways", choices=WAYS, nargs="+", required=True)
parser.add_argument("--address", help="the socket where requests come from, default: stdin")
arguments = parser.parse_args()
if arguments.address:
    serve_at(arguments.address, build)
else:
    serve(build)
