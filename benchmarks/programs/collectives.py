"""The collectives of a compiled graph."""

from __future__ import annotations

from typing import Any

from mindspore import nn
from mindspore.train import anf_ir_pb2

_OPERATORS = ("AllReduce", "AllGather", "ReduceScatter")


def collectives_of(cell: nn.Cell) -> list[Any]:
    """Return each collective of a Cell's compiled graph, branches and loops not looked into."""
    graph = anf_ir_pb2.ModelProto()
    graph.ParseFromString(cell.get_func_graph_proto())
    return [node for node in graph.graph.node if node.op_type in _OPERATORS]
