"""Is a loop of the user's own, around an Accumulator, resumed exactly?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from helpers import batches, compiled_step, cross_entropy, rows_of
from ms_accum import Accumulator, Checkpointer, CheckpointError, Ema, ResumableLoop, Stopped
from ms_accum.saving import training_state
from runs import stop_after

ROWS = [8, 8, 5, 8, 8, 8, 5]


def batches_of(epoch):
    """The order is a function of the epoch."""
    return batches(np.random.RandomState(epoch), ROWS)


class UserProgram:
    """A user's program."""

    def __init__(self, window=3, make=nn.Adam, **options):
        options = {"reduction": "mean", **options}
        ms.set_seed(1)
        self.network, loss_fn = nn.SequentialCell(nn.Flatten(), nn.Dense(6, 3)), cross_entropy()
        self.optimizer = make(self.network.trainable_params(), 0.1)
        self.accumulator = Accumulator(self.optimizer, window, clip_norm=0.5, **options)
        weight = rows_of if options["reduction"] == "mean" else lambda x, y: None
        self.step = compiled_step(self.network, loss_fn, self.accumulator, self.optimizer, weight)

    def train(self, folder, epochs=2, **options):
        options = {"resume": "auto", **options}
        with ResumableLoop(Checkpointer(folder, **options), self.network, self.accumulator) as loop:
            self.resumed_at = (loop.epoch, loop.batches)
            for epoch in range(loop.epoch, epochs + 1):
                for number, (x, y) in enumerate(batches_of(epoch), 1):
                    if number > loop.batches:
                        self.step(x, y)
                        loop.after_micro_batch(epoch, number)
                self.accumulator.flush()
                loop.after_micro_batch(epoch + 1, 0)
        return self


@pytest.mark.usefixtures("eager")
def test_states_are_saved_on_the_update_clock(tmp_path):
    program = UserProgram().train(tmp_path, every=2, keep=9, resume=None)
    saved = [training_state.read(str(path)).metadata for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [facts["updates"] for facts in saved] == [2, 4, 6] and program.accumulator.updates == 6
    assert [facts["at"]["batches"] for facts in saved] == [6, 3, 0]


@pytest.mark.usefixtures("eager")
def test_nothing_is_saved_after_error(tmp_path):
    """The Parameters may be ahead of the position."""
    program = UserProgram()
    with pytest.raises(KeyError), ResumableLoop(Checkpointer(tmp_path), program.network, program.accumulator):
        raise KeyError("mine")
    assert list(tmp_path.glob("*.safetensors")) == []
    program.train(tmp_path)  # the folder is free again


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 4}, "accumulate_step was 3 and is 4"),
        ({"make": nn.SGD}, "optimizer was Adam and is SGD"),
    ],
)
def test_state_of_run_with_other_settings_is_rejected(tmp_path, settings, message):
    with pytest.raises(Stopped):
        UserProgram().train(tmp_path, stop=stop_after(4))
    with pytest.raises(CheckpointError, match=message):
        UserProgram(**settings).train(tmp_path)


OPTIONAL = {
    "ema": lambda: {"ema": Ema(0.5)},
    "stages": lambda: {"stages": [lambda gradients, norm: gradients]},
    "reduction": lambda: {"reduction": "sum"},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", OPTIONAL)
def test_what_is_optional_comes_and_goes_with_allow_config_change(name, tmp_path):
    """An average, a stage that counts the windows it skips, or a sum of weights is in one of the two runs only."""
    UserProgram().train(tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match=f"belongs to a run with other settings: {name}.* was "):
        UserProgram(**OPTIONAL[name]()).train(tmp_path)
    UserProgram(**OPTIONAL[name]()).train(tmp_path, allow_config_change=True)
    program = UserProgram().train(tmp_path, epochs=3, allow_config_change=True)
    assert program.resumed_at == (3, 0) and program.accumulator.updates == 9


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{"loss_scale": 8.0}, {"nonfinite": "skip_micro"}, {"reduction": "sum"}], ids=str)
def test_sums_of_an_open_window_are_not_those_of_other_settings(options, tmp_path):
    """They would be divided by another scale, or by weights that were not counted."""
    with pytest.raises(Stopped):
        UserProgram().train(tmp_path, stop=stop_after(4))
    name = next(iter(options))
    with pytest.raises(CheckpointError, match=f"1 micro-batch of an open window, whose sums do not fit: {name} was"):
        UserProgram(**options).train(tmp_path, allow_config_change=True)


@pytest.mark.usefixtures("eager")
def test_open_window_rejected_by_windows_of_1(tmp_path):
    with pytest.raises(Stopped):
        UserProgram().train(tmp_path, stop=stop_after(4))
    with pytest.raises(CheckpointError, match="holds 1 micro-batch of an open window, which windows of 1"):
        UserProgram(window=1).train(tmp_path, allow_config_change=True)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("folder", "network"), "'checkpointer' must be a Checkpointer, but got str"),
        (("states", "function"), "'network' must be a Cell, but got function"),
    ],
)
def test_arguments_of_wrong_type_are_rejected(tmp_path, arguments, message):
    program = UserProgram()
    values = {"folder": "states", "states": Checkpointer(tmp_path), "network": program.network, "function": batches_of}
    with pytest.raises(TypeError, match=message):
        ResumableLoop(*(values[name] for name in arguments), program.accumulator)


@pytest.mark.parametrize(
    ("position", "error", "message"),
    [
        ((0, 3), ValueError, "'epoch' must be an int >= 1, but got 0."),
        ((1, -1), ValueError, "'batches' must be an int >= 0, but got -1."),
        ((1.0, 0), TypeError, "'epoch' must be an int >= 1, but got 1.0 (float)."),
        ((1, True), TypeError, "'batches' must be an int >= 0, but got True (bool)."),
    ],
)
@pytest.mark.usefixtures("eager")
def test_invalid_position_rejected_by_after_micro_batch(tmp_path, position, error, message):
    """And not at the save, which may come hours later."""
    program = UserProgram()
    with ResumableLoop(Checkpointer(tmp_path), program.network, program.accumulator) as loop:
        with pytest.raises(error) as raised:
            loop.after_micro_batch(*position)
        assert str(raised.value) == f"For 'after_micro_batch', {message}"
        loop.after_micro_batch(np.int64(1), np.int64(0))
