"""The operators in C++: are they right, and do windows end in them?"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim as experimental

from conftest import CORES
from helpers import batches, cross_entropy, has_stage, run
from ms_accum import GradientAccumulation, ZeroOptimizer, native
from ms_accum.engine.config import checked, resolve
from ms_accum.engine.native_update import NativeUpdate
from reference import miss
from running import ROOT, run_python
from ways import Trained

# Where they must have been built, as in .ci/run, their absence is a failure.
MUST = os.environ.get("MS_ACCUM_BUILT") == "1"
pytestmark = pytest.mark.skipif(not (MUST or native.available()), reason="the operators were not built")

F32 = np.float32


def test_operators_were_built():
    assert native.available()


def call(loaded, name, *arrays, types=()):
    """Call an operator with arrays, as MindSpore does: inputs, then the output. Returns 0 if it succeeded."""
    data = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    axes = (ctypes.c_int * len(arrays))(*[array.ndim for array in arrays])
    shapes = [(ctypes.c_int64 * max(1, array.ndim))(*array.shape) for array in arrays]
    pointers = (ctypes.POINTER(ctypes.c_int64) * len(arrays))(
        *[ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) for shape in shapes]
    )
    words = (ctypes.c_char_p * len(types))(*types) if types else None
    return getattr(loaded, name)(len(arrays), data, axes, pointers, words, None, None)


@pytest.fixture(scope="module")
def loaded():
    return ctypes.CDLL(str(native.library()))


def number(value):
    return np.array(value, F32)


def arrays(rng, *shapes):
    return [np.array(rng.randn(*shape), F32) for shape in shapes]


SHAPES = [(3,), (), (70000,), (5, 7, 2), (0,), (1,)]


# The operators, against NumPy


@pytest.mark.usefixtures("eager")
def test_norm_is_that_of_float64(loaded, rng):
    values, result = arrays(rng, *SHAPES), np.zeros(1, F32)
    squares = sum(np.square(array, dtype=np.float64).sum() for array in values)
    assert call(loaded, "norm", *values, result) == 0 and result[0] == F32(np.sqrt(squares))
    assert call(loaded, "sum_of_squares", *values, result) == 0 and result[0] == F32(squares)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 65535, 65536, 69999])
def test_one_bad_element_is_found(value, place, loaded, rng):
    values, norm, finite = arrays(rng, *SHAPES), np.zeros(1, F32), np.array([False])
    assert call(loaded, "all_finite", *values, finite) == 0 and finite[0]
    values[2][place] = value
    call(loaded, "all_finite", *values, finite)
    call(loaded, "norm", *values, norm)
    assert not finite[0] and not np.isfinite(norm[0])


@pytest.mark.usefixtures("eager")
def test_norm_is_not_finite_where_squares_exceed_float32(loaded):
    """As MindSpore's is, so that both skip the same windows."""
    norm = np.zeros(1, F32)
    call(loaded, "norm", np.array([1.9e19], F32), norm)
    assert norm[0] == np.inf
    call(loaded, "norm", np.array([1.8e19], F32), norm)
    assert norm[0] == F32(1.8e19)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("factor", "no_nan", "adds"), [(0.5, False, True), (0.0, True, False), (2.0, True, True)])
def test_add(factor, no_nan, adds, loaded, rng):
    sums, gradients, result = arrays(rng, *SHAPES), arrays(rng, *SHAPES), np.array([False])
    expected = [total + gradient * F32(factor) if adds else total.copy() for total, gradient in zip(sums, gradients)]
    if not adds:
        gradients[0][:] = np.nan
    assert call(loaded, "add", number(factor), np.array(no_nan), *sums, *gradients, result) == 0
    assert all(np.array_equal(total, other) for total, other in zip(sums, expected)) and result[0] == adds


@pytest.mark.usefixtures("eager")
def test_empty_writes_zeros_over_nan(loaded, rng):
    values = [np.full(shape, np.nan, F32) for shape in SHAPES]
    assert call(loaded, "empty", *values, np.array([False])) == 0
    assert not any(array.any() for array in values)


def momentum_by_numpy(gradient, parameter, moment, rate, decay, momentum):
    moment = moment * momentum + (parameter * decay + gradient)
    return parameter - moment * rate, moment


