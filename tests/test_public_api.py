"""The public API: the signatures that the tutorials' programs rely on, and what every docstring has."""

from __future__ import annotations

import inspect

import pytest
from mindspore import nn

import model_zoo
import ms_accum
from ms_accum.engine.config import DEFAULTS

pytestmark = pytest.mark.usefixtures("eager")
# What a program written for the tutorials may give by position; arguments after these are keywords.
TUTORIALS = {
    ms_accum.Accumulator: "optimizer, accumulate_step, clip_norm=None",
    ms_accum.Accumulator.__call__: "self, grads, weight=None",
    ms_accum.TrainForwardBackward: "network, optimizer, grad_sum, sens=1.0",
    ms_accum.TrainForwardBackward.construct: "self, *inputs",
    ms_accum.TrainOptim: "optimizer, grad_sum",
    ms_accum.TrainClear: "grad_sum, zeros=None",
    ms_accum.GradientAccumulation: "network, loss_fn, optimizer",
    ms_accum.GradientAccumulation.train_process: "self, epoch, train_dataset, mini_steps=None",
    ms_accum.AccumulatedTrainStep: "network, optimizer, gradient_accumulation_steps=4",
    model_zoo.LeNet5: "num_class=10, num_channel=1",
    model_zoo.MLP: "num_class=10",
    model_zoo.create_dataset: "data_path=None, batch_size=32, repeat_size=1, num_parallel_workers=1",
}
# Functions on the host, for which no platform is named, and what users do not construct.
ON_THE_HOST = ("Options", "ramp_up", "split_batch", "updates_per_epoch")
RECORDS, ERRORS = ("Group", "MicroBatch", "UpdateRecord", "Verification"), ("CheckpointError", "Stopped")


@pytest.mark.parametrize(("function", "expected"), TUTORIALS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_programs_of_the_tutorials_may_call_it(function, expected):
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
    ]
    assert ", ".join(map(str, parameters)) == expected


def test_docstrings_have_their_sections_and_claim_no_platform():
    for name in ms_accum.__all__:
        if name in (*RECORDS, *ERRORS):
            continue
        docstring = inspect.getdoc(getattr(ms_accum, name)) or ""
        assert "\nExamples:\n" in docstring, name
        assert "\nArgs:\n" in docstring or not inspect.signature(getattr(ms_accum, name)).parameters, name
        platforms = "\nSupported Platforms:\n    ``CPU`` (``Ascend`` and ``GPU`` not run here)\n"
        assert platforms in docstring or name in ON_THE_HOST, name


DOORS = (ms_accum.GradientAccumulation, ms_accum.AccumulatedTrainStep, ms_accum.Accumulator)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_options_are_in_signature_and_text_of_each_way_to_train(door):
    parameters = inspect.signature(door).parameters
    assert "options" not in parameters
    for name, default in DEFAULTS.items():
        assert parameters[name].default == default and f"\n        {name} (" in door.__doc__, name


def test_unknown_option_is_named_with_the_nearest():
    network = nn.Dense(2, 3)
    message = r"GradientAccumulation\(\) got an unexpected keyword argument 'clipnorm'. Did you mean 'clip_norm'\?"
    with pytest.raises(TypeError, match=message):
        ms_accum.GradientAccumulation(network, nn.MSELoss(), nn.SGD(network.trainable_params()), clipnorm=1)


def test_fields_of_records_are_documented():
    for name in RECORDS:
        kind = getattr(ms_accum, name)
        assert all(f"\n        {field} (" in kind.__doc__ for field in kind._fields), name


def test_repr_shows_settings():
    network = nn.Dense(2, 3)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    model = ms_accum.GradientAccumulation(network, nn.MSELoss(), optimizer, clip_norm=1)
    settings = "reduction='mean', tail='flush', clip_norm=1.0, optimizer='Momentum'"
    assert repr(model) == f"GradientAccumulation(Dense, {settings}, updates=0, skipped=0)"
    settings = "accumulate_step=4, reduction='sum', clip_norm=None"
    accumulator = ms_accum.Accumulator(optimizer, 4)
    assert repr(accumulator) == f"Accumulator(Momentum, {settings}, updates=0, skipped=0)"
    states = ms_accum.Checkpointer("states", minutes=5)
    assert repr(states) == "Checkpointer('states', every=None, minutes=5.0, keep=1, resume=None)"
