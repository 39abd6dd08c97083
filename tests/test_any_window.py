"""Random training programs compared with a simulator.

Random combinations of sizes, tails, weights, policies, scales and ways, with NaN in random micro-batches, and with
stops, flushes, clears and changes of the weights between, against tests/simulator.py. The seed is fixed: a case is a
number. The broken twins are faults that are planted; a few dozen cases find each of them.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops

from helpers import MUTATIONS, Recorder
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    Checkpointer,
    Ema,
    GradientAccumulation,
    ResumableLoop,
    Stopped,
    TrainClear,
    TrainForwardBackward,
    TrainOptim,
)
from ms_accum.engine.boundary import Boundary
from ms_accum.engine.loss_scale import DynamicScale
from ms_accum.engine.native_update import NativeUpdate
from ms_accum.engine.nonfinite import SkipMicro
from ms_accum.loss.objective import Weight
from ms_accum.network.state import state, unique_name, zeros_like
from ms_accum.training.window import OpenWindow, WindowLoss, _Accumulating
from reference import miss
from runs import stop_after
from simulator import FACTOR, GROWS_AFTER, HUGE, SHIFT, Fails, Settings, Simulator

CASES, IN_GRAPHS, TWIN_CASES = 240, 40, 90
PLENTY = 400  # learning rates, one for each update


class Distance(nn.Cell):
    """See simulator.py."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(2), ms.float32), name="w")

    def construct(self, x, z, c):
        unit = self.w[0] - ops.stop_gradient(self.w[0]) + 1.0
        return ops.mean(ops.sum(ops.square(self.w - x), 1)) / 2 + ops.mean(ops.sqrt(z * unit))


def cycling(updates):
    """A window size, on the host and in a graph."""
    return updates % 3 + 1


def column_weight(x, z, c):
    """A weight, on the host and in a graph."""
    return c[0]


# Random programs


class Case:
    """A random program: the settings, and the calls."""

    def __init__(self, number, in_graphs=False):
        self.rng = np.random.RandomState(1000 + number)
        self.in_graphs = in_graphs
        way = self.one_of("driver", "driver", "step", "accumulator", "cells")
        reduction = self.one_of("mean", "mean", "sum")
        driver = way == "driver"
        sizes = [1, 2, 3, 5, {0: 1, 2: 3, 5: 2}, cycling]
        tails = ["flush", "carry", "drop"]
        policies = ["skip_window", "skip_micro", *(["raise"] if driver else [])]
        size = ("split", int(self.one_of(2, 3))) if driver and self.rng.rand() < 0.15 else self.one_of(*sizes)
        self.settings = Settings(
            way=way,
            size=size,
            tail=self.one_of(*tails),
            reduction=reduction,
            weight="rows" if reduction == "sum" else self.one_of("rows", "column", 2.5),
            clip=self.one_of(None, None, 0.5, 2.0),
            policy=self.one_of(*policies),
            scale=self.one_of(None, None, 64.0, "dynamic", "dynamic"),
            ema=self.one_of(None, (0.75, 0), (0.9, 3)),
            rates=self.one_of(0.05, tuple(0.1 * 0.95 ** (at % 20) for at in range(PLENTY))),
        )
        self.rng.rand()  # keeps the cases in which each of the planted faults is found
        self.bad = self.one_of(0.0, 0.1, 0.25)
        self.even = in_graphs or self.rng.rand() < 0.3
        self.programme = [self.training()]
        for _ in range(self.rng.randint(3)):
            self.programme += [*self.between(), self.training()]
        self.programme += self.between()

    @property
    def stops(self):
        """list[int], after which micro-batches runs are stopped."""
        return [stop for kind, *programme in self.programme if kind == "train" for stop in programme[2]]

    @property
    def shifts_inside(self):
        """Whether weights change while a window is open, which ends afterwards with an update."""
        simulator, shifted = Simulator(self.settings), False
        for kind, *programme in self.programme:
            shifted = shifted or (kind == "shift" and bool(simulator.open))
            updates = simulator.updates
            try:
                getattr(simulator, kind)(*programme[:2])
            except Fails:
                return False
            if shifted and simulator.updates > updates:
                return True
        return False

    def one_of(self, *choices):
        return choices[self.rng.randint(len(choices))]

    def between(self):
        return self.one_of([], [], [("flush",)], [("clear",)], [("shift",)], [("shift",), ("flush",)])

    def training(self):
        batches = [self.batch() for _ in range(self.rng.randint(5, 10))]  # at least as many as the largest window
        resumes = self.settings.way != "cells" and self.settings.policy != "raise" and self.rng.rand() < 0.4
        stops = [int(stop) for stop in self.rng.randint(1, 9, self.rng.randint(1, 3))] if resumes else []
        return ("train", batches, self.rng.randint(1, 3), stops)

    def batch(self):
        """Return a micro-batch of three columns, which may not be finite."""
        splits = isinstance(self.settings.size, tuple)
        rows = 4 if self.even else self.rng.randint(3, 9) if splits else self.one_of(1, 2, 3, 8, 16)
        x = self.rng.randint(-8, 9, (rows, 2)) / 4.0
        z, weight = np.ones((rows, 1)), self.one_of(0.0, 0.5, 1.0, 3.0, 8.0)
        # A product of 0 and NaN is NaN in the ways to which the user gives gradients or Cells.
        counts = weight or self.settings.weight != "column" or self.settings.way in ("driver", "step")
        if self.rng.rand() < self.bad and (counts or self.settings.policy == "skip_micro"):
            kind = self.one_of("nan", "inf", "gradient")
            x[0, 1] = {"nan": np.nan, "inf": np.inf}.get(kind, x[0, 1])
            z[0] = 0.0 if kind == "gradient" else 1.0
        return tuple(column.astype(np.float32) for column in (x, z, np.full(rows, weight)))


