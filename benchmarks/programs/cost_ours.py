"""Ours: each piece of a window alone, and what users may add to it."""

from __future__ import annotations

import os
from typing import Any, Callable

import mindspore as ms
from mindspore import Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from benchmarks.programs import networks_ms
from benchmarks.programs.ours import VERSIONS, driver
from benchmarks.programs.protocol import flags_of, serve, timed
from benchmarks.programs.workload import Network, micro_batches
from ms_accum import AccumulatedTrainStep, Accumulator, Ema, FlushTail, native
from ms_accum.engine.config import checked, resolve
from ms_accum.engine.window import new_window
from ms_accum.network.compiled import branch
from ms_accum.network.parameters import unique_name
from ms_accum.training.runners import ByCalls

# What users may add to the driver.
COLLABORATORS: dict[str, Callable[[], dict[str, Any]]] = {
    "": dict,
    ", skip_micro": lambda: {"nonfinite": "skip_micro"},
    ", dynamic loss scale": lambda: {"loss_scale": amp.DynamicLossScaler(1024.0, 2, 1000)},
    ", average": lambda: {"ema": Ema(0.999)},
}
_MANY = {"mlp50m": 3}  # windows in a call, where a window takes long
_CE = networks_ms.loss()


def one_number(outputs: Any, targets: Any) -> Any:
    """Return a loss of two terms as one number."""
    return _CE(outputs, targets) + 0.1 * ops.mean(ops.square(outputs))


def two_terms(outputs: Any, targets: Any) -> Any:
    """Return its terms."""
    return {"ce": _CE(outputs, targets), "size": ops.mean(ops.square(outputs))}


# Losses of several terms, beside the same as one number.
TERMS: dict[str, dict[str, Any]] = {
    "one number": {"loss_fn": one_number},
    "two terms": {"loss_fn": two_terms, "weight": {"ce": "rows", "size": "rows"}, "coefficients": {"size": 0.1}},
}
_ADDED = 8  # micro-batches of which the last one's loss is read, where none ends a window
_MODEL = ("Model, graph mode", "Model, default mode")


class Plain(nn.Cell):
    """A forward-backward, with nothing done to the gradients or with the optimizer after it.

    With the branch that our graphs have, with which MindSpore's CPU backend is faster, so that it isn't compared.
    """

    def __init__(self, forward: nn.Cell, optimizer: nn.Optimizer, update: bool, branched: bool = True):
        super().__init__(auto_prefix=False)
        self.differentiate = ms.value_and_grad(forward, None, optimizer.parameters)
        self.optimizer = optimizer if update else None
        self.through_branch = branch(True) if branched else None

    def construct(self, *inputs: Any) -> Any:
        loss, grads = self.differentiate(*inputs)
        loss = ops.depend(loss, grads if self.optimizer is None else self.optimizer(grads))
        return loss if self.through_branch is None else self.through_branch(loss)


class Windows:
    """Our Cells, called in several ways, which wait for the losses.

    Args:
        ours (ByCalls): the Cells.
        data (list[tuple]): the micro-batches of a window.
    """

    def __init__(self, ours: ByCalls, data: list[tuple]):
        self._ours = ours
        self._input = (Tensor(1 / len(data), ms.float32), data[0])  # with its share, as the driver has it

    def add(self, count: int) -> None:
        """Run the first micro-batch `count` times, without an update."""
        self._ours.add([self._input] * count, ends=False, stops=lambda: False)

    def update(self) -> None:
        """Run a window of one, as the driver does if it can't do without accumulators."""
        added = self._ours.add([self._input], ends=True, stops=lambda: False)
        assert added is not None and added.ended is not None  # in the graph of the micro-batch


def _accumulating(forward: nn.Cell, optimizer: nn.Optimizer) -> ByCalls:
    """Return the Cells of the driver around a window of their own."""
    config = resolve("cost", optimizer, forward, checked("cost", {}), divides=False, shares=True)
    return ByCalls(forward, new_window(unique_name("cost"), config))


def _with_mindspores_kernels(forward: nn.Cell, optimizer: nn.Optimizer) -> ByCalls:
    """Return the same as where our operators could not be built."""
    os.environ[native.SWITCH] = "0"
    try:
        return _accumulating(forward, optimizer)
    finally:
        del os.environ[native.SWITCH]


