"""Are ranks with different settings rejected, and do ranks with uneven shards train together?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim
from mindspore.parallel.auto_parallel import AutoParallel

import ranks as program
import ranks_agreement
from ms_accum import GradientAccumulation, Group, ZeroOptimizer, total
from ms_accum.network.optimizers import rates_of
from ms_accum.ranks import agreement
from ms_accum.ranks import group as collectives
from ms_accum.ranks.zero import ELEMENTWISE
from ms_accum.training.loop import trained_parameters

SAME = "all ranks must have the same"
DRIVER, STEP, RUN = "'GradientAccumulation'", "'AccumulatedTrainStep'", "'train_process'"
ERRORS = {
    "clip_norm": f"For {DRIVER}, {SAME} 'clip_norm', but got 1.0 on rank 0, None on rank 1",
    "rate": f"For {DRIVER}, {SAME} 'learning_rate' of the optimizer, but got 0.1 on rank 0, 0.2 on rank 1",
    "order": f"For {DRIVER}, {SAME} parameter 0 of the optimizer, but got '1.weight' (5, 6) Float32 on rank 0,",
    "loss": f"For {DRIVER}, {SAME} 'loss_fn', but got SoftmaxCrossEntropyWithLogits on rank 0, CrossEntropyLoss on",
    "frozen": f"For {DRIVER}, {SAME} untrained Parameter 0 of the network, but got '4.weight' (4, 10) Float32 on rank",
    "checkpointer": f"For {RUN}, {SAME} 'checkpointer', but got one on rank 0, None on rank 1",
    "growing": f"For {RUN}, {SAME} 'mini_steps', but got {{'0': 1, '4': 4}} on rank 0, {{'0': 1, '2': 2, '3': 3",
    "way": f"{SAME} way to train, but got GradientAccumulation on rank 0, Accumulator on rank 1",
    "forward": f"For 'TrainForwardBackward', {SAME} 'sens', but got 2.0 on rank 0, 4.0 on rank 1",
    "accumulator steps": f"For 'Accumulator', {SAME} 'accumulate_step', but got 2 on rank 0, 3 on rank 1",
    "step": f"For {STEP}, {SAME} 'reduction', but got mean on rank 0, sum on rank 1",
}


@pytest.fixture(scope="module")
def results(job):
    """The results of each rank."""
    return [rank["agreement"] for rank in job[0]]


@pytest.mark.parametrize("name", ERRORS)
def test_different_settings_are_rejected_on_all_ranks(results, name):
    for rank in results:
        assert rank["settings"]["equal"] is None
        message = rank["settings"][name]
        assert message.startswith("RuntimeError: ") and ERRORS[name] in message and "\n" not in message


@pytest.mark.parametrize("way", ["driver", "loop"])
def test_different_states_to_resume_from_are_rejected(results, way):
    for rank in results:
        message = rank["folders"][way]
        assert f"{SAME} state to resume from, but got one after" in message
        assert ("None on rank 1" in message) == (way == "driver")


@pytest.mark.parametrize("way", ["driver", "accumulator", "model"])
def test_changed_rate_of_one_rank_is_detected_within_an_epoch(results, way):
    for rank in results:
        message, updates = rank["drifted"][f"{way} rate"]
        assert "have drifted apart: 'learning_rate' of the optimizer is 0.5 on rank 0, 0.05 on rank 1" in message
        assert updates == (4 if way == "accumulator" else 2)


def test_changed_weights_of_one_rank_are_detected(results):
    ranks = " and ".join(f"rank {rank}" for rank in range(1, len(results)))
    for rank in results:
        errors = {name: error for name, error in rank["drifted"].items() if name.endswith("weights")}
        assert len(errors) == (3 if len(results) > 2 else 1)
        assert all(f"the weights of {ranks} are no longer those of rank 0" in message for message, _ in errors.values())


def test_weights_with_rounding_differences_are_accepted(results):
    assert all(rank["drifted"]["rounding"] == [None, 6] for rank in results)


# Loops of ranks with other numbers of micro-batches


def windows_of(ranks, name):
    """Return the micro-batches of each window of an epoch, as (rank, number), of all ranks."""
    shards = ranks_agreement.SHARDS[name][:ranks]
    starts = range(0, max(shards), ranks_agreement.N)  # all have equally many full windows
    return [
        [(rank, n) for rank, size in enumerate(shards) for n in range(start, min(size, start + ranks_agreement.N))]
        for start in starts
    ]


def expected_of(ranks, name, *, sums=False):
    """Return the weight, the average, the updates and the last norm, by definition: x is the gradient of a row."""
    weight, average, updates, norm = 0.0, 0.0, 0, 0.0
    for window in windows_of(ranks, name) * 2:
        terms = [(ranks_agreement.rows(*micro_batch), ranks_agreement.value(*micro_batch)) for micro_batch in window]
        gradient = sum(value for _, value in terms)
        if not sums:
            gradient = sum(rows * value for rows, value in terms) / sum(rows for rows, _ in terms)
        weight -= 0.01 * gradient
        updates, norm = updates + 1, gradient * np.sqrt(2)
        average = weight if updates == 1 else (average + weight) / 2
    return weight, average, updates, norm


def test_rank_without_micro_batches_takes_part_in_the_last_window(results):
    weight, average, updates, norm = expected_of(len(results), "none", sums=True)
    for result in (rank["uneven"] for rank in results):
        assert result["weights"] == pytest.approx([weight] * 2, rel=1e-5)
        assert result["average"] == pytest.approx([average] * 2, rel=1e-5)
        assert result["counts"] == [updates, 0, 0, updates] and result["norm"] == pytest.approx(norm, rel=1e-5)
        assert not any(updated for _, updated in result["flushed"])
        # A scale of 8 that grows after every second update; closing exchanges neither count nor lower it.
        assert result["scale"] == [8.0 * 2 ** (updates // 2), 0]


def test_ranks_take_part_in_the_windows_of_a_step(results):
    weight, _, updates, _ = expected_of(len(results), "more windows")
    for rank in results:
        assert rank["stepped"] == [pytest.approx([weight] * 2, rel=1e-5), updates, 0]


def test_ranks_of_which_one_is_ahead_are_told(results):
    ahead = [3 - number for number in range(len(results))]
    windows, at = ", ".join(map(str, ahead)), ", ".join(f"epoch 2, batch {number}" for number in ahead)
    for rank in results:
        flush, loop = rank["apart"]
        assert f"all ranks must call it the same number of times, but they have ended {windows} windows." in flush
        assert f"all ranks must run the same number of micro-batches, but they are at {at}." in loop


def test_changed_window_size_of_one_rank_is_detected(results):
    assert all("drifted apart: 'accumulate_step' is 2 on rank 0, 3 on rank 1" in rank["resized"] for rank in results)


def test_loop_of_ranks_is_resumed(results):
    weight, _, updates, _ = expected_of(len(results), "equal")
    for rank in results:
        result = rank["loop resumed"]
        assert result["weights"] == pytest.approx([weight] * 2, rel=1e-5) and result["updates"] == updates
        assert result["begun"] == [[1, 0, 0], [1, 3, 1]]  # stopped at the end of the window


# A stop in Model, left out micro-batches, what is sent


def test_stop_of_one_rank_ends_the_epoch_on_all_ranks(results):
    assert all(rank["model"]["inside"][:3] == [None, 2, results[0]["model"]["inside"][2]] for rank in results)


def test_callback_that_evaluates_averages_does_not_change_training(results):
    expected = results[0]["model evaluated"]["nobody"]
    assert expected[0] is None
    for rank in results:
        assert rank["model evaluated"] == dict.fromkeys(rank["model evaluated"], expected)


def test_stopped_model_is_resumed(results, job):
    for rank, uninterrupted in zip(results, job[0]):
        error, updates, weights, begun = rank["model"]["resumed"]
        assert (error, updates, begun) == (None, 4, 1)
        assert uninterrupted["in model"]["trained"]["digest"] == weights


def test_micro_batches_left_out_on_another_rank_are_reported(results):
    line = "For 'train_process', 8 micro-batches were left out, because not finite: 8 on rank 1."
    assert [rank["left out"]["left out"] for rank in results] == [8] * len(results)
    assert [rank["left out"]["lines"] for rank in results] == [[line]] + [[]] * (len(results) - 1)
    assert {rank["left out"]["updates"] for rank in results} == {4}


# In one process


@pytest.mark.usefixtures("eager")
def test_wrong_counts_are_rejected():
    with pytest.raises(ValueError, match="^For 'total', 'counts' must be ints >= 0 and < 2\\*\\*63, but got"):
        total([3, 2**63], Group(0, 2))
    with pytest.raises(TypeError, match="'counts' must be ints >= 0 and < 2\\*\\*63, but got 0.5"):
        total([1, 0.5], None)
    assert total([True, np.int64(3), 2**63 - 1], None) == [1, 3, 2**63 - 1]


@pytest.mark.usefixtures("eager")
def test_stages_with_parts_of_gradients_are_rejected():
    network = program.network_of()
    group, stage = Group(0, 2), lambda gradients, norm: gradients
    optimizer = ZeroOptimizer(lambda parts: nn.SGD(parts, 0.1), network.trainable_params(), group=group)
    with pytest.raises(ValueError, match=r"'stages' must be \(\) with a ZeroOptimizer"):
        program.Accumulator(optimizer, 2, group=group, stages=[stage])


@pytest.mark.usefixtures("eager")
def test_many_parameters_are_sent_in_batches(monkeypatch):
    """The broadcast returns what was sent, so each parameter must keep its values."""
    monkeypatch.setattr(collectives, "_broadcast", lambda chunk: (Tensor(chunk.asnumpy() * 1),))
    monkeypatch.setattr(collectives, "_BATCH_BYTES", 100)
    arrays = [np.arange(size, dtype=np.float32) + size for size in (3, 0, 40, 1, 9)]
    parameters = [Parameter(Tensor(array)) for array in arrays if array.size]
    values = [parameter.asnumpy().copy() for parameter in parameters]
    collectives.broadcast(parameters, Group(0, 2))
    assert all((parameter.asnumpy() == array).all() for parameter, array in zip(parameters, values))


class Counting(nn.Momentum):
    """An optimizer whose `get_lr` advances its step, as MindSpore's did."""

    def get_lr(self):
        raise AssertionError("nothing of the optimizer is run")


