"""Faults to plant in ms_accum, and in the programs. For each, the named tests must fail.

    python tests/faults.py                # all, each in a copy of the tree; prints which test found which fault
    python tests/faults.py NAME [NAME]    # some of them

A fault is a piece of the source and what stands there instead. `tests/test_faults.py` checks that each piece is still
there, once, and that the tests exist.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ON_RANKS = "test_any_window.py::test_random_programs_on_two_ranks_match_the_simulator"
IN_GROUPS = "test_any_window.py::test_random_programs_in_two_groups_match_the_simulator"


def programs(way: str) -> str:
    """Return the test of the random programs of a way."""
    return f"test_any_window.py::test_random_programs_match_the_simulator[eager-{way}]"


def compiled(way: str) -> str:
    """Return the test of its compiled ones."""
    return f"test_any_window.py::test_compiled_random_programs_match_the_simulator[{way}]"


class Fault(NamedTuple):
    """A change of one piece of the source."""

    file: str
    old: str
    new: str
    tests: str
    """The tests that find it, below tests/: one, or several with blanks between."""

    def path_in(self, root: Path) -> Path:
        """Return the path of the file in a tree: `programs/` and `model_zoo/` are beside the library."""
        return root / self.file if self.file.startswith(("programs/", "model_zoo/")) else root / "ms_accum" / self.file


FAULTS = {
    # The weight of a micro-batch
    "the weight enters a float16 backward": Fault(
        "engine/config.py",
        "is None and not self.half and self",
        "is None and self",
        "test_driver.py::test_weights_do_not_enter_a_float16_backward",
    ),
    "a weight counts twice": Fault(
        "engine/window.py", "weight is None or self.weight_in_loss else", "weight is None else", programs("driver")
    ),
    # Where a window ends
    "one late": Fault("training/sizes.py", "return amount >= window", "return amount > window", programs("driver")),
    "one early": Fault(
        "training/sizes.py",
        "return amount >= window",
        "return amount >= window - (window > 2)",
        programs("driver"),
    ),
    "the first micro-batch of a window asks for no new size": Fault(
        "training/windows.py",
        "                    size, amount = None, 0\n",
        "                    amount = 0\n",
        programs("driver"),
    ),
    "sizes by update begin one late": Fault(
        "training/sizes.py", "if first <= update][-1]", "if first < update or not first][-1]", programs("driver")
    ),
    "sizes by update begin one late in a graph": Fault(
        "accumulator.py",
        "ms.float32) >= self.firsts",
        "ms.float32) > self.firsts - (self.firsts == 0)",
        programs("accumulator"),
    ),
    "a tail is dropped": Fault(
        "training/windows.py",
        'self._waiting and self._tail == "flush"',
        'self._waiting and self._tail == "x"',
        programs("driver"),
    ),
    "a dropped tail stays": Fault(
        "training/windows.py",
        '        elif self._tail == "drop":\n            self._waiting.clear()\n',
        "",
        programs("driver"),
    ),
    "max_updates one more": Fault(
        "training/run.py",
        "self._step.updates >= self._plan.max",
        "self._step.updates > self._plan.max",
        "training/test_max_updates.py::test_skipped_windows_do_not_count[eager]",
    ),
    # The gradient of a window
    "no division": Fault(
        "engine/boundary.py",
        'end["divisor"] = end["weight"]\n',
        'end["divisor"] = Tensor(1.0, ms.float32)\n',
        programs("driver"),
    ),
    "the last weight divides": Fault(
        "engine/window.py",
        "ops.assign_add(self.weight_sum[0], ops.cast",
        "ops.assign(self.weight_sum[0], ops.cast",
        programs("driver"),
    ),
    "weights are not multiplied": Fault(
        "engine/window.py",
        "factor = kept_factor if weight is None or self.weight_in_loss else weight",
        "factor = kept_factor",
        programs("driver"),
    ),
    "rows count alike": Fault(
        "loss/objective.py",
        "return amount_of(self._owner, self._weight, micro_batch)",
        "return 1.0",
        programs("driver"),
    ),
    "a window of one with weight 0 updates": Fault(
        "engine/boundary.py", 'norm = norm * (end["weight"] / end["weight"])', "pass", programs("step")
    ),
    "clipping to the half": Fault(
        "engine/boundary.py", 'end["norm"] / self.norm', '2 * end["norm"] / self.norm', programs("driver")
    ),
    "clipping of the sum": Fault(
        "engine/boundary.py", 'norm = norm / end["divisor"]\n', "norm = norm * 1.0\n", programs("driver")
    ),
    "clipping lengthens": Fault(
        "engine/boundary.py", 'ops.maximum(end["norm"] / self', 'ops.minimum(end["norm"] / self', programs("driver")
    ),
    "unscaled twice": Fault(
        "engine/boundary.py",
        'end["divisor"] = scale if divisor',
        'scale = scale * scale\n        end["divisor"] = scale if divisor',
        programs("driver"),
    ),
    "not unscaled": Fault("engine/boundary.py", "if scale.is_used else []", "if False else []", programs("driver")),
    "the norm is scaled by the optimizer's scale": Fault(
        "engine/boundary.py", " / self.own_scale", "", "engine/test_cells.py::test_optimizer_loss_scale_cancels_sens"
    ),
    "nothing is skipped": Fault(
        "engine/boundary.py",
        'end["keep"] = ops.isfinite(norm)\n',
        'end["keep"] = ops.isfinite(norm - norm + 1.0) == ops.isfinite(norm)\n',
        programs("driver"),
    ),
    "NaN in float16 parameters updates": Fault(
        "engine/boundary.py",
        "if narrow else",
        "if False else",
        "test_driver.py::test_overflow_in_parameter_dtype_skips_window[eager]",
    ),
    "no clear by MindSpore's kernels": Fault(
        "network/tree.py",
        "return _map(_clear_finite if finite else _clear, total)",
        "return total",
        programs("driver"),
    ),
    "cleared by multiplying": Fault(
        "network/tree.py",
        "_multiply_no_nan(Tensor(0.0, ms.float32), total)",
        "total * 0.0",
        "network/test_tree.py::test_clear[nan]",
    ),
    "a cleared window keeps its weight": Fault(
        "engine/window.py",
        "cleared = (*cleared, ops.assign(weight_sum[0], Tensor(0.0, ms.float32)))",
        "pass",
        programs("driver"),
    ),
    "clear() of the driver clears nothing": Fault(
        "training/runners.py",
        "        self._clear()\n",
        "        pass\n",
        "test_driver.py::test_interrupted_micro_batch_leaves_no_state[eager-ValueError]",
    ),
    "gradients in another order": Fault(
        "engine/cells.py",
        "None, config.optimizer.parameters,",
        "None, tuple(reversed(config.optimizer.parameters)),",
        programs("driver"),
    ),
    # Policies
    "a left-out micro-batch keeps its weight": Fault(
        "engine/window.py", "None if weight is None else weight * kept_factor, kept", "weight, kept", programs("step")
    ),
    "weight 0 is left out": Fault(
        "engine/nonfinite.py",
        "        if weight is not None:\n            counts",
        "        if False:\n            counts",
        "engine/test_nonfinite.py::test_micro_batch_of_weight_0_is_not_left_out[eager]",
    ),
    "ten in a row do not end the run": Fault(
        "training/callbacks.py",
        ">= SKIPPED_IN_A_ROW",
        "> SKIPPED_IN_A_ROW",
        "engine/test_loss_scale.py::test_overflows_do_not_end_run_and_are_counted_separately[eager]",
    ),
    "skipped windows count as updates": Fault(
        "training/step.py", "self.updates += updated\n", "self.updates += 1\n", programs("driver")
    ),
    "skipped windows count as updates in graphs": Fault(
        "accumulator.py",
        "ops.assign_add(self.updates, ops.cast(updated, ms.int32))",
        "ops.assign_add(self.updates, Tensor(1, ms.int32))",
        programs("accumulator"),
    ),
    "skipped windows are not counted in graphs": Fault(
        "accumulator.py",
        "ops.assign_add(self.skipped, ops.cast(ops.logical_not(updated), ms.int32))",
        "",
        programs("accumulator"),
    ),
    "the scheduler steps in skipped windows": Fault(
        "training/step.py",
        "            if self.scheduler is not None:\n                self.scheduler.step()",
        "        if self.scheduler is not None:\n            self.scheduler.step()",
        "training/test_run_state.py::test_skipped_window_does_not_step_scheduler[eager]",
    ),
    # Loss scale and average
    "a dynamic scale that stays": Fault(
        "engine/loss_scale.py", "ops.assign(self.value, ops.where(ops", "(ops.where(ops", programs("model")
    ),
    "a scale that grows one late": Fault(
        "engine/loss_scale.py",
        "grows = ops.logical_and(good >= self",
        "grows = ops.logical_and(good > self",
        programs("model"),
    ),
    "NaN in the data lowers the scale": Fault(
        "engine/loss_scale.py", "        if loss is not None:\n", "        if False:\n", programs("driver")
    ),
    "an average that is too fast": Fault(
        "engine/ema.py",
        "return ops.where(count <= max(self._warm_up, 1)",
        "decay = decay * decay\n        return ops.where(count <= max(self._warm_up, 1)",
        programs("driver"),
    ),
    "the average counts skipped windows": Fault(
        "engine/ema.py",
        "ops.assign_add(self._updates, ops.cast(updated, ms.int32))",
        "ops.assign_add(self._updates, Tensor(1, ms.int32))",
        programs("driver"),
    ),
    "the average starts at zero": Fault("engine/ema.py", "max(self._warm_up, 1)", "self._warm_up", programs("driver")),
    "averages stay applied": Fault(
        "engine/ema.py",
        "            _assign(self._weights, copies)\n",
        "",
        "engine/test_ema.py::test_applied_sets_and_restores_weights[eager]",
    ),
    # Records
    "the loss of the last micro-batch": Fault(
        "training/shares.py",
        "            sums += (float(loss)",
        "            sums = np.zeros(2) + (float(loss)",
        programs("driver"),
    ),
    "the loss is a mean of means": Fault(
        "training/shares.py",
        "            share = part.divisors[0] / window.divisors[0]\n",
        "            share = 1.0\n",
        programs("driver"),
    ),
    "the rate after the update": Fault(
        "training/step.py",
        "return Ended(updated, loss, lr, ",
        "return Ended(updated, loss, self._learning_rate(), ",
        "network/test_learning_rate.py::test_recorded_rate_of_a_tail_is_the_one_used[eager]",
    ),
    "an evaluation without data is NaN": Fault(
        "training/evaluation.py",
        "        if columns is None:\n",
        "        if False:\n",
        "training/test_callbacks.py::test_exhausted_validation_data_is_rejected[eager]",
    ),
    "a notebook's Stop ends the kernel": Fault(
        "training/run.py",
        "            with interruptible() as self._raise_lost_interrupt, ExitStack() as closing:\n",
        "            with ExitStack() as closing:\n",
        "test_driver.py::test_sigterm_interrupts_only_in_notebooks[eager-notebook-default]",
    ),
    # States
    "moments are not saved": Fault(
        "training/loop.py", '**_named("optimizer", optimizer_state), ', "", programs("step")
    ),
    "Parameters in lists are not saved": Fault(
        "training/loop.py",
        "    return all_parameters(optimizer)",
        "    return list(optimizer.get_parameters())",
        "training/test_run_state.py::test_resumed_run_equals_uninterrupted_run[eager-ASGD]",
    ),
    "the scheduler is not saved": Fault(
        "training/loop.py",
        "excluding(list(parameters_in(scheduler)), parameters.values())",
        "[]",
        "training/test_run_state.py::test_scheduler_steps_per_update_and_resumes[eager-CosineAnnealingLR]",
    ),
    "the scale is not saved": Fault(
        "engine/loss_scale.py",
        'return {"value": self.value, "good": self.good, "overflows": self.counted}',
        "return {}",
        programs("driver"),
    ),
    "the average is not saved": Fault(
        "engine/ema.py",
        'return {"updates": self._updates, **named}',
        "return {}",
        programs("step"),
    ),
    "generators are not resumed": Fault(
        "saving/training_state.py",
        '    set_random_state(state.metadata["random"])\n',
        "",
        "saving/test_resume.py::test_random_number_generators_are_restored[eager]",
    ),
    "what waits is not copied": Fault(
        "training/windows.py",
        "tuple(map(copied, micro_batch)) if waits else micro_batch",
        "micro_batch",
        "training/test_window_of_terms.py::test_loader_may_reuse_its_buffer[eager]",
    ),
    "a window that is not finished moves statistics": Fault(
        "training/step.py",
        "self._undo.undo() and has_not_updated",
        "has_not_updated",
        "saving/test_resume.py::test_state_after_a_micro_batch_fails_is_that_of_the_last_windows_end",
    ),
    "a window that is not finished stays in the accumulators": Fault(
        "training/step.py",
        "# even the first micro-batch may have added a part\n            runner.clear()",
        "# even the first micro-batch may have added a part\n            pass",
        "test_driver.py::test_interrupted_micro_batch_leaves_no_state",
    ),
    "an epoch whose tail is carried ends twice": Fault(
        "training/run.py",
        "reading.reported = reading.epoch",
        "reading.reported = 0",
        "saving/test_resume.py::test_tail_that_is_read_again_does_not_end_its_epoch_again",
    ),
    "the position is one late": Fault(
        "training/data.py",
        "done, skip = at.epoch - 1, at.batches\n",
        "done, skip = at.epoch - 1, at.batches + (at.batches > 0)\n",
        programs("driver"),
    ),
    "the position in the loop is not resumed": Fault(
        "training/loop.py",
        "self._at, self._reading, self._is_resumed = at, (at.epoch, at.batches), True",
        "self._at, self._reading, self._is_resumed = at, (at.epoch, 0), True",
        programs("step"),
    ),
    "counters of a graph's window are not saved": Fault(
        "accumulator.py",
        'counters = ("micro_batches", "updates", "skipped", "updated", "grad_norm")',
        'counters = ("micro_batches",)',
        programs("accumulator"),
    ),
    "a state is numbered from its own": Fault(
        "saving/checkpointer.py",
        "for path in self.states()[:1]:",
        "for path in []:",
        "saving/test_states.py::test_state_with_a_higher_number_is_named[eager]",
    ),
    "the lock is not looked at": Fault(
        "saving/checkpointer.py",
        "        self._check_locked()\n        for",
        "        for",
        "saving/test_states.py::test_run_does_not_go_on_in_the_folder_of_another_run[eager]",
    ),
    "the best state is removed": Fault(
        "saving/checkpointer.py",
        "            if path.name != best:\n",
        "            if True:\n",
        "saving/test_states.py::test_best_state_is_kept_in_addition_to_the_newest[eager-values0-kept0-5]",
    ),
    "the newest state is removed": Fault(
        "saving/checkpointer.py",
        "for path in older[keep - 1 :]:",
        "for path in [newest, *older][keep:] + [newest]:",
        "saving/test_states.py::test_what_was_just_saved_is_never_removed[eager-emptied-1]",
    ),
    "a damaged state is read": Fault(
        "saving/training_state.py",
        "if digest != digest_of(arrays, text):",
        "if False:",
        "saving/test_states.py::test_400_flipped_bits_are_rejected[eager]",
    ),
    "a state is not read back": Fault(
        "saving/training_state.py",
        "    read_arrays(path)\n\n",
        "\n",
        "saving/test_states.py::test_file_that_the_disk_writes_otherwise_is_an_error[eager]",
    ),
    "what a crafted state says is not looked at": Fault(
        "saving/training_state.py",
        "    if wrong:\n",
        "    if False:\n",
        "saving/test_crafted_states.py::test_crafted_states_are_rejected_and_nothing_is_changed",
    ),
    "a position that does not fit is found after the weights are loaded": Fault(
        "training/loop.py",
        "        at = data.convert(at) if found_state.changed else at\n"
        "        warn_about_random_layers(self._network)\n"
        "        restore(found_state.state, parameters, found_state.path, changed=bool(found_state.changed))\n",
        "        warn_about_random_layers(self._network)\n"
        "        restore(found_state.state, parameters, found_state.path, changed=bool(found_state.changed))\n"
        "        at = data.convert(at) if found_state.changed else at\n",
        "saving/test_resume.py::test_fewer_batches_than_are_done_are_refused",
    ),
    "metadata in an order of chance": Fault(
        "saving/training_state.py",
        'metadata={_ENTRY: f"{digest_of(arrays, text)} {text}"}',
        'metadata={_ENTRY: f"{digest_of(arrays, text)} {text}", **dict.fromkeys("abcdefgh", "")}',
        "saving/test_states.py::test_equal_states_are_equal_files[eager]",
    ),
    "the old file goes before the new one is whole": Fault(
        "saving/files.py",
        "            write(new)\n",
        "            os.path.exists(name) and os.unlink(name)\n            write(new)\n",
        "saving/test_model_file.py::test_old_model_survives_a_full_disk[eager-ckpt]",
    ),
    "a dropout counter is not saved": Fault(
        "layers.py",
        "self.dropout_counter = untrained(COUNTER, 0, ms.int32)",
        "object.__setattr__(self, COUNTER, untrained(COUNTER, 0, ms.int32))",
        "layers/test_dropout.py::test_resumed_run_draws_same_masks[eager]",
    ),
    # Losses and weights
    "ignored labels count": Fault(
        "loss/known_losses.py",
        "return labels[labels != (-100 if ignored is None else ignored)]",
        "return abs(labels[labels > -200]) % 2",
        "loss/test_known_losses.py::test_partial_of_a_cell_has_the_cells_divisor[eager]",
    ),
    "class weights do not count": Fault(
        "loss/known_losses.py",
        "counted.size if class_weights is None else float(class_weights.asnumpy()[counted].sum())",
        "counted.size",
        "loss/test_known_losses.py::test_weighted_mean_of_parts_equals_the_loss",
    ),
    "elements count as rows": Fault(
        "loss/known_losses.py",
        "        return labels[0].size\n",
        "        return labels[0].shape[0]\n",
        "loss/test_known_losses.py::test_sequences_are_weighted_by_their_elements",
    ),
    "a stale mean of BCEWithLogits": Fault(
        "loss/known_losses.py",
        "    if _has_stale_mean(function):\n",
        "    if False:\n",
        "loss/test_runnable_losses.py::test_uneven_micro_batches_are_exact_in_pynative_mode[eager-nn]",
    ),
    "the additivity check is silent": Fault(
        "loss/objective.py",
        "            self._additivity.check(micro_batch, trained)\n",
        "            pass\n",
        "loss/test_additivity.py::test_weights_that_differ_only_later_warn[eager-1.0]",
    ),
    "terms divided by those of the micro-batch": Fault(
        "loss/terms.py",
        "/ np.where(sums > 0, sums, 1.0)",
        "/ np.maximum(np.array(divisors).reshape(-1, len(sums)), 1e-9)",
        programs("driver"),
    ),
    "coefficients count in the shown terms": Fault(
        "training/shares.py",
        "(self._coefficients * own * unit, own)",
        "(self._coefficients * own * unit, self._coefficients * own)",
        "training/test_window_of_terms.py::test_lines_and_metrics_show_each_term[eager]",
    ),
    "a coupled loss of each micro-batch": Fault(
        "training/coupled.py",
        "gathered = [gather_rows(np.concatenate(parts), self._group)",
        "gathered = [gather_rows(np.concatenate([part * (number == 0) for number, part in enumerate(parts)]), self._group)",
        "training/test_coupled.py::test_gradient_equals_that_of_the_large_batch[eager-labels]",
    ),
    "the third pass draws other masks": Fault(
        "training/coupled.py",
        "        self._undo()\n",
        "",
        "training/test_coupled.py::test_third_pass_repeats_masks_of_the_first[eager]",
    ),
    "parameters of a coupled loss count in each micro-batch": Fault(
        "training/coupled.py",
        "*[zeros] * (count - 1)]",
        "*[Tensor(array)] * (count - 1)]",
        "training/test_coupled.py::test_gradient_equals_that_of_the_large_batch",
    ),
    "columns that do not fit together reach the compiler": Fault(
        "loss/objective.py",
        "            if len(numbers) > 1 or ",
        "            if ",
        "loss/test_columns.py::test_columns_that_do_not_fit_together_are_rejected_before_a_graph_is_compiled[any]",
    ),
    "labels of no class reach the compiler": Fault(
        "loss/objective.py",
        "if len(numbers) > 1 or self.columns.are_unusual(self.network):",
        "if len(numbers) > 1:",
        "loss/test_columns.py::test_labels_are_rejected_before_a_graph_is_compiled",
    ),
    "a network that runs in graphs only is rejected": Fault(
        "loss/objective.py",
        "            except Exception as error:  # what",
        "            except ValueError as error:  # what",
        "loss/test_columns.py::test_network_that_runs_in_graphs_only_is_accepted",
    ),
    "the compiler's error drowns ours": Fault(
        "network/compiled.py",
        "return error if debugs() else None",
        "return error",
        "network/test_compiled.py::test_error_of_the_compiler_is_left_out_unless_wanted",
    ),
    "a failed compilation leaves a folder": Fault(
        "network/compiled.py",
        "                os.removedirs(os.path.dirname(_REPORT))\n",
        "",
        "network/test_compiled.py::test_error_of_the_compiler_is_left_out_unless_wanted",
    ),
    "an Accumulator sums without a word": Fault(
        "accumulator.py",
        "            _check.log_once(_SUMS)\n",
        "            pass\n",
        "test_accumulator.py::test_sum_that_was_not_chosen_is_logged_once",
    ),
    "a sum is advised to be weighted": Fault(
        "loss/additivity.py",
        "            if abs(loss - sum(of_parts)) <= allowed:\n",
        "            if False:\n",
        "loss/test_additivity.py::test_sum_is_named[eager]",
    ),
    "verify calls gradients of 0 equal": Fault(
        "verification.py",
        "if ok and not any(gradient.any() for gradient in expected):",
        "if False:",
        "test_verification.py::test_gradients_of_0_say_nothing[eager]",
    ),
    # Networks and optimizers
    "sparse gradients are accepted": Fault(
        "network/tree.py",
        'getattr(primitive, "name", "") == _SPARSE',
        "False",
        "network/test_sparse.py::test_network_with_sparse_gradients_is_refused[eager-driver]",
    ),
    "late weights are not trained": Fault(
        "engine/boundary.py",
        "return ops.depend(condition, self.touched)",
        "return condition",
        "network/test_compiled.py::test_weights_and_moments_loaded_later_are_trained[loop-2-True]",
    ),
    "late weights are not trained in loops": Fault(
        "training/runners.py",
        "number = ops.depend(number, self.touched)",
        "pass",
        "test_driver.py::test_weights_loaded_between_runs_are_trained[graph-2]",
    ),
    "each loop ends its window": Fault(
        "training/runners.py",
        "last = ends and number == len(inputs)\n        shares",
        "last = ends\n        weighs",
        "training/test_loops.py::test_loops_train_to_the_bytes_of_calls",
    ),
    "frozen parameters train in graphs": Fault(
        "engine/cells.py",
        "zero_where(self.frozen(), grads)",
        "zero_where(tuple([False for _ in self.frozen()]), grads)",
        "network/test_constants.py::test_changes_between_windows_are_followed[driver-changes0]",
    ),
    "changed attributes are not followed": Fault(
        "network/compiled.py",
        "not all(map(is_, values, self._values))",
        "False",
        "network/test_constants.py::test_many_graphs_are_a_warning_that_names_what_changes[eager]",
    ),
    "evaluated as it trains": Fault(
        "training/evaluation.py",
        "    with training_mode(network, False):\n",
        "    if True:\n",
        "test_evaluate.py::test_evaluate_restores_training_mode[True]",
    ),
    "evaluations without the average": Fault(
        "training/evaluation.py",
        "with training_mode(self._cell, False), averaged(self._ema):",
        "with training_mode(self._cell, False):",
        "engine/test_ema.py::test_driver_evaluates_with_average[eager]",
    ),
    "data are read to be counted": Fault(
        "training/data.py",
        "return None if _has_to_be_read(self.dataset) else",
        "return",
        "training/test_data.py::test_generator_is_not_read_before_training[eager-<lambda>0]",
    ),
    "frozen BatchNorm trains": Fault(
        "layers.py",
        "layer.use_batch_statistics = False",
        "pass",
        "layers/test_norm_layers.py::test_frozen_layers_use_and_keep_running_statistics[eager-BatchNorm1d-shape0]",
    ),
    # Operators of our own
    "a native decay with another sign": Fault(
        "native.cc",
        "gradient = parameter * decay + gradient;",
        "gradient = gradient - parameter * decay;",
        "test_native.py::test_update_is_that_of_numpy[eager-True-True-True]",
    ),
    "a native average of the old weights": Fault(
        "native.cc",
        "averages[i] * kept + parameter * added",
        "averages[i] * kept + parameters[i] * kept",
        "test_native.py::test_update_is_that_of_numpy[eager-True-True-True]",
    ),
    "native sums are not emptied if skipped": Fault(
        "native.cc", "if (empties_) std::memset(Array", "if (false) std::memset(Array", compiled("driver")
    ),
    "sums are not emptied beside a stage": Fault(
        "engine/native_update.py",
        "        if self.emptied:\n",
        "        if False:\n",
        "engine/test_stages.py::test_stage_that_holds_the_weights",
    ),
    "sums are not emptied by MindSpore's update": Fault(
        "engine/boundary.py", "if self.emptied else ()", "if False else ()", programs("driver")
    ),
    "sums of a skipped window keep NaN": Fault(
        "engine/boundary.py", "self._clear(False)", "self._clear(True)", programs("driver")
    ),
    "native counters stay": Fault(
        "native.cc",
        "*static_cast<int32_t *>(params[counter]) += 1;",
        "",
        "test_native.py::test_update_is_that_of_numpy[eager-True-True-True]",
    ),
    "native norm forgets the last elements": Fault(
        "native.cc",
        "for (int lane = 0; i < block.end; ++i, ++lane)",
        "for (int lane = 0; i + 1 < block.end; ++i, ++lane)",
        "test_native.py::test_norm_is_that_of_float64[eager]",
    ),
    "a native gradient that is written before it is read": Fault(
        "native.cc",
        "if (valid_ && !empties_) CopyShared(count);",
        "",
        "test_native.py::test_gradient_that_is_a_parameter_is_not_overwritten",
    ),
    # The stages of a user's
    "a stage gets gradients that are not clipped": Fault(
        "engine/boundary.py",
        "stages += [Multiply(in_place)] if native is None or config.stages else []\n        stages += config.stages.values()\n",
        "stages += config.stages.values()\n        stages += [Multiply(in_place)] if native is None or config.stages else []\n",
        programs("driver"),
    ),
    "a stage is not asked": Fault(
        "engine/boundary.py", "        stages += config.stages.values()\n", "", programs("driver")
    ),
    "gradients are divided again after a stage": Fault(
        "engine/boundary.py",
        'end["divisor"] = Tensor(1.0, ms.float32)',
        "pass",
        "engine/test_stages.py::test_gradients_are_clipped_once_before_a_stage",
    ),
    "what a stage skips updates": Fault(
        "engine/stages.py", "gradients, keep = self._changed(", "gradients, _ = self._changed(", programs("driver")
    ),
    "a stage sees NaN": Fault(
        "engine/stages.py",
        "if ops.depend(keep, self.touched):",
        "if True:",
        "engine/test_stages.py::test_what_a_stage_remembers_is_resumed[8]",
    ),
    "gradients that a stage spoiled update": Fault(
        "engine/stages.py",
        ", tree.all_finite(changed))",
        ", Tensor(True))",
        "engine/test_stages.py::test_gradients_that_a_stage_spoils_are_skipped[eager-loop]",
    ),
    "what a Cell remembers in tuples is not saved": Fault(
        "engine/stages.py",
        ", **value.name_cells(), **vars(value)}",
        "}",
        "engine/test_stages.py::test_what_a_cell_remembers_in_tuples_and_objects_is_saved[0]",
    ),
    "what a stage spoiled is called infinite": Fault(
        "engine/boundary.py",
        "kept_infinite = ops.logical_and(keep, ops.logical_not(finite))",
        "kept_infinite = ops.logical_not(finite)",
        "engine/test_stages.py::test_window_that_a_stage_spoils_is_not_called_infinite_in_float16[eager-2]",
    ),
    "a gradient of another group is overwritten": Fault(
        "engine/native_update.py",
        "(as_computed and len(rule.spans) > 1)",
        "False",
        "test_native.py::test_gradient_that_is_a_parameter_of_another_group_is_not_overwritten",
    ),
    "clear() keeps the end of an interrupted epoch": Fault(
        "model_step.py",
        "self._waiting, self._left, self._loss, self.terms = [], 0, 0.0, {}",
        "self._waiting, self._loss, self.terms = [], 0.0, {}",
        "test_model_step.py::test_step_called_by_hand_after_an_interrupted_run_has_complete_windows[eager]",
    ),
    "what a stage remembers is not saved": Fault(
        "engine/stages.py",
        "        self.state = own\n",
        "        self.state = {}\n",
        "engine/test_stages.py::test_what_a_stage_remembers_is_resumed[8]",
    ),
    "a stage that skips lowers the scale": Fault(
        "engine/loss_scale.py",
        'ops.logical_not(ops.isfinite(end["norm"]))',
        'ops.logical_not(end["keep"])',
        programs("driver"),
    ),
    "a stage that skips ends the run": Fault(
        "training/callbacks.py",
        "not (math.isfinite(window.grad_norm) or window.overflow)",
        "not window.overflow",
        programs("driver"),
    ),
    "a stage that skips is not finite for Model": Fault(
        "model_step.py",
        "+= is_not_finite(ended)",
        "+= not ended.updated",
        "engine/test_stages.py::test_window_that_a_stage_skips_is_no_error_in_model[eager]",
    ),
    # Ranks
    "the weight of a rank is lost": Fault(
        "ranks/reduction.py",
        'end["weight"] = others[0]',
        "pass",
        ON_RANKS,
    ),
    "shares of one rank": Fault(
        "training/shares.py", "Shared(parts, sums[:size], ", "Shared(parts, divisors, ", ON_RANKS
    ),
    "losses are not summed over the ranks": Fault(
        "ranks/reduction.py",
        'end["losses"] = others[1]\n',
        'end["figures"] = zero if figures is None else figures\n',
        ON_RANKS,
    ),
    "gradients in pieces lose the last one": Fault(
        "ranks/reduction.py",
        "return summed + last[:number], last[number:]",
        "return summed + gradients[start:], last[number:]",
        ON_RANKS,
    ),
    "the norm of a part": Fault(
        "ranks/reduction.py",
        "return ops.sqrt(self.all_reduce(ops.depend(squares, after))[0])",
        "return ops.sqrt(squares[0])",
        "ranks/test_reduction.py::test_all_ranks_skip_an_overflow_in_one_part",
    ),
    "parts are those of rank 0": Fault(
        "ranks/reduction.py",
        "self.all_reduce(rows)[self.rank]",
        "self.all_reduce(rows)[0]",
        ON_RANKS,
    ),
    "a rank ends its window alone": Fault(
        "model_step.py",
        "ended = None if self.group is None else self._run()",
        "ended = None",
        "ranks/test_agreement.py::test_ranks_take_part_in_the_windows_of_a_step",
    ),
    "the other ranks' left-out micro-batches are not counted": Fault(
        "engine/nonfinite.py",
        "added = ops.assign_add(self.left_out, of_other_ranks)",
        "added = self.left_out",
        "ranks/test_agreement.py::test_micro_batches_left_out_on_another_rank_are_reported",
    ),
    "all ranks draw the same masks": Fault(
        "network/generators.py",
        "return seed & (1 << bits) - 1 | rank << bits",
        "return seed",
        "ranks/test_ranks_apart.py::test_seeds_of_rank_0_are_those_of_a_single_process[eager]",
    ),
    "terms divided by those of one rank": Fault(
        "loss/terms.py",
        "gather_numbers(",
        "(lambda sums, group: sums.reshape(1, -1))(",
        "ranks/test_ranks_terms.py::test_factors_are_shares_of_all_ranks",
    ),
    "coupled rows of one rank": Fault(
        "ranks/group.py",
        "    arrays = gather_arrays(rows, group)\n    return",
        "    arrays = [rows] * group.size\n    return",
        "ranks/test_ranks_coupled.py::test_rows_of_any_type_are_gathered[eager]",
    ),
    "ranks begin with their own weights": Fault(
        "ranks/agreement.py",
        "    broadcast(parameters, group)\n",
        "    pass\n",
        "ranks/test_group.py::test_all_ranks_start_from_the_weights_of_rank_0",
    ),
    "drift is not noticed": Fault(
        "ranks/agreement.py",
        "    if texts is None:\n        return\n    gathered",
        "    if True:\n        return\n    gathered",
        "ranks/test_agreement.py::test_changed_weights_of_one_rank_are_detected",
    ),
    "weight 0 of a rank lets the others wait": Fault(
        "training/runners.py",
        "            self._add_zeros()\n",
        "            pass\n",
        "ranks/test_reduction.py::test_micro_batches_of_weight_0_take_part",
    ),
    # Model
    "a tail in Model is not flushed": Fault(
        "model_step.py", "self._size) or self._left == 0", "self._size)", programs("model")
    ),
    "Model shows no loss": Fault(
        "model_step.py",
        "self._loss = ended.loss if ended.samples",
        "self._loss = 0.0 if ended.samples",
        programs("step"),
    ),
    "Model evaluates without the average": Fault(
        "model_step.py",
        "            return averaged(self._ema)\n",
        "            return nullcontext()\n",
        "engine/test_ema.py::test_error_after_evaluation_restores_weights[eager]",
    ),
    "Model without FlushTail, without a word": Fault(
        "model_step.py",
        "            if caller:\n",
        "            if False:\n",
        "test_model_step.py::test_run_without_flush_tail_is_warned_of_once[eager]",
    ),
    "Model predicts without the average": Fault(
        "model_step.py",
        "            with self.average.applied():\n                return super().__call__(*columns)\n",
        "            return super().__call__(*columns)\n",
        "test_model_step.py::test_predictions_are_those_of_the_average",
    ),
    # Planted by a reviewer who had not seen the tests
    "empty window lowers the dynamic scale": Fault(
        "engine/loss_scale.py",
        "loss = (weight if loss is None else loss) / weight",
        "loss = weight if loss is None else loss",
        "engine/test_loss_scale.py::test_window_of_weight_0_does_not_lower_dynamic_scale[eager]",
    ),
    "plan of growing windows forgets earlier epochs": Fault(
        "training/sizes.py",
        "        before += by_epoch[-1]\n",
        "",
        "training/test_sizes.py::test_planned_windows_equal_executed_windows[eager-3-flush-2]",
    ),
    "weight 0 ignored in windows of 1": Fault(
        "accumulator.py",
        "self._window.close_without_sums(gradients, weight)",
        "self._window.close_without_sums(gradients, None)",
        "test_accumulator.py::test_window_of_weight_0_is_skipped[1]",
    ),
    "a large buffer of the first window is not put back": Fault(
        "network/undo.py",
        "return all(_digest(each) == digest for each, digest in self._digests)",
        "return True",
        "network/test_undo.py::test_large_change_of_the_first_window_is_told[large-eager]",
    ),
    "a large buffer is taken for a frozen weight": Fault(
        "network/undo.py",
        'type(cell).__module__.startswith("mindspore.")',
        "True",
        "network/test_undo.py::test_what_a_forward_changes_is_put_back[large-eager]",
    ),
    "a moved folder is written to": Fault(
        "programs/metrics.py",
        "        self._folder.check()",
        "        pass",
        "programs/test_runs.py::test_run_whose_folder_was_moved_writes_nothing_into_another",
    ),
    "ranks that read the same rows": Fault(
        "ranks/agreement.py",
        "== 1 and group.rank == 0:",
        "== 0:",
        "ranks/test_agreement.py::test_ranks_that_read_the_same_rows_are_warned_of",
    ),
    "state of the user's own that changes late is not put back": Fault(
        "network/undo.py",
        "each.size <= _LARGE and total <= _TOGETHER",
        "False",
        "network/test_undo.py::test_own_parameter_that_changes_later_is_put_back",
    ),
    "state outside of Cells is not put back": Fault(
        "network/undo.py",
        "[each for _, each in reached(network)]",
        "[*network.get_parameters()]",
        "network/test_undo.py::test_state_outside_of_cells_is_put_back",
    ),
    "the check of a loss changes its state": Fault(
        "network/held.py",
        "return excluding((parameter for _, parameter in held(network)), trained)",
        "return excluding(network.get_parameters(), trained)",
        "training/test_silent_mistakes.py::test_check_of_the_loss_does_not_count",
    ),
    "a tail that is flushed after an evaluation is not trained": Fault(
        "driver.py",
        "with training_again(self._network):",
        "if True:",
        "test_driver.py::test_flush_after_an_evaluation_trains[eager-driver]",
    ),
    "a step is flushed in evaluation mode": Fault(
        "model_step.py",
        "with training_again(self._objective.network):",
        "if True:",
        "test_driver.py::test_flush_after_an_evaluation_trains[eager-step]",
    ),
    "a validation moves the epochs of training": Fault(
        "training/data.py",
        "source.begin_with_epoch(first + number)",
        "pass",
        "training/test_token_batches.py::test_validation_does_not_move_the_epochs_of_training",
    ),
    "an interrupt that MindSpore drops is lost": Fault(
        "training/run.py",
        "self._raise_lost_interrupt()",
        "pass",
        "test_driver.py::test_interrupt_that_is_lost_ends_the_run",
    ),
    "a run after an interrupted one can't be interrupted": Fault(
        "training/interrupts.py",
        "not in (signal.SIG_DFL, _end_unless_repeated):",
        "!= signal.SIG_DFL:",
        "test_driver.py::test_interrupt_that_is_lost_ends_the_run",
    ),
    "more batches than the length are trained": Fault(
        "training/data.py",
        "if most is not None and number > most:",
        "if False:",
        "training/test_data.py::test_more_batches_than_the_length_are_rejected",
    ),
    "a loss trains Parameters in an object without gradients": Fault(
        "training/coupled.py",
        "for name, parameter in held(loss_fn):",
        "for name, parameter in []:",
        "training/test_coupled.py::test_loss_function_that_uses_trained_parameters_is_rejected",
    ),
    "a graph of another mode is run": Fault(
        "network/private.py",
        "graph = cell.known_graphs[0], (cell.phase, *named, *kinds)",
        "graph = cell.known_graphs[0], (*named, *kinds)",
        "network/test_compiled.py::test_graph_is_looked_up_once_for_inputs_of_a_kind",
    ),
    "a term that is NaN lowers the scale": Fault(
        "engine/loss_scale.py",
        "ops.sum(losses)  # of",
        "losses[0]  # of",
        "training/test_window_of_terms.py::test_term_that_is_nan_is_no_overflow",
    ),
    "a loop keeps a value that is set later": Fault(
        "training/runners.py",
        "*(parameter for _, parameter in held(network))",
        "*network.get_parameters()",
        "test_late_values.py::test_values_that_are_set_later_are_used[driver]",
    ),
    "a weight of one element keeps its shape": Fault(
        "network/tree.py",
        "isinstance(value, ms.Tensor) and value.shape else value",
        "False else value",
        "test_accumulator.py::test_weights_of_one_element_count_as_numbers_do",
    ),
    "a stop in a window that can't be put back": Fault(
        "training/step.py",
        "stops if self._undo.is_sure else never",
        "stops",
        "saving/test_resume.py::test_stop_in_a_window_that_can_not_be_put_back_waits_for_its_end",
    ),
    "generators of a window that is not finished": Fault(
        "training/run.py",
        'return state._replace(metadata={**state.metadata, "random": self._generators})',
        "return state",
        "training/test_window_of_terms.py::test_stopping_inside_a_window_changes_no_byte",
    ),
    "rows of the old ranks": Fault(
        "training/data.py",
        "now.size * now.ranks, at.rows * at.ranks",
        "now.size * now.ranks, at.rows * now.ranks",
        "ranks/test_group.py::test_position_for_other_ranks_needs_the_batch_size",
    ),
    "overflow of terms forgotten": Fault(
        "training/step.py",
        "Tensor([0.0, overflows], ms.float32)",
        "Tensor([0.0, 0.0], ms.float32)",
        "training/test_window_of_terms.py::test_window_of_which_all_overflows_lowers_the_scale[eager-skip_micro]",
    ),
    "evaluation weighted by rows": Fault(
        "training/evaluation.py",
        "objective.divisors(columns))\n",
        "(columns[0].shape[0],) if terms is None else objective.divisors(columns))\n",
        "training/test_callbacks.py::test_evaluation_weighs_as_training",
    ),
    "ignore_index 0": Fault(
        "loss/known_losses.py",
        "labels != (-100 if ignored is None else ignored)",
        "labels != (ignored or -100)",
        "loss/test_known_losses.py::test_partial_of_a_cell_has_the_cells_divisor[eager]",
    ),
    "name of the best state forgotten": Fault(
        "saving/checkpointer.py",
        'self.best, self._best_name = metadata["best"]',
        'self.best = facts["best"][0]',
        "saving/test_states.py::test_resumed_run_keeps_as_many_as_one_that_was_not_stopped[eager]",
    ),
    "loss scale of a sharded optimizer": Fault(
        "ranks/zero.py",
        "self.loss_scale = self.inner.loss_scale",
        "self.loss_scale = 1.0",
        "ranks/test_zero.py::test_single_process_trains_like_the_optimizer[eager-scale]",
    ),
    "epsilon of BatchNorm lost": Fault(
        "layers.py",
        "new = nn.GroupNorm(groups, channels, inner.eps)",
        "new = nn.GroupNorm(groups, channels)",
        "layers/test_norm_layers.py::test_number_of_groups_divides_channels[eager-7-32-7]",
    ),
    "evaluation with the first coefficients": Fault(
        "model_step.py",
        "self.terms.coefficients(self.updates())",
        "self.terms.coefficients(0)",
        "test_terms_in_model.py::test_evaluation_sums_the_terms[eager]",
    ),
    # Planted blind, and survived
    "results of an evaluation stay": Fault(
        "training/callbacks.py",
        "        for name in measured:\n            self.arguments.pop(name, None)\n",
        "",
        "training/test_callbacks.py::test_results_of_an_evaluation_are_not_those_of_the_next_epoch[eager]",
    ),
    "data of a finished run of Model begin in the middle": Fault(
        "training/model_callbacks.py",
        "        self._data.set_init_step(0)\n        self._loop",
        "        self._loop",
        "test_model_step.py::test_data_set_of_a_resumed_run_begins_anew_after_it[eager]",
    ),
    "a rank has drifted if all of its weights differ": Fault(
        "ranks/agreement.py",
        "if not near[rank].all()]",
        "if not near[rank].any()]",
        "ranks/test_agreement.py::test_rank_of_which_one_weight_differs_has_drifted[eager]",
    ),
    "parameters of a coupled loss counted on each rank": Fault(
        "training/coupled.py",
        "[Tensor(array) if is_first(self._group) else zeros, *[zeros] * (count - 1)]",
        "[Tensor(array), *[zeros] * (count - 1)]",
        "ranks/test_ranks_coupled.py::test_coupled_ranks_train_like_one_process[eager-trained]",
    ),
    # Planted blind, and found by no test then
    "a window of which all is left out updates by zeros": Fault(
        "engine/nonfinite.py",
        '            end["weight"] = end["skip_counts"][0]\n',
        "            pass\n",
        "engine/test_nonfinite.py::test_window_of_which_all_is_left_out_is_skipped",
    ),
    "left out and not counted": Fault(
        "engine/nonfinite.py",
        "        ops.assign_add(self.left_out, ops.cast(left_out, ms.int32))\n        ops.assign_add(self.uncounted",
        "        ops.assign_add(self.uncounted",
        "engine/test_nonfinite.py::test_window_of_which_all_is_left_out_is_skipped",
    ),
    "NaN of weight 0 lowers the scale": Fault(
        "engine/nonfinite.py",
        "            overflows = overflows * ops.cast(counts, ms.float32)\n",
        "",
        "engine/test_nonfinite.py::test_micro_batch_of_weight_0_lowers_no_scale[eager]",
    ),
    "what is skipped otherwise begins a new row of ten": Fault(
        "training/callbacks.py",
        "return skipped_in_a_row if record.skipped or not record.samples else 0",
        "return 0",
        "engine/test_nonfinite.py::test_ten_windows_in_a_row_end_the_run",
    ),
    "what is skipped otherwise counts among ten": Fault(
        "training/callbacks.py",
        "return skipped_in_a_row if record.skipped or not record.samples else 0",
        "return skipped_in_a_row + record.skipped",
        "engine/test_nonfinite.py::test_ten_windows_in_a_row_end_the_run",
    ),
    "an update begins no new row of ten": Fault(
        "training/callbacks.py",
        "return skipped_in_a_row if record.skipped or not record.samples else 0",
        "return skipped_in_a_row",
        "engine/test_nonfinite.py::test_ten_windows_in_a_row_end_the_run",
    ),
    "a resumed run begins a new row of ten": Fault(
        "training/step.py",
        'self.skipped_in_a_row = counters.get("skips") or 0',
        "self.skipped_in_a_row = 0",
        "engine/test_nonfinite.py::test_windows_before_a_resume_count_among_ten_in_a_row",
    ),
    "a scale of 1 overflows": Fault(
        "engine/loss_scale.py",
        "        overflow = ops.logical_and(overflow, self.value > 1.0)\n",
        "",
        "engine/test_loss_scale.py::test_scale_of_1_is_not_lowered",
    ),
    "an overflow resets no growth": Fault(
        "engine/loss_scale.py",
        "resets = ops.logical_or(overflow, good >= self.window)",
        "resets = good >= self.window",
        "engine/test_loss_scale.py::test_scale_grows_after_updates_without_an_overflow_between",
    ),
    "overflows before a resume are shown again": Fault(
        "training/step.py",
        "        self._overflows = self.config.scale.overflows\n        self.updates = counters",
        "        self.updates = counters",
        "engine/test_loss_scale.py::test_overflows_before_a_stop_are_not_those_of_the_resumed_run",
    ),
    "skipped windows are saved again": Fault(
        "saving/checkpointer.py",
        "updates // self._every > self._updates // self._every",
        "updates % self._every == 0",
        "saving/test_states.py::test_windows_that_are_skipped_after_a_state_save_no_other",
    ),
    "a resumed run saves its state again": Fault(
        "saving/checkpointer.py",
        "        self._updates = found_state.updates\n",
        "",
        "saving/test_states.py::test_windows_that_are_skipped_after_a_state_save_no_other",
    ),
    "minutes are seconds": Fault(
        "saving/checkpointer.py",
        "60 * _check.positive_number",
        "1 * _check.positive_number",
        "saving/test_states.py::test_state_is_due_when_minutes_have_passed_since_the_last_one",
    ),
    "minutes are not counted from the last state": Fault(
        "saving/checkpointer.py",
        "        self._saved_at = time.monotonic()\n        if not self._writes:",
        "        if not self._writes:",
        "saving/test_states.py::test_state_is_due_when_minutes_have_passed_since_the_last_one",
    ),
    "a file is not flushed": Fault(
        "saving/files.py",
        "            _flush(new, os.O_RDWR)\n",
        "",
        "saving/test_states.py::test_state_is_on_the_disk_before_it_gets_its_name_and_the_name_after",
    ),
    "a folder is not flushed": Fault(
        "saving/files.py",
        "        _flush_folder(folder)\n    except",
        "    except",
        "saving/test_states.py::test_state_is_on_the_disk_before_it_gets_its_name_and_the_name_after",
    ),
    "another policy resumes": Fault(
        "engine/config.py",
        'else {"nonfinite": self.policy}',
        "else {}",
        "saving/test_resume.py::test_other_settings_are_rejected_by_name",
    ),
    "masks of terms that run again are others": Fault(
        "training/step.py",
        "            self._undo.undo()\n            ops.assign(skips",
        "            ops.assign(skips",
        "training/test_window_of_terms.py::test_dropout_counts_each_micro_batch_once",
    ),
    "an evaluation of the driver with the first coefficients": Fault(
        "training/evaluation.py",
        "terms.coefficients(self._updates())",
        "terms.coefficients(0)",
        "training/test_window_of_terms.py::test_evaluation_has_the_mean_of_each_term_and_the_coefficients_of_its_update",
    ),
    "skipped windows warn in later epochs": Fault(
        "training/model_callbacks.py",
        "        self._counts = self._step.counts\n        if self._stop_together is not None:\n            self._stop_together.epoch_ends()",
        "        if self._stop_together is not None:\n            self._stop_together.epoch_ends()",
        "test_model_step.py::test_skipped_windows_warn_in_their_epoch_only",
    ),
    "a tail that is not finite does not end the run": Fault(
        "training/model_callbacks.py",
        "raises=self._step.raises)",
        "raises=False)",
        "test_model_step.py::test_tail_that_is_not_finite_ends_the_run",
    ),
    "FlushTail raises when the epoch ends": Fault(
        "training/model_callbacks.py",
        "        if self._step.raises:\n            self._raise_if_skipped(run_context, raises=True)\n",
        "",
        "engine/test_nonfinite.py::test_flush_tail_raises_for_nonfinite_gradient",
    ),
    "a tail is flushed with averages": Fault(
        "training/model_callbacks.py",
        "                self._step.average.restore()\n            self._step.flush()",
        "                pass\n            self._step.flush()",
        "test_model_step.py::test_tail_is_not_trained_while_averages_are_applied",
    ),
    "the time of an evaluation is that of the next window": Fault(
        "training/run.py",
        "        self._ended_at = time.perf_counter()  # the time of the next window is its own\n",
        "",
        "training/test_callbacks.py::test_time_of_an_evaluation_is_not_that_of_the_next_window",
    ),
    "all Cells get the mode of the first": Fault(
        "network/training_mode.py",
        "            cell.add_flags(training=training)\n",
        "            cell.add_flags(training=flags[0][1])\n",
        "training/test_callbacks.py::test_each_cell_has_its_mode_again_after_an_evaluation test_evaluate.py::test_each_cell_has_its_mode_again",
    ),
    "the phase stays that of an evaluation": Fault(
        "network/training_mode.py",
        "        network.phase = phase\n",
        "",
        "training/test_callbacks.py::test_each_cell_has_its_mode_again_after_an_evaluation test_evaluate.py::test_each_cell_has_its_mode_again",
    ),
    "verify leaves another generator": Fault(
        "verification.py",
        "                ms.set_rng_state(generator)\n",
        "",
        "test_verification.py::test_generators_are_left_as_they_were",
    ),
    "the largest micro-batch is taken": Fault(
        "micro_batch_size.py",
        "min(trials, key=lambda result: result[1])",
        "trials[-1]",
        "test_micro_batch_size.py::test_fastest_is_taken_and_not_the_largest",
    ),
    "the first window of a size is timed alone": Fault(
        "micro_batch_size.py",
        "range(_TIMED)",
        "range(1)",
        "test_micro_batch_size.py::test_fastest_is_taken_and_not_the_largest",
    ),
    "batchmean counts elements": Fault(
        "loss/known_losses.py",
        '    if labels and options("reduction") != "batchmean":',
        "    if labels:",
        "loss/test_known_losses.py::test_batchmean_is_weighted_by_rows_of_any_length",
    ),
    "another warm-up resumes": Fault(
        "engine/ema.py",
        'return {"decay": self.decay, "warm_up": self.warm_up}',
        'return {"decay": self.decay}',
        "engine/test_ema.py::test_other_averages_do_not_resume",
    ),
    "another decay resumes": Fault(
        "engine/ema.py",
        'return {"decay": self.decay, "warm_up": self.warm_up}',
        'return {"warm_up": self.warm_up}',
        "engine/test_ema.py::test_other_averages_do_not_resume",
    ),
    "no epoch to spare": Fault(
        "programs/flags.py",
        "return epochs + (args.epochs is None), min",
        "return epochs, min",
        "programs/test_flags.py::test_length_of_a_run_is_its_epochs_or_its_updates",
    ),
    "a run of updates is as long as its epochs": Fault(
        "programs/flags.py",
        "min(updates, args.max_updates)",
        "updates",
        "programs/test_flags.py::test_length_of_a_run_is_its_epochs_or_its_updates",
    ),
    "a rise from 0": Fault(
        "programs/flags.py",
        "return (update + 1) / args.warmup_updates",
        "return update / args.warmup_updates",
        "programs/test_flags.py::test_rate_rises_and_falls",
    ),
    "a fall that begins with the rise": Fault(
        "programs/flags.py",
        "progress = (update - args.warmup_updates) / max(1, updates - args.warmup_updates)",
        "progress = update / updates",
        "programs/test_flags.py::test_rate_rises_and_falls",
    ),
    "a lowest rate of a part": Fault(
        "programs/flags.py",
        "lowest = (args.min_lr or 0.0) / args.lr",
        "lowest = args.min_lr or 0.0",
        "programs/test_flags.py::test_rate_rises_and_falls",
    ),
    "an evaluation is written twice": Fault(
        "programs/metrics.py",
        "            if not is_window:\n",
        "            if False:\n",
        "programs/test_metrics.py::test_run_that_is_killed_anywhere_and_resumed_writes_each_line_once",
    ),
    "a run replaces another one": Fault(
        "programs/folder.py",
        "if os.path.isfile(path) and not args.resume:",
        "if False:",
        "programs/test_runs.py::test_folder_of_another_run_is_not_touched",
    ),
    "a model is named that replaces another one": Fault(
        "programs/folder.py",
        "folder.metrics, folder.model):",
        "folder.metrics):",
        "programs/test_runs.py::test_folder_of_another_run_is_not_touched",
    ),
    "the rank that fails is blamed alone": Fault(
        "launch.py",
        "if code is not None or errors[name]",
        "if name == failed",
        "test_launch.py::test_rank_that_the_others_wait_for_is_named",
    ),
    "two runs write one model": Fault(
        "programs/folder.py",
        "if os.access(place, os.W_OK):",
        "if False:",
        "programs/test_runs.py::test_model_elsewhere_is_that_of_one_run",
    ),
    "a closed terminal ends a run without its state": Fault(
        "programs/command.py",
        "signal.SIGTERM, _HANGUP)",
        "signal.SIGTERM)",
        "programs/test_runs.py::test_run_in_a_terminal_that_is_closed_saves_its_state",
    ),
    "the hang-up of the shell after that of the system ends a run": Fault(
        "programs/command.py",
        "elif number != _HANGUP and time.monotonic() - self._came > _TOGETHER:",
        "else:",
        "programs/test_runs.py::test_closed_terminal_is_a_signal_that_may_come_twice",
    ),
    "a full disk below stdout is not named": Fault(
        "programs/command.py",
        "_fault_of_stdout() if is_nameless else None",
        "None",
        "programs/test_runs.py::test_full_disk_below_stdout_is_named",
    ),
    "the file overrides the command line": Fault(
        "programs/flags.py",
        "parser.parse_args(argv, in_file)",
        "parser.parse_args([], in_file)",
        "programs/test_flags.py::test_config_is_read_and_command_line_overrides_it",
    ),
    # Files of strangers
    "a stranger's run saves its model anywhere": Fault(
        "programs/flags.py",
        "and not is_inside(args.ckpt_path, folder):",
        "and False:",
        "programs/test_flags.py::test_resumed_run_takes_only_what_a_run_saves",
    ),
    "a stranger's run names what it never saves": Fault(
        "programs/flags.py",
        "_ALL.items() if name not in ONE_START}",
        "_ALL.items()}",
        "programs/test_flags.py::test_resumed_run_takes_only_what_a_run_saves",
    ),
    "a network of the sizes of any record is made": Fault(
        "programs/tasks.py",
        "        _check_sizes(sizes, self._args)\n",
        "",
        "programs/test_flags.py::test_wrong_models_end_eval_with_1",
    ),
    "a run writes through a link": Fault(
        "programs/folder.py",
        "    check_own(*(",
        "    list((",
        "programs/test_runs.py::test_nothing_is_written_through_a_link",
    ),
    "a file is written through a link": Fault(
        "saving/files.py",
        "os.path.realpath(path) if keeps_link else os.path.abspath(path)",
        "os.path.realpath(path)",
        "saving/test_model_file.py::test_other_files_replace_a_link[eager]",
    ),
    "a signal is an error of what it interrupts": Fault(
        "programs/command.py",
        "class Interrupted(BaseException):",
        "class Interrupted(Exception):",
        "programs/test_runs.py::test_signal_is_no_error_of_what_it_interrupts",
    ),
    "data of the user's own have a fingerprint": Fault(
        "programs/tasks.py",
        'if hasattr(source, "fingerprint") else {}',
        "if source is not None else {}",
        "programs/test_flags.py::test_nothing_is_known_of_data_of_the_users_own[eager]",
    ),
    "results by class end a run": Fault(
        "programs/metrics.py",
        "np.asarray(value).tolist()",
        "float(value)",
        "programs/test_metrics.py::test_results_by_class_are_lists[eager]",
    ),
    "a lock that is a link": Fault(
        "saving/lock.py",
        "        check_own(self._given, in_place=True)",
        "        # ",
        "saving/test_states.py::test_lock_that_is_a_link_is_refused[eager]",
    ),
    "a file with other names is changed": Fault(
        "saving/files.py",
        "elif in_place and is_file and status.st_nlink > 1:",
        "elif False:",
        "programs/test_runs.py::test_nothing_is_written_to_a_file_with_other_names[.lock]",
    ),
    "a log is written through a link": Fault(
        "launch.py",
        "        check_own(self.log(name), in_place=True)\n",
        "",
        "test_launch.py::test_logs_are_files_of_their_own[eager-link]",
    ),
    "all that is left over in a model is read": Fault(
        "saving/model_file.py",
        "    if size > most:\n",
        "    if False:\n",
        "saving/test_model_file.py::test_file_with_much_that_is_left_over_is_rejected_before_it_is_read",
    ),
    "a pipe in the place of a record is passed over": Fault(
        "programs/flags.py",
        "record if os.path.lexists(record) else None",
        "record if os.path.isfile(record) else None",
        "programs/test_flags.py::test_what_is_no_record_is_named[eager-pipe]",
    ),
    "a resumed run replaces any model": Fault(
        "programs/folder.py",
        "    if args.resume and os.path.exists(folder.model)",
        "    if False and os.path.exists(folder.model)",
        "programs/test_runs.py::test_resumed_run_replaces_no_model_but_its_own",
    ),
    "a run without a state is begun anew": Fault(
        "programs/folder.py",
        "    if not states_in(os.path.join(folder, STATES)):\n",
        "    if False:\n",
        "programs/test_runs.py::test_run_without_a_state_is_not_begun_anew",
    ),
    "a run that has not begun is the newest": Fault(
        "programs/folder.py",
        " if os.path.isfile(os.path.join(_path_of(number), CONFIG))]",
        "]",
        "programs/test_flags.py::test_newest_run_is_one_that_has_begun",
    ),
    "the last of two values of a flag counts": Fault(
        "programs/flags.py",
        "if action.dest in given:",
        "if False:",
        "programs/test_flags.py::test_wrong_flags_end_train_with_2",
    ),
    "a link in a folder of texts is trained on": Fault(
        "model_zoo/data/text.py",
        "if file != path and file.is_symlink():",
        "if False:",
        "zoo/test_text.py::test_only_files_of_the_folder_are_read[eager-file]",
    ),
    # Runs
    "the rows of an update are those of one rank": Fault(
        "programs/flags.py",
        "    rows = args.batch_size * ranks\n",
        "    rows = args.batch_size\n",
        "programs/test_flags.py::test_rows_of_an_update_decide_the_window",
    ),
    "a layer inside with other rows begins at random": Fault(
        "saving/model_file.py",
        'name.rpartition(".")[0] != last_layer or ',
        "",
        "programs/test_flags.py::test_model_of_another_network_is_rejected",
    ),
    "a last layer of other features begins at random": Fault(
        "saving/model_file.py",
        " or there[name][1:] != own[name].shape[1:]",
        "",
        "programs/test_flags.py::test_model_of_another_network_is_rejected",
    ),
    "a text is trained with the weights of other characters": Fault(
        "programs/tasks.py",
        "        _check_characters(self._vocabulary, self._args)\n",
        "",
        "programs/test_flags.py::test_model_of_other_characters_is_rejected",
    ),
    "other data with as many rows resume": Fault(
        "programs/tasks.py",
        '{"rows": source.rows, "data": source.fingerprint}',
        '{"rows": source.rows}',
        "programs/test_flags.py::test_other_data_with_as_many_rows_are_told_apart",
    ),
    "AdamW that minimizes what is to be maximized": Fault(
        "engine/native_update.py",
        'sign = -1.0 if settings.get("maximize") else None',
        "sign = None",
        "test_native.py::test_trains_like_mindspore",
    ),
    "AdamW with the numbers of the first group": Fault(
        "engine/native_update.py",
        "settings = optimizer.param_groups[group]",
        "settings = optimizer.param_groups[0]",
        "test_native.py::test_trains_like_mindspore",
    ),
    "a run of Model resumes with the order of the first epoch": Fault(
        "training/model_callbacks.py",
        "source.begin_with_epoch(source.next_epoch + self.initial_epoch)",
        "pass",
        "training/test_token_batches.py::test_run_of_model_resumes_with_the_order_of_its_epoch",
    ),
    # Networks with several inputs
    "labels are the second column": Fault(
        "loss/known_losses.py",
        "return count(options, columns[0], *columns[inputs:])",
        "return count(options, *columns)",
        "training/test_inputs.py::test_trains_like_the_whole_batch",
    ),
    "metrics get the columns after the first": Fault(
        "loss/objective.py",
        "return columns[-1:] if self.loss_fn is None else columns[self.inputs :]",
        "return columns[1:]",
        "training/test_inputs.py::test_metrics_and_early_stopping",
    ),
    "many shapes are not warned of": Fault(
        "training/step.py",
        "before < _MANY <= len(self._seen)",
        "before < 0 <= len(self._seen)",
        "training/test_silent_mistakes.py::test_many_shapes_are_warned_of_once",
    ),
    "Model.predict trains after an evaluation": Fault(
        "model_step.py",
        'if self.training and caller == "predict":',
        "if False:",
        "test_model_step.py::test_predicting_after_an_evaluation_does_not_train",
    ),
    # Micro-batches by tokens, and windows by what they count
    "the rest of an epoch is not packed": Fault(
        "training/token_batches.py",
        "    while rest:\n",
        "    while len(rest) > 1:\n",
        "training/test_token_batches.py::test_each_sample_is_in_one_micro_batch_of_few_shapes",
    ),
    "labels are padded like tokens": Fault(
        "training/token_batches.py",
        "self._pads[number], samples[0]",
        "self._pads[0], samples[0]",
        "training/test_token_batches.py::test_each_sample_is_in_one_micro_batch_of_few_shapes",
    ),
    "each epoch is shuffled alike": Fault(
        "training/token_batches.py",
        "[self._seed, self.next_epoch]",
        "[self._seed, 0]",
        "training/test_token_batches.py::test_each_sample_is_in_one_micro_batch_of_few_shapes",
    ),
    "rows are longer than what is used of a sample": Fault(
        "training/token_batches.py",
        "* _MULTIPLE, longest or tokens)",
        "* _MULTIPLE, tokens)",
        "training/test_token_batches.py::test_longer_samples_are_cut_if_asked",
    ),
    "shapes of equal steps": Fault(
        "training/token_batches.py",
        "better = found < fewest[1:]",
        "better = found < 0 * fewest[1:]",
        "training/test_token_batches.py::test_shapes_need_the_fewest_positions",
    ),
    "a carried tail counts for nothing": Fault(
        "training/windows.py",
        "size, amount = None, sum(map(self._amount_of, self._waiting))",
        "size, amount = None, 0",
        "training/test_token_batches.py::test_carried_tail_counts_for_the_next_window",
    ),
    "the weights of windows add up": Fault(
        "training/windows.py",
        "                    size, amount = None, 0\n",
        "                    size = None\n",
        "training/test_token_batches.py::test_windows_end_when_they_count_for_a_number",
    ),
    "each rank fills the whole window": Fault(
        "training/sizes.py",
        "self._part = self._weight / ranks * _ALMOST",
        "self._part = self._weight * _ALMOST",
        "ranks/test_group.py::test_each_rank_fills_its_part_of_a_window_by_weight",
    ),
    "each rank resumes where the furthest one was": Fault(
        "training/run.py",
        "reading.batches = reading.of_ranks[self._group.rank]",
        "pass",
        "ranks/test_group.py::test_each_rank_fills_its_part_of_a_window_by_weight",
    ),
    # Other engines, and groups that are not all ranks
    "factors forget what the engine divides by": Fault(
        "loss/terms.py",
        "(times * terms.divisors_and_factors(window, updates)[1])",
        "(terms.divisors_and_factors(window, updates)[1])",
        "loss/test_window_factors.py::test_gradient_is_that_of_the_whole_window",
    ),
    "factors of this rank alone": Fault(
        "loss/terms.py",
        "group=group_of(owner, group), inputs",
        "group=None, inputs",
        "loss/test_window_factors.py::test_gradient_is_that_of_the_whole_window",
    ),
    "gradients are summed over all processes": Fault(
        "ranks/reduction.py",
        "kernels: Any):\n        self.kernels = kernels\n        self.all_reduce = group.collective(ops.AllReduce)",
        "kernels: Any):\n        self.kernels = kernels\n        self.all_reduce = ops.AllReduce()",
        IN_GROUPS,
    ),
    "parts are gathered in the places of others": Fault(
        "ranks/zero.py",
        "= group.rank, group.size - 1 - group.rank",
        "= group.size - 1 - group.rank, group.rank",
        IN_GROUPS,
    ),
    "small numbers are sent within a group as they are": Fault(
        "ranks/group.py",
        "halves = Tensor(values.view(np.uint16).astype(np.float32))\n"
        "    return _all_reduce(str(group.name))(halves).asnumpy().astype(np.uint16).view(np.float32)",
        "return _all_reduce(str(group.name))(Tensor(values)).asnumpy()",
        IN_GROUPS,
    ),
    "a mode that sums by itself is accepted": Fault(
        "ranks/agreement.py",
        'if mode in _SUMS_BY_ITSELF or "AutoParallel" in cells:',
        'if "AutoParallel" in cells:',
        "ranks/test_agreement.py::test_modes_in_which_mindspore_sums_by_itself_are_refused",
    ),
}


def copy_of_tree(folder: Path) -> None:
    """Copy what git knows, and the compiled operators."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "ms_accum").glob("*.so")]
    for name in [*filter(None, names.split("\0")), *built]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _split(tests: str) -> list[str]:
    """Return the single tests; their parameters may contain blanks."""
    return re.split(r" (?=[\w/]+\.py)", tests)