# The systems under test


class System:
    """The network, trained in one of the ways; made anew when it is resumed."""

    def __init__(self, case):
        self.case, self.settings = case, case.settings
        self.recorder, self.losses = Recorder(), []
        self.make()

    def make(self):
        settings = self.settings
        self.network = Distance()
        rates = settings.rates if np.isscalar(settings.rates) else list(settings.rates)
        self.optimizer = nn.Momentum([self.network.w], rates, 0.9)
        self.ema = None if settings.ema is None else Ema(*settings.ema)
        self.scaler = (
            amp.DynamicLossScaler(HUGE, FACTOR, GROWS_AFTER) if settings.scale == "dynamic" else settings.scale
        )
        self.options = {
            "clip_norm": settings.clip,
            "loss_scale": self.scaler,
            "ema": self.ema,
            "nonfinite": settings.policy,
        }
        self.weight = {"rows": None, "column": column_weight}.get(settings.weight, settings.weight)
        getattr(self, f"make_{settings.way}")()

    def make_driver(self):
        options = {**self.options, "tail": self.settings.tail, "group": None, "check": "off"}
        weight = {} if self.settings.reduction == "sum" else {"weight": self.weight}
        self.system = GradientAccumulation(
            self.network, None, self.optimizer, reduction=self.settings.reduction, **weight, **options
        )

    def make_step(self):
        weight = {} if self.settings.reduction == "sum" else {"weight": self.weight}
        options = {**self.options, **weight, "group": None, "check": "off", "reduction": self.settings.reduction}
        self.system = AccumulatedTrainStep(self.network, self.optimizer, self.settings.size, **options)
        self.run = lambda *columns: self.losses.append(float(self.system(*columns).asnumpy()))

    def make_accumulator(self):
        options = {**self.options, "group": None, "reduction": self.settings.reduction}
        self.system = accumulator = Accumulator(self.optimizer, self.settings.size, **options)

        def forward(x, z, c):
            return accumulator.scale(self.network(x, z, c))

        grad_fn, weighs = ms.value_and_grad(forward, None, self.optimizer.parameters), self.settings.weight

        def train_step(x, z, c):
            grads = grad_fn(x, z, c)[1]
            if self.settings.reduction == "sum":
                return accumulator(grads)
            return accumulator(grads, x.shape[0] if weighs == "rows" else c[0] if weighs == "column" else weighs)

        self.run = ms.jit(train_step) if self.case.in_graphs else train_step

    def make_cells(self):
        name = unique_name("by_hand")
        grad_sum = zeros_like(f"{name}.grad_sum", self.optimizer.parameters)
        weight_sum = state(f"{name}.weight_sum", 0.0, ms.float32) if self.settings.reduction == "mean" else None
        shared = {"weight_sum": weight_sum, "nonfinite": self.settings.policy}
        ranks = {"group": None, "loss_scale": self.scaler}
        self.add = TrainForwardBackward(self.network, self.optimizer, grad_sum, **shared, **ranks)
        options = {"clip_norm": self.settings.clip, "ema": self.ema, **ranks}
        self.optim = TrainOptim(self.optimizer, grad_sum, **shared, **options)
        self.empty = TrainClear(grad_sum, **shared)
        self.system, self.counts, self.window_losses = None, [0, 0], []

    # The programme

    def train(self, batches, epochs, stops, folder):
        getattr(self, f"train_{self.settings.way}")(
            [tuple(map(Tensor, batch)) for batch in batches], epochs, stops, folder
        )

    def stopped(self, train, stops, folder):
        """Train with stops; the resumed run is a new system that gets only the folder."""
        if not stops:
            return train(None)
        for stop in stops:
            try:
                return train(Checkpointer(folder, resume="auto", stop=stop_after(stop)))
            except Stopped:
                self.make()
        return train(Checkpointer(folder, resume="auto"))

    def train_driver(self, batches, epochs, stops, folder):
        splits = isinstance(self.settings.size, tuple)
        sizes = {"micro_batch_size": self.settings.size[1]} if splits else {"mini_steps": self.settings.size}

        def train(states):
            options = {"report": (self.recorder,), "ckpt_path": None, "checkpointer": states, **sizes}
            self.system.train_process(epochs, batches, **options)

        self.stopped(train, stops, folder)

    def train_by_hand(self, batches, epochs, stops, folder):
        def tail():
            if self.settings.tail != "carry":
                self.system.flush() if self.settings.tail == "flush" else self.system.clear()

        def train(states):
            if states is None:
                for _ in range(epochs):
                    for columns in batches:
                        self.run(*columns)
                    tail()
                return
            with ResumableLoop(states, self.network, self.system) as loop:
                for epoch in range(loop.epoch, epochs + 1):
                    for number, columns in enumerate(batches, 1):
                        if number > loop.batches:
                            self.run(*columns)
                            loop.after_micro_batch(epoch, number)
                    tail()
                    loop.after_micro_batch(epoch + 1, 0)

        self.stopped(train, stops, folder)

    train_step = train_accumulator = train_by_hand

    def train_cells(self, batches, epochs, stops, folder):
        del stops, folder
        sizes = self.settings if not isinstance(self.settings.size, int) else None
        for _ in range(epochs):
            for x, z, c in batches:
                if not self.window_losses:
                    self.window = sizes.size_after(self.counts[0]) if sizes else self.settings.size
                weight = self.settings.weight
                own = {} if weight == "rows" else {"weight": c[0] if weight == "column" else Tensor(weight, ms.float32)}
                self.window_losses.append(float(self.add(x, z, c, **own).asnumpy()))
                if weight == "column" and not float(c.asnumpy()[0]):
                    self.window_losses[-1] = 0.0
                if len(self.window_losses) == self.window:
                    self.flush()
            if self.settings.tail != "carry":
                self.flush() if self.settings.tail == "flush" else self.clear()

    def flush(self):
        if self.system is not None:
            return self.system.flush()
        if self.window_losses:
            left_out = self.settings.policy == "skip_micro"
            figure = sum(loss for loss in self.window_losses if not (left_out and np.isnan(loss)))
            updated = bool(self.optim(Tensor([figure], ms.float32))[0].asnumpy())
            self.counts[not updated] += 1
            self.clear()
        return None

    def clear(self):
        if self.system is not None:
            self.system.clear()
        else:
            self.empty()
            self.window_losses = []

    def shift(self):
        ops.assign(self.network.w, self.network.w + SHIFT)

    # What remains

    @property
    def numbers(self):
        """Return counts by name."""
        if self.system is None:
            updates, skipped = self.counts
            skips = self.add.window.skips
            micro_batches, left_out = len(self.window_losses), 0 if skips is None else int(skips.left_out.asnumpy())
            return {"updates": updates, "skipped": skipped, "held": micro_batches, "left_out": left_out}
        system = self.system
        counts = {"updates": system.updates, "skipped": system.skipped, "held": system.micro_batches}
        return {**counts, "left_out": system.left_out, "overflows": system.overflows, "scale": system.loss_scale}

    @property
    def arrays(self):
        average = [] if self.ema is None else [self.ema.state["of.w"].asnumpy()]
        return [self.network.w.asnumpy(), self.optimizer.moments[0].asnumpy(), *average]