def update_inputs(rng, *, finite=True, empties=True, averages=True, rates=(0.1,), decays=(0.01,)):
    """Return the inputs of `momentum`, by name."""
    inputs = {
        "finite": np.array(finite),
        "factor": number(0.5),
        "kept": number(0.75),
        "rates": np.array(rates, F32),
        "decays": np.array(decays, F32),
        "unscale": number(1.0),
        "layout": np.array([len(SHAPES), empties, averages, 1], np.int32),
        "momentum": number(0.9),
        "step": np.array([7], np.int32),
    }
    kinds = {"gradients": arrays(rng, *SHAPES), "parameters": arrays(rng, *SHAPES), "moments": arrays(rng, *SHAPES)}
    if averages:
        kinds["averages"] = arrays(rng, *SHAPES)
    return inputs, kinds


def flat(inputs, kinds, result):
    return [*inputs.values(), *(array for kind in kinds.values() for array in kind), result]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("empties", [True, False])
@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("several", [True, False])
def test_update_is_that_of_numpy(empties, averages, several, loaded, rng):
    rates, decays = (np.linspace(0.1, 0.6, 6), np.linspace(0, 0.5, 6)) if several else ((0.1,), (0.01,))
    inputs, kinds = update_inputs(rng, empties=empties, averages=averages, rates=rates, decays=decays)
    before = {name: [array.copy() for array in kind] for name, kind in kinds.items()}
    result = np.array([False])
    assert call(loaded, "momentum", *flat(inputs, kinds, result)) == 0 and result[0] and inputs["step"][0] == 8
    for index in range(len(SHAPES)):
        rate, decay = (F32(each[index if several else 0]) for each in (rates, decays))
        old = [before[name][index] for name in ("gradients", "parameters", "moments")]
        parameter, moment = momentum_by_numpy(old[0] * F32(0.5), *old[1:], rate, decay, F32(0.9))
        assert np.array_equal(kinds["parameters"][index], parameter)
        assert np.array_equal(kinds["moments"][index], moment)
        assert np.array_equal(kinds["gradients"][index], old[0] * (0 if empties else 1))
        if averages:
            expected = before["averages"][index] * F32(0.75) + parameter * F32(0.25)
            assert np.array_equal(kinds["averages"][index], expected)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("empties", [True, False])
def test_skipped_update_changes_only_the_sums(empties, loaded, rng):
    inputs, kinds = update_inputs(rng, finite=False, empties=empties)
    kinds["gradients"][0][:] = np.nan
    before = {name: [array.copy() for array in kind] for name, kind in kinds.items()}
    result = np.array([True])
    assert call(loaded, "momentum", *flat(inputs, kinds, result)) == 0 and not result[0] and inputs["step"][0] == 7
    for name in ("parameters", "moments", "averages"):
        assert all(np.array_equal(array, old) for array, old in zip(kinds[name], before[name]))
    assert any(array.any() for array in kinds["gradients"]) is not empties


def digest_of_training(loaded):
    """Return the digest of what three windows with Adam leave, large enough for several threads."""
    rng, size = np.random.RandomState(1), 3_000_001
    state = arrays(rng, *[(size,)] * 3)
    norm, digest = np.zeros(1, F32), hashlib.sha256()
    for _ in range(3):
        (gradient,) = arrays(rng, (size,))
        assert call(loaded, "norm", gradient, norm) == 0
        common = [number(each) for each in (1 / norm[0], 0, 0.1, 0.01, 1)]
        own = [number(each) for each in (1, 1, 0.9, 0.999, 1e-8, 0)]  # the first two are the powers
        layout = np.array([1, 1, 0, 0], np.int32)
        assert call(loaded, "adam", np.array(True), *common, layout, *own, gradient, *state, np.array([False])) == 0
        digest.update(norm.tobytes() + b"".join(array.tobytes() for array in state))
    return digest.hexdigest()


@pytest.mark.usefixtures("eager")
def test_bytes_do_not_depend_on_threads(loaded):
    """The operators start a thread for each core that the process may use."""
    used, cores = os.sched_getaffinity(0), CORES
    if len(cores) < 2:
        pytest.skip("one core")
    digests = set()
    try:
        for allowed in (cores[:1], cores):
            os.sched_setaffinity(0, allowed)
            digests.add(digest_of_training(loaded))
    finally:
        os.sched_setaffinity(0, used)
    assert len(digests) == 1


# Against MindSpore's optimizers


