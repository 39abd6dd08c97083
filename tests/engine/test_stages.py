"""Are the user's stages called once per window, with its gradient, and does what they return count?"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from helpers import Slope, micro_batch, run, seen_gradient, slope_driver
from ms_accum import AccumulatedTrainStep, Checkpointer, CheckpointError, FlushTail, GradientAccumulation, Stopped
from runs import stop_after
from ways import WAYS, Trained

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "stages.md"
ROWS = [(1.0, -3.0, 2), (3.0, 1.0, 2), (40.0, 60.0, 3)]  # two windows, whose gradients are 2 and -1, and 40 and 60


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The stages of the page, as a module, because MindSpore compiles from files."""
    source = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    path = tmp_path_factory.mktemp("page") / "stages_of_the_page.py"
    path.write_text(source, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        yield importlib.import_module(path.stem)


class Layers(nn.Cell):
    """The mean over rows of a * x0 + b * x1: two parameters, whose gradients are the means of the columns."""

    def __init__(self):
        super().__init__()
        self.a = Parameter(Tensor([0.0], ms.float32), name="a")
        self.b = Parameter(Tensor([0.0], ms.float32), name="b")

    def construct(self, x):
        return ops.mean(ops.sum(x * ops.cat((self.a, self.b)), 1))

    @property
    def w(self):
        return ops.cat((self.a, self.b))


def trained(way, stages, rows=ROWS, **options):
    made = Trained(way, Layers(), stages=stages, **options)
    return made.train([micro_batch(a, b, rows=count) for a, b, count in rows])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
def test_clip_by_layer_after_the_global_norm(way, page):
    """Each layer has one element, which is clipped to 1."""
    made = trained(way, [page.clip_by_layer], clip_norm=20.0)
    assert made.weights == pytest.approx([-2.0, 0.0])
    assert trained(way, [page.clip_by_layer], clip_norm=0.5).weights == pytest.approx(
        [-0.5 * (2 / 5**0.5 + 4 / 52**0.5), -0.5 * (-1 / 5**0.5 + 6 / 52**0.5)]
    )


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
def test_layer_norms_and_order(way, page):
    before, after = page.LayerNorms(2), page.LayerNorms(2)
    trained(way, [before, page.clip_by_value, after])
    assert before.norms.asnumpy() == pytest.approx([40.0, 60.0])
    assert after.norms.asnumpy() == pytest.approx([0.1, 0.1])


def infinite(gradients, norm):
    return [each / 0.0 for each in gradients]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_a_stage_spoils_are_skipped(way):
    made = trained(way, [infinite])
    assert made.updates == 0 and made.weights.tolist() == [0.0, 0.0]


def too_few(gradients, norm):
    return gradients[:1]


def other_shape(gradients, norm):
    return [ops.cat((each, each)) for each in gradients]


def no_tuple(gradients, norm):
    return gradients[0]


def keeps_two(gradients, norm):
    return gradients, ops.stack((norm > 0, norm > 1))


def fails(gradients, norm):
    raise ValueError("the user's own words")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (too_few, r"stages\[0\] \(too_few\)' must have one tensor for each of the optimizer's 2 parameters, but got 1"),
        (
            other_shape,
            r"stages\[0\] \(other_shape\)' must have the shapes of the optimizer's parameters, but",
        ),
        (no_tuple, r"stages\[0\] \(no_tuple\) must be a tuple of Tensors"),
        (keeps_two, r"'keep' of stage keeps_two must be one bool"),
        (fails, "the user's own words"),
    ],
)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
def test_what_a_stage_returns_is_checked(way, stage, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as caught:
        trained(way, [stage])
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(("stage", "message"), [(too_few, "but got 1. Return one for each"), (fails, "own words")])
def test_what_a_stage_returns_is_checked_in_graphs(stage, message):
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        trained("driver", [stage])
    assert "\n" not in str(caught.value).strip()


class Plain:
    def __call__(self, gradients, norm):
        return gradients


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
def test_stages_must_be_compilable(way):
    with pytest.raises(TypeError, match="'stages' must be a list of functions or objects, but got"):
        Trained(way, Layers(), stages=too_few)
    with pytest.raises(TypeError, match="'stages' must be functions, Cells, or objects of a class with @ms.jit_class"):
        Trained(way, Layers(), stages=[Plain().__call__])


@pytest.mark.usefixtures("eager")
def test_optimizer_that_divides_by_a_scale_of_its_own_is_rejected():
    with pytest.raises(ValueError, match=r"'stages' must be \(\) with an optimizer that has a loss_scale"):
        Trained("driver", Layers(), make=lambda trained: nn.SGD(trained, 1.0, loss_scale=64.0), stages=[too_few])


@pytest.mark.usefixtures("eager")
def test_window_that_a_stage_skips_is_no_error_in_model(page):
    network = Layers()
    options = {"stages": [page.SkipSpikes()], "nonfinite": "raise", "check": "off"}
    step = AccumulatedTrainStep(network, nn.SGD(network.trainable_params(), 1.0), 1, **options)
    data = GeneratorDataset(
        [(np.full((1, 2), value, np.float32),) for value in (1.0, 100.0, 1.0)], ["x"], shuffle=False
    )
    Model(step).train(1, data, callbacks=FlushTail(), dataset_sink_mode=False)
    assert (step.updates, step.skipped) == (2, 1)


@ms.jit_class
class Calls:
    def __init__(self):
        self.number = Parameter(Tensor(0, ms.int32))


@ms.jit_class
class Decay:
    """Adds a tenth of the weights, which it holds, and counts its calls in another object."""

    def __init__(self, weights):
        self.weights, self.calls = tuple(weights), Calls()

    def decayed(self, gradients, norm):
        ops.assign_add(self.calls.number, Tensor(1, ms.int32))
        return tuple([gradient + 0.1 * weight for gradient, weight in zip(gradients, self.weights)])


def test_stage_that_holds_the_weights():
    network = Slope()
    decay = Decay([network.w])
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), stages=[decay.decayed], check="off")
    model.train_process(1, [micro_batch(1.0)] * 4, 2, report=(), ckpt_path=None)
    assert network.w.asnumpy() == pytest.approx(-1.0 - (1.0 - 0.1)) and int(decay.calls.number) == 2
    assert network.trainable_params() == [network.w]
    network.w.set_data(Tensor([5.0], ms.float32))
    model.train_process(1, [micro_batch(1.0)] * 2, 2, report=(), ckpt_path=None)
    assert network.w.asnumpy() == pytest.approx(5.0 - 1.5)
    assert sorted(model._step.config.state) == ["stages[0] decayed.calls.number", "stages[0] decayed.windows_skipped"]


