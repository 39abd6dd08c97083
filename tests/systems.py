"""What random programs train: one network in each of the ways, and what is compared with the simulator."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Model

from helpers import Losses, Recorder, dataset
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    Checkpointer,
    Ema,
    FlushTail,
    GradientAccumulation,
    ResumableLoop,
    SaveStates,
    Stopped,
    Terms,
    TrainClear,
    TrainForwardBackward,
    TrainOptim,
    ZeroOptimizer,
)
from ms_accum.network.parameters import unique_name, untrained, zeros_like
from reference import miss
from runs import stop_after
from simulator import BOUND, FACTOR, GROWS_AFTER, HUGE, RATIO, SECOND, SHIFT, STATES, WIDTH, Fails, Simulator

WEIGHTS_OF_TERMS = {"distance": "rows", "slope": lambda x, z, c: float(c.asnumpy()[0])}
MOMENTS = {"SGD": (), "Momentum": ("moments",), "Adam": ("moment1", "moment2")}


class Distance(nn.Cell):
    """See simulator.py; with terms it returns two."""

    def __init__(self, terms=False, half=False):
        super().__init__()
        self.left = Parameter(Tensor(np.zeros(WIDTH // 2), ms.float32), name="left")
        self.right = Parameter(Tensor(np.zeros(WIDTH // 2), ms.float32), name="right")
        self.terms, self.half = terms, half
        if half:
            self.to_float(ms.float16)

    def construct(self, x, z, c):
        w = ops.cat((self.left, self.right))
        w = ops.cast(w, ms.float16) if self.half else w
        unit = w[0] - ops.stop_gradient(w[0]) + 1.0
        squares = ops.cast(ops.sum(ops.square(w - x), 1), ms.float32)
        distance = ops.mean(squares) / 2 + ops.mean(ops.cast(ops.sqrt(z * unit), ms.float32))
        return (distance, ops.mean(ops.cast(ops.sum(w * x, 1), ms.float32))) if self.terms else distance


def column_weight(x, z, c):
    """A weight, on the host and in a graph."""
    return c[0]


def bound(gradients, norm):
    return [ops.clip_by_value(gradient, -BOUND, BOUND) for gradient in gradients]


@ms.jit_class
class Spikes:
    """Skips windows whose norm is more than twice the average; see simulator.py."""

    def __init__(self):
        self.average = Parameter(Tensor(0.0, ms.float32))

    def __call__(self, gradients, norm):
        is_first = self.average == 0
        keep = ops.logical_or(is_first, norm <= 2 * self.average)
        average = ops.where(is_first, norm, 0.9 * self.average + 0.1 * norm)
        ops.assign(self.average, ops.where(keep, average, self.average))
        return gradients, keep


class System:
    """The network, trained in one of the ways; made anew when it is resumed.

    Args:
        program (Program): what it runs.
        group (Optional[Group]): the ranks. Default: ``None``, one process.
    """

    def __init__(self, program, group=None):
        self.program, self.settings, self.group = program, program.settings.of_size(program.settings.size), group
        self.ranks = {"group": group, "sync_every_micro_batch": program.sync}
        self.recorder, self.losses, self.size = Recorder(), [], program.settings.size
        self.has_terms = self.settings.weight == "terms"
        self.make()

    def make(self):
        settings = self.settings
        self.network = Distance(self.has_terms, settings.half)
        self.optimizer = self.optimizer_of(self.parameters)
        self.ema = None if settings.ema is None else Ema(*settings.ema)
        self.scaler = (
            amp.DynamicLossScaler(HUGE, FACTOR, GROWS_AFTER) if settings.scale == "dynamic" else settings.scale
        )
        self.options = {
            "clip_norm": settings.clip,
            "loss_scale": self.scaler,
            "ema": self.ema,
            "nonfinite": settings.policy,
            **self.ranks,
        }
        self.spikes = Spikes()
        self.stages = [bound if name == "bound" else self.spikes for name in settings.stages]
        self.options["stages"] = self.stages
        self.weight = {"rows": None, "column": column_weight}.get(settings.weight, settings.weight)
        self.window = []
        """list[tuple], micro-batches that wait for the complete window: in one's own loop, with terms."""
        of_terms = {"weight": WEIGHTS_OF_TERMS, "coefficients": {"slope": SECOND}}
        weight = of_terms if self.has_terms else {"weight": self.weight}
        self.losses_options = {"reduction": settings.reduction, "check": "off"}
        self.losses_options |= {} if settings.reduction == "sum" else weight
        getattr(self, f"make_{settings.way}")()

    @property
    def parameters(self):
        return [self.network.left, self.network.right]

    def optimizer_of(self, parameters):
        """Return the optimizer; with groups the second Parameter is its first."""
        settings = self.settings
        rates = settings.rates if np.isscalar(settings.rates) else list(settings.rates)
        if settings.groups:
            of_right = rates * RATIO if np.isscalar(rates) else [rate * RATIO for rate in rates]
            parameters = [{"params": parameters[1:], "lr": of_right}, {"params": parameters[:1]}]
        make = {
            "SGD": lambda parts: nn.SGD(parts, rates),
            "Momentum": lambda parts: nn.Momentum(parts, rates, 0.9),
            "Adam": lambda parts: nn.Adam(parts, rates, eps=1e-2),
        }[settings.optimizer]
        return ZeroOptimizer(make, parameters, group=self.group) if self.program.zero else make(parameters)

    def make_driver(self):
        options = {**self.options, **self.losses_options, "tail": self.settings.tail}
        self.system = GradientAccumulation(self.network, None, self.optimizer, **options)

    def make_step(self):
        options = {**self.options, **self.losses_options}
        self.system = AccumulatedTrainStep(self.network, self.optimizer, self.size, **options)
        self.run = lambda *columns: self.losses.append(float(self.system(*columns).asnumpy()))

    make_model = make_step

    def make_accumulator(self):
        self.make_loop()
        self.run = ms.jit(self.run)  # with MS_JIT=0 nothing is compiled

    def make_loop(self):
        if self.has_terms:
            return self.make_loop_of_terms()
        options = {**self.options, "reduction": self.settings.reduction, "network": self.network}
        self.system = accumulator = Accumulator(self.optimizer, self.size, **options)

        def forward(x, z, c):
            return accumulator.scale(self.network(x, z, c))

        grad_fn, weighs = ms.value_and_grad(forward, None, self.optimizer.parameters), self.settings.weight

        def train_step(x, z, c):
            grads = grad_fn(x, z, c)[1]
            if self.settings.reduction == "sum":
                return accumulator(grads)
            return accumulator(grads, x.shape[0] if weighs == "rows" else c[0] if weighs == "column" else weighs)

        self.run = train_step
        return None

    def make_loop_of_terms(self):
        self.system = accumulator = Accumulator(self.optimizer, self.size, **self.options, network=self.network)
        terms = Terms(WEIGHTS_OF_TERMS, {"slope": SECOND}, group=self.group)

        def forward(x, z, c, factors, counts):
            return accumulator.scale(terms.scale(self.network(x, z, c), factors, counts))

        grad_fn = ms.value_and_grad(forward, None, self.optimizer.parameters)

        def train_step(x, z, c, factors, counts):
            return accumulator(grad_fn(x, z, c, factors, counts)[1])

        self.terms, self.run = terms, train_step

    def make_cells(self):
        name = unique_name("by_hand")
        grad_sum = zeros_like(f"{name}.grad_sum", self.optimizer.parameters)
        weight_sum = untrained(f"{name}.weight_sum", 0.0, ms.float32) if self.settings.reduction == "mean" else None
        shared = {"weight_sum": weight_sum, "group": self.group}
        self.add = TrainForwardBackward(self.network, self.optimizer, grad_sum, **shared)
        self.optim = TrainOptim(self.optimizer, grad_sum, clip_norm=self.settings.clip, ema=self.ema, **shared)
        self.empty = TrainClear(grad_sum, weight_sum=weight_sum)
        self.system, self.counts, self.held, self.run = None, [0, 0], 0, self.add_by_hand

    # The calls

    def train(self, batches, epochs, size, stops, folder):
        rank = 0 if self.group is None else self.group.rank
        data = [tuple(map(Tensor, batch[rank])) for batch in batches]
        self.size = self.size if size is None else size
        way = self.settings.way
        getattr(self, f"train_{way if way in ('driver', 'model') else 'by_hand'}")(data, epochs, stops, folder)

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

    def train_driver(self, data, epochs, stops, folder):
        splits = isinstance(self.size, tuple)
        sizes = {"micro_batch_size": self.size[1]} if splits else {"mini_steps": self.size}

        def train(states):
            options = {"report": (self.recorder,), "ckpt_path": None, "checkpointer": states, **sizes}
            before = len(self.recorder.records)
            self.system.train_process(epochs, data, **options)
            records = self.recorder.records
            skipped = any(record.skipped for record in records[before:])  # sizes may depend on updates
            if self.group is None and not skipped:
                assert self.recorder.planned == len(records) - before

        self.stopped(train, stops, folder)

    def train_model(self, data, epochs, stops, folder):
        def train(states):
            rows, done = dataset(data), 0
            callbacks = [FlushTail(), Losses(self.losses)]
            if states is not None:
                callbacks.append(SaveStates(states, self.system, rows))
                done = callbacks[-1].initial_epoch
            if done < epochs:
                options = {"callbacks": callbacks, "initial_epoch": done, "dataset_sink_mode": False}
                Model(self.system).train(epochs, rows, **options)
            else:
                callbacks[-1].__exit__(Stopped)

        self.stopped(train, stops, folder)

    def train_by_hand(self, data, epochs, stops, folder):
        def tail():
            if self.settings.tail != "carry":
                self.flush() if self.settings.tail == "flush" else self.clear()

        def train(states):
            if states is None:
                for _ in range(epochs):
                    for columns in data:
                        self.take(*columns)
                    tail()
                return
            with ResumableLoop(states, self.network, self.system) as loop:
                for epoch in range(loop.epoch, epochs + 1):
                    for number, columns in enumerate(data, 1):
                        if number > loop.batches:
                            self.take(*columns)
                            loop.after_micro_batch(epoch, number)
                    tail()
                    loop.after_micro_batch(epoch + 1, 0)

        self.stopped(train, stops, folder)

    def take(self, *columns):
        """Run a micro-batch; with terms, when its window is complete."""
        if not self.has_terms or self.settings.way == "step":
            return self.run(*columns)
        self.window.append(columns)
        if len(self.window) == self.settings.of_size(self.size).size_after(self.system.updates):
            self.run_window()
        return None

    def run_window(self):
        factors = self.terms.factors(self.window, self.system.updates) if self.window else []
        for columns, (of_terms, counts) in zip(self.window, factors):
            self.run(*columns, of_terms, counts)
        self.window = []

    def add_by_hand(self, x, z, c):
        """Run a micro-batch through the Cells, whose caller counts."""
        if not self.held:
            self.full = self.settings.size_after(self.counts[0])
        weight = self.settings.weight
        own = {} if weight == "rows" else {"weight": c[0] if weight == "column" else Tensor(weight, ms.float32)}
        self.add(x, z, c, **own)
        self.held += 1
        if self.held == self.full:
            self.flush()

    def flush(self):
        if self.system is not None:
            self.run_window()
            return self.system.flush()
        if self.held:
            updated = bool(self.optim()[0].asnumpy())
            self.counts[not updated] += 1
            self.clear()
        return None

    def clear(self):
        self.window = []
        if self.system is not None:
            self.system.clear()
        else:
            self.empty()
            self.held = 0

    def shift(self):
        for parameter in self.parameters:
            ops.assign(parameter, parameter + SHIFT)

    def resize(self, size):
        self.system.accumulate_step = self.size = size

    # What remains

    @property
    def numbers(self):
        """Return counts by name."""
        inner = self.optimizer.inner if self.program.zero else self.optimizer
        numbers = {"global_step": int(inner.global_step.asnumpy()[0])}
        if self.system is None:
            updates, skipped = self.counts
            return {**numbers, "updates": updates, "skipped": skipped, "held": self.held, "left_out": 0}
        system = self.system
        numbers |= {"updates": int(system.updates), "skipped": int(system.skipped), "updated": bool(system.updated)}
        numbers |= {"held": int(system.micro_batches) + len(self.window), "left_out": system.left_out}
        return {**numbers, "overflows": system.overflows, "scale": system.loss_scale}

    @property
    def arrays(self):
        """Return what is trained, in the simulator's order."""
        arrays = [np.concatenate([parameter.asnumpy() for parameter in self.parameters])]
        if not self.program.zero:
            ordered = slice(None, None, -1 if self.settings.groups else 1)
            for name in MOMENTS[self.settings.optimizer]:
                arrays.append(np.concatenate([m.asnumpy() for m in getattr(self.optimizer, name)[ordered]]))
        arrays.append(self.spikes.average.asnumpy())
        if self.ema is not None:
            arrays.append(np.concatenate([self.ema.state[f"of.{each.name}"].asnumpy() for each in self.parameters]))
        return arrays


