"""MindSpore's private names are in one module, which works without each of them, or says which MindSpore it wants."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.experimental import optim
from mindspore.train import Accuracy

from helpers import batches, cross_entropy
from ms_accum import GradientAccumulation
from ms_accum.engine import native_update
from ms_accum.loss import known_losses
from ms_accum.network import private
from ms_accum.network.compiled import Compiled
from ms_accum.saving import model_file

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("ms_accum", "programs", "model_zoo") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES += [ROOT / "train.py", ROOT / "eval.py"]
PRIVATE = Path("ms_accum/network/private.py")
# The modules whose names MindSpore documents.
PARTS = ("amp", "common.initializer", "communication", "dataset", "mint", "nn", "ops", "train")
DOCUMENTED = {"mindspore", *(f"mindspore.{part}" for part in PARTS)}
DOCUMENTED |= {f"mindspore.experimental{part}" for part in ("", ".optim", ".optim.lr_scheduler")}
# What only MindSpore's own code reads, though it has no underscore.
OF_CELLS = {name for name in {*dir(nn.Cell), *vars(nn.Cell())} if re.match("_[^_]", name)}
READ_BY_ITSELF = {"arguments_key", "compile_cache", "compile_phase", "current_phase", "init_mode", "phase_cache"}
# Private names that are Python's: of tuples with names, `os`, `sys`, `argparse` and `urllib`.
OF_PYTHON = {"_asdict", "_exit", "_getframe", "_opener", "_option_string_actions", "_replace"}
DUNDER = re.compile(r"__\w+__$")
OF_CLASSES = {"__compile_cell_hook__", "__ms_class__"}  # no other names with two underscores are MindSpore's


def names_in(tree):
    """Return the names that a source gives to what is its own."""
    nodes = list(ast.walk(tree))
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    defined |= {node.id for node in stored if isinstance(node, ast.Name)}
    attributes = [node for node in stored if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"]
    return defined | {node.attr for node in attributes}


def is_private(name, ours):
    if DUNDER.match(name):
        return name in OF_CLASSES
    return name in OF_CELLS | READ_BY_ITSELF or (name.startswith("_") and name not in ours and name not in OF_PYTHON)


def private_names(source, ours=frozenset()):
    """Return the private names of MindSpore in a source; those that are ours are not, unless a Cell has them, too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr, ours):
            found.append(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            given = node.args[1]
            name = given.value if isinstance(given, ast.Constant) else ""
            found += [name] if is_private(name, ours) and not name.startswith("_ms_accum_") else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mindspore":
            found += [] if node.module in DOCUMENTED else [node.module]
            found += [each.name for each in node.names if each.name.startswith("_")]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith("mindspore.")]
    return found


@pytest.mark.usefixtures("eager")
def test_no_other_module_uses_a_private_name():
    sources = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in SOURCES}
    ours = set().union(*(names_in(ast.parse(source)) for path, source in sources.items() if path != PRIVATE))
    found = {path: names for path, source in sources.items() if (names := private_names(source, ours))}
    assert found.keys() == {PRIVATE}, found


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "source",
    [
        "from mindspore.common.api import jit",
        "from mindspore import _checkparam",
        "import mindspore.context",
        "cell._cells",
        "cell.compile_cache",
        "getattr(cell, '_amp_level', None)",
        "cell.__compile_cell_hook__ = True",
    ],
)
def test_private_names_are_found(source):
    ours = "from mindspore.train import Model\nself._own\nos._exit\ngetattr(loss, '_ms_accum_scale')"
    assert private_names(source, {"_cells"}) and not private_names(ours, {"_own"})


# With this MindSpore


@pytest.mark.usefixtures("eager")
def test_this_version_has_every_name():
    assert private.Checkpoint is not None and private._context is not None and private._KEEPS_GRAPHS
    assert private.HOOKS and private.LearningRateSchedule is not nn.Cell
    for name in ("isconstant", "jit_context", "get_metrics"):  # not those of this module
        assert getattr(private, name).__class__.__module__ != private.__name__
        assert getattr(getattr(private, name), "__module__", "") != private.__name__
    assert private.jit_context() is None
    dense = nn.Dense(2, 3)
    assert dict(private.parameters_of(dense)) == {"weight": dense.weight, "bias": dense.bias}
    assert dict(private.cells_of(nn.SequentialCell(dense))) == {"0": dense}
    assert [each.name for each in private.primitives_of(nn.Dropout(p=0.5))] == ["Dropout"]
    assert private.is_list_of_rates(nn.SGD(dense.trainable_params(), [0.1, 0.2]).learning_rate)
    assert private.is_jit_class(native_update.NativeUpdate) and not private.is_jit_class(nn.Dense)
    was = private.set_synchronous(True)
    assert private.set_synchronous(was) is True and private.set_synchronous(was) is was
    assert private.amp_level(ms.amp.auto_mixed_precision(nn.SequentialCell(dense), "O1")) == "O1"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_hooks_of_an_optimizer_are_found(register):
    optimizer = nn.SGD(nn.Dense(2, 2).trainable_params())
    assert not private.has_hooks(optimizer)
    handle = getattr(optimizer, register)(lambda *_: None)
    assert private.has_hooks(optimizer)
    handle.remove()
    assert not private.has_hooks(optimizer)


# Without a name