@pytest.mark.parametrize("stop", [8, 10])
def test_what_a_stage_remembers_is_resumed(stop, page, tmp_path):
    def model():
        network = Slope()
        spikes, norms, decay = page.SkipSpikes(), page.LayerNorms(1), Decay([Tensor([0.0])])
        stages = [spikes, norms, decay.decayed]
        made = GradientAccumulation(network, None, nn.SGD([network.w], 0.1), stages=stages, check="off")
        return made, [network.w, spikes.average, norms.norms, decay.calls.number]

    def train(made, states=None):
        data = [micro_batch(value) for value in (1.0, 2.0, 3.0, 400.0, 2.0, 1.0, 5.0)]
        made.train_process(2, data, 2, report=(), ckpt_path=None, checkpointer=states)

    whole, expected = model()
    train(whole)
    assert expected[0].asnumpy() == pytest.approx(-0.1 * 2 * (1.5 + 1.5 + 5.0))  # the second of four windows is skipped
    with pytest.raises(Stopped):
        train(model()[0], Checkpointer(tmp_path, stop=stop_after(stop)))
    resumed, left = model()
    train(resumed, Checkpointer(tmp_path, resume="auto"))
    assert whole.skipped == resumed.skipped > 0
    assert [each.asnumpy().tobytes() for each in left] == [each.asnumpy().tobytes() for each in expected]


