"""Wrong flags and data end a program with one line that says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from idx_files import write_mnist
from model_zoo import GPT, LeNet5
from model_zoo.data.sentences import sentences
from ms_accum import TokenBatches, own_group
from ms_accum.saving.training_state import CheckpointError, write_arrays
from ms_accum.training.sizes import sizes_of, windows_by_epoch
from programs.command import FlagError
from programs.flags import (
    evaluation_flags,
    learning_rate,
    length_of,
    mini_steps_of,
    training_flags,
    window_of,
)
from programs.folder import MODEL, _new_run, model_to_evaluate, resumed_folder
from programs.tasks import begin_with, facts_of, task_of
from running import ROOT, error_of, evaluate, train

pytestmark = pytest.mark.usefixtures("eager")

WRONG_FLAGS = {  # each ends with exit code 2, before anything is created
    "--mini_steps=0": "argument --mini_steps/--accumulate_step/--gradient_accumulation_steps: must be an int >= 1",
    "--accumulate_step=x": "must be an int >= 1, or such as 0:1,100:4, but got 'x'",
    "--mini_steps=5:1,9:4": "must be an int >= 1, or such as 0:1,100:4, but got '5:1,9:4'",
    "--batch_size=0": "argument --batch_size: must be an int >= 1, but got '0'",
    "--batch_size=5000": "'batch_size' must be <= 1437",
    "--effective_batch_size=100": "argument --effective_batch_size: must be a multiple of 32, the --batch_size, but",
    "--effective_batch_size=64 --mini_steps=2": "argument --effective_batch_size: replaces --mini_steps",
    "--init_from=none.ckpt": "argument --init_from: 'none.ckpt' does not exist; where to save the model is --ckpt_path",
    "--ckpt_path=model.pt": "argument --ckpt_path: must be a path that ends with .ckpt or .safetensors, but got 'model",
    "--ckpt_path=none/m.ckpt": "argument --ckpt_path: its folder must exist, but got 'none/m.ckpt'",
    "--lr=-1": "argument --lr: must be a number > 0, but got '-1'",
    "--lr=nan": "argument --lr: must be a number > 0, but got 'nan'",
    "--epochs=0": "argument --epochs/--epoch_size: must be an int >= 1 and <= 1000000, but got '0'",
    "--epochs=1000000000": "argument --epochs/--epoch_size: must be an int >= 1 and <= 1000000, but got '1000000000'",
    "--max_updates=10000001": "argument --max_updates: must be an int >= 1 and <= 10000000, but got '10000001'",
    "--max_updates=9999999 --batch_size=1437": "argument --max_updates: needs more than 1,000,000 epochs",
    "--epochs=999999 --lr_decay=linear": "a learning rate that changes is for at most 10,000,000 updates, but the run",
    "--seed=4294967296": "must be an int >= 0 and <= 4294967295",
    "--save_every=5m": "must be a number of updates, such as 100, or of minutes, such as 5min",
    "--ema=1": "argument --ema: must be a number >= 0 and < 1",
    "--batchsize=4": "unrecognized arguments: --batchsize=4; did you mean --batch_size?",
    "--batch-size=4": "unrecognized arguments: --batch-size=4; did you mean --batch_size?",
    "--learning_rate=1": "unrecognized arguments: --learning_rate=1; did you mean --lr?",
    "--network=mlp": "unrecognized arguments: --network=mlp; did you mean --model?",
    "--grad_accum=4": "unrecognized arguments: --grad_accum=4; did you mean --mini_steps?",
    "--global_batch_size=64": "unrecognized arguments: --global_batch_size=64; did you mean --effective_batch_size?",
    "--pretrained=x.ckpt": "unrecognized arguments: --pretrained=x.ckpt; did you mean --init_from?",
    "--device_target=Ascend": "argument --device_target: Ascend is not available here, CPU is",
    "--model=gpt --dataset=digits": "argument --model: gpt does not take digits; lenet5 does",
    "--dataset=cifar10": "argument --data_path: for cifar10 it must be given",
    "--dataset=digits --data_path=x": "argument --data_path: for digits it must be left out",
    "--download": "argument --download: needs --data_path",
    "--optimizer=adam --momentum=0.5": "'momentum' must be left out: lenet5 by adam has none",
    "--layers=2": "unrecognized arguments: --layers=2; layers is for the file of --config",
    "--resume": "argument --resume: there is no run in 'runs'",
    "--resume --output_dir=TYPO": "argument --resume: 'TYPO' does not exist",
    "--config=none.yaml": "'none.yaml' can't be read: No such file or directory",
    "--config=list.yaml": "'list.yaml' must have lines of the form 'flag: value'",
    "--config=typo.yaml": "'typo.yaml' has the unknown flag 'batch_szie'; did you mean batch_size?",
    "--config=resume.yaml": "'resume.yaml' has the unknown flag 'resume'",  # what a run does once is no setting
    "--config=debug.yaml": "'debug.yaml' has the unknown flag 'debug'",
    "--config=object.yaml": "'object.yaml' must have one value for",
    "--config=twice.yaml": "'twice.yaml' must have 'lr' once, but has it twice",
    "--config=other_name.yaml": "must have 'accumulate_step' once, but has it twice, the first time as 'mini_steps'",
    "--config=twice.json": "'twice.json' must have 'lr' once, but has it twice",
    "--config=object.json": "'object.json' must have one value for 'lr', but has several",
    "--config=yes.yaml": "'yes.yaml': 'download' must be true or false, but got 'yes'",
    "--config=zero.yaml": "'zero.yaml': argument --layers: must be an int >= 1 and <= 65536, but got '0'",
    "--config=sizes.yaml": "'layers' must be left out: lenet5 by momentum has none",
    "--config=beta2.yaml": "'beta2' must be left out: lenet5 by momentum has none",
    "--config=min_lr.yaml": "'min_lr' needs --lr_decay",
    "--config=tokens.yaml": "'tokens' must be left out: lenet5 by momentum has none",
    "--config=tokens.yaml --model=gpt": "'tokens' and 'window_weight' must be given together",
    "--config=short.yaml": "'tokens' must be >= 64, the context, but got 50",
    "--config=lines.yaml --batch_size=4": "argument --batch_size: must be left out with 'tokens'",
    "--config=lines.yaml --mini_steps=4": "argument --mini_steps: must be left out with 'window_weight'",
    "--config=lines.yaml --warmup_updates=9": "argument --max_updates: must be given with 'window_weight'",
}
FILES = {
    "list.yaml": "- lr\n",
    "typo.yaml": "batch_szie: 3\n",
    "resume.yaml": "resume: true\n",
    "debug.yaml": "debug: true\n",
    "object.yaml": "lr: !!python/object/apply:os.getcwd []\n",
    "twice.yaml": "lr: 1\nlr: 2\n",
    "other_name.yaml": "mini_steps: 1\naccumulate_step: 2\n",
    "twice.json": '{"lr": 1, "lr": 2}',
    "object.json": '{"lr": {}}',
    "yes.yaml": "download: yes\n",
    "zero.yaml": "layers: 0\n",
    "sizes.yaml": "layers: 2\n",
    "beta2.yaml": "beta2: 0.9\n",
    "min_lr.yaml": "min_lr: 0.1\n",
    "tokens.yaml": "tokens: 512\n",
    "short.yaml": "model: gpt\ntokens: 50\nwindow_weight: 100\n",
    "lines.yaml": "model: gpt\ntokens: 512\nwindow_weight: 2000\n",
}


@pytest.mark.parametrize(("argv", "message"), WRONG_FLAGS.items())
def test_wrong_flags_end_train_with_2(argv, message, tmp_path, capsys):
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert train(*argv.split()) == 2
    assert message in error_of(capsys)
    assert sorted(os.listdir()) == sorted(FILES)


@pytest.mark.parametrize("program", [train, evaluate])
def test_flag_that_is_like_no_other_gets_no_hint(program, capsys):
    assert program("--export=x") == 2
    assert error_of(capsys) == "unrecognized arguments: --export=x"


def test_file_of_flags_is_a_small_file(capsys):
    os.mkfifo("pipe.yaml")
    Path("link.yaml").symlink_to("/dev/zero")
    Path("large.yaml").touch()
    os.truncate("large.yaml", 2**40)
    large = "1,099,511,627,776 bytes, more than 1,048,576"
    for name, fault in (("pipe", "not a file"), ("link", "not a file"), ("large", large)):
        assert train(f"--config={name}.yaml") == 2
        assert error_of(capsys) == f"'{name}.yaml' can't be read: {fault}"


def test_aliases_in_a_file_of_flags_are_not_expanded(capsys):
    """Ten levels of ten are a text of 10 GB."""
    levels = "".join(f"- &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 11))
    Path("bomb.yaml").write_text(f"lr:\n- &a0 xxxxxxxxx\n{levels}")
    Path("name.yaml").write_text(f"? - &a0 xxxxxxxxx\n{levels.replace('- &', '  - &')}: 1\n")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, limits[1]))  # an error in the place of a full machine
    try:
        assert train("--config=bomb.yaml") == train("--config=name.yaml") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert capsys.readouterr().err.splitlines() == [
        "error: 'bomb.yaml' must have one value for 'lr', but has several",
        "error: 'name.yaml' must have lines of the form 'flag: value'",
    ]


# Missing and damaged files, each with exit code 1 and a line that names the file


def data_with(pattern, change):
    """Write MNIST with one file that is changed, and return the flags."""
    folder = write_mnist(Path("data"))
    path = next(folder.rglob(pattern))
    path.write_bytes(change(path.read_bytes()))
    return ["--data_path=data"]


WRONG_DATA = {
    "missing": lambda: ["--data_path=none"],
    "short": lambda: data_with("train-images*", lambda content: content[:-7]),
    "empty": lambda: data_with("train-labels*", lambda content: b""),
    "magic": lambda: data_with("t10k-images*", lambda content: b"\1" * len(content)),
    "label": lambda: data_with("train-labels*", lambda content: content[:-1] + b"\x0a"),
    "no text": lambda: ["--dataset=text", "--data_path=none"],
    "own images": lambda: os.makedirs("photos/cats") or ["--data_path=photos"],
}


@pytest.mark.parametrize("make", WRONG_DATA.values(), ids=WRONG_DATA)
def test_wrong_data_end_train_with_1(make, capsys):
    argv = make()
    assert train(*argv) == 1
    message = error_of(capsys)
    assert argv[-1].split("=")[1] in message, message
    assert ("docs/how-to/programs.md#your-own-network-and-data" in message) == (argv == ["--data_path=photos"])
    assert not Path("runs").exists()


def written(content, name="model.ckpt"):
    """Write a file, and return its path."""
    Path(name).write_bytes(content)
    return name


def npz():
    np.savez("arrays.npz", x=np.ones(3))
    return "arrays.npz"


WRONG_MODELS = {
    "missing": (lambda: "none.ckpt", "none.ckpt"),
    "empty": (lambda: written(b""), "model.ckpt"),
    "text": (lambda: written(b"hello"), "model.ckpt"),
    "pickle": (lambda: written(pickle.dumps(os.getcwd)), "model.ckpt"),
    "zip": (lambda: written(b"PK\3\4" + b"\0" * 60), "model.ckpt"),
    "npz": (npz, "arrays.npz"),
    "safetensors": (lambda: written(b"\xff" * 40, "model.safetensors"), "model.safetensors"),
    "folder": (lambda: os.curdir, "."),
    "pipe": (lambda: os.mkfifo("model.ckpt") or "model.ckpt", "model.ckpt"),
    "other network": (lambda: saved(nn.Dense(2, 3)), "missing conv1.weight"),
    "other number of classes": (lambda: saved(LeNet5(num_class=5)), "instead of"),
    "record of other sizes": (
        lambda: saved(small_gpt()) and record(layers=3),
        "its 'layers' is 1, and 3 in the file",
    ),
    "record of another network": (
        lambda: saved(LeNet5()) and record(layers=1),
        "its 'vocab_size' is 0, and 2 in the file",
    ),
    "record": (lambda: written(b"[]", "model.ckpt.json")[:-5], "is not the record of a model"),
    "record of a size": (lambda: record(layers=10**9), "is not the record of a model"),
    "record with a path": (lambda: record(layers=1, data_path="x"), "is not the record of a model"),
    "record with a folder": (lambda: record(layers=1, report="x"), "is not the record of a model"),
}


def saved(network):
    """Save a network without a record, and return the path."""
    ms.save_checkpoint(network, "model.ckpt")
    return "model.ckpt"


def small_gpt():
    return GPT(2, context=8, width=8, heads=1, layers=1, tie_weights=True)


def record(**sizes):
    """Write the record of a GPT, and return the path of its model."""
    content = {
        "model": "gpt",
        "dataset": "sentences",
        "amp": "off",
        "context": 8,
        "heads": 1,
        "width": 8,
        "vocabulary": "ab",
        **sizes,
    }
    Path("model.ckpt.json").write_text(json.dumps(content))
    return "model.ckpt"


def other_record(write):
    """Write a model, and what has the name of its record."""
    saved(small_gpt())
    write(Path("model.ckpt.json"))
    return "model.ckpt"


NO_RECORDS = {
    "nested": lambda path: path.write_text("[" * 99999),
    "cut off": lambda path: path.write_text(Path(record(layers=1) + ".json").read_text()[:-9]),
    "not UTF-8": lambda path: path.write_bytes(b'{"model": "\xff"}'),
    "pipe": os.mkfifo,
    "half a character": lambda path: record(layers=1, vocabulary="a\ud800"),
    "a character twice": lambda path: record(layers=1, vocabulary="aba"),
    "no characters": lambda path: record(layers=1, vocabulary=["a", "b"]),
}


@pytest.mark.parametrize("write", NO_RECORDS.values(), ids=NO_RECORDS)
def test_what_is_no_record_is_named(write, capsys):
    """Also by the run that begins with its model: it could not compare the characters."""
    model, fault = other_record(write), "'model.ckpt.json' is not the record of a model; remove it"
    assert evaluate(f"--ckpt_path={model}") == 1
    assert error_of(capsys) == fault
    Path("text").write_text("ab" * 600)
    flags = ("--dataset=text", "--data_path=text", f"--init_from={model}", "--max_updates=1")
    assert train(*flags) == 1
    assert error_of(capsys) == fault


def test_model_without_a_record_says_what_is_assumed(capsys):
    assert evaluate(f"--ckpt_path={saved(nn.Dense(2, 3))}") == 1
    out, err = capsys.readouterr()
    expected = (
        "assumed          --model lenet5 --dataset digits: there is no record beside the model, or it does not say\n"
    )
    assert out.startswith(expected) and "missing conv1.weight" in err
    args = evaluation_flags(["--ckpt_path=model.ckpt", "--model=mlp", "--dataset=digits"])
    assert (args.model, capsys.readouterr().out) == ("mlp", "")


def test_report_is_a_folder(capsys):
    Path("out").touch()
    assert evaluate(f"--ckpt_path={saved(LeNet5())}", "--report=out") == 2
    assert error_of(capsys) == "argument --report: must be a folder, but 'out' is a file"


@pytest.mark.parametrize(("make", "message"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_wrong_models_end_eval_with_1(make, message, capsys):
    assert evaluate(f"--ckpt_path={make()}") == 1
    assert message in error_of(capsys)


def test_eval_names_missing_flags(capsys):
    assert evaluate() == 2
    assert error_of(capsys) == "argument --ckpt_path: there is no run in 'runs'; give the path of a model"
    assert evaluate("--ckpt_path=x.ckpt", "--dataset=mnist") == 2
    assert error_of(capsys) == "argument --data_path: for mnist it must be given"
    record()
    assert evaluate("--ckpt_path=model.ckpt") == 2
    assert "the record of a network that takes text is missing, or has no sizes, 'model.ckpt.json'" in error_of(capsys)


def begun(name, *files):
    for each in ("config.json", *files):
        Path("runs", name, each).parent.mkdir(parents=True, exist_ok=True)
        Path("runs", name, each).touch()


def test_newest_run_is_one_that_has_begun(capsys):
    """Neither what a user has named, nor what an error has left before the training."""
    state = "states/state-00000001.safetensors"
    for name in ("002", "003", "5", "20261129"):
        begun(name, state, MODEL)
    os.makedirs("runs/004")
    assert resumed_folder(None) == "runs/003" and model_to_evaluate(None) == f"runs/003/{MODEL}"
    assert _new_run() == 5
    begun("1000", state, MODEL)
    assert resumed_folder(None) == "runs/1000"


def test_newest_run_without_a_model_names_the_way_out(capsys):
    begun("001")
    fault = "argument --ckpt_path: the newest run, 'runs/001', has no model in its folder; give the path of a model"
    assert evaluate() == 2 and error_of(capsys) == fault
    begun("001", "states/state-00000001.safetensors")
    assert evaluate() == 2
    assert error_of(capsys) == f"{fault}, or finish the run: python train.py --resume"


def test_model_may_be_saved_in_the_folder_that_the_run_creates():
    assert training_flags(["--output_dir=out", "--ckpt_path=out/model.ckpt"]).ckpt_path == "out/model.ckpt"


# Where flags come from


def test_config_is_read_and_command_line_overrides_it():
    Path("config.yaml").write_text("lr: 1e-3\nepochs: 2\nmini_steps: 0:1,100:4\noptimizer: sgd\n")
    args = training_flags(["--config=config.yaml", "--epochs=3"])
    assert (args.lr, args.epochs, args.mini_steps, args.optimizer) == (0.001, 3, {0: 1, 100: 4}, "sgd")
    Path("config.yaml").write_text("layers: 1\ncontext: 8\nbeta2: 0.9\nlr_decay: linear\nmin_lr: 1e-4\n")
    args = training_flags(["--config=config.yaml", "--model=gpt"])
    assert (args.layers, args.context, args.heads, args.width) == (1, 8, 4, 64)
    assert (args.beta2, args.min_lr) == (0.9, 1e-4) and {"layers", "beta2", "min_lr"} <= set(args.saved)


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_of_the_repository_are_flags(config):
    args = training_flags([f"--config={config}", "--data_path=x"])
    assert args.dataset in ("mnist", "cifar10", "text")


def test_data_set_decides_what_is_not_given():
    def chosen(*argv):
        args = training_flags(argv)
        return args.dataset, args.model, args.epochs, args.batch_size, args.optimizer, args.lr, args.weight_decay

    assert chosen() == ("digits", "lenet5", 25, 32, "momentum", 0.04, 0)
    assert chosen("--data_path=x", "--model=mlp") == ("mnist", "mlp", 10, 32, "momentum", 0.01, 0)
    assert chosen("--data_path=x", "--model=resnet18") == ("cifar10", "resnet18", 80, 128, "sgd", 0.1, 5e-4)
    assert chosen("--data_path=x", "--model=gpt", "--optimizer=sgd") == ("text", "gpt", 5, 16, "sgd", 0.1, 0)
    assert chosen("--model=gpt", "--max_updates=9") == ("sentences", "gpt", None, 16, "adamw", 0.003, 0)


def test_three_names_of_the_window_are_one_flag():
    for name in ("mini_steps", "accumulate_step", "gradient_accumulation_steps"):
        assert training_flags([f"--{name}=3"]).mini_steps == 3


def shown_window(*argv, ranks=1):
    args = training_flags(argv)
    args.mini_steps = mini_steps_of(args, ranks)
    return window_of(args, ranks)


def test_rows_of_an_update_are_said():
    assert shown_window("--batch_size=32", "--mini_steps=4") == "128 rows per update (4 micro-batches of 32)"
    assert shown_window("--mini_steps=1", ranks=2) == "64 rows per update (1 micro-batch of 32 on each of 2 ranks)"
    growing = "32 rows per update (1 micro-batch of 32), 64 rows per update (2 micro-batches of 32) from update 9"
    assert shown_window("--mini_steps=0:1,9:2") == growing


def test_rows_of_an_update_decide_the_window():
    flags = ("--batch_size=16", "--effective_batch_size=96")
    assert shown_window(*flags) == "96 rows per update (6 micro-batches of 16)"
    assert shown_window(*flags, ranks=3) == "96 rows per update (2 micro-batches of 16 on each of 3 ranks)"
    with pytest.raises(FlagError, match="must be a multiple of 64, the --batch_size 16 of 4 ranks, but got 96"):
        shown_window(*flags, ranks=4)


def test_window_of_the_command_line_replaces_that_of_a_file():
    Path("rows.yaml").write_text("effective_batch_size: 64\n")
    Path("steps.yaml").write_text("mini_steps: 8\n")
    assert shown_window("--config=rows.yaml", "--mini_steps=3").startswith("96 ")
    assert shown_window("--config=steps.yaml", "--effective_batch_size=64").startswith("64 ")
    args = training_flags(["--config=rows.yaml"])
    assert args.saved["effective_batch_size"] == 64 and "mini_steps" not in args.saved  # resumed on other ranks, too


def run_of_a_stranger(**flags):
    """Write the flags of a run into the folder theirs, with the name of a state."""
    state = Path("theirs/states/state-00000001.safetensors")
    state.parent.mkdir(parents=True, exist_ok=True)
    state.touch()
    Path("theirs/config.json").write_text(json.dumps({"dataset": "mnist", "data_path": "data", **flags}))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"download": True}, "has the unknown flag 'download'"),
        ({"output_dir": "mine"}, "has the unknown flag 'output_dir'"),
        ({"seed": -1}, "must be an int >= 0 and <= 4294967295"),
        ({"ckpt_path": "mine.ckpt"}, "saves its model outside of 'theirs', to 'mine.ckpt'; if it is yours, give it"),
        ({"ckpt_path": "theirs/../mine.ckpt"}, "saves its model outside of 'theirs'"),
        ({"ckpt_path": "theirs/link.ckpt"}, "saves its model outside of 'theirs'"),
    ],
    ids=lambda value: " ".join(map(str, *value.items())) if isinstance(value, dict) else "",
)
def test_resumed_run_takes_only_what_a_run_saves(flags, message, capsys):
    run_of_a_stranger(**flags)
    Path("theirs/link.ckpt").symlink_to("../mine.ckpt")
    assert train("--resume", "--output_dir=theirs") == 2
    assert message in error_of(capsys)


def test_sizes_of_a_resumed_run_are_those_of_its_state(capsys):
    run_of_a_stranger(dataset="sentences", data_path=None, context=8, width=8, heads=1, layers=3)
    network = GPT(len(set(sentences())), context=8, width=8, heads=1, layers=1, tie_weights=True)
    arrays = {f"network.{each.name}": each.asnumpy() for each in network.get_parameters()}
    write_arrays("theirs/states/state-00000001.safetensors", arrays, {})
    Path("theirs/states/state-00000002.safetensors").write_bytes(b"damaged")
    assert train("--resume", "--output_dir=theirs") == 1
    assert "state-00000001.safetensors' is of another architecture: its 'layers' is 1, and 3 in" in error_of(capsys)


def test_resumed_run_saves_its_model_where_it_did():
    run_of_a_stranger(ckpt_path="theirs/model.ckpt")
    resume = ["--resume", "--output_dir=theirs"]
    assert training_flags(resume).ckpt_path == "theirs/model.ckpt"
    run_of_a_stranger(ckpt_path="mine.ckpt")
    assert training_flags([*resume, "--ckpt_path=mine.ckpt"]).ckpt_path == "mine.ckpt"


def test_model_is_evaluated_on_the_data_that_it_was_trained_on(capsys):
    run_of_a_stranger()
    Path("theirs/model.ckpt.json").write_text('{"model": "lenet5", "dataset": "mnist", "amp": "off"}')
    flags = ["--ckpt_path=theirs/model.ckpt"]
    with pytest.raises(FlagError, match="--data_path: for mnist it must be given"):  # the data are not there
        evaluation_flags(flags)
    os.mkdir("data")
    assert evaluation_flags(flags).data_path == "data"
    assert capsys.readouterr().out == "data_path        data, as in theirs/config.json\n"
    assert evaluation_flags([*flags, "--data_path=other"]).data_path == "other"
    for no_run in ('{"dataset": "cifar10", "data_path": "data"}', '{"architectures": ["BertModel"]}'):
        Path("theirs/config.json").write_text(no_run)
        with pytest.raises(FlagError, match="must be given"):
            evaluation_flags(flags)


# The weights to begin with


def values_of(network):
    return {each.name: each.asnumpy().copy() for each in network.get_parameters()}


def test_network_begins_with_the_weights_of_a_model(capsys):
    """Those of the last layer are new if it has another number of classes."""
    model, network = LeNet5(), LeNet5(num_class=5)
    before, there = values_of(network), values_of(model)
    begin_with(network, saved(model))
    for name, value in values_of(network).items():
        np.testing.assert_array_equal(value, before[name] if name.startswith("fc3") else there[name])
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "init_from        model.ckpt, 6 of 8 parameters",
        "  new            fc3.weight, fc3.bias: of another number of classes in the file",
    ]


class Other(nn.Cell):
    """Has one layer of LeNet5, and one of its own."""

    def __init__(self, channels=6, dtype=ms.float32):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 5, dtype=dtype)
        self.head = nn.Dense(3, 3)


class Last(nn.Cell):
    """Has the last layer of LeNet5, after more features."""

    def __init__(self):
        super().__init__()
        self.fc3 = nn.Dense(85, 10)


def test_parameters_of_one_of_both_are_listed(capsys):
    network, model = Other(dtype=ms.float16), LeNet5()
    begin_with(network, saved(model))
    expected = model.conv1.weight.asnumpy().astype(np.float16)
    np.testing.assert_array_equal(network.conv1.weight.asnumpy(), expected)
    assert capsys.readouterr().out.splitlines() == [
        "init_from        model.ckpt, 1 of 3 parameters",
        "  new            head.weight, head.bias: not in the file",
        "  left over      conv2.weight, fc1.weight, fc1.bias and 4 more: in the file only",
    ]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: Other(8), r"conv1.weight is \(6, 1, 5, 5\) instead of \(8, 1, 5, 5\); only the number of classes"),
        (Last, r"fc3.weight is \(10, 84\) instead of \(10, 85\); only the number of classes in the last layer may"),
        (lambda: nn.Dense(84, 10), "none of the network's parameters, weight, bias: it has conv1.weight, conv2.weight"),
    ],
)
def test_model_of_another_network_is_rejected(network, message):
    network = network()
    before = values_of(network)
    with pytest.raises(CheckpointError, match=message):
        begin_with(network, saved(LeNet5()))
    for name, value in values_of(network).items():
        np.testing.assert_array_equal(value, before[name])


def test_model_of_other_characters_is_rejected(capsys):
    saved(small_gpt())
    record(layers=1, vocabulary="ba")
    Path("text").write_text("ab" * 600)
    assert train("--dataset=text", "--data_path=text", "--init_from=model.ckpt", "--max_updates=1") == 2
    message = "'model.ckpt' is for other tokens: its text had 2 characters, this one has 2, not all the same"
    assert message in error_of(capsys)


# Before MindSpore is imported


@pytest.mark.parametrize("program", ["train.py", "eval.py"])
def test_mindspore_is_not_imported_for_wrong_flags_and_help(program):
    block = f"import sys; sys.modules.update(mindspore=None, numpy=None); sys.path.insert(0, {str(ROOT)!r}); "
    for argv, code, text in ((["--x"], 2, "error: unrecognized"), (["--help"], 0, "usage:")):
        source = f"{block}sys.argv = {[program, *argv]}; import runpy; "
        source += f"runpy.run_path({str(ROOT / program)!r}, run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
        assert done.returncode == code and text in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize("program", ["train.py", "eval.py"])
def test_missing_packages_are_one_line(program, tmp_path):
    flags = ("--ckpt_path=x.ckpt", "--model=lenet5", "--dataset=digits")
    command = [sys.executable, "-S", str(ROOT / program), *flags]  # -S: without installed packages
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.startswith("error: the package '") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("' is missing. Run: pip install -r requirements.txt\n")


# What flags become


def test_long_runs_are_planned_at_once():
    """With windows that change size, too: how many epochs there are is searched for, not counted."""
    for sizes in ("4", "0:1,100:4"):
        args = training_flags([f"--mini_steps={sizes}", "--max_updates=300000"])
        epochs, updates = length_of(args, 10)
        last = sum(windows_by_epoch(10, sizes_of("", "", args.mini_steps), "flush", epochs - 2))
        assert updates == 300000 and last < updates <= last + 10


def test_file_of_flags_has_texts():
    """As on the command line, not YAML's numbers of base 60, 16 or 8, nor its words for no."""
    Path("flags.yaml").write_text("output_dir: 001\namp: off\nepochs: 2\ndownload: false\n")
    args = training_flags(["--config=flags.yaml"])
    assert (args.output_dir, args.amp, args.epochs) == ("001", "off", 2)
    Path("flags.yaml").write_text("seed: 1:30\n")
    with pytest.raises(FlagError, match="seed: must be an int"):
        training_flags(["--config=flags.yaml"])


