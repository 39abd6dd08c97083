"""When is a window divided by its weights, and is the mean exact either way?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from helpers import Slope, micro_batch, run, seen_gradient, slope_driver
from ms_accum import GradientAccumulation, TrainOptim
from ms_accum.training.window import _Accumulating, _AddAndEnd

WHOLE, DIVIDED = "whole", "divided"


@pytest.fixture
def ended(monkeypatch):
    """List by what each window was divided: the sum of its weights, in the unit that makes it 1 for a full window."""
    names = []
    optim, add = TrainOptim.__call__, _AddAndEnd.__call__

    def record_end(self, figures, divides):
        names.append(DIVIDED if divides else WHOLE)
        return optim(self, figures, divides)

    def record_last(self, weights, *inputs):
        if float(weights.asnumpy()) >= 0:
            names.append(WHOLE if weights.asnumpy() == 1 else DIVIDED)
        return add(self, weights, *inputs)

    monkeypatch.setattr(TrainOptim, "__call__", record_end)
    monkeypatch.setattr(_AddAndEnd, "__call__", record_last)
    return names


def end_windows_with(monkeypatch, weights):
    """End all windows with this sum of the weights; None: with the one in the graph."""
    end = _Accumulating.end
    monkeypatch.setattr(_Accumulating, "end", lambda self, figures, _: end(self, figures, weights))


def mean_of(values, window, rows=4, **options):
    """Return the gradient of the last window of a driver, which is the mean of the values in it."""
    model = slope_driver(**options)
    run(model, [micro_batch(value, rows=rows) for value in values], window)
    return seen_gradient(model)


@pytest.mark.parametrize("window", [3, 7, *(pytest.param(window, marks=pytest.mark.slow) for window in (2, 5, 6))])
def test_equal_micro_batches_need_no_division(window, rng, ended):
    values = rng.randint(1, 100, window)
    assert mean_of(values, window) == pytest.approx(values.mean(), rel=1e-7)
    assert ended == [WHOLE]


@pytest.mark.parametrize(("window", "count"), [(7, 3), (194, 193), pytest.param(5, 4, marks=pytest.mark.slow)])
def test_tail_is_divided_by_exact_sum_of_weights(window, count, rng, ended):
    values = rng.randint(1, 100, count)
    assert mean_of(values, window) == pytest.approx(values.mean(), rel=5e-7)
    assert ended == [DIVIDED]


def test_mutant_with_sum_of_rounded_weights_is_detected(rng, monkeypatch):
    """That of 193 times 1/194 misses by 2.8e-6 in float32."""
    end_windows_with(monkeypatch, None)
    values = rng.randint(1, 100, 193)
    assert mean_of(values, 194) != pytest.approx(values.mean(), rel=1e-6)


def test_mutant_without_division_is_detected(monkeypatch):
    end_windows_with(monkeypatch, 1)
    assert mean_of([1, 2, 3], 4) == pytest.approx(1.5)  # not 2


def test_full_window_of_uneven_micro_batches_needs_no_division(ended):
    model = slope_driver()
    run(model, [micro_batch(1.0, rows=3), micro_batch(2.0, rows=2), micro_batch(3.0, rows=4)], 3)  # 9 rows, as 3 x 3
    assert ended == [WHOLE] and seen_gradient(model) == pytest.approx(19 / 9, rel=1e-7)
    run(model, [micro_batch(1.0, rows=3), micro_batch(2.0, rows=2)], 3)
    assert ended == [WHOLE, DIVIDED] and seen_gradient(model) == pytest.approx(19 / 9 + 7 / 5, rel=1e-7)


def test_unit_changes_with_window_size(ended):
    model = slope_driver()
    for window in (2, 3):
        run(model, [micro_batch(1.0)] * 6, window)
    assert ended == [WHOLE] * 5


@pytest.mark.slow
def test_clipping_and_nonfinite_gradient_without_division(ended):
    assert mean_of([3, 5], 2, clip_norm=2.0) == pytest.approx(2.0)
    model = slope_driver()
    run(model, [micro_batch(value) for value in (1.0, np.nan, 2.0, 4.0)], 2)
    assert ended == [WHOLE] * 3 and model.skipped == 1 and seen_gradient(model) == 3.0


class Half(Slope):
    """Its gradient goes through float16."""

    def construct(self, x):
        return super().construct(ops.cast(x, ms.float16))


@pytest.mark.parametrize(
    "options", [{"loss_scale": 4.0}, {"nonfinite": "skip_micro"}, {"half": True}], ids=["scaled", "leaves out", "half"]
)
def test_windows_that_are_always_divided(options, ended):
    """A gradient in float16 would be lost sooner, and what is left out is known to the graph alone."""
    network = Half().to_float(ms.float16) if options.pop("half", False) else Slope()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), **options)
    run(model, [(Tensor([[value]], ms.float32),) for value in (1.0, 2.0, 3.0)], 3)
    assert seen_gradient(model) == pytest.approx(2.0, rel=1e-3) and ended == [DIVIDED]
