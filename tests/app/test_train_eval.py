"""train.py and eval.py: training, evaluation, and one-line errors.

In this process where that is possible: it saves the two seconds in which MindSpore is imported.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import pytest
from safetensors.numpy import save_file

import eval as evaluation
import train as training
from idx_files import real_mnist, write_mnist
from model_zoo import LeNet5
from ms_accum import UpdateRecord
from ms_accum._check import quantity
from ms_accum.app import tasks
from ms_accum.app.process import CHECKPOINT, DATA, DISK, INTERRUPTED, OK, TERMINATED, TRAINING, USAGE, run
from ms_accum.app.steps import choose_device
from ms_accum.saving import training_state
from ms_accum.saving.model_file import load_parameters, read_record, save_model
from programs import QUICK, ROOT, closing, evaluate, lines_of, metrics, one_line, plan, process, settings_of, train

DIGITS = [32] * 44 + [29]  # the rows of the micro-batches of an epoch of the embedded digits


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a short run, and its output."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.chdir(folder)
        assert train(*QUICK, "--save_every=1", "--keep=2") == OK
    return folder / "out", output.getvalue()


@pytest.fixture
def out(trained, tmp_path):
    """The same in a folder of the test's own."""
    return shutil.copytree(trained[0], tmp_path / "out")


def windows(micro_batches, size, tail, epochs=1):
    """Return epoch and rows of each update, from the plainest of loops."""
    updates, open_window = [], []
    for epoch in range(1, epochs + 1):
        for rows in micro_batches:
            open_window.append(rows)
            if len(open_window) == size:
                updates.append((epoch, sum(open_window)))
                open_window = []
        if open_window and tail == "flush":
            updates.append((epoch, sum(open_window)))
        open_window = open_window if tail == "carry" else []
    return updates