class Average(nn.Cell):
    """Averages gradients in Parameters that a Cell does not count among its own."""

    def __init__(self):
        super().__init__()
        self.averages = tuple(Parameter(Tensor([0.0], ms.float32), name=f"average{n}") for n in range(1))
        self.calls = Calls()

    def construct(self, gradients, norm):
        ops.assign_add(self.calls.number, Tensor(1, ms.int32))
        return [ops.assign(each, 0.5 * each + gradient) for each, gradient in zip(self.averages, gradients)]


@pytest.mark.parametrize("jit", ["0", "1"])
def test_what_a_cell_remembers_in_tuples_and_objects_is_saved(jit, monkeypatch):
    monkeypatch.setenv("MS_JIT", jit)
    network, average = Slope(), Average()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), stages=[average], check="off")
    model.train_process(1, [micro_batch(1.0)] * 4, 2, report=(), ckpt_path=None)
    assert network.w.asnumpy() == pytest.approx(-(1.0 + 1.5))
    names = ["stages[0] Average.averages.0", "stages[0] Average.calls.number", "stages[0] Average.windows_skipped"]
    assert sorted(model._step.config.state) == names
    average.averages[0].set_data(Tensor([8.0], ms.float32))
    model.train_process(1, [micro_batch(1.0)] * 2, 2, report=(), ckpt_path=None)
    assert network.w.asnumpy() == pytest.approx(-(1.0 + 1.5) - 5.0) and int(average.calls.number) == 3


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("size", [1, 2])
def test_window_that_a_stage_spoils_is_not_called_infinite_in_float16(size):
    """What is cast to the type of the parameters is judged once more, but not if the stage has skipped it."""
    network = Slope(dtype=ms.float16)
    scale, optimizer = amp.DynamicLossScaler(64.0, 2, 1000), nn.Momentum([network.w], 0.01, 0.0)
    options = {"stages": [infinite], "loss_scale": scale, "nonfinite": "raise", "check": "off"}
    model = GradientAccumulation(network, None, optimizer, **options)
    model.train_process(1, [micro_batch(1.0)] * 4, size, report=(), ckpt_path=None)
    assert (model.updates, model.skipped, model.overflows, model.loss_scale) == (0, 4 // size, 0, 64.0)


@pytest.mark.usefixtures("eager")
def test_other_stages_do_not_resume(tmp_path, page):
    def train(stages, states):
        network = Slope()
        made = GradientAccumulation(network, None, nn.SGD([network.w], 0.1), stages=stages, check="off")
        made.train_process(1, [micro_batch(1.0)] * 4, 2, report=(), ckpt_path=None, checkpointer=states)

    with pytest.raises(Stopped):
        train([page.SkipSpikes()], Checkpointer(tmp_path, stop=stop_after(1)))
    with pytest.raises(ValueError, match="stages"):
        train([], Checkpointer(tmp_path, resume="auto"))


def unchanged(gradients, norm):
    return gradients


def test_gradients_are_clipped_once_before_a_stage():
    model = slope_driver(clip_norm=1.0, stages=[unchanged])
    run(model, [micro_batch(3.0), micro_batch(5.0)], 2)
    assert seen_gradient(model) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.usefixtures("eager")
def test_what_another_stage_remembers_is_not_taken_over(tmp_path):
    """Of two stages the first is left out: the second begins anew at its place."""

    def run_with(stages, **options):
        network = Slope()
        model = GradientAccumulation(network, None, nn.SGD([network.w], 1.0), stages=stages, check="off")
        states = Checkpointer(tmp_path, resume="auto", **options)
        data = [micro_batch(1.0)] * 4
        model.train_process(2 if options else 1, data, 2, report=(), ckpt_path=None, checkpointer=states)

    run_with([Decay([Slope().w]).decayed, Average()])
    average = Average()
    with pytest.raises(CheckpointError, match=r"stages\[0\] Average was None and is Average"):
        run_with([average])
    run_with([average], allow_config_change=True)
    assert int(average.calls.number) == 2
