"""Which feature works in which way to accumulate, and the test that shows it: the tables of docs/features.md.

A cell has the names of tests, or `No` with the reason, or `NotTested`. In brackets behind a test are values of its
parameters: the way, if it runs in several, and what else picks the cases that are meant. tests/test_features.py checks
that each test exists, has these values, and compiles where the way is a compiled step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Union

from .tables import Lines, markdown

WAYS = {"driver": "driver", "cells": "cells", "jit": "accumulator", "loop": "loop", "model": "step"}
"""dict[str, str], the columns; and what tests/ways.py calls each of them."""


class No(NamedTuple):
    """A feature that does not work in a way: the reason, in both languages."""

    english: str
    chinese: str


class NotTested(NamedTuple):
    """A feature without a test in a way: what comes near, in both languages."""

    english: str = ""
    chinese: str = ""


CONFORMANCE = {"driver": "driver", "cells": "Cells", "jit": "Accumulator", "model": "Model"}
"""dict[str, str], what docs/conformance.md calls the ways."""

Cell = Union[str, tuple[str, ...], No, NotTested]
Row = dict[str, Cell]

RANDOM = "tests/test_any_window.py::test_random_case_matches_simulator[accumulator]"
"""str, in this test the way `accumulator` is a plain loop."""
EVALUATED = "tests/test_evaluate.py::test_evaluation_in_own_loop_sees_new_weights_and_changes_nothing[{}]"
"""str, the test of `evaluate` in a loop of the user's own."""
DRIVER_ONLY = No(
    "only the driver takes a `CoupledLoss`, see [Limits](limits.md)",
    "只有训练驱动接受 `CoupledLoss`，见[限制](limits.md)",
)
NO_TERMS = No(
    "the Cells process one micro-batch at a time, see [Several terms](how-to/several_terms.md#restrictions)",
    "每次只处理一个微批次，见[由多项组成的损失](how-to/several_terms.md)",
)
NO_STATISTIC = No(
    "`Terms` rejects a `WindowStatistic`: use the driver or `Model`",
    "`Terms` 不接受 `WindowStatistic`：请使用训练驱动或 `Model`",
)


def _all_ways(test: str, case: str = "", **more: str) -> Row:
    """Return the row of a test that runs in all ways of tests/ways.py; with a case of docs/conformance.md, or others.

    `more` are further tests by their way.
    """
    row: Row = {}
    for way, name in WAYS.items():
        others = [_conformance(CONFORMANCE[way], case)] if case and way in CONFORMANCE else []
        row[way] = (f"{test}[{name}]", *others, *([more[way]] if way in more else []))
    return row


def _conformance(way: str, *cases: str) -> str:
    """Return the test that trains cases of docs/conformance.md."""
    return f"tests/test_conformance.py::test_ours_is_right[{', '.join((way, *cases))}]"