IMPORT_CHECK = """
import runpy, sys
try:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
except SystemExit as end:
    print(end.code, *(name for name in ("mindspore", "numpy") if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("train.py --help", OK),
        ("train.py --epochs=0", USAGE),
        ("train.py --keep_best", USAGE),
        ("train.py --dataset=mnist", USAGE),
        ("eval.py --help", OK),
        ("eval.py --model=x", USAGE),
    ],
)
def test_flags_are_checked_before_mindspore_import(command, code, tmp_path):
    """Whose import takes seconds; and NumPy starts threads, which have to leave signals alone."""
    program, *argv = command.split()
    run = [sys.executable, "-c", IMPORT_CHECK, str(ROOT / program), *argv]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == str(code)
    assert (done.stderr == "") if code == OK else one_line(done.stderr)


# Rejected flags and files


@pytest.mark.parametrize(
    ("argv", "mentioned"),
    [
        *[([f"--mini_steps={n}"], f"must be an int >= 1, but got '{n}'") for n in ("0", "-1", "1.5", "x")],
        (["--accumulate_step=0"], "--mini_steps"),
        (["--batch_size=0"], "argument --batch_size: must be an int >= 1"),
        (["--batch_size=1438"], "argument --batch_size: must be <= 1437, the number of train images, but got 1438"),
        (["--lr=-1"], "argument --lr: must be a number > 0, but got '-1'"),
        (["--lr=nan"], "argument --lr: must be a number > 0, but got 'nan'"),
        (["--clip_norm=0"], "argument --clip_norm: must be a number > 0"),
        (["--momentum=-1"], "argument --momentum: must be a number >= 0"),
        (["--weight_decay=inf"], "argument --weight_decay: must be a number >= 0"),
        (["--epochs=0"], "argument --epochs/--epoch_size: must be an int >= 1, but got '0'"),
        (["--seed=-1"], "argument --seed: must be an int >= 0"),
        (["--tail=cut"], "argument --tail: invalid choice: 'cut'"),
        (["--model=vgg"], "argument --model: invalid choice: 'vgg'"),
        (["--device_target=TPU"], "argument --device_target: invalid choice: 'TPU'"),
        (["--data_path="], "argument --data_path: must be a path, but got ''"),
        (["--output_dir="], "argument --output_dir: must be a path, but got ''"),
        (["--ckpt_path="], "argument --ckpt_path: must be a path, but got ''"),
        (["--ckpt_path=model.pt"], "argument --ckpt_path: must end with '.ckpt' or '.safetensors', but got 'model.pt'"),
        (["--ckpt_path=."], "'.ckpt' or '.safetensors', but got '.'"),
        *[([f"--save_every={text}"], "must be a number of updates, such as 100") for text in ("0", "5s", "0min")],
        (["--keep=0"], "argument --keep: must be an int >= 1"),
        (["--keep_best"], "argument --keep_best: needs --save_every, the moments to choose from"),
        (["--dataset=mnist"], "argument --data_path: must be given for mnist"),
        (["--dataset=digits", "--data_path=x"], "argument --dataset: digits are embedded"),
        (["--download"], "argument --download: needs --data_path"),
        (["--optimizer=adam", "--momentum=0.9"], "argument --momentum: adam has none"),
        (["--optimizer=adamw", "--momentum=0"], "argument --momentum: adamw has none"),
        (["--tail=drop", "--mini_steps=46"], "argument --mini_steps: must be at most 45 with --tail drop, but got 46"),
        (["--tail=carry", "--mini_steps=91", "--epochs=2"], "argument --mini_steps: no window of 91 would fill"),
        (["--batch_size=auto"], "argument --batch_size: auto needs --effective_batch"),
        (["--batch_size=most"], "argument --batch_size: must be an int >= 1, but got 'most'"),
        (["--memory_budget=2GiB"], "argument --memory_budget: is for --batch_size auto"),
        (["--effective_batch=64", "--batch_size=auto", "--memory_budget=2G"], "must be an amount of memory above 0"),
        (["--effective_batch=64", "--zero=2"], "argument --zero: 2 needs --mini_steps"),
        (["--zero=3"], "argument --zero: invalid choice: 3"),
        (["--effective_batch=64", "--mini_steps=2"], "argument --mini_steps: follows from --effective_batch"),
        (["--effective_batch=64", "--tail=carry"], "argument --tail: each effective batch is a window"),
        (["--effective_batch=64", "--batch_size=65"], "argument --batch_size: must be <= 64, the --effective_batch"),
        (["--effective_batch=64", "--batch_size=auto"], "argument --memory_budget: must be given on CPU"),
        (
            ["--effective_batch=1438"],
            "argument --effective_batch: must be <= 1437, the number of train images",
        ),
        (["--seed=4294967296"], "argument --seed: must be an int >= 0 and <= 4294967295, but got '4294967296'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags_exit_with_usage_code(argv, mentioned, capfd, tmp_path):
    assert train("--output_dir=out", *argv) == USAGE
    out, err = capfd.readouterr()
    assert mentioned in one_line(err) and out == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("program", [train, evaluate])
def test_unknown_key_in_config_exits_with_usage_code(program, capfd, tmp_path):
    (tmp_path / "run.yaml").write_text("ckpt_path: out/a.ckpt\naccumulation: 4\n")
    assert program("--config=run.yaml") == USAGE
    assert "unknown key 'accumulation'" in one_line(capfd.readouterr().err)
    assert os.listdir(tmp_path) == ["run.yaml"]


@pytest.mark.parametrize(
    ("program", "device"), [("train.py", "GPU"), pytest.param("eval.py", "Ascend", marks=pytest.mark.slow)]
)
def test_unavailable_device_exits_with_usage_code(program, device, tmp_path):
    if ms.get_context("device_target") != "CPU":
        pytest.skip("this machine has another device than the CPU")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLOG_")}  # as a user's
    done = process(program, f"--device_target={device}", "--ckpt_path=out/a.ckpt", cwd=tmp_path, env=environment)
    assert done.returncode == USAGE and done.stdout == ""
    assert one_line(done.stderr) == f"argument --device_target: {device} is not available here, CPU is"
    assert os.listdir(tmp_path) == []


def test_auto_is_the_default_device_of_mindspore():
    assert choose_device("auto") == ms.get_context("device_target")


def test_empty_data_path_of_eval_exits_with_usage_code(capfd, tmp_path):
    save_model(LeNet5(), str(tmp_path / "a.ckpt"))
    assert evaluate("--ckpt_path=a.ckpt", "--data_path=") == USAGE


def damage(folder, name, content):
    path = write_mnist(folder) / name
    path.write_bytes(content)
    return path


DAMAGED = {
    "empty": ("train/train-images-idx3-ubyte", b""),
    "magic": ("train/train-labels-idx1-ubyte", b"\x00\x00\x08\x09" + bytes(68)),
    "short": ("test/t10k-images-idx3-ubyte", b"\x00\x00\x08\x03" + bytes(7)),
    "label": ("test/t10k-labels-idx1-ubyte", b"\x00\x00\x08\x01\x00\x00\x00\x20" + b"\x0a" * 32),
}


@pytest.mark.parametrize(("name", "content"), DAMAGED.values(), ids=DAMAGED)
def test_train_rejects_damaged_file(name, content, capfd, tmp_path):
    path = damage(tmp_path / "data", name, content)
    assert train("--data_path=data", "--batch_size=8", "--output_dir=out") == DATA
    out, err = capfd.readouterr()
    assert path.name in one_line(err) and out == "" and os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("name", ["test/t10k-images-idx3-ubyte", "test/t10k-labels-idx1-ubyte"])
def test_eval_rejects_damaged_file(name, capfd, tmp_path):
    path = damage(tmp_path / "data", name, b"damaged")
    save_model(LeNet5(), str(tmp_path / "a.ckpt"))
    assert evaluate("--data_path=data", "--ckpt_path=a.ckpt") == DATA
    out, err = capfd.readouterr()
    assert path.name in one_line(err) and out == ""


@pytest.mark.parametrize(("data", "mentioned"), [("none", "none"), ("half", "t10k-images-idx3-ubyte")])
def test_missing_data_is_named(data, mentioned, capfd, tmp_path):
    write_mnist(tmp_path / "half", test=0)
    save_model(LeNet5(), str(tmp_path / "a.ckpt"))
    assert train(f"--data_path={data}", "--output_dir=out", "--batch_size=8") == DATA
    assert mentioned in one_line(capfd.readouterr().err)
    assert evaluate(f"--data_path={data}", "--ckpt_path=a.ckpt") == DATA
    assert mentioned in one_line(capfd.readouterr().err)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "half"]


def test_failed_download_exits_with_data_code(capfd, tmp_path):
    assert train("--data_path=data", "--download=http://127.0.0.1:9/MNIST.zip", "--output_dir=out") == DATA
    assert "http://127.0.0.1:9/MNIST.zip" in one_line(capfd.readouterr().err)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("write", "mentioned"),
    [
        (lambda path: None, "is not a file"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.write_bytes(b""), "is not a checkpoint"),
        (lambda path: path.write_bytes(b"PK\x03\x04 a zip, or so"), "is not a valid checkpoint"),
        (
            lambda path: save_model(LeNet5(num_class=3), str(path)),
            "does not match any of lenet5, mlp, resnet18",
        ),
    ],
    ids=["missing", "folder", "empty", "foreign", "other classes"],
)
def test_eval_rejects_other_files(write, mentioned, capfd, tmp_path):
    write(tmp_path / "bad.ckpt")
    assert evaluate("--ckpt_path=bad.ckpt") == CHECKPOINT
    out, err = capfd.readouterr()
    message = one_line(err)
    assert "'bad.ckpt'" in message and mentioned in message and out == ""


def test_eval_names_parameters_that_do_not_match(capfd, tmp_path):
    save_model(LeNet5(), str(tmp_path / "a.ckpt"))
    assert evaluate("--ckpt_path=a.ckpt", "--model=mlp") == CHECKPOINT
    assert "missing dense_relu_sequential.0.weight, " in one_line(capfd.readouterr().err)


@pytest.mark.parametrize("argv", ["--output_dir=file", "--output_dir=file/out", "--ckpt_path=file/a.ckpt"])
def test_unwritable_output_exits_with_disk_code(argv, capfd, tmp_path):
    (tmp_path / "file").touch()
    assert train(argv) == DISK
    out, err = capfd.readouterr()
    why = "( can't be made: (File exists|Not a directory))?"
    assert re.search(rf"'[^']*file(/out)?'{why}$", one_line(err)) and out == ""
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.slow
def test_full_disk_is_one_line_error(tmp_path):
    def leave_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    argv = (*QUICK, "--batch_size=1024")
    done = process("train.py", *argv, cwd=tmp_path, preexec_fn=leave_little_room)
    assert done.returncode == DISK and sorted(os.listdir(tmp_path / "out")) == ["metrics.jsonl", "states"]
    assert os.listdir(tmp_path / "out" / "states") == [".lock"]
    assert re.match(r"'.*gradient_accumulation.ckpt' \(\d,\d{3},\d{3} bytes\) can't be written", one_line(done.stderr))


@pytest.mark.slow
def test_nearly_full_disk_gets_the_model(tmp_path):
    """The state is twice as large, and is written after it."""

    def leave_room_for_the_model():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))

    done = process("train.py", *QUICK, cwd=tmp_path, preexec_fn=leave_room_for_the_model)
    assert done.returncode == DISK and "state-00000001.safetensors' (" in one_line(done.stderr)
    model = tmp_path / "out" / "gradient_accumulation.ckpt"
    assert len(load_parameters(str(model))) == 6 and read_record(model)["updates"] == 3


def test_resume_rejects_other_flags(out, capfd):
    assert train(*QUICK, "--resume", "--lr=0.5", "--seed=2") == CHECKPOINT
    message = "to a run with other settings: lr was 0.04 and is 0.5, seed was 1 and is 2. Give --allow_config_change"
    assert message in one_line(capfd.readouterr().err)


def test_resume_rejects_other_data(out, capfd, monkeypatch):
    """As many rows, of the same shapes: labels of others."""
    made = tasks.create_dataset

    def relabelled(*arguments, **options):
        dataset = made(*arguments, **options)
        rows = dataset.source.data
        rows._labels = rows._labels[::-1].copy()
        return dataset

    monkeypatch.setattr(tasks, "create_dataset", relabelled)
    capfd.readouterr()
    assert train(*QUICK, "--epochs=2", "--resume") == CHECKPOINT
    assert re.search(r"to a run with other settings: data was \w+ and is \w+\.", one_line(capfd.readouterr().err))


@pytest.mark.slow
def test_resume_with_fewer_epochs_than_state_is_rejected(out, capfd):
    assert train(*QUICK, "--epochs=2", "--resume") == OK
    capfd.readouterr()
    assert train(*QUICK, "--resume") == CHECKPOINT
    message = one_line(capfd.readouterr().err)
    assert message.startswith("argument --epochs: must be at least 2, but got 1: 'out/states/state-0000000")


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="a folder in which nobody can make another one")
def test_folder_that_cannot_be_created_is_named_by_its_flag(capfd):
    assert train(*QUICK, "--output_dir=/proc/out") == DISK
    message = "argument --output_dir: '/proc/out' can't be made: No such file or directory"
    assert one_line(capfd.readouterr().err) == message


def test_path_of_best_model_is_checked_before_training(capfd):
    os.makedirs("out/gradient_accumulation.best.ckpt")
    assert train(*QUICK, "--save_every=1", "--keep_best") == USAGE
    assert "must name a file, but got the folder 'out/gradient_accumulation.best.ckpt'" in one_line(
        capfd.readouterr().err
    )
    assert os.listdir("out") == ["gradient_accumulation.best.ckpt"]


@pytest.mark.slow
def test_home_folder_is_expanded_everywhere(monkeypatch, tmp_path):
    """On the command line, where a shell leaves it alone behind a "=", and in a YAML file."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "run.yaml").write_text("ckpt_path: ~/model.ckpt\n")
    assert train(*QUICK, "--output_dir=~/out", "--config=run.yaml") == OK
    assert (tmp_path / "home" / "out" / "metrics.jsonl").exists() and (tmp_path / "home" / "model.ckpt").exists()
    assert not (tmp_path / "~").exists()


