"""Does MindSpore's `Model` train a loss of several terms as the driver does?"""

from __future__ import annotations

from itertools import count

import pytest
from mindspore import Tensor, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import LambdaCallback, Model

import several_terms as terms
from ms_accum import (
    AccumulatedTrainStep,
    Checkpointer,
    FlushTail,
    SaveStates,
)
from reference import digest

pytestmark = pytest.mark.usefixtures("eager")

DATA = terms.data_of((4, 2, 5, 3, 1, 6, 2), masked=[2])


def dataset():
    return GeneratorDataset(DATA, ["x", "y"], shuffle=False)


def step_of(network, loss_fn=None, size=3, weight=terms.WEIGHT, lr=1.0, coefficients=terms.COEFFICIENTS, **options):
    optimizer = nn.SGD(network.trainable_params(), lr)
    return AccumulatedTrainStep(
        (network, loss_fn or terms.Loss()),
        optimizer,
        size,
        weight=weight,
        coefficients=coefficients,
        check="off",
        **options,
    )


def test_stop_inside_a_window_of_fit_trains_nothing_twice(tmp_path):
    """`Model.fit` evaluates after the stop, which must not run the open window that is saved as not run."""

    def train(folder=None, stop=None):
        network, data = terms.Net(), dataset()
        step, number = step_of(network), count(1)
        callbacks, initial = [FlushTail()], 0
        if folder is not None:
            states = SaveStates(Checkpointer(folder, resume="auto"), step, data)
            callbacks, initial = [*callbacks, states], states.initial_epoch
        if stop is not None:
            callbacks.append(LambdaCallback(on_train_step_end=lambda c: next(number) == stop and c.request_stop()))
        model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"loss"})
        valid = GeneratorDataset(DATA[:1], ["x", "y"], shuffle=False)
        options = {"dataset_sink_mode": False, "initial_epoch": initial}
        model.fit(1, data, valid, callbacks=callbacks, **options)
        return digest([*network.get_parameters(), *step.optimizer.get_parameters()]), step.updates

    expected = train()
    assert train(tmp_path, 5)[1] == 1
    assert train(tmp_path) == expected


def test_evaluation_sums_the_terms():
    """With the coefficients of now: after one update twice those before."""
    network = terms.Net()
    growing = {name: lambda updates, at=value: at * (1 + updates) for name, value in terms.COEFFICIENTS.items()}
    step = step_of(network, size=1, coefficients=growing)
    step(*map(Tensor, DATA[1]))
    model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"loss"})
    found = model.eval(GeneratorDataset(DATA[:1], ["x", "y"], shuffle=False), dataset_sink_mode=False)["loss"]
    doubled = {name: 2 * value for name, value in terms.COEFFICIENTS.items()}
    assert found == pytest.approx(terms.loss_of(terms.oracle(network, DATA[:1])[1], doubled), rel=1e-5)


def test_what_a_step_cannot_do_is_rejected():
    with pytest.raises(ValueError, match="'coefficients' must be None unless"):
        step_of(terms.Net(), weight=None)
