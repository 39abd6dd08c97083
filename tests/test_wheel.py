"""The built package installs into a fresh environment, and works there from another folder.

The oldest setuptools that pyproject.toml allows, and the newest, build the sdist and, from it, the wheel. MindSpore is
not installed again: the fresh environment sees the packages of this one behind its own.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import model_zoo
import ms_accum

pytestmark = [pytest.mark.slow, pytest.mark.several]
ROOT = Path(__file__).resolve().parents[1]
# What builds, trains and tests leave in a clone.
LEFT = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "out", "logs", "states", "*.ckpt"
)
OLDEST = re.search(r'"setuptools>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
BIN = "Scripts" if os.name == "nt" else "bin"
THEIRS = ("train.py", "eval.py", "program.py", "benchmarks.py")


def run(*command, cwd, status=0, **environment):
    """Run a command and return its output."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def environment_in(folder, *, sees_ours=False):
    """Make an environment with pip and return its folder of programs."""
    venv.create(folder, with_pip=True)
    if sees_ours:
        own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(own, "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return folder / BIN


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return a function that builds with a version of setuptools, once: the folder of the files, what was printed."""

    @functools.cache
    def made(version):
        folder = tmp_path_factory.mktemp("build")
        python = environment_in(folder / "environment") / "python"
        command = [python, "-m", "pip", "install", "--upgrade", f"setuptools{version}", "build"]
        installation = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if installation.returncode:
            pytest.skip(f"no package index: {installation.stderr.strip().splitlines()[-1]}")
        shutil.copytree(ROOT, folder / "clone", ignore=LEFT)
        printed = run(python, "-m", "build", "--no-isolation", cwd=folder / "clone")
        return folder / "clone" / "dist", printed

    return made


@pytest.fixture(params=[f"=={OLDEST}", ""], ids=["oldest setuptools", "newest setuptools"])
def built(request, build):
    """The folder of an sdist and of the wheel made from it, and what the build printed."""
    return build(request.param)


@pytest.fixture(scope="module")
def installed(build, tmp_path_factory):
    """The programs of a fresh environment, and a user's folder whose files have the names of our modules."""
    folder = tmp_path_factory.mktemp("installed")
    programs = environment_in(folder / "environment", sees_ours=True)
    (wheel,) = build(f"=={OLDEST}")[0].glob("*.whl")
    run(programs / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    home = folder / "home"
    home.mkdir()
    for name in THEIRS:
        (home / name).write_text("raise SystemExit('not ours')\n", encoding="utf-8")
    return programs, home


def right(printed):
    """Return the number of right answers that a program printed."""
    return re.findall(r"\b(\d+)/360\b", printed)[-1]


QUICK = ("--model=mlp", "--epochs=1", "--batch_size=256", "--mini_steps=2")


# What is built


def test_build_prints_no_deprecation_warnings(built):
    assert re.findall(r".*(?:[Dd]eprecat|SetuptoolsWarning).*", built[1]) == []


def test_wheel_contains_complete_package(built):
    (wheel,) = built[0].glob("ms_accum-*-py3-none-any.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    facts = f"ms_accum-{ms_accum.__version__}.dist-info"
    assert {name.split("/")[0] for name in files} == {"ms_accum", "model_zoo", facts}
    sources = [path for name in ("ms_accum", "model_zoo") for path in (ROOT / name).rglob("*.py*")]
    own = {path.relative_to(ROOT).as_posix() for path in sources if path.suffix in (".py", ".pyi")}
    own |= {"ms_accum/py.typed", "ms_accum/native.cc", "model_zoo/py.typed"}
    own |= {"ms_accum/scripts/train.py", "ms_accum/scripts/eval.py"}
    assert {name for name in files if not name.startswith(facts)} == own
    assert f"{facts}/licenses/LICENSE" in files


def test_metadata_is_complete(built):
    (wheel,) = built[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        text = file.read(f"ms_accum-{ms_accum.__version__}.dist-info/METADATA").decode()
    fields = text.partition("\n\n")[0].splitlines()
    assert {"Name: ms-accum", f"Version: {ms_accum.__version__}", "License-Expression: Apache-2.0"} <= set(fields)
    needed = {re.match(r"Requires-Dist: ([\w-]+)", field)[1] for field in fields if field.startswith("Requires-Dist")}
    needed -= {re.match(r"Requires-Dist: ([\w-]+)", f)[1] for f in fields if "extra ==" in f}
    assert needed == {"mindspore", "numpy", "protobuf", "safetensors", "filelock", "tqdm", "pillow"}
    # setup.py makes the description: README with complete links, for a package index. The rest is in pyproject.toml.
    dynamic = {field.lower() for field in fields if field.startswith("Dynamic: ")}
    assert dynamic <= {f"dynamic: {name}" for name in ("license-file", "description", "description-content-type")}
    links = re.findall(r"\]\(([^)\s]+)\)", text.partition("\n\n")[2])
    assert links and [link for link in links if not link.startswith(("https://", "#"))] == []


# What is installed


def test_installed_programs_train_evaluate_and_launch(installed):
    programs, home = installed
    trained = run(programs / "ms-accum-train", *QUICK, "--output_dir=one", cwd=home)
    ckpt = "--ckpt_path=one/gradient_accumulation.ckpt"
    assert right(run(programs / "ms-accum-eval", ckpt, cwd=home)) == right(trained)
    launch = (programs / "ms-accum-launch", "--nproc=2", "--log_dir=logs")
    two = run(*launch, "ms-accum-train", *QUICK, "--output_dir=two", cwd=home)
    assert right(two) and "[0] " in two and "x 2 ranks" in two
    again = run(*launch, programs / "ms-accum-train", *QUICK, "--output_dir=path", cwd=home)
    module = run(*launch, "-m", "ms_accum.scripts.train", *QUICK, "--output_dir=module", cwd=home)
    assert right(two) == right(again) == right(module)


def test_micro_batch_trials_find_installed_program(installed):
    programs, home = installed
    flags = ("--model=mlp", "--epochs=1", "--effective_batch=256", "--batch_size=auto", "--memory_budget=4GiB")
    assert re.search(r"256 = \d+ rows x \d", run(programs / "ms-accum-train", *flags, "--output_dir=auto", cwd=home))


def test_wrong_flags_fail_before_mindspore_is_imported(installed):
    programs, home = installed
    (home / "mindspore.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    printed = run(programs / "ms-accum-train", "--epoch_s=1", cwd=home, status=2, PYTHONPATH=str(home))
    (home / "mindspore.py").unlink()
    assert printed.startswith("error: unrecognized arguments: --epoch_s=1") and printed.count("\n") == 1


@pytest.mark.parametrize("name", ["inspect", "plot", "train", "eval"])
def test_command_shows_its_version(installed, name):
    programs, home = installed
    shown = run(programs / f"ms-accum-{name}", "--version", cwd=home)
    assert shown.startswith(f"ms_accum {ms_accum.__version__}, MindSpore ")


FEW_CHECKS = "from ms_accum import selftest; from ms_accum.app import checks; checks.CHECKS = checks.CHECKS[:1]; "


def test_installed_commands_show_their_name_and_versions(installed):
    programs, home = installed
    for name in ("train", "eval", "launch", "selftest", "inspect", "plot"):
        assert run(programs / f"ms-accum-{name}", "--help", cwd=home).startswith(f"usage: ms-accum-{name} ")
        shown = run(programs / f"ms-accum-{name}", "--version", cwd=home)
        assert shown.startswith(f"ms_accum {ms_accum.__version__}, MindSpore 2.")


def test_self_test_runs_from_installed_package(installed):
    programs, home = installed
    printed = run(programs / "ms-accum-selftest", "--help", cwd=home)
    assert "--device_target" in printed and "--json" in printed
    assert "1 check in " in run(programs / "python", "-c", FEW_CHECKS + "exit(selftest.main())", cwd=home)


PROGRAM = """
from pathlib import Path

import model_zoo
import ms_accum
from mindspore import nn
from model_zoo import MLP, create_dataset
from ms_accum import GradientAccumulation

network = MLP()
dataset = create_dataset(batch_size=256, image_size=28)
model = GradientAccumulation(network, nn.CrossEntropyLoss(), nn.Adam(network.trainable_params()))
model.train_process(1, dataset, 2, report=(), ckpt_path=None)
print(model.updates, Path(ms_accum.__file__).parent, Path(model_zoo.__file__).parent)
"""


def test_user_program_imports_installed_package(installed):
    programs, home = installed
    (home / "mine.py").write_text(PROGRAM, encoding="utf-8")
    updates, package, networks = run(programs / "python", "mine.py", cwd=home).splitlines()[-1].split()
    assert (
        updates == "3"
        and Path(package).is_relative_to(programs.parent)
        and Path(networks) == Path(package).with_name("model_zoo")
    )


# Types

TYPED = """
from __future__ import annotations

from collections.abc import Iterator

import ms_accum
from ms_accum import {names}
from model_zoo import {zoo}
from mindspore import Tensor, nn

network = LeNet5()
optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
loss_fn = nn.CrossEntropyLoss()
dataset = create_dataset(batch_size=32, usage="train")
states = Checkpointer("states", every=10, resume="auto", score=lambda: 0.5)
model = GradientAccumulation(network, loss_fn, optimizer, clip_norm=1.0, tail="carry")
model.train_process(2, dataset, 4, checkpointer=states, report=())
planned: int | None = model.planned_updates(2, dataset, 4)
counts: tuple[int, int] = evaluate(network, dataset)
accumulator = Accumulator(optimizer, 4, clip_norm=1.0, reduction="mean")
accumulator((Tensor(1.0),), 32)
updated: bool = accumulator.updated
number: int = accumulator.updates + accumulator.skipped
accumulator.flush()
with ResumableLoop(states, network, accumulator) as loop:
    loop.after_micro_batch(loop.epoch, loop.batches + 1)
step = AccumulatedTrainStep((network, loss_fn), optimizer, 4, clip_norm=1.0)
saving = SaveStates(states, step, dataset)
callbacks = [FlushTail(), saving, TensorBoardLog("curves")]
done: int = saving.initial_epoch + step.updates + step.micro_batches
model.train_process(3, dataset, 4, callbacks=callbacks, valid_dataset=dataset, metrics={{"acc"}}, initial_epoch=2)
ema = Ema(0.999, warm_up=100)
sized = GradientAccumulation(replace_dropout(GPT(256)), None, optimizer, loss_scale=64, ema=ema)
sized.train_process(1, dataset, ramp_up(128, 1024, 10_000, micro_batch_size=32), report=())
with ema.applied():
    counted: int = sized.overflows + sized.left_out
layers: list[nn.Cell] = [batch_to_group_norm(network), freeze_batch_norm(network), CountedDropout(0.5)]
pool_batch_norm(network).clear()
together = CoupledLoss(lambda out, y: out)
checked: Verification = verify(network, loss_fn, (Tensor(1.0), Tensor(1)), 4)
same: bool = checked.ok and bool(checked.diagnosis)
sums = (Tensor(1.0),)
forward = TrainForwardBackward(network, optimizer, sums)
forward.construct(Tensor(1.0), weight=32)
TrainOptim(optimizer, sums, clip_norm=1.0).construct()
TrainClear(sums).construct()
group: Group = own_group()
summed: list[int] = total([group.rank, group.size], group)
report: MemoryReport = memory_report(network, optimizer, mini_steps=4)
size: int = report.total
found: MicroBatch = find_micro_batch_size(lambda rows: print, 128, memory_budget="2GiB")
rows: int = found.micro_batch_size + found.trials[0].rows
chosen: dict[str, str] = tune_cpu(network)
pieces: Iterator[tuple[object, ...]] = split_batch((Tensor(1.0), Tensor(2.0)), 32)
windows: int = updates_per_epoch(45, 4, "drop")
rate: float = scale_learning_rate(0.1, 32, 128, rule="sqrt") * scale_adam(0.99, 32, 128)
schedule: BatchSchedule = seesaw(0.1, 1000, first=2, most=8)
sizes: dict[int, int] = windows_by({{0: 1, 640: 4}}, 32) | schedule.mini_steps
warm: list[float] = batch_warmup(0.1, 1, 4, 100, over=50).learning_rates
rates: list[float] = batch_schedule(0.1, sizes, 1000, rule="sqrt").learning_rates + warm
sharded = ZeroOptimizer(lambda parts: nn.Adam(parts, 0.001), network.trainable_params())
divisors = {{"ce": "elements", "balance": WindowStatistic(balance)}}
factor = {{"balance": 0.01}}
mixture = GradientAccumulation(MoEGPT(256), LossWithBalance(), optimizer, weight=divisors, coefficients=factor)
terms = Terms(PolicyLoss("grpo").weight, {{"kl": 0.1}}, group=group)
factors: Tensor = terms.factors([(Tensor(1.0), Tensor(1))], 3)[0][0]
recipes = DistillationLoss(2.0).weight | AuxiliaryHeads(2).coefficients


def show(record: UpdateRecord) -> str:
    return f"{{record.update + record.samples}} {{record.loss + record.seconds}} {{ms_accum.__version__.upper()}}"


try:
    image_size: int = MODELS["mlp"].image_size + RECIPES["mnist"].epochs
    folder: str = download_mnist("data", DEFAULT_URL) + download_cifar10("data") + DOWNLOADS["mnist"]("data")
    made: object = make_optimizer(OPTIMIZERS[0], network.trainable_params(), lr=0.1, momentum=0.9, weight_decay=0.0)
    text = create_text_dataset("book.txt", 8, context=32, level="bytes")
    counted: int = NextTokenLoss().weight(text, text)
    networks: tuple[object, ...] = (MLP(), ResNet18(num_class=10), SmallResNet(norm="batch"))
except (Stopped, CheckpointError, DataError) as error:
    print(error)
"""
WRONG = """
from ms_accum import GradientAccumulation, Group, own_group, split_batch, updates_per_epoch
from model_zoo import LeNet5, create_dataset

updates_per_epoch("45", 4)  # arg-type
split_batch((1,), "32")  # arg-type
GradientAccumulation(None, None, None, clip="1")  # call-arg
rank: str = own_group().rank  # assignment
own_group().ranks  # attr-defined
LeNet5(num_class="ten")  # arg-type
create_dataset(batch_size=3.5)  # arg-type
"""
MYPY = "[mypy]\nstrict = true\n[mypy-mindspore.*]\nignore_missing_imports = true\n"


@pytest.fixture(scope="module")
def checked(installed):
    """Return a function that runs mypy --strict on a program, with what is installed, and returns what it prints."""
    pytest.importorskip("mypy")
    programs, home = installed
    (home / "mypy.ini").write_text(MYPY, encoding="utf-8")

    def check(source, status):
        (home / "typed.py").write_text(source, encoding="utf-8")
        command = (sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--cache-dir=types", "--python-executable")
        return run(*command, programs / "python", "typed.py", cwd=home, status=status)

    return check


def test_program_using_every_public_name_type_checks(checked):
    source = TYPED.format(names=", ".join(ms_accum.__all__), zoo=", ".join(model_zoo.__all__))
    for name in (*ms_accum.__all__, *model_zoo.__all__):
        assert len(re.findall(rf"\b{name}\b", source)) > 1, f"use {name} in TYPED"
    assert checked(source, 0).startswith("Success: no issues found")


def test_wrong_types_are_detected(checked):
    errors = re.findall(r"^typed.py:(\d+): error: .*\[([\w-]+)\]$", checked(WRONG, 1), re.MULTILINE)
    wanted = re.findall(r"# ([\w-]+)$", WRONG, re.MULTILINE)
    first = WRONG.splitlines().index('updates_per_epoch("45", 4)  # arg-type') + 1
    assert errors == [(str(first + number), kind) for number, kind in enumerate(wanted)]
