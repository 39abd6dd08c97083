"""Do several processes train like a single one?"""

from __future__ import annotations

import os
from itertools import zip_longest

import mindspore as ms
import numpy as np
import pytest

import ranks as program
from helpers import Recorder, batches, cross_entropy, joined
from ms_accum import (
    Accumulator,
    Checkpointer,
    CheckpointError,
    GradientAccumulation,
    own_group,
    total,
)
from ms_accum.ranks.group import group_of
from ms_accum.training.data import Data, Position
from reference import miss
from runs import Run, numbers


def same(at_end, name):
    """Return the result of rank 0, after checking that all ranks have the same."""
    results = [rank[name] for rank in at_end[0]]
    assert all(result["digest"] == results[0]["digest"] for result in results)
    return results[0]


def check_close(result, expected):
    arrays = [np.array(array, np.float32) for array in result["parameters"]]
    assert miss(arrays, expected, rtol=1e-5, atol=1e-7) <= 1


@pytest.mark.usefixtures("eager")
def test_ranks_train_like_one_process(at_end):
    result = same(at_end, "mean 3")
    model = program.driver_of(program.network_of(), clip_norm=0.5)
    records = program.train(model, program.all_data(program.ROWS), program.N * len(at_end[0]))
    check_close(result, [parameter.asnumpy() for parameter in model._step.optimizer.get_parameters()])
    # Those of rank 0, which alone reports: of all rows, with the loss over all ranks.
    assert [record[:3] for record in result["records"]] == [list(record[:3]) for record in records]
    assert [record[6] for record in result["records"]] == [record.samples for record in records]
    for column in (3, 4, 5):  # loss, lr, norm
        expected = [record[column] for record in records]
        assert [record[column] for record in result["records"]] == pytest.approx(expected, rel=1e-5)
    assert all(not rank["mean 3"]["records"] for rank in at_end[0][1:])


@pytest.mark.usefixtures("eager")
def test_each_rank_fills_its_part_of_a_window_by_weight(at_end):
    """Also after a stop, where the ranks had read 4 and 6 micro-batches."""
    result, windows = same(at_end, "by weight"), []
    for rank, rows in enumerate(program.OWN_ROWS):
        data, windows_of_rank = batches(np.random.RandomState(rank), rows), [[]]
        for each in data:
            windows_of_rank[-1].append(each)
            if sum(len(x) for x, _ in windows_of_rank[-1]) >= program.WEIGHT / 2:
                windows_of_rank.append([])
        windows.append(windows_of_rank)
    together = [sum(each, []) for each in zip_longest(*windows, fillvalue=[])]
    sizes = [len(each) for each in together if each]
    model = program.driver_of(program.network_of())
    records = program.train(model, sum(together, []), lambda updates: sizes[updates % len(sizes)])
    check_close(result, [parameter.asnumpy() for parameter in model._step.optimizer.get_parameters()])
    assert result["samples"] == [record.samples for record in records]
    assert result["updates"] == [1, 2 * len(sizes), 2 * len(sizes)] and result["resumed"] == result["digest"]


def test_gradients_that_were_summed_already_are_warned_of(at_end):
    for own, averaged in (rank["reduced"] for rank in at_end[0]):
        assert own == [] and len(averaged) == 1
        assert "all ranks add the same gradients" in averaged[0] and "nn.DistributedGradReducer" in averaged[0]


def test_all_ranks_start_from_the_weights_of_rank_0(at_end):
    results = [rank["own weights"] for rank in at_end[0]]
    for cell in (0, 1):
        before, after = zip(*(result[cell] for result in results))
        assert len(set(before)) == len(results) and set(after) == {before[0]}


def test_flush_updates_all_ranks(at_end):
    results = [rank["flushed"] for rank in at_end[0]]
    assert [result["held"] for result in results] == [1] + [0] * (len(results) - 1)
    ranks = len(results)
    sums = [ranks * 2**40 + sum(range(ranks)), 0, ranks * (2**24 - 1)]
    assert all(result["updated"] == [True, False] and result["sums"] == sums for result in results)
    same(at_end, "flushed")


def check_windows(at_end, name, windows):
    """Check for the training of one process with a batch for each window of all ranks."""
    result = same(at_end, name)
    model = program.driver_of(program.network_of(), clip_norm=0.5)
    records = program.train(model, [joined(window) for window in windows], 1)
    check_close(result, [parameter.asnumpy() for parameter in model._step.optimizer.parameters])
    assert [record[6] for record in result["records"]] == [record.samples for record in records]
    for column in (3, 5):  # loss, norm
        expected = [record[column] for record in records]
        assert [record[column] for record in result["records"]] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("eager")
def test_rank_without_data_takes_part_until_no_rank_has_any(at_end):
    """Rank 0 has no micro-batch in the last window; the sizes of data sets need not be known."""
    shards = [program.uneven_data(rank) for rank in range(len(at_end[0]))]
    starts = range(0, max(program.SHARDS), program.N)
    assert starts[-1] >= len(shards[0])
    check_windows(at_end, "uneven", [[part for own in shards for part in own[at : at + program.N]] for at in starts])