FEATURES: dict[str, Row] = {
    "uneven": {
        "driver": (
            "tests/test_equivalence.py::test_epochs_with_uneven_tail",
            _conformance("driver", "ragged rows", "short last window"),
        ),
        "cells": _conformance("Cells", "ragged rows", "short last window"),
        "jit": (
            "tests/test_accumulator.py::test_mean_is_weighted",
            _conformance("Accumulator", "ragged rows", "short last window"),
        ),
        "loop": RANDOM,
        "model": (
            "tests/test_model_step.py::test_window_equals_large_batch",
            _conformance("Model", "ragged rows", "short last window"),
        ),
    },
    "tokens": {
        "driver": (
            "tests/test_driver.py::test_masked_tokens_have_no_weight",
            _conformance("driver", "padded tokens", "class weights"),
        ),
        "cells": _conformance("Cells", "padded tokens", "class weights"),
        "jit": _conformance("Accumulator", "padded tokens", "class weights"),
        "loop": RANDOM,
        "model": _conformance("Model", "padded tokens", "class weights"),
    },
    "clip": {
        "driver": _conformance("driver", "clip"),
        "cells": ("tests/engine/test_cells.py::test_clip_norm_bounds_unscaled_window_gradient",)
        + (_conformance("Cells", "clip"),),
        "jit": (
            "tests/test_accumulator.py::test_clip_norm_bounds_window_gradient",
            _conformance("Accumulator", "clip"),
        ),
        "loop": RANDOM,
        "model": _conformance("Model", "clip"),
    },
    "rates": _all_ways(
        "tests/network/test_learning_rate.py::test_schedule_advanced_by_get_lr_steps_once_per_update", "warm-up"
    ),
    "scale": _all_ways("tests/engine/test_loss_scale.py::test_dynamic_scale_is_lowered_until_nothing_overflows"),
    "amp": _all_ways(
        "tests/engine/test_loss_scale.py::test_mixed_precision_trains_like_large_batches",
        driver="tests/zoo/test_gpt.py::test_training_in_float16",
    ),
    "skip-window": {
        "driver": "tests/test_driver.py::test_nonfinite_window_is_skipped_and_counted",
        "cells": "tests/engine/test_cells.py::test_nonfinite_window_is_skipped",
        "jit": "tests/test_accumulator.py::test_nonfinite_window_is_skipped",
        "loop": "tests/engine/test_ema.py::test_skipped_window_does_not_change_average[loop]",
        "model": "tests/test_model_step.py::test_nonfinite_window_is_skipped",
    },
    "skip-micro": _all_ways(
        "tests/engine/test_nonfinite.py::test_window_equals_that_of_its_finite_micro_batches",
        model="tests/engine/test_nonfinite.py::test_model_leaves_out_nonfinite_micro_batches",
    ),
    "ema": _all_ways("tests/engine/test_ema.py::test_average_follows_its_definition", "EMA"),
    "noise": {
        "driver": "tests/engine/test_noise_scale.py::test_estimate_in_graph_mode",
        "cells": No(
            "`NoiseScale` works with the driver, an `Accumulator` or a step of `Model` only",
            "`NoiseScale` 只能用于训练驱动、`Accumulator` 或 `Model` 的训练步",
        ),
        "jit": "tests/engine/test_noise_scale.py::test_estimate_in_compiled_step",
        "loop": "tests/engine/test_noise_scale.py::test_estimate_in_custom_loop",
        "model": "tests/engine/test_noise_scale.py::test_estimate_as_callback_of_model",
    },
    "terms": {
        "driver": (
            "tests/training/test_windows_of_terms.py::test_compiled_window_is_that_of_the_oracle",
            _conformance("driver", "two terms"),
        ),
        "cells": NO_TERMS,
        "jit": (
            "tests/loss/test_terms.py::test_compiled_functional_pattern_is_that_of_the_oracle",
            _conformance("Accumulator", "two terms"),
        ),
        "loop": "tests/loss/test_terms.py::test_plain_loop_is_that_of_the_oracle",
        "model": (
            "tests/test_terms_in_model.py::test_model_trains_like_the_driver",
            _conformance("Model", "two terms"),
        ),
    },
    "statistic": {
        "driver": "tests/training/test_windows_of_terms.py::test_statistic_is_that_of_the_large_batch",
        "cells": NO_TERMS,
        "jit": NO_STATISTIC,
        "loop": NO_STATISTIC,
        "model": "tests/test_terms_in_model.py::test_statistic_in_model",
    },
    "coupled": {
        "driver": "tests/engine/test_coupled.py::test_gradient_equals_that_of_the_large_batch",
        "cells": DRIVER_ONLY,
        "jit": DRIVER_ONLY,
        "loop": DRIVER_ONLY,
        "model": DRIVER_ONLY,
    },
    "sizes": {
        "driver": (
            "tests/engine/test_sizes.py::test_driver_changes_sizes_at_window_ends",
            _conformance("driver", "N that changes"),
        ),
        "cells": _conformance("Cells", "N that changes"),
        "jit": (
            "tests/engine/test_sizes.py::test_accumulator_changes_sizes_at_window_ends",
            _conformance("Accumulator", "N that changes"),
        ),
        "loop": RANDOM,
        "model": (
            "tests/engine/test_sizes.py::test_step_changes_sizes_at_window_ends",
            _conformance("Model", "N that changes"),
        ),
    },
    "ranks": {
        "driver": "tests/ranks/test_group.py::test_ranks_train_like_one_process",
        "cells": _conformance("Cells", "two ranks"),
        "jit": (
            "tests/ranks/test_group.py::test_accumulators_on_ranks_train_like_one_process",
            _conformance("Accumulator", "two ranks"),
        ),
        "loop": (
            "tests/ranks/test_agreement.py::test_ranks_with_fewer_micro_batches_take_part_in_all_windows[tail plain]",
        ),
        "model": "tests/ranks/test_ranks_in_model.py::test_ranks_in_model_train_like_one_process[trained]",
    },
    "zero-1": {
        "driver": (
            "tests/ranks/test_zero.py::test_sharded_optimizer_trains_like_the_unsharded",
            "tests/ranks/test_reduction.py::test_all_ways_to_sum_train_alike[zero 1]",
        ),
        "cells": "tests/ranks/test_reduction.py::test_cells_on_ranks_train_like_one_process[zero 1]",
        "jit": "tests/ranks/test_reduction.py::test_accumulators_on_ranks_train_like_one_process[zero 1]",
        "loop": "tests/ranks/test_agreement.py::test_uneven_ranks_in_all_ways_to_sum[tail zero 1]",
        "model": "tests/ranks/test_ranks_in_model.py::test_ranks_in_model_train_like_one_process[zero]",
    },
    "zero-2": {
        "driver": "tests/ranks/test_reduction.py::test_all_ways_to_sum_train_alike[zero 2]",
        "cells": "tests/ranks/test_reduction.py::test_cells_on_ranks_train_like_one_process[zero 2]",
        "jit": "tests/ranks/test_reduction.py::test_accumulators_on_ranks_train_like_one_process[zero 2]",
        "loop": "tests/ranks/test_agreement.py::test_uneven_ranks_in_all_ways_to_sum[tail zero 2]",
        "model": "tests/ranks/test_ranks_in_model.py::test_sharded_accumulators_in_model_train_like_one_process",
    },
    "resume": {
        "driver": (
            "tests/saving/test_resume.py::test_stopping_compiled_changes_no_byte",
            "tests/saving/test_resume.py::test_stopping_at_every_position_changes_no_byte",
        ),
        "cells": No(
            "the Cells have no training state to save",
            "这些 Cell 没有可以保存的训练状态",
        ),
        "jit": "tests/training/test_loop.py::test_resumed_loop_equals_uninterrupted_loop",
        "loop": RANDOM,
        "model": "tests/test_model_step.py::test_resumed_run_equals_uninterrupted_run",
    },
    "batch-norm": _all_ways("tests/layers/test_pooled_in_windows.py::test_statistics_equal_those_of_large_batch"),
    "sparse": {
        "driver": "tests/network/test_sparse.py::test_driver_trains_as_with_dense_gradients",
        "cells": "tests/network/test_sparse.py::test_other_ways_train_as_with_dense_gradients[cells]",
        "jit": "tests/network/test_sparse.py::test_custom_step_trains_as_with_dense_gradients",
        "loop": No("it raises an error, see [Limits](limits.md)", "会报错，见[限制](limits.md)"),
        "model": "tests/network/test_sparse.py::test_other_ways_train_as_with_dense_gradients[step]",
    },
    "graph": {
        "driver": "tests/test_driver.py::test_tails",
        "cells": "tests/engine/test_cells.py::test_windows_in_graph_mode_equal_large_batches",
        "jit": "tests/loss/test_terms.py::test_compiled_functional_pattern_is_that_of_the_oracle",
        "loop": No("a plain loop runs in PyNative mode", "普通循环在 PyNative 模式下运行"),
        "model": (
            "tests/engine/test_ema.py::test_model_fit_evaluates_with_average",
            "tests/test_terms_in_model.py::test_compiled_model_trains_like_the_oracle",
        ),
    },
    "not-compiled": {
        "driver": "tests/test_equivalence.py::test_default_mode_equals_graph_mode_and_operators_one_by_one",
        "cells": "tests/network/test_constants.py::test_change_between_two_calls_is_followed[cells]",
        "jit": No("a step with `ms.jit` is always compiled", "使用 `ms.jit` 的训练步总会编译"),
        "loop": "tests/network/test_constants.py::test_change_between_two_calls_is_followed[loop]",
        "model": "tests/network/test_constants.py::test_change_between_two_calls_is_followed[step]",
    },
    "evaluation": {
        "driver": (
            "tests/training/test_callbacks.py::test_evaluation_covers_complete_data_set",
            _conformance("driver", "evaluation"),
        ),
        "cells": EVALUATED.format("cells"),
        "jit": EVALUATED.format("accumulator"),
        "loop": EVALUATED.format("loop"),
        "model": (
            "tests/test_model_step.py::test_tail_is_applied_before_evaluation_and_saving",
            _conformance("Model", "evaluation"),
        ),
    },
}
"""dict[str, dict], the rows by the names of their anchors."""


