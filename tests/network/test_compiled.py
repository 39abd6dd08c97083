"""Networks are compiled in MindSpore's default mode, unless compile=False."""

from __future__ import annotations

import traceback

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.train import Model

from helpers import batches
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    FlushTail,
    GradientAccumulation,
    evaluate,
    native,
    verify,
)
from ms_accum.network.compiled import Compiled
from ways import Trained

PUBLIC = "GradientAccumulation"


class NotCompilable(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, 3)

    def construct(self, x):
        async def nothing():
            pass

        return self.dense(x)


class Raises(NotCompilable):
    def construct(self, x):
        raise ValueError("x is wrong")


def make_driver(network, **options):
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    return GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, check="off", **options)


def data(sizes=(8, 8, 8, 8)):
    return batches(np.random.RandomState(0), sizes)


def train(model, sizes=(8, 8, 8, 8), window=2, **options):
    model.train_process(1, data(sizes), window, report=(), ckpt_path=None, **options)


def own(compiles):
    """Return the names of the compiled graphs, without those of MindSpore's optimizers, which are always compiled."""
    return [name for name in compiles if "mindspore/nn/optim" not in name and "_UpdateOutside" not in name]


def test_nothing_is_compiled_with_compile_false(compiles):
    network = nn.Dense(6, 3)
    model = make_driver(network, compile=False)
    train(model, valid_dataset=data(), metrics={"acc"})
    train(model, window=1)
    assert own(compiles) == [] and model.updates == 6
    assert evaluate(network, data(), compile=False)[1] == 32 and own(compiles) == []
    assert verify(network, nn.CrossEntropyLoss(), data()[0], 2, compile=False).ok and own(compiles) == []


def test_evaluations_are_compiled_once(compiles):
    network = nn.Dense(6, 3)
    first = evaluate(network, data())
    number = len(compiles)
    assert number == 1 and evaluate(network, data()) == first and len(compiles) == number
    assert evaluate(network, data(), compile=False) == first


def test_evaluation_follows_the_weights():
    """A graph that kept the weights of its first run would give the same answer."""
    network = nn.Dense(6, 3)
    evaluate(network, data())
    network.weight.set_data(Tensor(np.zeros((3, 6)), ms.float32))
    network.bias.set_data(Tensor([0.0, 0.0, 9.0], ms.float32))
    labels = np.concatenate([label.asnumpy() for _, label in data()])
    assert evaluate(network, data()) == (int((labels == 2).sum()), len(labels))


def test_model_fit_is_compiled_once(compiles):
    network = nn.Dense(6, 3)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = AccumulatedTrainStep((network, nn.CrossEntropyLoss()), optimizer, 2)
    model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"acc"})
    columns = tuple(np.concatenate(column) for column in zip(*numpy_data()))
    source = ms.dataset.NumpySlicesDataset(columns, ["data", "label"]).batch(8)
    model.fit(1, source, source, callbacks=FlushTail())
    number = len(compiles)
    model.fit(1, source, source, callbacks=FlushTail())
    assert number > 0 and len(compiles) == number and step.updates == 4


def numpy_data():
    return [tuple(column.asnumpy() for column in columns) for columns in data()]


def test_plain_loop_compiles_one_graph(compiles):
    """Rows and gradients are inputs: each constant would compile another one."""
    network = nn.Dense(6, 3)
    loss_fn, optimizer = nn.CrossEntropyLoss(), nn.SGD(network.trainable_params(), 0.1)
    accumulator = Accumulator(optimizer, 2, reduction="mean")
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(network(x), y), None, optimizer.parameters)
    for x, y in data((8, 7, 6, 5, 4)):
        _, grads = grad_fn(x, y)
        accumulator(grads, x.shape[0])
    assert compiles == ["_Add"] and (accumulator.updates, accumulator.micro_batches) == (2, 1)
    assert accumulator.flush() and accumulator.updates == 3


class Doubles(Compiled):
    def __init__(self, part):
        super().__init__("Doubles", True, part)
        self.part = part

    def construct(self, x, switch, factor):
        y = self.part(x) * 2 if switch[0] else x
        return y if factor is None else y * factor