@pytest.mark.usefixtures("eager")
def test_rates_are_read_without_running_the_optimizer():
    parameters = program.network_of().trainable_params()
    optimizer = Counting(parameters, nn.CosineDecayLR(0.1, 0.5, 7), 0.9)
    assert rates_of(optimizer) == {"'momentum'": "0.9", "'global_step'": "0"}
    groups = [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}]
    assert {**rates_of(nn.SGD(groups, 0.1))} == {
        "'learning_rate_group_0'": "0.2",
        "'learning_rate'": "0.1",
        "'momentum'": "0.0",
        "'global_step'": "0",
    }
    assert rates_of(optim.SGD(parameters, 0.3))["'learning_rate_group_0'"] == "0.3"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_sharded_state_has_the_names_and_shapes_of_the_unsharded(kind):
    def make(parameters):
        return kind(parameters, 0.1, 0.9) if kind is nn.Momentum else kind(parameters)

    network = program.network_of()
    plain = trained_parameters(network, make(network.trainable_params()))
    sharded = ZeroOptimizer(make, network.trainable_params(), group=Group(0, 2))
    state = trained_parameters(network, sharded)
    assert {name: tuple(parameter.shape) for name, parameter in state.items()} == {
        name: tuple(parameter.shape) for name, parameter in plain.items()
    }