def failing(folder: Path, tests: str, core: int) -> str | None:
    """Return the first of these tests that fails in a tree, on one core; None if all pass."""
    named = [f"tests/{name}" for name in _split(tests)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-n", "0", "-m", ""]
    # Bytecode of a source that was changed twice in a second would be that of the first change.
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *named],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if done.returncode == 0:
        return None
    found = re.search(r"^FAILED (\S+)|^ERROR (\S+::\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        raise RuntimeError(f"pytest {tests} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr}")
    return found[1] or found[2]


def build(folder: Path) -> None:
    """Compile the operators of a tree."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, capture_output=True, check=True
    )


def find(folder: Path, fault: Fault, core: int) -> str | None:
    """Plant a fault in a tree, look for a test that fails, and take it out again."""
    path = fault.path_in(folder)
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
    try:
        if path.suffix == ".cc":
            build(folder)
        return failing(folder, fault.tests, core)
    finally:
        path.write_text(sound, encoding="utf-8")
        if path.suffix == ".cc":
            build(folder)


def main(arguments: list[str] | None = None) -> int:
    """Plant the faults that are named, or all; return 1 if the tests do not find one of them, or fail without any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *FAULTS], help="a fault; default: all")
    names = parser.parse_args(arguments).names or list(FAULTS)
    trees: queue.Queue[tuple[Path, int]] = queue.Queue()

    def look(name: str | None) -> bool:
        """Look for one fault, or run all tests without any; return whether the result is as it should be."""
        (tree, core), began = trees.get(), time.monotonic()
        try:
            if name is None:
                tests = dict.fromkeys(test for name in names for test in _split(FAULTS[name].tests))
                found = failing(tree, " ".join(tests), core)
                print(f"| no fault | {found or 'nothing fails'} | {time.monotonic() - began:.0f} s |", flush=True)
                return found is None
            found = find(tree, FAULTS[name], core)
            print(f"| {name} | {found or 'NOT FOUND'} | {time.monotonic() - began:.0f} s |", flush=True)
            return found is not None
        finally:
            trees.put((tree, core))

    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(len(cores)) as workers:
        for core in cores:
            folder = Path(root) / str(core)
            copy_of_tree(folder)
            trees.put((folder, core))
        results = list(workers.map(look, [None, *names]))
    print(f"{len(names)} faults, {sum(results[1:])} found")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
