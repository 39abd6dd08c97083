"""Does the size of windows change at their ends, and only there?"""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import nn

from helpers import Recorder, Slope, micro_batch, run, slope_driver
from ms_accum import Accumulator, Checkpointer, ramp_up
from ms_accum.training.sizes import Sizes

STEPS = {0: 1, 2: 3, 3: 2, 5: 4}
DATA = [micro_batch(float(number)) for number in range(1, 17)]


def by_function(update):
    return [1, 1, 3, 2, 2, 4][min(int(update), 5)]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("tail", ["flush", "drop", "carry"])
@pytest.mark.parametrize("count", [3, 5, 16])
def test_planned_windows_equal_executed_windows(epochs, tail, count):
    model, recorder = slope_driver(tail=tail), Recorder()
    model.train_process(epochs, DATA[:count], STEPS, report=recorder, ckpt_path=None)
    assert recorder.planned == len(recorder.records)


@pytest.mark.usefixtures("eager")
def test_windows_larger_than_epoch_with_drop_are_rejected():
    """From the second epoch on nothing would be learned, and nothing said."""
    with pytest.raises(ValueError, match="No window would ever fill; use a smaller one, or tail='flush'"):
        slope_driver(tail="drop").train_process(3, DATA[:4], {0: 2, 1: 6}, report=(), ckpt_path=None)


@pytest.mark.usefixtures("eager")
def test_resuming_with_other_sizes_is_rejected(tmp_path):
    run(slope_driver(), DATA, STEPS, checkpointer=Checkpointer(tmp_path))
    with pytest.raises(ValueError, match="mini_steps"):
        run(slope_driver(), DATA, {0: 1, 2: 4}, epochs=2, checkpointer=Checkpointer(tmp_path, resume="auto"))


@pytest.mark.usefixtures("eager")
def test_settings_and_constant_size():
    sizes = Sizes("Accumulator", "accumulate_step", STEPS)
    assert sizes.settings == {"0": 1, "2": 3, "3": 2, "5": 4} and sizes.constant is None
    assert Sizes("x", "y", by_function).settings == "by_function"
    assert Sizes("x", "y", {0: 4}).constant == Sizes("x", "y", np.int64(4)).constant == 4


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("sizes", "error"),
    [({}, ValueError), ({1: 2}, ValueError), ({0: 0}, ValueError), ({0: 2.5}, TypeError), ("4", TypeError)],
)
def test_invalid_sizes_are_rejected(sizes, error):
    with pytest.raises(error, match="'accumulate_step' must be"):
        Accumulator(nn.SGD([Slope().w], 1.0), sizes)


@pytest.mark.usefixtures("eager")
def test_function_that_returns_invalid_size_is_rejected():
    with pytest.raises(ValueError, match="'mini_steps' must be an int >= 1, but got 0"):
        slope_driver().train_process(1, DATA, lambda update: 2 - update, report=(), ckpt_path=None)


@pytest.mark.usefixtures("eager")
def test_changing_sizes_can_not_be_set():
    accumulator = Accumulator(nn.SGD([Slope().w], 1.0), STEPS)
    with pytest.raises(ValueError, match="'accumulate_step' can't be set: it is defined by the update"):
        accumulator.accumulate_step = 3


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("first", "last", "samples", "rows"), [(1, 4, 1000, 50), (2, 9, 100, 8), (3, 3, 10, 1), (1, 2, 1, 64)]
)
def test_ramp_up_is_linear_in_samples(first, last, samples, rows):
    sizes = ramp_up(first, last, samples, micro_batch_size=rows)
    seen, update = 0, 0
    size_of = Sizes("x", "y", sizes).size_after
    while seen < samples:
        assert size_of(update) == first + int((last - first) * seen / samples)
        seen += size_of(update) * rows
        update += 1
    assert size_of(update) == last and list(sizes) == sorted(sizes)


@pytest.mark.usefixtures("eager")
def test_ramp_up_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="For 'ramp_up', 'last' must be >= 4, the size of the first window, but got 2"):
        ramp_up(4, 2, 100, micro_batch_size=8)
    with pytest.raises(ValueError, match="'samples' must be an int >= 1"):
        ramp_up(1, 2, 0, micro_batch_size=8)