def schedule():
    return nn.ExponentialDecayLR(0.1, 0.5, 2)


class HalvedDecay(nn.Cell):
    def construct(self, step):
        return 0.1 / (step + 1.0)


def grouped(make):
    def make_grouped(parameters):
        first, *others = parameters
        groups = [{"params": others, "lr": 0.3, "weight_decay": 0.2}, {"params": [first]}, {"order_params": parameters}]
        return make(groups)

    return make_grouped


def experimental_groups(parameters):
    first, *others = parameters
    return experimental.AdamW(
        [{"params": others, "lr": 0.3, "betas": (0.5, 0.9)}, {"params": [first], "maximize": True}], 0.1
    )


# By name: how to make it, and whether it is equal to the byte.
OPTIMIZERS = {
    "SGD": (lambda p: nn.SGD(p, 0.1), True),
    "SGD, momentum": (lambda p: nn.SGD(p, 0.1, momentum=0.9, dampening=0.2, weight_decay=0.1), True),
    "SGD, groups": (grouped(lambda g: nn.SGD(g, 0.1, momentum=0.9)), True),
    "Momentum": (lambda p: nn.Momentum(p, 0.1, 0.9), True),
    "Momentum, schedule": (lambda p: nn.Momentum(p, schedule(), 0.9, weight_decay=0.1), True),
    "Momentum, changing decay": (lambda p: nn.Momentum(p, 0.1, 0.9, weight_decay=HalvedDecay()), True),
    "Momentum, groups": (grouped(lambda g: nn.Momentum(g, schedule(), 0.9, weight_decay=0.1)), True),
    "Adam": (lambda p: nn.Adam(p, 0.1, weight_decay=0.1), False),
    "AdamWeightDecay": (lambda p: nn.AdamWeightDecay(p, 0.1, weight_decay=0.1), False),
    "AdamWeightDecay, groups": (grouped(lambda g: nn.AdamWeightDecay(g, 0.1)), False),
    "AdamW": (lambda p: experimental.AdamW(p, 0.1), True),
    "AdamW, groups": (experimental_groups, True),
}


class Layers(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Dense(6, 5), nn.LayerNorm((5,)), nn.Dense(5, 3)

    def construct(self, x):
        return self.last(self.norm(self.first(x)))


def trained(make, use_native, monkeypatch, *, steps=4, data=None, **options):
    """Train windows of 2 without clipping, and return the driver and all Parameters of the optimizer."""
    monkeypatch.setenv(native.SWITCH, use_native)
    ms.set_seed(1)
    network = Layers()
    rng = np.random.RandomState(1)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(rng.randn(*parameter.shape).astype(F32)))
    optimizer = make(network.trainable_params())
    model = GradientAccumulation(network, cross_entropy(), optimizer, check="off", **options)
    run(model, data or batches(rng, [8] * (2 * steps)), 2)
    assert has_stage(NativeUpdate, model._step._runner([]).window.boundary) == (use_native == "1")
    return model, {parameter.name: parameter.asnumpy() for parameter in optimizer.get_parameters()}


FAST = ("Momentum, groups", "Adam", "AdamW, groups")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in OPTIMIZERS]
)
def test_trains_like_mindspore(name, monkeypatch):
    make, exact = OPTIMIZERS[name]
    _, expected = trained(make, "0", monkeypatch)
    _, actual = trained(make, "1", monkeypatch)
    assert list(actual) == list(expected)
    differences = [parameter for parameter in actual if not np.array_equal(actual[parameter], expected[parameter])]
    assert not (exact and differences), differences
    # Adam: roundings of terms as large as the rate, where the gradient is nearly 0
    assert miss(list(actual.values()), list(expected.values()), 1e-5, 1e-5) <= 1


class OwnRate(nn.SGD):
    def get_lr(self):
        return Tensor(0.2, ms.float32)


def unchanged(cell, inputs):
    return inputs


class Held(nn.Cell):
    """A decay with a state that MindSpore does not see."""

    def __init__(self):
        super().__init__()
        self.held = (Parameter(Tensor(0.0, ms.float32), name="held", requires_grad=False),)

    def construct(self, step):
        return 0.1 / ops.assign_add(self.held[0], Tensor(1.0, ms.float32))