class Words(NamedTuple):
    """The words of the table in a language."""

    head: str
    yes: str
    no: str
    not_tested: str
    and_: str
    colon: str
    brackets: str
    ways: Mapping[str, str]
    features: Mapping[str, str]


WORDS = {
    "": Words(
        head="feature",
        yes="yes",
        no="no",
        not_tested="not tested",
        and_=", ",
        colon=": ",
        brackets=" ({})",
        ways={"driver": "driver", "cells": "Cells", "jit": "jit step", "loop": "plain loop", "model": "Model"},
        features={
            "uneven": "uneven micro-batches and tails",
            "tokens": "weights by tokens",
            "clip": "clipping by norm",
            "rates": "learning-rate schedules, by updates",
            "scale": "loss scale, with float16",
            "amp": "`amp.auto_mixed_precision`",
            "skip-window": "non-finite windows are skipped",
            "skip-micro": "non-finite micro-batches are left out",
            "ema": "EMA of the weights",
            "noise": "noise scale",
            "terms": "losses of several terms",
            "statistic": "`WindowStatistic`",
            "coupled": "`CoupledLoss`",
            "sizes": "window sizes that change",
            "ranks": "several ranks",
            "zero-1": "ZeRO-1",
            "zero-2": "ZeRO-2",
            "resume": "resuming inside a window",
            "batch-norm": "BatchNorm, pooled statistics",
            "sparse": "sparse gradients",
            "graph": "graph mode",
            "not-compiled": "`compile=False`",
            "evaluation": "evaluation during training",
        },
    ),
    ".zh": Words(
        head="功能",
        yes="是",
        no="否",
        not_tested="未测试",
        and_="、",
        colon="：",
        brackets="（{}）",
        ways={"driver": "训练驱动", "cells": "Cell", "jit": "jit 训练步", "loop": "普通循环", "model": "Model"},
        features={
            "uneven": "大小不一的微批次与尾窗口",
            "tokens": "按 token 加权",
            "clip": "按范数裁剪梯度",
            "rates": "按更新计数的学习率调度",
            "scale": "float16 的损失缩放系数",
            "amp": "`amp.auto_mixed_precision`",
            "skip-window": "跳过出现非有限值的窗口",
            "skip-micro": "去掉出现非有限值的微批次",
            "ema": "权重的 EMA",
            "noise": "梯度噪声尺度",
            "terms": "由多项组成的损失",
            "statistic": "`WindowStatistic`",
            "coupled": "`CoupledLoss`",
            "sizes": "训练中改变窗口大小",
            "ranks": "多进程（多个 rank）",
            "zero-1": "ZeRO-1",
            "zero-2": "ZeRO-2",
            "resume": "从窗口中间断点续训",
            "batch-norm": "合并 BatchNorm 的滑动平均统计量",
            "sparse": "稀疏梯度",
            "graph": "图模式",
            "not-compiled": "`compile=False`",
            "evaluation": "在训练中评估",
        },
    ),
}


