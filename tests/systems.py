"""What random programs train: one network in each of the ways, and what is compared with the simulator."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from helpers import Recorder
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
    TrainClear,
    TrainForwardBackward,
    TrainOptim,
)
from ms_accum.network.state import state, unique_name, zeros_like
from reference import miss
from runs import stop_after
from simulator import BOUND, FACTOR, GROWS_AFTER, HUGE, SECOND, SHIFT, STATES, Fails, Simulator

WEIGHTS_OF_TERMS = {"distance": "rows", "slope": lambda x, z, c: float(c.asnumpy()[0])}
MOMENTS = {"SGD": (), "Momentum": ("moments",), "Adam": ("moment1", "moment2")}


class Distance(nn.Cell):
    """See simulator.py; with terms it returns two."""

    def __init__(self, terms=False):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(2), ms.float32), name="w")
        self.terms = terms

    def construct(self, x, z, c):
        unit = self.w[0] - ops.stop_gradient(self.w[0]) + 1.0
        distance = ops.mean(ops.sum(ops.square(self.w - x), 1)) / 2 + ops.mean(ops.sqrt(z * unit))
        return (distance, ops.mean(ops.sum(self.w * x, 1))) if self.terms else distance


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
        sync (bool): whether gradients are summed in every micro-batch. Default: ``False``.
    """

    def __init__(self, program, group=None, sync=False):
        self.program, self.settings, self.group = program, program.settings, group
        self.ranks = {"group": group, "sync_every_micro_batch": sync}
        self.recorder, self.losses = Recorder(), []
        self.make()

    def make(self):
        settings = self.settings
        self.network = Distance(settings.weight == "terms")
        rates = settings.rates if np.isscalar(settings.rates) else list(settings.rates)
        parameters = [self.network.w]
        self.optimizer = {
            "SGD": lambda: nn.SGD(parameters, rates),
            "Momentum": lambda: nn.Momentum(parameters, rates, 0.9),
            "Adam": lambda: nn.Adam(parameters, rates, eps=1e-2),
        }[settings.optimizer]()
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
        of_terms = {"weight": WEIGHTS_OF_TERMS, "coefficients": {"slope": SECOND}}
        weight = of_terms if settings.weight == "terms" else {"weight": self.weight}
        self.losses_options = {"reduction": settings.reduction, "check": "off"}
        self.losses_options |= {} if settings.reduction == "sum" else weight
        getattr(self, f"make_{settings.way}")()

    def make_driver(self):
        options = {**self.options, **self.losses_options, "tail": self.settings.tail}
        self.system = GradientAccumulation(self.network, None, self.optimizer, **options)

    def make_step(self):
        options = {**self.options, **self.losses_options}
        self.system = AccumulatedTrainStep(self.network, self.optimizer, self.settings.size, **options)
        self.run = lambda *columns: self.losses.append(float(self.system(*columns).asnumpy()))

    make_model = make_step

    def make_accumulator(self):
        self.make_loop()
        self.run = ms.jit(self.run)  # with MS_JIT=0 nothing is compiled

    def make_loop(self):
        options = {**self.options, "reduction": self.settings.reduction, "network": self.network}
        self.system = accumulator = Accumulator(self.optimizer, self.settings.size, **options)

        def forward(x, z, c):
            return accumulator.scale(self.network(x, z, c))

        grad_fn, weighs = ms.value_and_grad(forward, None, self.optimizer.parameters), self.settings.weight

        def train_step(x, z, c):
            grads = grad_fn(x, z, c)[1]
            if self.settings.reduction == "sum":
                return accumulator(grads)
            return accumulator(grads, x.shape[0] if weighs == "rows" else c[0] if weighs == "column" else weighs)

        self.run = train_step

    def make_cells(self):
        name = unique_name("by_hand")
        grad_sum = zeros_like(f"{name}.grad_sum", self.optimizer.parameters)
        weight_sum = state(f"{name}.weight_sum", 0.0, ms.float32) if self.settings.reduction == "mean" else None
        shared = {"weight_sum": weight_sum, "nonfinite": self.settings.policy}
        ranks = {**self.ranks, "loss_scale": self.scaler}
        self.add = TrainForwardBackward(self.network, self.optimizer, grad_sum, **shared, **ranks)
        options = {"clip_norm": self.settings.clip, "ema": self.ema, "stages": self.stages, **ranks}
        self.optim = TrainOptim(self.optimizer, grad_sum, **shared, **options)
        self.empty = TrainClear(grad_sum, **shared)
        self.system, self.counts, self.window_losses = None, [0, 0], []

    # The calls

    def train(self, batches, epochs, stops, folder):
        rank = 0 if self.group is None else self.group.rank
        data = [tuple(map(Tensor, batch[rank])) for batch in batches]
        way = self.settings.way
        getattr(self, f"train_{way if way in ('driver', 'model', 'cells') else 'by_hand'}")(data, epochs, stops, folder)

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
        splits = self.settings.splits
        sizes = {"micro_batch_size": self.settings.size[1]} if splits else {"mini_steps": self.settings.size}

        def train(states):
            options = {"report": (self.recorder,), "ckpt_path": None, "checkpointer": states, **sizes}
            self.system.train_process(epochs, data, **options)

        self.stopped(train, stops, folder)

    def train_model(self, data, epochs, stops, folder):
        rows = [tuple(column.asnumpy() for column in columns) for columns in data]

        def train(states):
            dataset, callbacks, done = GeneratorDataset(rows, ["x", "z", "c"], shuffle=False), [FlushTail()], 0
            if states is not None:
                callbacks.append(SaveStates(states, self.system, dataset))
                done = callbacks[-1].initial_epoch
            if done < epochs:
                options = {"callbacks": callbacks, "initial_epoch": done, "dataset_sink_mode": False}
                Model(self.system).train(epochs, dataset, **options)
            else:
                callbacks[-1].__exit__(Stopped)

        self.stopped(train, stops, folder)

    def train_by_hand(self, data, epochs, stops, folder):
        def tail():
            if self.settings.tail != "carry":
                self.system.flush() if self.settings.tail == "flush" else self.system.clear()

        def train(states):
            if states is None:
                for _ in range(epochs):
                    for columns in data:
                        self.run(*columns)
                    tail()
                return
            with ResumableLoop(states, self.network, self.system) as loop:
                for epoch in range(loop.epoch, epochs + 1):
                    for number, columns in enumerate(data, 1):
                        if number > loop.batches:
                            self.run(*columns)
                            loop.after_micro_batch(epoch, number)
                    tail()
                    loop.after_micro_batch(epoch + 1, 0)

        self.stopped(train, stops, folder)

    def train_cells(self, data, epochs, stops, folder):
        del stops, folder
        sizes = self.settings if not isinstance(self.settings.size, int) else None
        for _ in range(epochs):
            for x, z, c in data:
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
            held, left_out = len(self.window_losses), 0 if skips is None else int(skips.left_out.asnumpy())
            return {"updates": updates, "skipped": skipped, "held": held, "left_out": left_out}
        system = self.system
        counts = {"updates": system.updates, "skipped": system.skipped, "held": system.micro_batches}
        return {**counts, "left_out": system.left_out, "overflows": system.overflows, "scale": system.loss_scale}

    @property
    def arrays(self):
        average = [] if self.ema is None else [self.ema.state["of.w"].asnumpy()]
        moments = [getattr(self.optimizer, name)[0].asnumpy() for name in MOMENTS[self.settings.optimizer]]
        return [self.network.w.asnumpy(), *moments, self.spikes.average.asnumpy(), *average]