@pytest.mark.slow
def test_newest_state_is_resumed_and_printed(out, capfd):
    assert len(metrics("out")) == 3
    assert train(*QUICK, "--epochs=2", "--resume") == OK
    shown = plan(capfd.readouterr().out)["resumed"]
    assert shown == "out/states/state-00000003.safetensors: 3 updates, 1 epoch done"
    assert [line["update"] for line in metrics("out")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_best_model_is_kept_beside_last(capfd):
    argv = ("--model=mlp", "--epochs=2", "--batch_size=64", "--mini_steps=2", "--output_dir=out", "--seed=5")
    assert train(*argv, "--save_every=7", "--keep_best", "--eval_every=end") == OK
    shown = re.findall(r"^the best so far: accuracy .* after (\d+) updates$", capfd.readouterr().out, re.MULTILINE)
    evaluations = [line for line in lines_of("out") if "updates" in line]
    assert [line["updates"] for line in evaluations] == [7, 14, 21, 24]
    scores = [line["accuracy"] for line in evaluations]
    better = [score > max(scores[:n], default=-1) for n, score in enumerate(scores)]
    assert [int(updates) for updates in shown] == [
        line["updates"] for line, is_better in zip(evaluations, better) if is_better
    ]
    assert evaluate("--ckpt_path=out/gradient_accumulation.best.ckpt") == OK
    assert closing(capfd.readouterr().out)[0] == pytest.approx(max(scores), abs=5e-5)
    best = max(range(4), key=scores.__getitem__) + 1
    states = [f"state-0000000{number}.safetensors" for number in sorted({best, 4})]
    assert sorted(os.listdir("out/states")) == [".lock", *states]


def test_stopped_run_resumes_to_same_bytes(trained, capfd, monkeypatch):
    with monkeypatch.context() as patch:
        asked = itertools.count(1)
        patch.setattr(training.steps.SIGNALS, "pending", lambda: next(asked) >= 4)
        assert train(*QUICK) == TERMINATED
    assert one_line(capfd.readouterr().err).endswith(
        "state-00000001.safetensors'; --resume --output_dir=out continues from there"
    )
    assert train(*QUICK, "--resume") == OK
    models = [folder / "gradient_accumulation.ckpt" for folder in (Path("out"), trained[0])]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_resumed_run_does_not_search_micro_batch(out):
    flags = ("--batch_size=auto", "--effective_batch=512", "--memory_budget=8GiB", "--resume", "--output_dir=out")
    settings, lines = training.steps.choose_micro_batch(
        settings_of(*flags), lambda rows: pytest.fail("it was tried"), "1.0"
    )
    assert (settings.batch_size, lines) == (256, ["256 rows, as in the run that is resumed"])


@pytest.mark.slow
def test_resumed_run_uses_found_micro_batch(capfd):
    argv = ("--model=mlp", "--epochs=1", "--effective_batch=256", "--output_dir=out")
    assert train(*argv, "--batch_size=64") == OK
    auto = (*argv, "--batch_size=auto", "--memory_budget=8GiB", "--resume", "--epochs=2")
    capfd.readouterr()
    assert train(*auto) == OK
    out, err = capfd.readouterr()
    assert plan(out)["micro-batch"] == "64 rows, as in the run that is resumed" and err == ""
    assert plan(out)["effective batch"] == "256 = 64 rows x 4 micro-batches"
    assert train(*auto, "--epochs=3", "--allow_config_change") == OK
    out = capfd.readouterr().out
    rows = int(re.match(r"\d+", plan(out)["micro-batch"])[0])
    assert plan(out)["effective batch"] == f"256 = {rows} rows x {quantity(256 // rows, 'micro-batch')}"
    assert f"micro_batch_size was 64 and is {None if rows == 256 else rows}" in out or rows == 64


def test_state_with_crafted_facts_exits_with_checkpoint_code(out, capfd):
    newest, older = sorted((out / "states").glob("*.safetensors"), reverse=True)
    older.unlink()
    state = training_state.read(str(newest))
    facts = json.dumps({**state.facts, "at": {}})
    metadata = {"facts": facts, "sha256": training_state.state_digest(state.arrays, facts)}
    save_file(state.arrays, str(newest), metadata=metadata)
    for resume in ("--resume", f"--resume={newest}"):
        assert train(*QUICK, resume) == CHECKPOINT
        assert "'at' is wrong" in one_line(capfd.readouterr().err)


@pytest.mark.parametrize("resume", ["--resume=nowhere", "--resume=out/gradient_accumulation.ckpt"])
def test_file_that_is_not_a_state_is_rejected(out, capfd, resume):
    assert train(*QUICK, resume) == CHECKPOINT
    assert resume[9:] in one_line(capfd.readouterr().err)


def test_run_without_finite_gradients_exits_with_training_code(capfd):
    assert train("--model=mlp", "--lr=1e30", "--epochs=3", "--output_dir=out") == TRAINING
    assert "windows in a row were not finite" in one_line(capfd.readouterr().err)


def test_debug_shows_traceback(tmp_path):
    done = process("eval.py", "--ckpt_path=none.ckpt", "--debug", cwd=tmp_path)
    assert done.returncode == CHECKPOINT
    assert "Traceback" in done.stderr and "CheckpointError" in done.stderr and "none.ckpt" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_run_with_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "--epochs=1000", "--output_dir=out"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as program:
        try:
            while not program.stdout.readline().startswith("epoch: 1 step: 3"):
                assert program.poll() is None
            program.send_signal(signal.SIGINT)
            err = program.communicate(timeout=60)[1]
        finally:
            program.kill()
    assert program.returncode == INTERRUPTED
    assert one_line(err).startswith("interrupted, the training state is in 'out/states/state-00000001.safetensors'")


@pytest.mark.parametrize("module", [training, evaluation])
def test_help_lists_every_flag(module, capfd):
    with pytest.raises(SystemExit) as end:
        run(module.main, module.flags(), ["--help"])
    shown = capfd.readouterr().out
    assert end.value.code == OK
    assert [flag for flag in module.flags()._option_string_actions if flag not in shown] == []


# What is trained


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The two programs, as a user starts them, and the folder they leave."""
    folder = tmp_path_factory.mktemp("digits")
    trained = process("train.py", "--epochs=2", "--output_dir=我的 输出/run 1", cwd=folder)
    evaluated = process("eval.py", "--ckpt_path=我的 输出/run 1/gradient_accumulation.ckpt", cwd=folder)
    return trained, evaluated, folder / "我的 输出" / "run 1"


def test_train_and_eval_succeed_with_same_accuracy(digits):
    trained, evaluated, _ = digits
    assert (trained.returncode, trained.stderr, evaluated.returncode, evaluated.stderr) == (OK, "", OK, "")
    assert closing(trained.stdout) == closing(evaluated.stdout)
    assert closing(trained.stdout)[2] == 360


def test_model_metrics_and_state_are_written(digits):
    folder = digits[2]
    model = "gradient_accumulation.ckpt"
    assert sorted(os.listdir(folder)) == [model, f"{model}.json", "metrics.jsonl", "states"]
    assert sorted(os.listdir(folder / "states")) == [".lock", "state-00000001.safetensors"]
    assert os.listdir(folder.parents[1]) == ["我的 输出"]


def test_checkpoint_contains_only_the_model(digits):
    saved = load_parameters(str(digits[2] / "gradient_accumulation.ckpt"))
    assert list(saved) == [parameter.name for parameter in LeNet5().get_parameters()]


def test_plan_describes_the_run(digits):
    shown = plan(digits[0].stdout)
    folder, seconds, accuracy = "我的 输出/run 1", shown.pop("time"), closing(digits[0].stdout)
    assert re.fullmatch(r"\d+\.\d (s|min)", seconds)
    assert shown == {
        "model": "lenet5, 61,684 parameters, on CPU",
        "data": "embedded digits, seed 1",
        "effective batch": "128 = 32 rows x 4 micro-batches",
        "an epoch": "45 micro-batches, 1 of them in a shorter last window",
        "the run": "2 epochs, 24 updates",
        "optimizer": "momentum, lr 0.04, momentum 0.9",
        "gradient": "mean over a window",
        "accumulators": "0.24 MiB",
        "output": folder,
        "model file": f"{folder}/gradient_accumulation.ckpt",
        "states": f"{folder}/states",
        "metrics": f"{folder}/metrics.jsonl",
        "accuracy": f"{accuracy[0] * 100:.2f} % ({accuracy[1]}/360)",
    }


def test_each_update_has_a_line_and_a_json_object(digits):
    rows = metrics(digits[2])
    lines = [line for line in digits[0].stdout.splitlines() if re.match("epoch: . step:", line)]
    assert [line.partition(", ")[0] for line in lines] == [
        f"epoch: {row['epoch']} step: {(row['update'] - 1) % 12 + 1} loss is {row['loss']:.7g}" for row in rows
    ]
    assert all(re.search(r", lr 0\.04(, [\d,]+ rows/s)?$", line) for line in lines)
    assert [(row["epoch"], row["samples"]) for row in rows] == windows(DIGITS, 4, "flush", epochs=2)
    assert [row["update"] for row in rows] == list(range(1, 25))


def test_json_objects_have_fields_of_record(digits):
    for row in metrics(digits[2]):
        # `step` is for the printed line only, and the others are there if there is something to say.
        assert set(row) == set(UpdateRecord._fields) - {"step", "overflow", "bad", "terms"}
        assert row["lr"] == pytest.approx(0.04) and row["skipped"] is False
        assert 0 < row["loss"] < math.inf and 0 < row["grad_norm"] < math.inf and 0 < row["seconds"] < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["carry", "flush", "drop"])
def test_tails(tail, capfd):
    assert train("--epochs=2", "--mini_steps=7", f"--tail={tail}", "--output_dir=out", "--model=mlp") == OK
    out = capfd.readouterr().out
    expected = windows(DIGITS, 7, tail, epochs=2)
    assert [(row["epoch"], row["samples"]) for row in metrics("out")] == expected
    assert plan(out)["the run"] == f"2 epochs, {len(expected)} updates"
    assert plan(out)["an epoch"].startswith("45 micro-batches, 3 of them in ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "line", "accumulators"),
    [
        ("--batch_size=96", "256 = 96 rows x 2 micro-batches + 64 rows", "2.55 MiB"),
        ("--batch_size=256", "256 = 256 rows x 1 micro-batch", "0.00 MiB"),
        ("--model=mlp", "256 = 32 rows x 8 micro-batches", "2.55 MiB"),
    ],
)
def test_effective_batch_is_exact_for_any_split(rows, line, accumulators, capfd):
    losses = []
    for split in ("--batch_size=256", rows):
        assert (
            train("--epochs=1", "--model=mlp", "--effective_batch=256", split, "--output_dir=out", "--overwrite") == OK
        )
        shown = plan(capfd.readouterr().out)
        losses.append([row["loss"] for row in metrics("out")])
        assert [row["samples"] for row in metrics("out")] == [256] * 5 + [157]
    assert (shown["effective batch"], shown["accumulators"]) == (line, accumulators)
    assert (shown["an epoch"], shown["the run"]) == ("6 windows", "1 epoch, 6 updates")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_fastest_micro_batch_is_found(tmp_path):
    argv = ("--batch_size=auto", "--effective_batch=128", "--memory_budget=8GiB", "--epochs=1", "--output_dir=out")
    done = process("train.py", *argv, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (OK, "")
    micro_batch_line = plan(done.stdout)["micro-batch"]
    assert re.search(r"^ +the fastest of those that fit, [\d.]+ MiB of 8 GiB$", done.stdout, re.MULTILINE)
    pattern = r"(\d+) rows \(of 128, (\d+) in a window\)"
    rows, count = map(int, re.fullmatch(pattern, micro_batch_line).groups())
    assert rows * count == 128 and plan(done.stdout)["effective batch"].startswith(f"128 = {rows} rows x {count} ")
    table = re.findall(r"^ +(\d+) +(\d+) +([\d.]+) +([\d,]+)  [\d.]+ MiB$", done.stdout, re.MULTILINE)
    assert [int(line[0]) for line in table] == [4, 8, 16, 32, 64, 128]
    assert min(float(line[2]) for line in table) == float(next(line[2] for line in table if line[0] == str(rows)))
    again = process("train.py", *argv, "--overwrite", cwd=tmp_path)
    assert (
        plan(again.stdout)["micro-batch"] == micro_batch_line
        and "found before: delete out/micro_batches.json" in again.stdout
    )


@pytest.mark.slow
def test_too_small_budget_reports_memory_needed(tmp_path, capfd):
    assert train("--batch_size=auto", "--effective_batch=64", "--memory_budget=9MB") == USAGE
    out, err = capfd.readouterr()
    assert out.count("\n") == 1 and "looking for the fastest" in out and os.listdir(tmp_path) == []
    assert re.search(r"must be at least [\d.]+ MiB, which training with a micro-batch of 1 row", one_line(err))


def test_out_of_memory_names_flags_to_use(capfd, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("std::bad_alloc")

    monkeypatch.setattr("ms_accum.training.window._Accumulating.add", fail)
    assert train("--output_dir=out") == TRAINING
    message = one_line(capfd.readouterr().err)
    assert "use micro-batches of 16 and 'mini_steps' 8" in message and "--effective_batch 128" in message


@pytest.mark.parametrize("flag", ["--mini_steps", "--accumulate_step", "--gradient_accumulation_steps"])
@pytest.mark.parametrize("epochs", ["--epochs", "--epoch_size"])
def test_aliases(flag, epochs):
    arguments = training.flags().parse_args([flag, "6", epochs, "2"])
    assert (arguments.mini_steps, arguments.epochs) == (6, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--optimizer=momentum"], "momentum, lr 0.04, momentum 0.9, mean over a window"),
        (["--optimizer=sgd", "--momentum=0", "--lr=0.5"], "sgd, lr 0.5, momentum 0, mean over a window"),
        (["--optimizer=adam", "--clip_norm=1"], "adam, lr 0.001, mean over a window, clip_norm 1"),
        (["--optimizer=adamw", "--weight_decay=0.1"], "adamw, lr 0.001, weight decay 0.1, mean over a window"),
        (["--reduction=sum"], "momentum, lr 0.04, momentum 0.9, sum over a window"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_optimizer_trains_and_is_printed(argv, line, capfd):
    assert train(*QUICK, *argv) == OK
    out = capfd.readouterr().out
    assert f"{plan(out)['optimizer']}, {plan(out)['gradient']}" == line and closing(out)[2] == 360
    first, *_, last = metrics("out")
    assert last["loss"] < first["loss"]


def test_eval_detects_the_model(trained, capfd):
    path = f"--ckpt_path={trained[0] / 'gradient_accumulation.ckpt'}"
    assert evaluate(path) == evaluate(path, "--model=mlp") == OK
    out = capfd.readouterr().out
    assert out == 2 * out[: len(out) // 2] and closing(out[: len(out) // 2]) == closing(trained[1])


def test_window_of_one_has_no_accumulators(capfd):
    assert train("--epochs=1", "--batch_size=256", "--mini_steps=1", "--model=mlp", "--output_dir=out") == OK
    assert plan(capfd.readouterr().out)["accumulators"] == "0.00 MiB"
    assert [row["samples"] for row in metrics("out")] == [256] * 5 + [157]


@pytest.mark.slow
def test_seed_determines_the_run(trained, tmp_path):
    losses = [[row["loss"] for row in metrics(trained[0])]]
    for seed in (1, 2):
        assert train(*QUICK, f"--seed={seed}", "--overwrite") == OK
        losses.append([row["loss"] for row in metrics("out")])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_mnist_in_a_folder(capfd, tmp_path):
    write_mnist(tmp_path / "MNIST 数据", train=100, test=30)
    argv = ("--data_path=MNIST 数据", "--batch_size=16", "--mini_steps=3", "--epochs=1", "--output_dir=a/b")
    assert train(*argv) == OK
    out = capfd.readouterr().out
    assert plan(out)["data"] == "MNIST 数据, seed 1"
    assert plan(out)["optimizer"] == "momentum, lr 0.01, momentum 0.9"
    assert [(row["epoch"], row["samples"]) for row in metrics("a/b")] == [(1, 48), (1, 48), (1, 4)]
    assert evaluate("--data_path=MNIST 数据", "--ckpt_path=a/b/gradient_accumulation.ckpt") == OK
    assert closing(capfd.readouterr().out) == closing(out) and closing(out)[2] == 30


@pytest.mark.slow
def test_unwritable_metrics_do_not_end_run(capfd, tmp_path):
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="metrics are no longer written to 'out.metrics.jsonl'"):
        assert train(*QUICK) == OK
    assert closing(capfd.readouterr().out)[2] == 360


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*_mnist.yaml")), ids=lambda path: path.stem)
def test_configs_are_valid(path, capfd, tmp_path):
    write_mnist(tmp_path / "data", train=64, test=16)
    argv = (f"--config={path}", "--data_path=data", "--epochs=1", "--output_dir=out")
    assert train(*argv) == OK
    assert [row["samples"] for row in metrics("out")] == [64]


@pytest.mark.slow
def test_one_epoch_of_real_mnist(tmp_path, capfd):
    data = real_mnist(tmp_path / "data")
    trained = process("train.py", f"--data_path={data}", "--epochs=1", "--output_dir=out", cwd=tmp_path)
    assert (trained.returncode, trained.stderr) == (OK, "")
    accuracy, _, total = closing(trained.stdout)
    assert accuracy > 0.9 and total == 10_000
    assert plan(trained.stdout)["an epoch"] == "1,875 micro-batches, 3 of them in a shorter last window"
    assert len(metrics(tmp_path / "out")) == 469
    assert evaluate(f"--data_path={data}", "--ckpt_path=out/gradient_accumulation.ckpt") == OK
    assert closing(capfd.readouterr().out) == closing(trained.stdout)


@pytest.mark.host
def test_download_without_its_package_is_one_line_error(capfd, tmp_path, monkeypatch):
    (tmp_path / "download.py").write_text("raise ModuleNotFoundError(\"No module named 'download'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert train("--data_path=data", "--download=http://127.0.0.1:1/x.zip") == USAGE
    rule, got = "must come with the package download installed", "the error: No module named 'download'"
    message = f"argument --download: {rule}, but got {got}. Run: pip install download"
    assert one_line(capfd.readouterr().err) == message
    assert not os.path.exists("data")