def test_graph_is_looked_up_once_for_inputs_of_a_kind(monkeypatch):
    """And again if the kind, the mode of a layer or a hook has changed, or MindSpore has dropped the graphs."""
    looked_up, compile = [], nn.Cell.compile
    monkeypatch.setattr(nn.Cell, "compile", lambda self, *a, **k: looked_up.append(1) or compile(self, *a, **k))
    part = nn.Dropout(p=0.5)
    cell, two, rows = Doubles(part), Tensor(2.0, ms.float32), Tensor(np.ones((4, 3)), ms.float32)
    calls = [
        lambda: cell(rows, (True,), None),
        lambda: cell(rows[:2], (True,), None),
        lambda: cell(rows, (False,), None),
        lambda: cell(rows, (True,), two),
        lambda: cell(rows.astype(ms.float16), (True,), None),
    ]
    for number, call in enumerate(calls, 1):
        results = [float(call().asnumpy().max()) for _ in range(3)]
        assert results == [1.0 if number == 3 else 4.0 if number == 4 else 2.0] * 3 and len(looked_up) == number
    for _ in range(3):
        assert float(cell(rows, (True,), factor=two).asnumpy().max()) == 4.0 and len(looked_up) == 5
    part.set_train()
    assert {float(each) for each in calls[0]().asnumpy().ravel()} <= {0.0, 4.0} and len(looked_up) == 6
    part.set_train(False)
    assert float(calls[1]().asnumpy().max()) == 2.0 and len(looked_up) == 6
    ms.ms_memory_recycle()
    assert [float(call().asnumpy().max()) for call in calls[:2]] == [2.0, 2.0] and len(looked_up) == 8


@pytest.mark.parametrize("make", [make_driver, lambda network, **options: evaluate(network, data(), **options)])
def test_compile_false_in_graph_mode_is_rejected(make):
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(ValueError, match=r"'compile' must be True in graph mode, .* Remove ms\.set_context"):
        make(nn.Dense(6, 3), compile=False)


def test_compile_must_be_bool():
    with pytest.raises(TypeError, match="'compile' must be a bool"):
        make_driver(nn.Dense(6, 3), compile=None)


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_network_that_can_not_be_compiled_is_one_line(mode):
    ms.set_context(mode=mode)
    expected = f"^For '{PUBLIC}', MindSpore can't compile the network.*: Unsupported statement .* Use compile=False .*$"
    with pytest.raises(RuntimeError, match=expected):
        train(make_driver(NotCompilable()))
    with pytest.raises(RuntimeError, match="^For 'evaluate', MindSpore can't compile"):
        evaluate(NotCompilable(), data())


def test_each_reason_comes_with_the_way_out():
    message = rf"^For '{PUBLIC}', MindSpore can't compile .*: x is wrong\. Use compile=False"
    with pytest.raises(RuntimeError, match=message):
        train(make_driver(Raises()))


@pytest.mark.parametrize("debug", ["", "0", "1"])
def test_error_of_the_compiler_is_left_out_unless_wanted(debug, tmp_path, monkeypatch):
    """And the file that it writes into the current folder."""
    monkeypatch.setenv("MS_ACCUM_DEBUG", debug)
    with pytest.raises(RuntimeError, match="x is wrong") as caught:
        train(make_driver(Raises()))
    shown = "".join(traceback.format_exception(None, caught.value, caught.value.__traceback__))
    assert ("Call Stack" in shown) == (tmp_path / "rank_0/om/analyze_fail.ir").exists() == (debug == "1")
    assert bool(list(tmp_path.iterdir())) == (debug == "1")


def test_files_that_were_there_are_kept(tmp_path):
    for name in ("analyze_fail.ir", "mine"):
        path = tmp_path / "rank_0/om" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with pytest.raises(RuntimeError, match="x is wrong"):
            train(make_driver(Raises()))
        assert list(path.parent.iterdir()) == [path]
        path.unlink()


@pytest.fixture
def set_recursion_limit():
    """MindSpore compiles at most so many calls inside each other, 1,000 by default."""
    yield ms.set_recursion_limit
    ms.set_recursion_limit(1000)


class Sum(nn.Cell):
    """The mean of x times the sum of many Parameters: the gradient of each is the mean of x."""

    def __init__(self, number):
        super().__init__()
        weights = [Parameter(Tensor([0.0], ms.float32), name=f"w{place}") for place in range(number)]
        self.weights = ms.ParameterTuple(weights)

    def construct(self, x):
        return ops.mean(x * ops.addn(self.weights))


def unchanged(gradients, norm):
    return gradients


