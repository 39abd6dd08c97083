"""The public API equals its documentation."""

from __future__ import annotations

import ast
import inspect
from collections import namedtuple
from pathlib import Path

import pytest
from mindspore import nn

import model_zoo
import ms_accum
from ms_accum import _check

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = ms_accum.__all__
# Functions on the host, for which no platform is named.
ON_THE_HOST = (
    "ramp_up",
    "split_batch",
    "updates_per_epoch",
)
# Users do not construct these; their fields are documented one by one.
RECORDS = ("Group", "MicroBatch", "UpdateRecord", "Verification")
# Exceptions; users do not construct them.
ERRORS = ("CheckpointError", "Stopped")

# Names, order, kinds and defaults. Up to the `*` they are those of the tutorials' programs.
SIGNATURES = {
    ms_accum.Accumulator: (
        "(optimizer, accumulate_step, clip_norm=None, *, reduction='sum', network=None, group='auto', "
        "sync_every_micro_batch=False, loss_scale=None, nonfinite='skip_window', ema=None, compile=True)"
    ),
    ms_accum.Accumulator.__call__: "(self, grads, weight=None)",
    ms_accum.AccumulatedTrainStep: (
        "(network, optimizer, gradient_accumulation_steps=4, *, clip_norm=None, reduction='mean', weight=None, "
        "coefficients=None, check='first', group='auto', sync_every_micro_batch=False, loss_scale=None, "
        "nonfinite='skip_window', ema=None, compile=True)"
    ),
    ms_accum.AccumulatedTrainStep.construct: "(self, *columns)",
    ms_accum.CoupledLoss: "(loss_fn, columns=1)",
    ms_accum.Terms: "(weight, coefficients=None, *, group=None)",
    ms_accum.Terms.scale: "(self, losses, factors, counts)",
    ms_accum.Terms.factors: "(self, window, updates=0)",
    ms_accum.CountedDropout: "(p=0.5, *, seed=0, layer=0)",
    ms_accum.CountedDropout.construct: "(self, x)",
    ms_accum.batch_to_group_norm: "(network, groups=32)",
    ms_accum.freeze_batch_norm: "(network)",
    ms_accum.replace_dropout: "(network, seed=None)",
    ms_accum.FlushTail: "()",
    ms_accum.SaveStates: "(checkpointer, step, dataset)",
    ms_accum.ResumableLoop: "(checkpointer, network, accumulator)",
    ms_accum.ResumableLoop.after_micro_batch: "(self, epoch, batches)",
    ms_accum.TrainForwardBackward: (
        "(network, optimizer, grad_sum, sens=1.0, *, weight_sum=None, group='auto', sync_every_micro_batch=False, "
        "loss_scale=None, nonfinite='skip_window', compile=True)"
    ),
    ms_accum.TrainForwardBackward.construct: "(self, *inputs, weight=None)",
    ms_accum.TrainOptim: (
        "(optimizer, grad_sum, *, weight_sum=None, clip_norm=None, group='auto', sync_every_micro_batch=False, "
        "loss_scale=None, nonfinite='skip_window', ema=None, compile=True)"
    ),
    ms_accum.TrainOptim.construct: "(self, figures=None, divides=True)",
    ms_accum.ZeroOptimizer: "(make, parameters, *, group='auto')",
    ms_accum.TrainClear: "(grad_sum, zeros=None, *, weight_sum=None, nonfinite='skip_window', compile=True)",
    ms_accum.TrainClear.construct: "(self, finite=False)",
    ms_accum.GradientAccumulation: (
        "(network, loss_fn, optimizer, *, reduction='mean', tail='flush', clip_norm=None, weight=None, "
        "coefficients=None, check='first', group='auto', sync_every_micro_batch=False, scheduler=None, "
        "loss_scale=None, nonfinite='skip_window', ema=None, compile=True)"
    ),
    ms_accum.GradientAccumulation.train_process: (
        "(self, epoch, train_dataset, mini_steps=None, *, micro_batch_size=None, report=None, callbacks=None, "
        "valid_dataset=None, metrics=None, eval_every=None, initial_epoch=0, max_updates=None, "
        "ckpt_path='gradient_accumulation.ckpt', checkpointer=None)"
    ),
    ms_accum.GradientAccumulation.planned_updates: "(self, epoch, train_dataset, mini_steps=None)",
    ms_accum.GradientAccumulation.flush: "(self)",
    ms_accum.GradientAccumulation.clear: "(self)",
    ms_accum.UpdateRecord: (
        "(epoch, step, update, loss, lr, grad_norm, samples, seconds, skipped, overflow=False, bad=(), "
        "terms=mappingproxy({}))"
    ),
    ms_accum.MicroBatch: "(micro_batch_size, mini_steps, trials)",
    ms_accum.Checkpointer: (
        "(folder, *, every=None, minutes=None, keep=1, score=None, resume=None, config=None, "
        "allow_config_change=False, stop=None, notes=None, at_end=None)"
    ),
    ms_accum.Ema: "(decay, warm_up=0)",
    ms_accum.Verification: "(ok, diagnosis, table)",
    ms_accum.verify: (
        "(network, loss_fn, batch, gradient_accumulation_steps, *, reduction='mean', weight=None, coefficients=None, "
        "rtol=0.001, compile=True)"
    ),
    ms_accum.ramp_up: "(first, last, samples, *, micro_batch_size)",
    ms_accum.evaluate: "(network, dataset, *, compile=True)",
    ms_accum.find_micro_batch_size: "(trial, effective_batch, *, memory_budget=None)",
    ms_accum.scale_learning_rate: "(lr, base_batch, batch, rule='linear')",
    ms_accum.split_batch: "(batch, micro_batch_size)",
    ms_accum.updates_per_epoch: "(micro_batches, mini_steps, tail='flush', *, epoch=None)",
    model_zoo.GPT: "(vocab_size, context=64, width=64, heads=4, layers=2, *, tie_weights=False)",
    model_zoo.LeNet5: "(num_class=10, num_channel=1)",
    model_zoo.MLP: "(num_class=10)",
    model_zoo.ResNet18: "(num_class=10)",
    model_zoo.SmallResNet: "(num_class=10, norm='none')",
    model_zoo.create_dataset: (
        "(data_path=None, batch_size=32, repeat_size=1, num_parallel_workers=1, *, usage=None, image_size=32, "
        "shuffle=None, seed=None, drop_remainder=False, num_shards=1, shard_id=0, dataset=None)"
    ),
}