def build(network: Network, window: int = 4) -> tuple[dict, Callable[..., dict]]:
    """Make the pieces, outside the measured time."""
    trained = networks_ms.tuned(networks_ms.make(network))
    optimizer = networks_ms.momentum(trained)
    forward = nn.WithLossCell(trained, networks_ms.loss())
    data = networks_ms.tensors(micro_batches(network, 8 if network == "transformer" else 32, window))
    train, many = driver(trained, optimizer).train_process, _MANY.get(network, 25)
    ours = _accumulating(forward, optimizer)
    plain, updating = Plain(forward, optimizer, False), Plain(forward, optimizer, True)
    without_branch = Plain(forward, optimizer, False, branched=False)
    windows = Windows(ours, data)
    without_operators = Windows(_with_mindspores_kernels(forward, optimizer), data)
    collaborating = {
        f"windows{name}": (_windows(networks_ms.make(network), data * many, window, options()), many * window)
        for name, options in COLLABORATORS.items()
    }
    fits = {mode: _fit(networks_ms.make(network), data * many, window) for mode in _MODEL}
    # By name: what is run, and how many micro-batches that are.
    pieces: dict[str, tuple[Callable[[], Any], int]] = {
        "plain": (lambda: [plain(*data[0]) for _ in range(_ADDED)][-1], _ADDED),
        "plain, without our branch": (lambda: [without_branch(*data[0]) for _ in range(_ADDED)][-1], _ADDED),
        "accumulate": (lambda: windows.add(_ADDED), _ADDED),
        "plain, optimizer": (lambda: updating(*data[0]), 1),
        "update": (windows.update, 1),
        "update, without C++ operators": (without_operators.update, 1),
        "window, driver": (lambda: train(1, data, window, report=(), ckpt_path=None), window),
        **collaborating,
        **{
            f"windows, {name}": (
                _windows(networks_ms.make(network), data * many, window, {"check": "off", **of_terms}),
                many * window,
            )
            for name, of_terms in TERMS.items()
        },
        "windows, default mode": (_windows(networks_ms.make(network), data * many, window, {}), many * window),
        **{name: (fit, many * window) for name, fit in fits.items()},
        "loop, plain": (_loop(networks_ms.make(network), data, None), window),
        "loop, Accumulator": (_loop(networks_ms.make(network), data, window), window),
    }

    def burst(what: str, count: int) -> dict[str, float]:
        run, size = pieces[what]
        ms.set_context(mode=ms.PYNATIVE_MODE if what.endswith("default mode") or "loop" in what else ms.GRAPH_MODE)
        seconds, _ = timed(lambda: [_wait(run()) for _ in range(count)])
        ms.set_context(mode=ms.GRAPH_MODE)
        ours.clear()
        return {"seconds": seconds, "micro_batches": size * count}

    return {"versions": VERSIONS, "parameters": networks_ms.size(trained), "pieces": list(pieces)}, burst


def _windows(network: nn.Cell, data: list[tuple], window: int, options: dict[str, Any]) -> Callable[[], None]:
    train = driver(network, **options).train_process
    return lambda: train(1, data, window, report=(), ckpt_path=None)


def _fit(network: nn.Cell, data: list[tuple], window: int) -> Callable[[], None]:
    """Return what runs windows with MindSpore's `Model`."""
    step = AccumulatedTrainStep((network, networks_ms.loss()), networks_ms.momentum(network), window)
    model = Model(step)
    micro_batches = [tuple(column.asnumpy() for column in columns) for columns in data]
    names = [f"column {number}" for number in range(len(micro_batches[0]))]
    dataset = GeneratorDataset(micro_batches, names, shuffle=False)  # a Transformer has more labels than rows
    return lambda: model.train(1, dataset, callbacks=FlushTail(), dataset_sink_mode=False)


def _loop(network: nn.Cell, data: list[tuple], window: int | None) -> Callable[[], Any]:
    """Return what runs micro-batches in a loop without `ms.jit`: each with an update, or accumulated in windows."""
    optimizer = networks_ms.momentum(network)
    accumulator = None if window is None else Accumulator(optimizer, window, reduction="mean")
    grad_fn = ms.value_and_grad(nn.WithLossCell(network, networks_ms.loss()), None, optimizer.parameters)

    def run() -> Any:
        for micro_batch in data:
            loss, grads = grad_fn(*micro_batch)
            optimizer(grads) if accumulator is None else accumulator(grads, micro_batch[0].shape[0])
        return loss

    return run


def _wait(result: Any) -> None:
    if isinstance(result, Tensor):
        result.asnumpy()


if __name__ == "__main__":
    serve(build, **flags_of(build))