def without(module, *names):
    """Return the module of private names as it is where one of MindSpore's modules is not there, or lacks names."""
    there = vars(sys.modules[module])
    left = SimpleNamespace(**{name: there[name] for name in there if name not in names}) if names else None
    spec = importlib.util.spec_from_file_location("ms_accum.network.without", ROOT / PRIVATE)
    loaded = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, left)
        spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.usefixtures("eager")
def test_what_is_not_there_is_left_out():
    assert without("mindspore.ops.functional", "isconstant").isconstant((2, 3)) is False
    assert without("mindspore.ops.primitive", "jit_context").jit_context() is None
    assert without("mindspore.nn.learning_rate_schedule").LearningRateSchedule is nn.Cell
    assert without("mindspore.context", "_context").set_synchronous(True) is True
    made = without("mindspore.train.metrics").get_metrics({"accuracy"})
    assert isinstance(made["accuracy"], Accuracy)
    assert without("mindspore.train.checkpoint_pb2").Checkpoint is None


@pytest.mark.usefixtures("eager")
def test_setting_that_is_gone_is_not_set(monkeypatch):
    monkeypatch.setattr("mindspore.context.ms_ctx_param", SimpleNamespace())
    assert without("mindspore.train.checkpoint_pb2").set_synchronous(False) is False


@pytest.mark.usefixtures("eager")
def test_models_are_saved_and_loaded_without_the_parser(monkeypatch, tmp_path):
    monkeypatch.setattr(model_file, "Checkpoint", None)
    network, other = nn.Dense(2, 3), nn.Dense(2, 3)
    model_file.save_model(network, tmp_path / "model.ckpt")
    model_file.load_model(other, tmp_path / "model.ckpt")
    np.testing.assert_array_equal(other.weight.asnumpy(), network.weight.asnumpy())
    with pytest.raises(model_file.CheckpointError, match="another architecture"):
        model_file.load_model(nn.Dense(2, 4), tmp_path / "model.ckpt")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("read", "name"),
    [
        (private.cells_of, "_cells"),
        (private.parameters_of, "_params"),
        (private.primitives_of, "_primitives"),
        (private.initial_values, "init_mode"),
        (private.forget_graphs, "compile_cache"),
    ],
)
def test_name_without_which_nothing_is_right_is_an_error_in_one_line(read, name):
    rule = rf"^For 'ms_accum', MindSpore must have '{name}', to .*, but MindSpore {re.escape(ms.__version__)} has not\."
    with pytest.raises(RuntimeError, match=rule) as caught:
        read(SimpleNamespace(has_init=True))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("eager")
def test_hooks_without_their_names_are_an_error(monkeypatch):
    monkeypatch.setattr(private, "HOOKS", frozenset())
    with pytest.raises(RuntimeError, match="MindSpore must have '_forward_hook'"):
        private.has_hooks(nn.SGD(nn.Dense(2, 2).trainable_params()))


@pytest.mark.usefixtures("eager")
def test_marks_that_are_gone_are_taken_for_the_usual():
    cell = SimpleNamespace()
    assert private.amp_level(cell) is None and private.runs_on_device(cell)
    assert not private.is_list_of_rates(cell) and not private.is_jit_class(SimpleNamespace)


def test_graph_without_isconstant_checks_no_shapes(monkeypatch, rng):
    missing = without("mindspore.ops.functional", "isconstant")
    monkeypatch.setitem(sys.modules, missing.__name__, missing)  # where MindSpore's compiler looks for its function
    monkeypatch.setattr(known_losses, "isconstant", missing.isconstant)
    network = nn.Dense(6, 3)
    model = GradientAccumulation(network, cross_entropy(), nn.SGD(network.trainable_params(), 0.1), check="off")
    before = network.weight.asnumpy().copy()
    model.train_process(1, batches(rng, [4, 4]), mini_steps=2)
    assert np.isfinite(network.weight.asnumpy()).all() and (network.weight.asnumpy() != before).any()


class Twice(Compiled):
    def __init__(self):
        super().__init__("Twice", True)

    def construct(self, x):
        return x * 2


@pytest.mark.parametrize("name", ["_KEEPS_GRAPHS", "current_phase"])
def test_without_names_of_graphs_each_call_looks_them_up(monkeypatch, name):
    if name == "current_phase":
        never = property(lambda cell: None, lambda cell, value: None)
        monkeypatch.setattr(Compiled, "current_phase", never, raising=False)
    else:
        monkeypatch.setattr(private, name, False)
    compile, calls = nn.Cell.compile, []
    monkeypatch.setattr(nn.Cell, "compile", lambda *args, **named: calls.append(1) or compile(*args, **named))
    twice = Twice()
    assert [twice(Tensor(number, ms.float32)).item() for number in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    assert len(calls) == 3


@pytest.mark.parametrize("make", [nn.Adam, optim.AdamW])
def test_optimizer_without_an_attribute_is_updated_by_mindspore(monkeypatch, rng, make):
    def trained(is_there):
        monkeypatch.setattr(native_update, "_has", lambda optimizer, names: is_there)
        ms.set_seed(1)
        network = nn.Dense(6, 3)
        model = GradientAccumulation(network, cross_entropy(), make(network.trainable_params(), 0.1), check="off")
        model.train_process(1, window, mini_steps=2)
        return network.weight.asnumpy()

    window = batches(rng, [4, 4])
    np.testing.assert_allclose(trained(is_there=False), trained(is_there=True), rtol=1e-5, atol=1e-6)
