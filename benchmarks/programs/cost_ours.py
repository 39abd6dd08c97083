"""What does each piece of a window cost in `ms_accum`, and what would other ways to run it?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, Callable

import mindspore as ms
import networks_ms
from mindspore import Tensor, nn, ops
from protocol import serve
from workload import NETWORKS, micro_batches

from ms_accum import GradientAccumulation, __version__, tune_cpu
from ms_accum.running import TOGETHER, Accumulating

_ADD = ops.HyperMap()


class Plain(nn.Cell):
    """A forward-backward, with nothing done to the gradients or with the optimizer after it."""

    def __init__(self, forward: nn.Cell, optimizer: nn.Optimizer, update: bool):
        super().__init__(auto_prefix=False)
        self.differentiate = ms.value_and_grad(forward, None, optimizer.parameters)
        self.optimizer = optimizer if update else None

    def construct(self, *inputs: Any) -> Any:
        loss, grads = self.differentiate(*inputs)
        return ops.depend(loss, grads if self.optimizer is None else self.optimizer(grads))


class Returned(nn.Cell):
    """A forward-backward that hands its gradients out, for another graph to add up."""

    def __init__(self, forward: nn.Cell, optimizer: nn.Optimizer):
        super().__init__(auto_prefix=False)
        self.differentiate = ms.value_and_grad(forward, None, optimizer.parameters)

    def construct(self, *inputs: Any) -> Any:
        return self.differentiate(*inputs)


class AddUp(nn.Cell):
    """That other graph."""

    def __init__(self, grad_sum: tuple):
        super().__init__(auto_prefix=False)
        self.grad_sum = grad_sum

    def construct(self, *grads: Any) -> Any:
        return ops.depend(True, _ADD(ops.assign_add, self.grad_sum, grads))


class While(nn.Cell):
    """A whole window of stacked micro-batches in one graph, with the Cells of ours inside."""

    def __init__(self, windows: Accumulating):
        super().__init__(auto_prefix=False)
        self.add, self.optim, self.clear = windows._forward_backward, windows._optim, windows._clear

    def construct(self, inputs: Any, targets: Any, weight: Any, window: Any) -> Any:
        done = Tensor(0, ms.int32)
        loss = Tensor(0.0, ms.float32)
        while done < window:
            loss = self.add(inputs[done], targets[done], weight=weight)
            done = done + 1
        ended = self.optim()
        self.clear()
        return loss, ended


class Pieces:
    """All of them for one network; each call runs a piece some times and returns the seconds."""

    def __init__(self, name: str, window: int):
        network = networks_ms.make(name)
        tune_cpu(network)
        optimizer = networks_ms.momentum(network)
        forward = nn.WithLossCell(network, networks_ms.loss())
        self._driver = GradientAccumulation(network, networks_ms.loss(), optimizer)
        self._data = networks_ms.tensors(micro_batches(name, 8 if name == "transformer" else 32, window))
        self._window = window
        self._weight = Tensor(1.0, ms.float32)
        self._ours, looped = (Accumulating(forward, optimizer, "mean", None) for _ in range(2))
        self._returned, self._add_up = Returned(forward, optimizer), AddUp(self._ours._optim.grad_sum)
        self._while = While(looped)
        self._stacked = [ops.stack(column) for column in zip(*self._data)]
        plain, updating = Plain(forward, optimizer, False), Plain(forward, optimizer, True)
        # By name: what is run, and how many micro-batches that are.
        self._pieces: dict[str, tuple[Callable[[], Any], int]] = {
            "plain": (lambda: plain(*self._data[0]), 1),
            "accumulate": (self._accumulate, TOGETHER),
            "plain, optimizer": (lambda: updating(*self._data[0]), 1),
            "update": (self._update, 1),
            "window, ours": (self._ours_together, window),
            "window, driver": (self._drive, window),
            "window, one by one": (self._one_by_one, window),
            "window, gradients returned": (self._return, window),
            "window, one graph": (self._loop, window),
        }
        self.parameters = networks_ms.size(network)

    def __call__(self, what: str, count: int) -> dict[str, float]:
        run, held = self._pieces[what]
        began = time.perf_counter()
        for _ in range(count):
            _wait(run())
        seconds = time.perf_counter() - began
        self._ours.clear()
        return {"seconds": seconds, "micro_batches": held * count}

    @property
    def names(self) -> Sequence[str]:
        """What can be asked for."""
        return list(self._pieces)

    def _accumulate(self) -> Any:
        """Run as many micro-batches as are run together, and no update."""
        return [self._ours.add(self._data[0], self._weight) for _ in range(TOGETHER)][-1]

    def _update(self) -> Any:
        loss = self._ours.add(self._data[0], self._weight)
        self._ours.end()
        return loss

    def _ours_together(self) -> Any:
        losses = [self._ours.add(micro_batch, self._weight) for micro_batch in self._data]
        self._ours.end()
        return losses[-1]

    def _one_by_one(self) -> Any:
        for micro_batch in self._data:
            loss = self._ours._forward_backward(*micro_batch, weight=self._weight)
        self._ours.end()
        return loss

    def _return(self) -> Any:
        for micro_batch in self._data:
            loss, grads = self._returned(*micro_batch)
            self._add_up(*grads)
        self._ours.end()
        return loss

    def _loop(self) -> Any:
        return self._while(*self._stacked, self._weight, Tensor(self._window, ms.int32))[0]

    def _drive(self) -> None:
        self._driver.train_process(1, self._data, self._window, report=(), ckpt_path=None)


def _wait(result: Any) -> None:
    if result is not None:
        result.asnumpy()


def build() -> tuple[dict, Callable[..., dict]]:
    """Make the pieces, outside the measured time."""
    pieces = Pieces(arguments.network, arguments.window)
    versions = {"ms_accum": __version__, **networks_ms.VERSIONS}
    return {"versions": versions, "parameters": pieces.parameters, "pieces": pieces.names}, pieces


parser = argparse.ArgumentParser()
parser.add_argument("--network", choices=NETWORKS, required=True)
parser.add_argument("--window", type=int, default=4)
arguments = parser.parse_args()
serve(build)