# Comparisons


def check_numbers(simulator, system):
    expected = {
        "updates": simulator.updates,
        "skipped": simulator.skipped,
        "held": len(simulator.open),
        "left_out": simulator.left_out,
    }
    if system.settings.way == "driver" and simulator.is_immediate:
        expected["left_out"] = 0
    if system.system is not None:
        scale = simulator.scale if system.settings.scale is not None else 1.0
        expected |= {"overflows": simulator.overflows, "scale": scale}
    assert system.numbers == expected


def check_arrays(simulator, system):
    expected = [simulator.w, simulator.velocity, *([] if system.ema is None else [simulator.average])]
    assert miss(system.arrays, expected, 1e-4, 1e-5) <= 1
    if system.ema is not None:
        assert system.ema.updates == simulator.averaged


def is_near(actual, expected):
    """Return whether a number is what was expected; NaN stands for any that is not finite."""
    if not np.isfinite(expected):
        return not np.isfinite(actual)
    return abs(actual - expected) <= 1e-5 + 1e-4 * abs(expected)


def check_records(simulator, system):
    assert len(system.recorder.records) == len(simulator.records)
    for actual, expected in zip(system.recorder.records, simulator.records):
        assert is_near(actual.loss, expected.loss) and is_near(actual.lr, expected.lr)
        assert expected.skipped or is_near(actual.grad_norm, expected.norm)
        counts = (actual.samples, actual.skipped, actual.overflow, actual.bad)
        assert counts == (expected.samples, expected.skipped, expected.overflow, expected.bad)


