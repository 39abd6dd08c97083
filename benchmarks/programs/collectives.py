"""The collectives of a compiled graph, what they send, and the time of one alone."""

from __future__ import annotations

import math
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.train import anf_ir_pb2

from ms_accum import Group, total

_FLOAT32 = 4
_OPERATORS = ("AllReduce", "AllGather", "ReduceScatter")


class _Collective(nn.Cell):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def construct(self, row: Any) -> Any:
        return self.operator(row)


def collectives_of(cell: nn.Cell, ranks: int) -> list[dict[str, Any]]:
    """Return each collective of a Cell's compiled graph, branches and loops not looked into, and its input's bytes."""
    graph = anf_ir_pb2.ModelProto()
    graph.ParseFromString(cell.get_func_graph_proto())
    nodes = [node for node in graph.graph.node if node.op_type in _OPERATORS]
    return [{"operator": node.op_type, "bytes": _input_bytes(node, ranks)} for node in nodes]


def _input_bytes(node: Any, ranks: int) -> float:
    """Return the bytes that go in, from the shape of what comes out: not every input is a node of its own."""
    output_bytes = _FLOAT32 * math.prod(dim.size for dim in node.output_type.tensor_type.shape.dim)
    return output_bytes * {"AllGather": 1 / ranks, "ReduceScatter": ranks}.get(node.op_type, 1)


@lru_cache(None)
def _cell(operator: str) -> nn.Cell:
    return _Collective(getattr(ops, operator)())


def alone(group: Group, operator: str, elements: int, count: int) -> dict[str, Any]:
    """Return the seconds that `count` collectives of float32 take alone.

    `elements` are those of what comes out.
    """
    own = round(elements / group.size) if operator == "AllGather" else elements
    row, cell = Tensor(np.ones(own, np.float32)), _cell(operator)
    cell(row).asnumpy()  # compiled here
    total([0], group)
    began = time.perf_counter()
    for _ in range(count):
        cell(row).asnumpy()
    return {"seconds": time.perf_counter() - began}


def loopback_bytes() -> int:
    """Return what this machine has sent to itself since it started, 0 where it is not counted."""
    try:
        lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.strip().startswith("lo:")), 0)


def bytes_of(parameters: Any) -> int:
    """Return what Parameters hold."""
    return sum(parameter.nbytes for parameter in parameters)