# Comparisons


def tolerances(settings):
    """Return the relative and absolute error that numbers may have."""
    return (1e-2, 1e-2) if settings.half else (1e-4, 1e-5)


STEPS = ("step", "model")


def check_numbers(simulator, system):
    expected = {
        "global_step": simulator.updates,
        "updates": simulator.updates,
        "skipped": simulator.skipped,
        "held": simulator.held,
        "left_out": simulator.left_out,
    }
    if system.system is not None:
        scale = simulator.scale if system.settings.scale is not None else 1.0
        expected |= {"updated": simulator.updated, "overflows": simulator.overflows, "scale": scale}
    numbers = system.numbers
    if system.group is not None and system.settings.tail != "flush":
        expected["left_out"] = numbers["left_out"]  # those of the other ranks are known when a window ends
    different = {name: (numbers[name], expected[name]) for name in expected if numbers[name] != expected[name]}
    assert not different, different
    # A new step does not know the norm of the last window.
    if system.settings.way in ("accumulator", "loop") or (system.settings.way in STEPS and not system.program.stops):
        norm = float(system.system.grad_norm)
        assert is_near(norm, simulator.norm, *tolerances(system.settings)), (norm, simulator.norm)


def check_arrays(simulator, system):
    kept = [simulator.optimizer_state.get(name, np.zeros(WIDTH)) for name in STATES[system.settings.optimizer]]
    expected = [
        simulator.w,
        *([] if system.program.zero else kept),
        np.array(simulator.average_norm),
        *([] if system.ema is None else [simulator.average]),
    ]
    assert miss(system.arrays, expected, *tolerances(system.settings)) <= 1
    if system.ema is not None:
        assert system.ema.updates == simulator.averaged