def check_case(case, folder):
    """Run the case on the simulator and on ms_accum, and compare after each step."""
    simulator, system = Simulator(case.settings), System(case)
    for number, (kind, *programme) in enumerate(case.programme):
        failed = None
        try:
            getattr(simulator, kind)(*programme[:2])
        except Fails as error:
            failed = error.args[0]
        programme = [*programme, folder / str(number)] if kind == "train" else programme
        try:
            getattr(system, kind)(*programme)
            ended = None
        except (FloatingPointError, RuntimeError) as error:
            ended = type(error)
        assert ended is failed
        check_numbers(simulator, system)
        check_arrays(simulator, system)
        if case.settings.way == "driver":
            check_records(simulator, system)
        if failed:
            return
    if case.settings.way == "step":
        assert len(system.losses) == len(simulator.losses) and all(map(is_near, system.losses, simulator.losses))


def numbers(count, fast):
    """Return the numbers of cases, of which the first ones are in the fast part."""
    return [pytest.param(number, marks=[] if number < fast else [pytest.mark.slow]) for number in range(count)]


@pytest.mark.host
@pytest.mark.parametrize("number", numbers(CASES, 80))
def test_random_case_matches_simulator(number, tmp_path):
    check_case(Case(number), tmp_path)


@pytest.mark.parametrize("number", numbers(IN_GRAPHS, 6))
def test_random_case_matches_simulator_compiled(number, tmp_path):
    check_case(Case(number, in_graphs=True), tmp_path)