LEFT_TO_MINDSPORE = {
    "another optimizer": lambda p: nn.RMSProp(p, 0.1),
    "Momentum, nesterov": lambda p: nn.Momentum(p, 0.1, 0.9, use_nesterov=True),
    "Adam, amsgrad": lambda p: nn.Adam(p, 0.1, use_amsgrad=True),
    "centralized gradients": lambda p: nn.SGD([{"params": p, "grad_centralization": True}], 0.1),
    "sharded": lambda p: ZeroOptimizer(lambda parts: nn.Adam(parts, 0.1), p),
    "a decay with a state in a tuple": lambda p: nn.Momentum(p, 0.1, 0.9, weight_decay=Held()),
    "a class of the user's": lambda p: OwnRate(p, 0.1),
}


@pytest.mark.parametrize("name", LEFT_TO_MINDSPORE)
def test_other_optimizers_are_left_to_mindspore(name, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "1")
    network = Layers()
    model = GradientAccumulation(network, cross_entropy(), LEFT_TO_MINDSPORE[name](network.trainable_params()))
    model._step.open(2)
    window = model._step._runner([]).window
    assert not has_stage(NativeUpdate, window.boundary) and window.kernels.library is not None


def test_ranks_compare_whether_they_use_the_operators(monkeypatch):
    compared = []
    for switch in ("0", "1"):
        monkeypatch.setenv(native.SWITCH, switch)
        optimizer = nn.SGD(Layers().trainable_params(), 0.1)
        compared.append(resolve("Accumulator", optimizer, None, checked("Accumulator", {}), divides=True).facts.items())
    different = compared[0] ^ compared[1]
    assert {value for _, value in different} == {"none", "all"}
    assert {name for name, _ in different} == {"C++ operators (MS_ACCUM_NATIVE=0 turns them off)"}


@pytest.mark.usefixtures("eager")
def test_wrong_numbers_and_types_of_inputs_are_refused(loaded, rng):
    """MindSpore ends such a call with an error instead of reading other bytes."""
    inputs, kinds = update_inputs(rng)
    values = flat(inputs, kinds, np.array([False]))
    types = [b"float32" if array.dtype == F32 else str(array.dtype).encode() for array in values]
    assert call(loaded, "momentum", *values, types=types) == 0
    types[3] = b"float64"
    before = [array.copy() for array in values]
    assert call(loaded, "momentum", *values[:-2], values[-1]) != 0
    assert call(loaded, "momentum", *values, types=types) != 0
    assert all(map(np.array_equal, before[:-1], values[:-1])) and not values[-1][0]


class Product(nn.Cell):
    """The sum of a * b: the gradient of each is the other's buffer itself."""

    def __init__(self):
        super().__init__()
        self.a = Parameter(Tensor([1.0, 2.0], ms.float32), name="a")
        self.b = Parameter(Tensor([4.0, 8.0], ms.float32), name="b")

    def construct(self, x):
        return ops.sum(self.a * self.b)


def test_gradient_that_is_a_parameter_is_not_overwritten():
    network = Product()
    Trained("driver", network, window=1, lr=0.5).train(rows_of(0.0))
    assert network.a.asnumpy().tolist() == [-1.0, -2.0] and network.b.asnumpy().tolist() == [3.5, 7.0]


def test_gradient_that_is_a_parameter_of_another_group_is_not_overwritten():
    """The operator is called for each group, so the first one's parameters have changed when it reads the second's."""
    network = Product()
    groups = [{"params": [network.a]}, {"params": [network.b]}]
    optimizer = experimental.AdamW(groups, lr=0.1, eps=1.0, weight_decay=0.0)
    model = GradientAccumulation(network, None, optimizer, check="off")
    model.train_process(1, rows_of(0.0) * 2, 1, report=(), ckpt_path=None)
    weights, moments = [np.array([1.0, 2.0]), np.array([4.0, 8.0])], np.zeros((2, 2, 2))
    for step in (1, 2):
        for each, gradient in enumerate([weights[1], weights[0]]):
            moments[each] = moments[each] * [[0.9], [0.999]] + [0.1 * gradient, 0.001 * gradient**2]
        weights = [
            w - 0.1 / (1 - 0.9**step) * m / (np.sqrt(v) / np.sqrt(1 - 0.999**step) + 1.0)
            for w, (m, v) in zip(weights, moments)
        ]
    np.testing.assert_allclose([network.a.asnumpy(), network.b.asnumpy()], weights, rtol=1e-6)