def test_length_of_a_run_is_its_epochs_or_its_updates():
    """Ten micro-batches are three updates; an epoch is added in case windows are skipped."""

    def length(*flags):
        return length_of(training_flags(["--mini_steps=4", *flags]), 10)

    assert length("--epochs=3") == (3, 9) and length("--epochs=3", "--tail=drop") == (3, 6)
    assert length("--max_updates=7") == (4, 7) and length("--max_updates=6") == (3, 6)
    assert length("--epochs=3", "--max_updates=7") == (3, 7) and length("--epochs=2", "--max_updates=7") == (2, 6)


def test_rate_rises_and_falls():
    def rates(*flags, updates=6):
        Path("config.yaml").write_text("min_lr: 0.2\n")
        return learning_rate(training_flags(["--lr=0.4", *flags]), updates)

    assert rates() == 0.4 and rates("--warmup_updates=4") == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert rates("--lr_decay=linear", updates=4) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    falling = ("--warmup_updates=2", "--lr_decay=linear", "--config=config.yaml")
    assert rates(*falling) == pytest.approx([0.2, 0.4, 0.4, 0.35, 0.3, 0.25])
    halves = [0.4, 0.2 + 0.2 * 0.5**0.5, 0.2, 0.2 - 0.2 * 0.5**0.5]
    assert rates("--lr_decay=cosine", updates=4) == pytest.approx(halves)


def test_other_data_with_as_many_rows_are_told_apart():
    """A run is not resumed with them."""
    facts = []
    for name, text in (("one", "ab" * 600), ("other", "ba" * 600)):
        Path(name).write_text(text)
        args = training_flags(["--dataset=text", f"--data_path={name}"])
        facts.append(facts_of(task_of(args).data("train", 2, own_group())))
    assert facts[0]["rows"] == facts[1]["rows"] and facts[0]["data"] != facts[1]["data"]


def test_nothing_is_known_of_data_of_the_users_own():
    pairs = [([1, 2, 3], [2, 3, 4])] * 4
    packed = TokenBatches([np.zeros(each, np.int32) for each in (1, 2, 3)], 4)
    generated = ms.dataset.GeneratorDataset(pairs, ["x", "y"])
    assert facts_of(packed) == facts_of(generated) == facts_of(pairs) == {}
