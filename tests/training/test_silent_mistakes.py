"""Do mistakes that would train nothing, or something else, lead to a warning, and nothing else to one?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler
from mindspore.train import Model

from helpers import Slope, micro_batch, run, slope_driver
from ms_accum import AccumulatedTrainStep, Accumulator, FlushTail, GradientAccumulation
from ms_accum.network.optimizers import warn_if_rate_vanishes

ONES = [micro_batch(1.0)] * 4


class Detached(Slope):
    """A network whose loss does not depend on its Parameters."""

    def construct(self, x):
        return ops.mean(ops.stop_gradient(x * self.w))


# No gradient


@pytest.mark.usefixtures("eager")
def test_first_window_without_gradient_warns():
    network = Detached()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0))
    with pytest.warns(RuntimeWarning, match="all gradients of the window are 0, so nothing is learned"):
        run(model, ONES, 2)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("weight", [None, lambda x: float(x.asnumpy()[0, 0] != 0)])
def test_later_window_without_gradient_does_not_warn(weight):
    """It may be that nothing is left to learn, or that nothing counts."""
    model = slope_driver(weight=weight)
    data = [*ONES[:2], micro_batch(0.0), micro_batch(0.0)]
    run(model, data if weight is None else data[::-1], 2)
    assert model.updates + model.skipped == 2


@pytest.mark.parametrize("loss_of", [0, 1], ids=["its own", "another network's"])
def test_accumulator_of_another_network_warns_when_it_is_flushed(loss_of, recwarn, compiles):
    networks = [Slope(), Slope()]
    networks[1].w.name = "other"
    accumulator = Accumulator(nn.SGD([networks[0].w], 1.0), 2, reduction="mean")
    grad_fn = ms.value_and_grad(networks[loss_of], None, accumulator.optimizer.parameters)

    @ms.jit
    def step(x):
        loss, grads = grad_fn(x)
        return ops.depend(loss, accumulator(grads, x.shape[0]))

    graphs = []
    for epoch in range(2):
        for (x,) in ONES[:3]:
            step(x)
        if loss_of and not epoch:
            with pytest.warns(RuntimeWarning, match="For 'Accumulator', all gradients of the window are 0"):
                accumulator.flush()
        else:
            accumulator.flush()
        graphs.append(len(compiles))
    assert accumulator.updates == 4 and not recwarn.list and graphs[0] == graphs[1]
    assert float(networks[0].w.asnumpy()[0]) == (0 if loss_of else -4)


# Windows that never get full


@pytest.mark.usefixtures("eager")
def test_window_larger_than_the_data_warns():
    with pytest.warns(RuntimeWarning, match="'mini_steps' is 5, but an epoch has 4 batches: no window gets full"):
        run(slope_driver(), ONES, 5)


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("error")
def test_windows_that_get_full_do_not_warn():
    run(slope_driver(), ONES, 4)
    run(slope_driver(tail="carry"), ONES, 5, epochs=2)
    run(slope_driver(), ONES, {0: 1, 3: 8})


# A learning rate that vanishes


def optimizer():
    return optim.SGD([Parameter(Tensor(np.zeros(1), ms.float32), name="w")], lr=0.5)


@pytest.mark.usefixtures("eager")
def test_scheduler_stepped_for_epochs_warns():
    network = Slope()
    sgd = optim.SGD([network.w], lr=0.5)
    scheduler = lr_scheduler.StepLR(sgd, step_size=1, gamma=0.1)
    model = GradientAccumulation(network, None, sgd, scheduler=scheduler)
    with pytest.warns(RuntimeWarning, match="'StepLR' would multiply the learning rate by 1e-8 in 8 updates"):
        run(model, ONES, 1, epochs=2)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("make", "updates"),
    [
        (lambda sgd: lr_scheduler.StepLR(sgd, 30, 0.1), 100),
        (lambda sgd: lr_scheduler.ExponentialLR(sgd, 0.999), 10_000),
        (lambda sgd: lr_scheduler.StepLR(sgd, 1, 0.1), None),
        (lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 100), 100),
    ],
)
def test_usual_schedules_do_not_warn(make, updates):
    warn_if_rate_vanishes("train_process", make(optimizer()), updates)


@pytest.mark.usefixtures("eager")
def test_exponential_decay_for_epochs_warns():
    with pytest.warns(RuntimeWarning, match="'ExponentialLR' would multiply the learning rate by 1e-46 in 1,000"):
        warn_if_rate_vanishes("train_process", lr_scheduler.ExponentialLR(optimizer(), 0.9), 1000)


# Rates

PER_MICRO_BATCH = [0.1 * number for number in range(1, 9)]


def of_rates(rates):
    network = Slope()
    return network, nn.SGD([network.w], rates)


@pytest.mark.usefixtures("eager")
def test_rates_for_each_micro_batch_warn():
    network, sgd = of_rates(PER_MICRO_BATCH)
    with pytest.warns(RuntimeWarning, match="has 8 learning rates, one for each micro-batch, .* has 4 updates"):
        run(GradientAccumulation(network, None, sgd), ONES, 2, epochs=2)
    network, sgd = of_rates(PER_MICRO_BATCH)
    data = ms.dataset.GeneratorDataset([(x.asnumpy(),) for (x,) in ONES], ["x"], shuffle=False)
    step = AccumulatedTrainStep(network, sgd, 2)
    with pytest.warns(RuntimeWarning, match="For 'AccumulatedTrainStep', the optimizer has 8 learning rates"):
        Model(step).train(2, data, callbacks=FlushTail(), dataset_sink_mode=False)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("rates", "options"),
    [
        (PER_MICRO_BATCH[:4], {}),
        (PER_MICRO_BATCH[:7], {}),
        ([0.1] * 8, {}),
        (PER_MICRO_BATCH, {"max_updates": 3}),
        (PER_MICRO_BATCH, {"mini_steps": 1}),
    ],
    ids=["fits", "longer", "constant", "ends before", "no windows"],
)
def test_other_lists_of_rates_do_not_warn(rates, options):
    network, sgd = of_rates(rates)
    model = GradientAccumulation(network, None, sgd)
    model.train_process(2, ONES, **{"mini_steps": 2, "report": (), "ckpt_path": None, **options})
    assert model.updates


def test_many_shapes_are_warned_of_once():
    """Each is a graph of its own; outside graphs none is."""
    data = [micro_batch(1.0, rows=rows) for rows in range(1, 12)]
    with pytest.warns(RuntimeWarning, match=r"have had 10 shapes so far, .* took \d+\.\d s. .* TokenBatches") as caught:
        run(slope_driver(), data, 2, epochs=2)
    assert len(caught) == 1
    run(slope_driver(compile=False), data, 2)
    run(slope_driver(), data[:8], 2, epochs=2)


@pytest.mark.usefixtures("eager")
def test_check_of_the_loss_does_not_count():
    """The loss has a Parameter that no Cell has as its own."""
    count = ms.Parameter(ms.Tensor(0.0, ms.float32), name="count", requires_grad=False)

    def loss_fn(output, target):
        return ops.mean(ops.square(output - target)) + 0 * ops.assign_add(count, ms.Tensor(1.0, ms.float32))

    network = nn.Dense(2, 1)
    model = GradientAccumulation(network, loss_fn, nn.SGD(network.trainable_params(), 0.1))
    rows = np.random.RandomState(0).randn(4, 2).astype(np.float32)
    model.train_process(1, [(rows, rows[:, :1])] * 4, 2, report=(), ckpt_path=None)
    assert float(count.asnumpy()) == 4