def test_hook_after_the_first_run_is_an_error(monkeypatch, rng):
    model, _ = trained(OPTIMIZERS["Momentum"][0], "1", monkeypatch, steps=1)
    model._step.optimizer.register_forward_pre_hook(unchanged)
    with pytest.raises(RuntimeError, match="Use a new GradientAccumulation"):
        run(model, batches(rng, [8, 8]), 2)


def rows_of(*values):
    return [(Tensor(np.full((4, 2), value) / 10, ms.float32),) for value in values]


# Which file is used, and what happens without it


@pytest.fixture
def forgotten():
    """Look for the built file anew in the test, and after it."""
    native._built.cache_clear()
    yield
    native._built.cache_clear()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("allowed", ["elsewhere", "", "/"])
def test_list_of_allowed_folders_is_respected(allowed, tmp_path, monkeypatch, forgotten):
    monkeypatch.setenv("MS_CUSTOM_AOT_WHITE_LIST", str(tmp_path / allowed) if allowed == "elsewhere" else allowed)
    assert native.available() is (allowed == "/")


@pytest.mark.usefixtures("eager")
def test_installation_without_a_compiler_has_no_operators(monkeypatch, forgotten, caplog):
    monkeypatch.setattr(native, "_names", lambda: ["_native_of_no_compiler"])
    with caplog.at_level("INFO", logger="ms_accum"):
        assert not native.available() and not native.available()
    assert len(caplog.records) == 1 and "the installation did not build them" in caplog.text


@pytest.mark.usefixtures("eager")
def test_switch_and_device_turn_it_off(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert not native.available()
    monkeypatch.delenv(native.SWITCH)
    monkeypatch.setattr(ms, "get_context", {"device_target": "Ascend"}.get)
    assert not native.available()


@pytest.mark.slow
@pytest.mark.ranks
def test_random_programs_without_the_operators():
    """MindSpore's kernels in all graphs."""
    command = ["-m", "pytest", "-q", "-n", "0", "--tb=short", "-p", "no:cacheprovider", "tests/test_any_window.py"]
    result = run_python(*command, "-k", "test_compiled", cwd=ROOT, **{native.SWITCH: "0"})
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:]


SANITIZED = """
import ctypes, sys
import numpy as np
import test_native
loaded, rng = ctypes.CDLL(sys.argv[1]), np.random.RandomState(1)
test_native.test_norm_is_that_of_float64(loaded, rng)
test_native.test_one_bad_element_is_found(np.nan, 69999, loaded, rng)
test_native.test_empty_writes_zeros_over_nan(loaded, rng)
for factor in (0.0, 2.0):
    test_native.test_add(factor, True, factor > 0, loaded, rng)
for flags in np.ndindex(2, 2, 2):
    test_native.test_update_is_that_of_numpy(*map(bool, flags), loaded, rng)
for empties in (True, False):
    test_native.test_skipped_update_changes_only_the_sums(empties, loaded, rng)
test_native.check_all_rules(loaded, rng)
print("clean")
"""


def check_all_rules(loaded, rng):
    """Run each rule once, on arrays of several sizes: for the sanitizers."""
    for name, numbers, states in (
        ("sgd", 3, 2),
        ("adam", 6, 2),
        ("adam_weight_decay", 3, 2),
        ("adamw", 4, 2),
    ):
        inputs, kinds = update_inputs(rng)
        del inputs["momentum"], kinds["moments"]
        step = inputs.pop("step")
        own = [number(0.5) for _ in range(numbers)]
        averages = kinds.pop("averages")
        moments = [np.square(array, out=array) for _ in range(states) for array in arrays(rng, *SHAPES)]
        values = [*inputs.values(), *own, step, *kinds["gradients"], *kinds["parameters"], *moments, *averages]
        assert call(loaded, name, *values, np.array([False])) == 0
        assert all(np.isfinite(array).all() for array in kinds["parameters"])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="g++ has the sanitizers")
def test_sanitizers_find_nothing(tmp_path):
    library = tmp_path / "sanitized.so"
    flags = ["-O1", "-g", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *flags, "-o", str(library), str(ROOT / "ms_accum" / "native.cc")], check=True)
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    variables = {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    result = run_python("-c", SANITIZED, library, cwd=tmp_path, **variables)
    assert result.stdout.endswith("clean\n"), result.stderr[-2000:]