@pytest.mark.usefixtures("eager")
def test_ranks_split_batches_into_other_numbers_of_micro_batches(at_end):
    by_rank = [program.batches_to_split(rank) for rank in range(len(at_end[0]))]
    check_windows(at_end, "split", [[batch for batch in window if batch] for window in zip_longest(*by_rank)])


def test_ranks_with_other_numbers_of_windows_resume_from_each(at_end):
    results = [rank["uneven and resumed"] for rank in at_end[0]]
    assert results == [results[0]] * len(results)
    assert results[0] == [results[0][0]] * 6 and results[0][0][0] == 6


def test_ranks_resume_with_a_tail_that_is_carried(at_end):
    for rank in at_end[0]:
        uninterrupted, stopped, resumed, refused = rank["carried"]
        assert resumed == uninterrupted and [uninterrupted[0], stopped[0]] == [4, 1]
        assert "all ranks must have the same number of batches in an epoch, but got 4 on rank 0, 3 on rank 1" in refused


def test_ranks_stop_together_and_resume(at_end):
    results = [rank["resumed"] for rank in at_end[0]]
    uninterrupted, resumed = results[0]["digests"]
    assert uninterrupted == resumed
    assert all(result["updates"] == [2, 6] and result["digests"] == results[0]["digests"] for result in results)
    assert "state-00000001.safetensors" in results[0]["said"]


@pytest.mark.usefixtures("eager")
def test_one_process_resumes_from_a_state_of_several_ranks(at_end):
    ranks, folder = len(at_end[0]), at_end[1]
    state = folder / "states" / "state-00000001.safetensors"
    data = program.Batches(program.all_data([8] * 8 * ranks))
    model = program.driver_of(program.network_of(seed=9))
    rejected = Checkpointer(folder / "one", resume=state)
    with pytest.raises(CheckpointError, match=f"ranks was {ranks} and is 1"):
        program.train(model, data, 3 * ranks, checkpointer=rejected)
    allowed = Checkpointer(folder / "one", resume=state, allow_config_change=True)
    program.train(model, data, 3 * ranks, checkpointer=allowed)
    check_close(at_end[0][0]["resumed"], [parameter.asnumpy() for parameter in model._step.optimizer.get_parameters()])


# In one process


def test_group_of_a_process_without_launcher_is_single():
    assert own_group() == (0, 1, None)
    assert total([3, 4], own_group()) == total([3, 4], None) == [3, 4]
    assert group_of("test", own_group()) is group_of("test", "auto") is None


@pytest.mark.parametrize("variable", ["RANK_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_process_of_several_without_a_group_is_rejected(variable, monkeypatch):
    """A rank table or mpirun started it; such processes would write the same files."""
    for size in ("1", "", "x"):
        monkeypatch.setenv(variable, size)
        assert own_group() == (0, 1, None)
    monkeypatch.setenv(variable, "2")
    with pytest.raises(RuntimeError, match=f"one of 2 .{variable}. must join .* msrun.*unset {variable}"):
        own_group()
    assert group_of("test", None) is None  # the user says so


@pytest.mark.parametrize("make", [lambda o: Accumulator(o, 2, group=2), lambda o: driver(o, group="all")])
def test_invalid_group_is_rejected(make):
    network = program.network_of()
    optimizer = ms.nn.SGD(network.trainable_params(), 0.1)
    with pytest.raises(TypeError, match="'group' must be 'auto', None or what 'own_group' returns"):
        make(optimizer)


def driver(optimizer, **options):
    return GradientAccumulation(program.network_of(), cross_entropy(), optimizer, **options)


def test_position_for_other_ranks_needs_the_batch_size():
    position = Position(batches=3, rows=24, size=8, total=9, ranks=2)
    assert Data(program.Batches(numbers([8] * 9)), 2).convert(position) is position
    assert Data(program.Batches(numbers([8] * 18))).convert(position).batches == 6
    assert Data(program.Batches(numbers([16] * 9))).convert(position).batches == 3
    assert Data(program.Batches(numbers([8] * 6)), 3).convert(position).batches == 2
    with pytest.raises(
        ValueError, match="must provide the size of its batches with 'get_batch_size', because 2 .* and 1 resume"
    ):
        Data(numbers([8] * 18)).convert(position)


def test_other_ranks_do_not_report_or_save(monkeypatch):
    """This process takes itself for rank 1."""
    monkeypatch.setattr("ms_accum.driver.is_first", lambda group: False)
    monkeypatch.setattr("ms_accum.training.run.is_first", lambda group: False)
    recorder = Recorder()
    run = Run()
    run.model.train_process(1, numbers([8] * 3), 3, report=(recorder,), ckpt_path="model.ckpt")
    assert not recorder.records and not os.path.exists("model.ckpt")