@pytest.mark.graph
@pytest.mark.parametrize("number", numbers(IN_GRAPHS, 2))
def test_random_case_matches_simulator_in_graph_mode(number, tmp_path):
    check_case(Case(number, in_graphs=True), tmp_path)


# Planted faults


def _late_scale(scale, updated, loss, left_out=None):
    return None


def _with_weight(self, kernels, gradients, loss=None, weight=None, skip=SkipMicro.__call__):
    return skip(self, kernels, gradients, loss)


def _twice(self, updated, kept=Ema.kept):
    return kept(self, updated) * kept(self, updated)


def _without_open_window(self, state, counters, load=OpenWindow.load):
    load(self, {**state, "micro_batches": 0}, counters)


def _without_losses(self, state, counters, load=OpenWindow.load):
    load(self, {**state, "loss": [0.0, 0.0, 0]}, counters)


def _without_bad(self, state, bad=()):
    return _load_losses(self, state)


def _clipped_twice(self, weight_sum, norm, scale, divisor=Boundary._divisor):
    return divisor(self, weight_sum, norm * 2, scale)


def _unscaled(self, weight_sum, norm, scale, divisor=Boundary._divisor):
    return divisor(self, weight_sum, norm, scale * 2)


def _always(self, finite, *sums, update=Boundary._update):
    return update(self, Tensor(True), *sums)


def _always_native(self, finite, *sums, update=NativeUpdate.__call__):
    return update(self, Tensor(True), *sums)


def _counts_all(self, requests=(), end=OpenWindow.end):
    ended = end(self, requests)
    self.updates += not ended.updated
    return ended


def _one_each(self, micro_batch):
    return 1.0


_load_losses = WindowLoss.load
MUTANTS = {
    **MUTATIONS,
    "a dynamic scale that stays": [(DynamicScale, "adjust", _late_scale)],
    "weight 0 is left out": [(SkipMicro, "__call__", _with_weight)],
    "an average twice": [(Ema, "kept", _twice)],
    "an open window is not resumed": [(OpenWindow, "load", _without_open_window)],
    "its losses are not resumed": [(OpenWindow, "load", _without_losses)],
    "its bad micro-batches are not resumed": [(WindowLoss, "load", _without_bad)],
    "clipping to the half": [(Boundary, "_divisor", _clipped_twice)],
    "unscaling by the double": [(Boundary, "_divisor", _unscaled)],
    "nothing is skipped": [(Boundary, "_update", _always), (NativeUpdate, "__call__", _always_native)],
    "skipped windows count as updates": [(OpenWindow, "end", _counts_all)],
    "all micro-batches count alike": [(Weight, "of", _one_each)],
    "what is cleared stays": [(_Accumulating, "clear", lambda self: None)],
    "no fault": [],
}


def first_failing_case(name, folder, monkeypatch):
    """Return the number of the first case that finds the fault, or None."""
    for module, attribute, replacement in MUTANTS[name]:
        monkeypatch.setattr(module, attribute, replacement)
    for number in range(TWIN_CASES):
        try:
            check_case(Case(number), folder / str(number))
        except Exception:  # noqa: BLE001 - a fault may show in any way
            return number
    return None


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_detected(name, tmp_path, monkeypatch):
    assert (first_failing_case(name, tmp_path, monkeypatch) is None) is (name == "no fault")