@pytest.mark.usefixtures("eager")
def test_rank_of_which_one_weight_differs_has_drifted(monkeypatch):
    monkeypatch.setattr(agreement, "gather_numbers", lambda own, group: np.stack([own, own + [0.0, 0.1]]))
    parameters = [Parameter(Tensor([1.0], ms.float32)), Parameter(Tensor([2.0], ms.float32))]
    assert agreement._far_from_rank_0(parameters, Group(0, 2)) == [1]


@pytest.mark.usefixtures("eager")
def test_modes_in_which_mindspore_sums_by_itself_are_refused():
    def begin(network):
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        GradientAccumulation(network, nn.MSELoss(), optimizer, group=Group(0, 2))

    with pytest.raises(RuntimeError, match="^For 'GradientAccumulation', .* twice, .* with a network in AutoParallel"):
        begin(AutoParallel(nn.Dense(2, 2), "semi_auto"))
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        with pytest.raises(RuntimeError, match="parallel_mode='semi_auto_parallel'.* by 'window_factors'"):
            begin(nn.Dense(2, 2))
    finally:
        ms.reset_auto_parallel_context()


def test_ranks_that_read_the_same_rows_are_warned_of(at_end):
    (first, second), _ = at_end
    same, own = first["same rows"]
    assert len(same) == 1 and "all 2 ranks begin with the same rows, so each row counts 2 times" in same[0]
    assert own == [] and second["same rows"] == [[], []]
