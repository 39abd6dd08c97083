"""What can be done to a tuple of gradients inside a graph?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from helpers import values
from ms_accum.network import tree
from reference import global_norm

SHAPES = ((300, 200), (7,), ())


def arrays(rng, scale=1.0):
    return [np.asarray(rng.randn(*shape) * scale, np.float32) for shape in SHAPES]


def tensors(arrays, dtype=ms.float32):
    return tuple(Tensor(array, dtype) for array in arrays)


def totals(arrays):
    return tuple(
        Parameter(Tensor(array), name=f"total{number}", requires_grad=False) for number, array in enumerate(arrays)
    )


def in_a_graph(function, total):
    @ms.jit
    def call(*arguments):
        return function(total, *arguments)

    return call


@pytest.mark.parametrize("poison", [1.0, np.nan, np.inf])
def test_clear(poison):
    total = totals([np.full(shape, poison, np.float32) for shape in SHAPES])
    in_a_graph(tree.clear, total)()
    assert all(np.array_equal(value, np.zeros(shape)) for value, shape in zip(values(total), SHAPES))


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("elements", [4, 2**17])
def test_accumulators_change_in_place(elements, compiled, mode):
    """Small or large, in a graph or outside. There MindSpore's in-place methods leave them unchanged."""
    ms.set_context(mode=mode)
    total = (Parameter(Tensor(np.ones(elements), ms.float32), name="t", requires_grad=False),)
    gradients = (Tensor(np.full(elements, 3.0), ms.float32),)

    def work(factor, *gradients):
        tree.add(total, gradients)
        tree.multiply_in_place(total, factor)
        tree.add_weighted(total, gradients, factor)
        return True

    def clear():
        tree.clear(total)
        return True

    def cancel():
        tree.clear(total, True)
        return True

    if compiled:
        work, clear, cancel = ms.jit(work), ms.jit(clear), ms.jit(cancel)
    for empty in (clear, cancel):
        work(Tensor(0.5, ms.float32), *gradients)
        assert set(total[0].asnumpy()) == {3.5 if empty is clear else 3.0}
        empty()
        assert set(total[0].asnumpy()) == {0.0}


@pytest.mark.parametrize("devices", [tree._IN_PLACE_ON, ("Ascend",)], ids=["kernels in place", "neutral operators"])
def test_device_without_in_place_kernels_gets_same_results(devices, rng, monkeypatch):
    """Which of them a graph gets is decided by its device; the neutral ones run here, too."""
    monkeypatch.setattr(tree, "_IN_PLACE_ON", devices)
    assert tree.has_in_place() == (tree._WRITES and "CPU" in devices)
    initial = [*arrays(rng), np.full(3, np.nan, np.float32)]
    total = totals(initial)
    in_a_graph(tree.multiply_in_place, total)(Tensor(0.25, ms.float32))
    assert all(np.array_equal(value, array / 4, equal_nan=True) for value, array in zip(values(total), initial))
    in_a_graph(tree.clear, total)()
    assert not any(value.any() for value in values(total))


LONG = tree._LONGEST_ROW


@pytest.mark.parametrize("shape", [(), (2, LONG), (2, LONG + 1), (LONG + 1,), (3, 2, LONG)], ids=str)
def test_global_norm_of_other_shapes(shape, rng):
    gradient = np.abs(rng.randn(*shape)) + 1
    norm = ms.jit(tree.global_norm)((Tensor(gradient, ms.float32),))
    assert float(norm.asnumpy()) == pytest.approx(np.linalg.norm(gradient), rel=1e-6)


def test_global_norm_on_other_devices(monkeypatch, rng):
    monkeypatch.setattr(tree, "_on_cpu", ops.constexpr(lambda: False))
    gradients = [rng.randn(*shape) for shape in (*SHAPES, (2, 3, 4))]
    norm = ms.jit(tree.global_norm)(tensors(gradients))
    assert float(norm.asnumpy()) == pytest.approx(global_norm(gradients), rel=1e-6)


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (0, 5), (2, 6)])
def test_columns_slice_partial_ranges_only(start, stop):
    row = Tensor(np.arange(6, dtype=np.float32))
    rows = Tensor(np.arange(12, dtype=np.float32).reshape(2, 6))
    for tensor in (row, rows):
        columns = tree.columns(tensor, start, stop)
        assert np.array_equal(columns.asnumpy(), tensor.asnumpy()[..., start:stop])
        assert (columns is tensor) == (stop - start == 6)