def tables() -> dict[str, str]:
    """Return the tables of docs/features.md by the names of their marks, and the lists of tests below them."""
    found = {}
    for language, words in WORDS.items():
        found[f"features{language}"] = _table(words)
        found[f"features/tests{language}"] = "".join(_list(words)).rstrip("\n") + "\n"
    return found


def shown_by(cell: Cell) -> tuple[str, ...]:
    """Return the tests of a cell."""
    if isinstance(cell, (No, NotTested)):
        return ()
    return (cell,) if isinstance(cell, str) else cell


@markdown
def _table(words: Words) -> Lines:
    yield [words.head, *words.ways.values()]
    for name, row in FEATURES.items():
        yield [words.features[name], *(f"[{_answer(row[way], words)}](#{name})" for way in WAYS)]


def _answer(cell: Cell, words: Words) -> str:
    if isinstance(cell, No):
        return words.no
    return words.not_tested if isinstance(cell, NotTested) else words.yes


def _list(words: Words) -> Iterator[str]:
    """Yield for each feature its name, and for each test or reason the ways that it is about."""
    for name, row in FEATURES.items():
        yield f"- **{words.features[name]}**{{ #{name} }}\n\n"
        ways_of: dict[str, list[str]] = {}
        for way in WAYS:
            for line in _lines(row[way], words):
                ways_of.setdefault(line, []).append(words.ways[way])
        for line, ways in ways_of.items():
            yield f"    - {words.and_.join(ways)}{words.colon}{line}\n"
        yield "\n"


def _lines(cell: Cell, words: Words) -> list[str]:
    """Return each test of a cell as code, with the values that are no way; or why there is none."""
    if isinstance(cell, (No, NotTested)):
        text = cell.chinese if words is WORDS[".zh"] else cell.english
        return [_answer(cell, words) + (words.brackets.format(text) if text else "")]
    lines = []
    for test in shown_by(cell):
        name, _, values = test.rstrip("]").partition("[")
        cases = [value for value in values.split(", ") if value not in ("", *WAYS.values(), *CONFORMANCE.values())]
        lines.append(f"`{name}`" + (words.brackets.format(words.and_.join(cases)) if cases else ""))
    return lines