def signature_of(function):
    """Return a signature without its types, which are documentation."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def sections_missing(documented, expected):
    docstring = inspect.getdoc(documented) or ""
    return [section for section in expected if f"\n{section}:\n" not in docstring]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES.items(), ids=[f.__qualname__ for f in SIGNATURES])
def test_signature(function, expected):
    assert signature_of(function) == expected


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in (*RECORDS, *ERRORS)])
def test_docstring_has_its_sections(name):
    documented = getattr(ms_accum, name)
    expected = ["Examples"] if name in ON_THE_HOST else ["Supported Platforms", "Examples"]
    expected += ["Args"] if inspect.signature(documented).parameters else []
    assert sections_missing(documented, expected) == []


def test_missing_docstring_section_is_detected():
    def documented(x):
        """Do it.

        Args:
            x (int): in passing, Examples: are not this.
        """

    assert sections_missing(documented, ["Args", "Examples"]) == ["Examples"]
    assert signature_of(documented) == "(x)"


@pytest.mark.parametrize("name", RECORDS)
def test_record_fields_are_documented(name):
    kind = getattr(ms_accum, name)
    (record,) = ast.parse(inspect.getsource(kind)).body
    pairs = zip(record.body[1::2], record.body[2::2])
    documented = [field.target.id for field, text in pairs if isinstance(getattr(text, "value", None), ast.Constant)]
    assert tuple(documented) == kind._fields
    assert not any(getattr(kind, field).__doc__.startswith("Alias for field") for field in kind._fields)
    assert ast.get_docstring(record)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in (*ON_THE_HOST, *RECORDS, *ERRORS)])
def test_untested_platforms_are_not_claimed(name):
    docstring = inspect.getdoc(getattr(ms_accum, name))
    assert "\nSupported Platforms:\n    ``CPU`` (``Ascend`` and ``GPU`` not run here)\n" in docstring


def test_record_without_source_is_unchanged():
    made = namedtuple("made", ["field"])
    assert _check.documented(made) is made and made.field.__doc__ == "Alias for field number 0"


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