def is_near(actual, expected, rtol=1e-4, atol=1e-5):
    """Return whether a number is what was expected; NaN stands for any that is not finite."""
    if not np.isfinite(expected):
        return not np.isfinite(actual)
    return abs(actual - expected) <= atol + rtol * abs(expected)


EQUAL = ("epoch", "step", "update", "samples", "skipped", "overflow")
NEAR = ("loss", "lr", "norm")


def check_records(simulator, system):
    allowed = tolerances(system.settings)
    assert len(system.recorder.records) == len(simulator.records)
    for actual, expected in zip(system.recorder.records, simulator.records):
        for name in EQUAL:
            assert getattr(actual, name) == getattr(expected, name), name
        for name in NEAR:
            assert is_near(getattr(actual, {"norm": "grad_norm"}.get(name, name)), getattr(expected, name), *allowed)
        assert actual.terms.keys() == expected.terms.keys()
        assert all(is_near(actual.terms[name], mean, *allowed) for name, mean in expected.terms.items())
        assert actual.bad == expected.bad


def check_program(program, folder, group=None):
    """Run a program on the simulator and on ms_accum, and compare after each call."""
    simulator, system = Simulator(program.settings), System(program, group)
    way, alone = program.settings.way, group is None
    for number, (name, *arguments) in enumerate(program.calls):
        failed = ended = None
        try:
            getattr(simulator, name)(*arguments[:3])
        except Fails as error:
            failed = error.args[0]
        arguments = [*arguments, folder / str(number)] if name == "train" else arguments
        try:
            getattr(system, name)(*arguments)
        except (FloatingPointError, RuntimeError) as error:
            ended = type(error)
            if failed is None:
                raise
        assert ended is failed
        check_numbers(simulator, system)
        check_arrays(simulator, system)
        if way == "driver" and (alone or group.rank == 0):
            check_records(simulator, system)
        if failed:
            return
    # A new step does not know the loss of the last window.
    if way in STEPS and not program.stops:
        ranks = program.settings.ranks
        expected = simulator.losses[ranks - 1 :: ranks]  # after each micro-batch of all ranks
        assert len(system.losses) == len(expected)
        assert all(is_near(*pair, *tolerances(program.settings)) for pair in zip(system.losses, expected))
