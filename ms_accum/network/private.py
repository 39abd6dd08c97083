"""MindSpore's private names: all that this package uses, each with what happens without it.

Private is what begins with an underscore, what the documentation does not list, and what only MindSpore's own code
reads. A new MindSpore may rename it, so no other module uses one; tests/network/test_private.py checks that, and takes
the names away one by one.
"""

from __future__ import annotations

from typing import Any, NoReturn

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.train import get_metric_fn

from . import _NEWEST

try:
    from mindspore.train.checkpoint_pb2 import Checkpoint
except ImportError:
    Checkpoint = None
"""Parses a `.ckpt` before MindSpore loads it. Without it MindSpore's loader reads a file that was not checked."""

try:
    from mindspore.ops.functional import isconstant
except ImportError:

    def isconstant(value: Any) -> bool:
        """Return whether a value is known when a graph is compiled. Without it, False: shapes are not checked."""
        return False


try:
    from mindspore.ops.primitive import jit_context
except ImportError:

    def jit_context() -> None:
        """Return what MindSpore is tracing. Without it, None: capture_mode="trace" is not refused."""


try:
    from mindspore.nn.learning_rate_schedule import LearningRateSchedule
except ImportError:
    LearningRateSchedule = nn.Cell
"""The class of MindSpore's schedules. Without it, any Cell is one; MindSpore's optimizers then say what they take."""

try:
    from mindspore.train.metrics import get_metrics
except ImportError:

    def get_metrics(metrics: Any) -> Any:
        """Return metrics by name for the argument of `Model`. Without it, `Model`'s types are not checked."""
        return {name: get_metric_fn(name) for name in metrics} if isinstance(metrics, set) else metrics


try:
    from mindspore.context import _context, ms_ctx_param

    _SYNCHRONIZE = ms_ctx_param.pynative_synchronize
except (ImportError, AttributeError):
    _context = None


def set_synchronous(value: bool) -> bool:
    """Set whether each operator outside graphs runs to its end, and return what it was. Without it, nothing is set.

    `set_context` prints a warning about this setting, and what it recommends instead can't be undone.
    """
    if _context is None:
        return value
    context = _context()
    previous = context.get_param(_SYNCHRONIZE)
    context.set_param(_SYNCHRONIZE, value)
    return previous


def _raise_missing(name: str, purpose: str) -> NoReturn:
    raise RuntimeError(
        f"For 'ms_accum', MindSpore must have '{name}', to {purpose}, but MindSpore {ms.__version__} has not. "
        f"Use MindSpore 2.7.2 to {_NEWEST}."
    )


def _own(owner: Any, name: str, purpose: str) -> Any:
    """Return an attribute of MindSpore's object; without it, one line that names MindSpore's version."""
    try:
        return getattr(owner, name)
    except AttributeError:
        _raise_missing(name, purpose)


# What is in a Cell


def cells_of(cell: nn.Cell) -> dict[str, Any]:
    """Return the dict itself in which a Cell has its Cells: it is followed, and written. Without it, an error."""
    return _own(cell, "_cells", "find the layers of a network")


def parameters_of(cell: nn.Cell) -> dict[str, Parameter | None]:
    """Return the dict itself in which a Cell has its own Parameters. Without it, an error."""
    return _own(cell, "_params", "find the Parameters of a layer")


def primitives_of(cell: nn.Cell) -> list[Any]:
    """Return the operators of a Cell, whose seeds and reductions are read. Without it, an error."""
    return list(_own(cell, "_primitives", "find the operators of a layer").values())


def initial_values(parameter: Parameter) -> Tensor | None:
    """Return what `no_init_parameters` left a Parameter to begin with; None if it has values. Without it, an error."""
    return _own(parameter, "init_mode", "give Parameters their values") if parameter.has_init else None


OF_EVERY_CELL = frozenset({*vars(nn.Cell()), "current_phase"})
"""frozenset[str], what MindSpore notes in a Cell, which is not the user's. Without a name, it is followed: slower."""
HOOKS = frozenset(name for name in OF_EVERY_CELL if "ward" in name and "hook" in name)
"""frozenset[str], under which a Cell has hooks. Without any, `has_hooks` is an error."""


def has_hooks(cell: nn.Cell) -> bool:
    """Return whether something of the user's runs before or after a Cell."""
    if not HOOKS:
        _raise_missing("_forward_hook", "find the hooks of an optimizer")
    return any(map(vars(cell).get, HOOKS))


def amp_level(cell: nn.Cell) -> str | None:
    """Return the level with which `auto_mixed_precision` rewrote a Cell. Without it, None: taken for float32."""
    return getattr(cell, "_amp_level", None)


def runs_on_device(optimizer: nn.Cell) -> bool:
    """Return whether an optimizer updates on the device, not on the host. Without it, True, as most do."""
    return getattr(optimizer, "_is_device", True)


def is_list_of_rates(cell: nn.Cell) -> bool:
    """Return whether it is a schedule that MindSpore made of a list of rates. Without it, False: no warning."""
    return type(cell).__name__ == "_IteratorLearningRate"


def is_jit_class(kind: type) -> bool:
    """Return whether a class has `ms.jit_class`. Without it, False: functions and Cells are accepted alone."""
    return hasattr(kind, "__ms_class__")


# Its graphs

HOOKS_IN_GRAPH = "__compile_cell_hook__"
"""str, an attribute of a Cell that is true if its own hooks are in its graph. Without it they would not run."""
_NOTED = ("compile_cache", "arguments_key", "_has_mutable_args_list")
_KEEPS_GRAPHS = all(hasattr(nn.Cell(), name) for name in _NOTED)


def compile_once(cell: Any, *inputs: Any, **named: Any) -> None:
    """Compile a graph of a `Compiled`, unless it is known: MindSpore's look-up costs as much as a small graph.

    It notes the graph's name in each Cell inside, where only its automatic parallelism reads it. Without the names of
    `_NOTED`, and `current_phase`, each call looks it up.
    """
    kinds = [(each.shape, each.dtype) if type(each) is Tensor else each for each in (*inputs, *named.values())]
    if not _KEEPS_GRAPHS or not all(kind is None or type(kind) is tuple for kind in kinds):
        cell.before_compiling()
        return nn.Cell.compile(cell, *inputs, **named)
    known, graph = cell.known_graphs[0], (cell.phase, *named, *kinds)
    name, *noted = known.get(graph, (None,))
    if name in cell.compile_cache:  # it is not after `ms_memory_recycle`
        cell.arguments_key, cell._has_mutable_args_list = noted
    else:
        cell.before_compiling()
        nn.Cell.compile(cell, *inputs, **named)
        name = getattr(cell, "current_phase", None)
        known[graph] = name, cell.arguments_key, cell._has_mutable_args_list
    return None


def forget_graphs(network: nn.Cell) -> None:
    """Make MindSpore compile a network again, whose layers were replaced. Without it, an error."""
    _own(network, "compile_cache", "compile a network again").clear()
