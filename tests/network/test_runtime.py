"""Is the CPU runtime made fast, and are settings of the user kept?"""

from __future__ import annotations

import logging
import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from model_zoo import MLP, LeNet5
from ms_accum import Accumulator, GradientAccumulation, TrainForwardBackward, _check, evaluate, tune_cpu
from ms_accum import network as network_room
from ms_accum.network import runtime
from running import ROOT, run_python

KERNELS, HOST = "ONEDNN_MAX_CPU_ISA", "MS_DEV_HOST_BLOCKING_RUN"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """An AVX-512 machine without settings of the user; what a test sets is reset."""
    for name in (KERNELS, HOST):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    monkeypatch.setattr(runtime, "_has_avx512", lambda: True)
    monkeypatch.setattr(runtime, "_uses_avx512", lambda: False)
    monkeypatch.setattr(ms, "__version__", "2.10.0")
    monkeypatch.setattr(_check, "_logged", set())


def test_convolutions_get_both_settings():
    settings = tune_cpu(LeNet5())
    assert settings == {KERNELS: "AVX2", HOST: "1"}
    assert {name: os.environ[name] for name in settings} == settings


def test_network_without_convolutions_keeps_its_kernels():
    assert tune_cpu(MLP()) == {HOST: "1"}
    assert KERNELS not in os.environ


@pytest.mark.parametrize(("name", "other"), [(KERNELS, HOST), (HOST, KERNELS)])
def test_settings_of_user_are_kept(monkeypatch, name, other):
    monkeypatch.setenv(name, "of the user")
    assert list(tune_cpu(LeNet5())) == [other]
    assert os.environ[name] == "of the user"


def test_warning_if_too_late(monkeypatch):
    """Once oneDNN uses AVX-512 kernels it ignores the variable, so it is not set."""
    monkeypatch.setattr(runtime, "_uses_avx512", lambda: True)
    with pytest.warns(RuntimeWarning, match="'tune_cpu', it is too late to set ONEDNN_MAX_CPU_ISA=AVX2: a network has"):
        assert tune_cpu(LeNet5()) == {HOST: "1"}
    assert KERNELS not in os.environ


PRINT_DEFAULT = f"""
import os
os.environ["{KERNELS}"] = "DEFAULT"
from ms_accum.network.runtime import _has_avx512, _uses_avx512
print(_has_avx512() == _uses_avx512())
"""


@pytest.mark.skipif(ms.__version__.startswith(("2.7.", "2.8.")), reason="another oneDNN, which is not queried")
def test_default_equals_that_of_onednn():
    done = run_python("-c", PRINT_DEFAULT, cwd=ROOT)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(("version", "names"), [("2.7.2", []), ("2.8.0", [HOST]), ("2.9.0", [HOST, KERNELS])])
def test_older_versions_get_fewer_settings(monkeypatch, version, names):
    monkeypatch.setattr(ms, "__version__", version)
    assert list(tune_cpu(LeNet5())) == names


def test_other_devices_get_no_settings(monkeypatch):
    monkeypatch.setattr(ms, "get_context", lambda name: "Ascend")
    assert tune_cpu(LeNet5()) == {}


# Constructors do the same


def sgd(network):
    return nn.SGD(network.trainable_params(), 0.1)


def cells(network):
    optimizer = sgd(network)
    TrainForwardBackward(network, optimizer, optimizer.parameters.clone(prefix="grad_sum", init="zeros"))


TUNING = {
    "GradientAccumulation": lambda network: GradientAccumulation(network, None, sgd(network)),
    "Accumulator": lambda network: Accumulator(sgd(network), 2, reduction="sum"),
    "TrainForwardBackward": cells,
    "evaluate": lambda network: evaluate(network, [(Tensor(np.ones((1, 1, 32, 32)), ms.float32), Tensor([1]))]),
}


@pytest.mark.parametrize("owner", TUNING)
def test_constructors_set_variables_and_log_once(owner, caplog):
    network = LeNet5()
    with caplog.at_level(logging.INFO, "ms_accum"):
        TUNING[owner](network)
        TUNING["Accumulator"](network)
    assert {name: os.environ[name] for name in (KERNELS, HOST)} == {KERNELS: "AVX2", HOST: "1"}
    (message,) = caplog.messages
    assert message.startswith(f"For '{owner}', {HOST}=1 {KERNELS}=AVX2 was set") and tune_cpu(network) == {}


def test_accumulator_does_not_find_frozen_convolution():
    network = nn.SequentialCell(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Dense(8, 2))
    for parameter in network[0].get_parameters():
        parameter.requires_grad = False
    TUNING["Accumulator"](network)
    assert KERNELS not in os.environ and os.environ[HOST] == "1"
    assert tune_cpu(network) == {KERNELS: "AVX2"}


def test_constructors_log_once_if_too_late(monkeypatch, caplog):
    monkeypatch.setattr(runtime, "_uses_avx512", lambda: True)
    for _ in range(2):
        TUNING["GradientAccumulation"](LeNet5())
    (record,) = [entry for entry in caplog.records if entry.name == "ms_accum"]
    assert record.levelno == logging.WARNING
    assert "'GradientAccumulation', it is too late to set ONEDNN_MAX_CPU_ISA=AVX2" in record.getMessage()
    assert KERNELS not in os.environ


@pytest.mark.usefixtures("eager")
def test_newer_mindspore_than_tested_is_warned_of():
    for version in (network_room._NEWEST, "2.7.2", "2.10.1"):
        network_room._warn_if_newer(version)
    with pytest.warns(RuntimeWarning, match=r"MindSpore 2\.11\.0rc1 is newer than the newest .*: 2\.7\.2 to 2\.10\."):
        network_room._warn_if_newer("2.11.0rc1")