# Comparisons


def check_numbers(simulator, system):
    expected = {
        "updates": simulator.updates,
        "skipped": simulator.skipped,
        "held": simulator.held,
        "left_out": simulator.left_out,
    }
    if system.system is not None:
        scale = simulator.scale if system.settings.scale is not None else 1.0
        expected |= {"overflows": simulator.overflows, "scale": scale}
    numbers = system.numbers
    if system.group is not None and system.settings.tail != "flush":
        expected["left_out"] = numbers["left_out"]  # those of the other ranks are known when a window ends
    assert numbers == expected


def check_arrays(simulator, system):
    kept = [simulator.optimizer_state.get(name, np.zeros(2)) for name in STATES[system.settings.optimizer]]
    expected = [
        simulator.w,
        *kept,
        np.array(simulator.average_norm),
        *([] if system.ema is None else [simulator.average]),
    ]
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
        assert (actual.samples, actual.skipped, actual.overflow) == (
            expected.samples,
            expected.skipped,
            expected.overflow,
        )
        if system.group is None:  # the micro-batches of rank 0
            assert actual.bad == expected.bad


def check_program(program, folder, group=None, sync=False):
    """Run a program on the simulator and on ms_accum, and compare after each call."""
    simulator, system = Simulator(program.settings), System(program, group, sync)
    way, alone = program.settings.way, group is None
    for number, (name, *arguments) in enumerate(program.calls):
        failed = ended = None
        try:
            getattr(simulator, name)(*arguments[:2])
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
    if way == "step" and alone:
        assert len(system.losses) == len(simulator.losses) and all(map(is_near, system.losses, simulator.losses))
