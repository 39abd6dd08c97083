"""The tables of figures in Chinese: heads and cells that have words are replaced, numbers and names stay."""

from __future__ import annotations

import re

# Heads of columns that elsewhere are names.
HEADS = {"data": "数据", "build": "构建"}
# Whole cells.
CELLS = {
    # of several tables
    "contender": "程序",
    "network": "网络",
    "all": "全部",
    "window's end": "窗口结束时",
    "every micro-batch": "每个微批次",
    "one process": "单进程",
    # speed and cost
    "plain, ms": "普通前向与反向，ms",
    "accumulating micro-batch / plain": "累积的微批次 / 普通的",
    "update / plain with optimizer": "更新 / 带优化器的普通训练步",
    "driver / its Cells": "驱动 / 其中的 Cell",
    "end in a graph of its own / in the last micro-batch's": "窗口结束部分单独成图 / 并入最后一个微批次的计算图",
    "dynamic loss scale": "动态损失缩放",
    "two terms / one number": "两项损失 / 单个损失",
    "driver in default mode / graph mode": "驱动：默认模式 / 图模式",
    "`Model` in default mode / graph mode": "`Model`：默认模式 / 图模式",
    "plain loop with `Accumulator` / without": "普通循环：使用 `Accumulator` / 不使用",
    # memory
    "peak, MiB": "峰值，MiB",
    "peak of the largest, MiB": "占用最多的进程的峰值，MiB",
    "parameters": "参数",
    "accumulators": "累加器",
    "optimizer": "优化器",
    # data, start
    "pipeline": "数据管道",
    "to the first batch, s": "到第一个批次，s",
    "again": "再次开始，s",
    "epoch with data, progress and metrics / its training alone": "含数据、进度与评估指标的一轮 / 仅训练",
    "seconds, median": "秒，中位数",
    "interpreter": "解释器",
    "first window": "第一个窗口",
    "seconds of `train.py`'s start": "`train.py` 启动各阶段的秒数",
    "graphs": "计算图",
    "compiling, s": "编译，s",
    "more for a tail": "有尾窗口时增加",
    "more for a short micro-batch": "有较短的微批次时增加",
    "kernels, share of the time in all": "算子，占总时间的比例",
    # accuracy, losses, language
    "goal": "目标",
    "seconds to it": "达到目标的秒数",
    "epochs": "轮数",
    "all epochs, s": "全部轮次，s",
    "accuracy then": "最终准确率",
    "update": "更新",
    "ours": "ms_accum",
    "validation loss": "验证损失",
    "ms per update": "每次更新，ms",
    "of the CPU, ms": "CPU 时间，ms",
    "tokens per s": "每秒 token 数",
    "s with the start": "含启动，s",
    # records
    "benchmark": "基准测试",
    "date": "日期",
    "versions": "版本",
}
# Within a cell, with numbers that stay.
PATTERNS = (
    (r"(\w+), one micro-batch of ([\d,]+) rows", r"\1，一个 \2 个样本的微批次"),
    (r"(\w+), after ([\d,]+) micro-batches", r"\1，\2 个微批次之后"),
    (r"ms per batch of (\d+)", r"每个批次（\1 个样本），ms"),
    (r"to the first update of LeNet5, N=(\d+)", r"到 LeNet5 的第一次更新，N=\1"),
    (r"([\d.,]+) to ([\d.,]+)", r"\1 至 \2"),
    (r"largest difference, ([\d,]+) updates", r"最大差异，\1 次更新"),
    (r"([\d,]+) updates", r"\1 次更新"),
    (r"(\d+) cores, (.+)", r"\1 核，\2"),
    (r"one process, ms", "单进程，ms"),
)


def in_chinese(table: str) -> str:
    """Return a Markdown table with its words in Chinese."""
    head, *lines = [line[2:-2].split(" | ") for line in table.splitlines()]
    translated = [
        [HEADS.get(cell) or _cell(cell) for cell in head],
        *([_cell(cell) for cell in line] for line in lines),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in translated)


def _cell(cell: str) -> str:
    if cell in CELLS:
        return CELLS[cell]
    for pattern, words in PATTERNS:
        if match := re.fullmatch(pattern, cell):
            return match.expand(words)
    return cell