@pytest.mark.parametrize("stages", [(), (unchanged,)])
def test_calls_inside_each_other_do_not_grow_with_the_parameters(set_recursion_limit, stages):
    set_recursion_limit(80)
    x = Tensor([[1.0], [3.0]], ms.float32)
    network = Sum(90)
    first, rest = network.trainable_params()[:45], network.trainable_params()[45:]
    optimizer = nn.SGD([{"params": first, "lr": 1.0}, {"params": rest, "lr": 2.0}], 1.0)
    model = GradientAccumulation(network, None, optimizer, stages=stages, check="off")
    model.train_process(1, [(x,), (x,)], 2, report=(), ckpt_path=None)
    accumulator = Accumulator(optimizer, 1, reduction="mean", stages=stages)
    grad_fn = ms.value_and_grad(network, None, optimizer.parameters)

    @ms.jit
    def step(x):
        loss, grads = grad_fn(x)
        return ops.depend(loss, accumulator(grads, x.shape[0]))

    step(x)
    assert [float(weight.asnumpy()[0]) for weight in (*first, *rest)] == [-4.0] * 45 + [-8.0] * 45


def test_too_many_calls_inside_each_other_come_with_the_way_out(set_recursion_limit):
    set_recursion_limit(20)
    with pytest.raises(
        RuntimeError, match=r"can't compile .*: Exceed function call depth .*set_recursion_limit\(10000\)"
    ):
        train(make_driver(nn.Dense(6, 3)))


def test_error_of_an_operator_is_not_called_one_of_the_compiler():
    with pytest.raises(ValueError, match="^For 'train_process', MindSpore rejects .*: For 'MatMul' the input dim"):
        train(make_driver(nn.Dense(5, 3)))


class MeanProduct(nn.Cell):
    """The mean of w * x: the gradient is x / 2."""

    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(Tensor(np.zeros(2), ms.float32), name="w")

    def construct(self, x):
        return ops.mean(x * self.w)


def halving(parameters):
    return nn.Momentum(parameters, 1.0, 0.5)


ONES = (Tensor(np.ones((2, 2)), ms.float32),)


@pytest.mark.parametrize("native_too", [True, False])
@pytest.mark.parametrize(("way", "window"), [("driver", 2), ("step", 2), ("loop", 2), ("loop", 3)])
def test_weights_and_moments_loaded_later_are_trained(way, window, native_too, monkeypatch):
    """MindSpore's operators update in a branch, which keeps the storage of its first run."""
    if not native_too:
        monkeypatch.setenv(native.SWITCH, "0")
    trained = Trained(way, MeanProduct(), window, make=halving).train([ONES] * 2)
    assert trained.weights.tolist() == [-0.5, -0.5]
    loaded = {parameter.name: parameter.asnumpy() for parameter in trained.optimizer.get_parameters()}
    loaded |= {"w": np.array([10, 20], np.float32), "moments.w": np.array([1, 3], np.float32)}
    ms.load_param_into_net(trained.optimizer, {name: Parameter(array) for name, array in loaded.items()})
    assert trained.train([ONES] * 2).weights.tolist() == [10 - (1 / 2 + 0.5), 20 - (3 / 2 + 0.5)]


def test_hooks_of_the_optimizer_run_as_python_with_compile_false():
    trained, calls = Trained("driver", MeanProduct(), compile=False), []

    def doubled(cell, inputs):
        calls.append(len(inputs[0]))
        return (tuple(gradient * 2 for gradient in inputs[0]),)

    trained.train([ONES] * 2)
    trained.optimizer.register_forward_pre_hook(doubled)
    assert trained.train([ONES] * 2).weights.tolist() == [-1.5, -1.5] and calls == [1]  # the gradient is 0.5


# Limits, as docs/limits.md states them


@pytest.mark.parametrize("compile", [True, False])
def test_experimental_optimizer_that_ran_outside_a_graph_needs_compile_false(compile):
    network = nn.Dense(6, 3)
    optimizer = optim.Adam(network.trainable_params(), 0.1)
    optimizer(tuple(ops.ones_like(parameter) for parameter in optimizer.parameters))
    model = GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, check="off", compile=compile)
    if compile:
        with pytest.raises(RuntimeError, match="compile the network, its loss, the optimizer or a stage.*compile=F"):
            train(model)
    else:
        train(model)
        assert model.updates == 2
