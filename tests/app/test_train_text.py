"""The programs train on text, evaluate and continue it, and everything that works for images works for text."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import train as training
from model_zoo import RECIPES, LeNet5
from ms_accum.app import tasks
from ms_accum.app.process import CHECKPOINT, DATA, INTERRUPTED, OK, TERMINATED, USAGE
from ms_accum.app.tasks import TextLoss
from ms_accum.saving.model_file import load_parameters, read_record, save_model, sidecar, write_record
from programs import evaluate, lines_of, one_line, plan, process, settings_of, train, train_in

WORDS = "the cat sat on the mat and the dog sat on the log, so the cat and the dog sat.\n"
SIZES = ("--context=8", "--layers=1", "--width=8", "--heads=2")
FLAGS = ("--dataset=text", "--data_path=text.txt", *SIZES, "--batch_size=8", "--mini_steps=2", "--lr=0.003")
TINY = (*FLAGS, "--max_updates=6", "--eval_every=2", "--output_dir=out")
MODEL = "out/gradient_accumulation.ckpt"
CLOSING = re.compile(
    r"loss +(?P<text>[\d.]+), ([\d.]+) bits per character\n {17}perplexity ([\d.,]+), ([\d,]+) tokens\n"
    r"============== (?P<printed>\{'Loss': .*\}) ==============\n$"
)


def write_text(folder):
    (folder / "text.txt").write_text(WORDS * 30)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text and a run on it."""
    folder = write_text(tmp_path_factory.mktemp("text"))
    assert train_in(folder, *TINY) == OK
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(write_text(tmp_path))
    return tmp_path


@pytest.fixture
def model(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def result_of(out):
    match = CLOSING.search(out)
    assert match
    return json.loads(match["printed"].replace("'", '"'))


def rejected(capfd, run, *argv, code):
    assert run(*argv) == code
    return one_line(capfd.readouterr().err)


# Training


def test_run_evaluates_and_records_what_eval_prints(model, capfd):
    evaluations = [line for line in lines_of("out") if "updates" in line]
    assert [line["updates"] for line in evaluations] == [2, 4, 6]
    record = read_record(MODEL)
    assert evaluate(f"--ckpt_path={MODEL}", "--data_path=text.txt") == OK
    out = capfd.readouterr().out
    printed = result_of(out)
    assert printed == {
        "Loss": record["loss"],
        "Bits per character": record["loss"] / math.log(2),
        "Tokens": record["predicted"],
    }
    last = evaluations[-1]
    assert last["eval_loss"] == record["loss"] and last["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert plan(out)["record"] == f"loss {plan(out)['loss']} after training"
    assert record["vocabulary"] == "".join(sorted(set(WORDS))) and record["updates"] == 6
    assert record["predicted"] == record["characters"] == len(WORDS * 30) - int(0.9 * len(WORDS * 30)) - 1


def test_loss_falls(model):
    losses = [line["eval_loss"] for line in lines_of("out") if "updates" in line]
    assert losses[0] > losses[1] > losses[2] and losses[0] < math.log(len(set(WORDS))) + 0.5


def test_plan_describes_text_and_network(here, capfd):
    assert train(*TINY, "--max_updates=1") == OK
    shown = plan(capfd.readouterr().out)
    assert shown["data"] == "text.txt, 2,132 tokens of 16 characters in 267 blocks of 8, seed 1"
    assert shown["the run"] == "1 update" and shown["model"].startswith("gpt, ")
    assert "runtime" not in shown


def test_stopped_run_resumes_to_same_bytes(trained, here, capfd, monkeypatch):
    with monkeypatch.context() as patch:
        asked = itertools.count(1)
        patch.setattr(training.steps.SIGNALS, "pending", lambda: next(asked) >= 8)
        assert train(*TINY) == TERMINATED
    capfd.readouterr()
    assert train("--resume", "--output_dir=out") == OK
    assert Path(MODEL).read_bytes() == (trained / MODEL).read_bytes()
    assert [line for line in lines_of("out") if "updates" in line] == [
        line for line in lines_of(trained / "out") if "updates" in line
    ]


@pytest.mark.slow
def test_completed_run_continues_with_more_updates(here, capfd):
    assert train(*TINY, "--max_updates=2") == OK
    capfd.readouterr()
    assert train("--resume", "--output_dir=out") == OK
    assert plan(capfd.readouterr().out)["resumed"] == "nothing left to train: 2 updates done (see --max_updates)"
    assert train("--resume", "--output_dir=out", "--max_updates=3") == OK
    assert read_record(MODEL)["updates"] == 3


@pytest.mark.slow
def test_windows_of_any_split_have_the_same_loss(here):
    """Sequences are padded: the first window has the last block of the text, of 3 tokens."""
    losses = []
    for rows, folder in ((16, "one"), (8, "two"), (5, "uneven")):
        flags = ("--effective_batch=16", f"--batch_size={rows}", "--max_updates=3", f"--output_dir={folder}")
        assert train(*FLAGS[:-2], "--lr=0.01", *SIZES, *flags) == OK
        losses.append([line["loss"] for line in lines_of(folder) if "update" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_gradients_are_verified(here, capfd):
    assert train(*FLAGS, "--verify") == OK
    assert capfd.readouterr().out.endswith("The gradients agree.\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("--amp=O2",),
        ("--amp=O3",),
        ("--ema=0.5", "--keep_best", "--save_every=2"),
        ("--vocabulary=bytes", "--untied_head", "--clip_norm=0.5"),
        ("--optimizer=sgd", "--lr_decay=cosine", "--min_lr=0.001", "--warmup_updates=2", "--zero=1", "--tensorboard"),
        ("--mini_steps=0:1,2:3", "--nonfinite=skip_micro", "--reduction=sum", "--lr=0.001"),
    ],
    ids=" ".join,
)
def test_flags_of_images_work_for_text(here, argv, capfd):
    assert train(*TINY, *argv) == OK
    result = result_of(capfd.readouterr().out)
    assert result["Loss"] < (6.0 if "--vocabulary=bytes" in argv else 3.0)
    flags = ("--use_ema",) if "--ema=0.5" in argv else ()
    assert evaluate(f"--ckpt_path={MODEL}", "--data_path=text.txt", *flags) == OK
    loss = result_of(capfd.readouterr().out)["Loss"]
    assert loss == pytest.approx(result["Loss"], rel=0.02 if "--amp" in argv[0] else 1e-6)


@pytest.mark.slow
def test_batch_size_auto_finds_a_split(here, capfd):
    flags = ("--batch_size=auto", "--effective_batch=16", "--memory_budget=8GiB", "--max_updates=2", "--output_dir=out")
    done = process("train.py", "--dataset=text", "--data_path=text.txt", *SIZES, *flags, cwd=here)
    assert done.returncode == OK, done.stderr
    assert "rows/s" in done.stdout and result_of(done.stdout)["Tokens"]


@pytest.mark.slow
def test_two_processes_train_and_evaluate_like_one(here):
    command = ("-m", "ms_accum.launch", "--nproc=2", "--log_dir=logs")
    flags = ("--dataset=text", "--data_path=text.txt", *SIZES, "--lr=0.01", "--max_updates=4", "--eval_every=2")
    alone = process("train.py", *flags, "--effective_batch=16", "--batch_size=8", "--output_dir=a", cwd=here)
    assert alone.returncode == OK, alone.stderr
    program = str(Path(training.__file__))
    done = process_of(command, program, *flags, "--effective_batch=16", "--batch_size=4", "--output_dir=b", cwd=here)
    assert done.returncode == OK, done.stderr
    one, two = ([line for line in lines_of(folder) if "updates" in line] for folder in ("a", "b"))
    assert [line["tokens"] for line in one] == [line["tokens"] for line in two]
    assert [line["eval_loss"] for line in one] == pytest.approx([line["eval_loss"] for line in two], rel=1e-4)


def process_of(command, program, *flags, cwd):
    environment = {**os.environ, "PYTHONPATH": str(Path(training.__file__).parent)}
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, *command, program, *flags], **options, check=False)


# Evaluation and samples


@pytest.mark.slow
def test_result_does_not_depend_on_the_batches(model, monkeypatch):
    sizes = settings_of(*FLAGS)
    task = tasks.task_of(sizes)
    data = [task.data("test", rows) for rows in (1, 7, 100)]
    network = task.network(data[0])
    results = [task.evaluate(network, part, None) for part in data]
    assert [result[1:] for result in results] == [results[0][1:]] * 3
    assert [result.loss for result in results] == pytest.approx([results[0].loss] * 3, rel=1e-6)
    mean_of_means = np.mean([task.evaluate(network, [batch], None).loss for batch in batches_of(data[1])])
    assert abs(mean_of_means - results[0].loss) > 1e-4 * results[0].loss  # the mutant: the last block is short


def batches_of(data):
    return list(data.create_tuple_iterator(num_epochs=1))


def test_bits_of_bytes_are_per_character():
    result = TextLoss(math.log(2), tokens=300, characters=100)
    assert result.bits == pytest.approx(3) and result.perplexity == pytest.approx(2)
    assert (result.text, result.more) == ("0.6931, 3.000 bits per character", "perplexity 2.00, 300 tokens")


def test_characters_of_utf_8_are_counted():
    task = tasks.Text("gpt", None, RECIPES["text"].text._replace(vocabulary="bytes"), untied_head=False)
    assert task._characters_in(np.frombuffer("aé梯🙂".encode(), np.uint8)) == 4


class Sure(nn.Cell):
    """Scores the token 0 with a large number, and others with 0."""

    def __init__(self, score):
        super().__init__()
        self.score = score

    def construct(self, tokens):
        return ops.one_hot(tokens * 0, 16, Tensor(self.score, ms.float32), Tensor(0.0, ms.float32))


@pytest.mark.parametrize(("score", "finite"), [(1e3, True), (1e14, True), (1e19, False), (math.inf, False)])
def test_loss_of_any_size_has_a_result(here, score, finite):
    task = tasks.task_of(settings_of(*FLAGS))
    result = task.evaluate(Sure(score), task.data("test", 8), None)
    targets = np.concatenate([targets.asnumpy() for _, targets in batches_of(task.data("test", 8))])
    share = (targets[targets >= 0] > 0).mean()
    assert result.loss == pytest.approx(score * share, rel=1e-6) if finite else math.isnan(result.loss)


def test_result_that_is_not_finite_is_recorded_and_never_the_best():
    assert TextLoss(math.log(2), tokens=300, characters=0).bits == pytest.approx(1)  # bytes that begin none
    result = TextLoss(math.nan, 5, 5)
    assert result.record["loss"] is None and math.isnan(result.perplexity) and not result.score > -math.inf
    assert math.isinf(TextLoss(1e4, 5, 5).perplexity)


def test_sample_continues_the_prompt(model, capfd):
    argv = (f"--ckpt_path={MODEL}", "--sample=40", "--prompt=the cat")
    texts = []
    for flags in (("--seed=1",), ("--seed=2",)):
        assert evaluate(*argv, *flags) == OK
        head, _, text = capfd.readouterr().out.partition(f"temperature 0.8, {flags[0][2:].replace('=', ' ')}\n")
        texts.append(text)
        assert text.startswith("the cat") and len(text) == len("the cat") + 40 + 1 and set(text) <= set(WORDS)
        assert head.endswith("sample           40 tokens, ")
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_text_is_evaluated_and_sampled(model, capfd):
    assert evaluate(f"--ckpt_path={MODEL}", "--sample=5", "--data_path=text.txt") == OK
    out = capfd.readouterr().out
    assert "sample           5 tokens" in out and result_of(out)["Tokens"]


@pytest.mark.slow
def test_sample_of_text_without_line_breaks_begins_with_its_first_character(here, capfd):
    (here / "text.txt").write_text("ab " * 400)
    assert train(*TINY) == OK
    assert evaluate(f"--ckpt_path={MODEL}", "--sample=3") == OK
    assert "sample           3 tokens" in capfd.readouterr().out


def test_interrupted_sample_ends_with_its_code(model, capfd, monkeypatch):
    def interrupted(*arguments, **options):
        yield "t"
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks.Text, "sample", interrupted)
    assert evaluate(f"--ckpt_path={MODEL}", "--sample=5") == INTERRUPTED
    out, err = capfd.readouterr()
    assert out.endswith("\nt\n") and one_line(err)


def test_unusable_samples_are_rejected(model, capfd):
    argv = (f"--ckpt_path={MODEL}",)
    message = rejected(capfd, evaluate, *argv, "--sample=5", "--prompt=Ω", code=USAGE)
    assert message == "argument --prompt: a character is not in the vocabulary of 16: 'Ω'"
    message = rejected(capfd, evaluate, *argv, "--sample=5", "--prompt=", code=USAGE)
    assert message == "argument --prompt: must not be empty"
    message = rejected(capfd, evaluate, *argv, "--sample=5", "--prompt=\udcff", code=USAGE)
    assert message == "argument --prompt: a character is not valid Unicode: '\\udcff'"
    assert rejected(capfd, evaluate, *argv, "--prompt=x", code=USAGE) == "argument --prompt: needs --sample"
    message = rejected(capfd, evaluate, *argv, "--sample=5", "--report=x", code=USAGE)
    assert message == "argument --data_path: must be given, the text: the model was trained on it"
    message = rejected(capfd, evaluate, *argv, "--sample=5", "--temperature=-1", code=USAGE)
    assert "must be a number >= 0" in message


def test_model_of_images_writes_no_text(here, capfd):
    save_model(LeNet5(), "plain.ckpt")
    assert evaluate("--ckpt_path=plain.ckpt", "--sample=5") == USAGE
    out, err = capfd.readouterr()
    assert (out, one_line(err)) == ("", "argument --sample: is for models of text; lenet5 classifies images")


def test_text_with_other_characters_is_rejected(model, capfd):
    Path("other.txt").write_text("QUITE OTHER TEXT " * 9)
    message = rejected(capfd, evaluate, f"--ckpt_path={MODEL}", "--data_path=other.txt", code=DATA)
    assert message.startswith("'other.txt' can't be read by a trained network: a character is not in the vocabulary")


def test_model_without_record_is_rejected(model, here, capfd):
    Path("x.ckpt").write_bytes((model / MODEL).read_bytes())
    message = rejected(capfd, evaluate, "--ckpt_path=x.ckpt", "--model=gpt", "--sample=1", code=CHECKPOINT)
    assert message == "'x.ckpt' has no record of a text, so its vocabulary is not known: keep 'x.ckpt.json' beside it."


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 65_000}, "its sizes are not those of the parameters"),
        ({"layers": 2}, "its sizes are not those of the parameters"),
        ({"context": 9}, "its sizes are not those of the parameters"),
        ({"heads": 3}, "'width' must be a multiple of 3 heads, but got 8"),
        ({"vocabulary": "abc"}, "its sizes are not those of the parameters"),
        ({"dataset": "mnist"}, "its model, its data set and its fields differ"),
        ({"model": "mlp"}, "its model, its data set and its fields differ"),
    ],
    ids=str,
)
def test_crafted_record_is_rejected(model, here, changed, message, capfd):
    for name in (MODEL, sidecar(MODEL)):
        Path(name.replace("out/gradient_accumulation", "x")).write_bytes((model / name).read_bytes())
    record = {name: value for name, value in read_record("x.ckpt").items() if name != "version"}
    write_record("x.ckpt", {**record, **changed})
    assert message in rejected(capfd, evaluate, "--ckpt_path=x.ckpt", "--sample=1", code=CHECKPOINT)


def test_vocabulary_that_is_not_sorted_is_no_record(model):
    record = {name: value for name, value in read_record(MODEL).items() if name != "version"}
    for vocabulary in ("ba", "aa", 7, None):
        with pytest.raises(ValueError, match="'vocabulary' is wrong"):
            write_record(MODEL, {**record, "vocabulary": vocabulary})


# Flags


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--dataset=text",), "argument --data_path: must be given for text; give a file, or a folder of .txt files"),
        (("--context=9",), "argument --context: is for text; digits are images"),
        (("--untied_head",), "argument --untied_head: is for text; digits are images"),
        (("--beta2=0.9",), "argument --beta2: momentum has none; adam and adamw have"),
        (("--beta2=0",), "argument --beta2: must be a number > 0 and < 1, but got '0'"),
        (("--beta2=0.99999999",), "argument --beta2: must be a number > 0 and < 1, but got '0.99999999'"),
        (("--min_lr=0.1",), "argument --min_lr: needs --lr_decay"),
        (("--min_lr=0.1", "--lr_decay=linear"), "argument --min_lr: must be <= 0.04, the --lr"),
        (
            ("--verify", "--batch_size=auto", "--effective_batch=8", "--memory_budget=4GiB"),
            "argument --verify: needs the rows of a micro-batch; give --batch_size",
        ),
        (("--eval_every=0",), "argument --eval_every: must be an int >= 1, but got '0'"),
        (("--max_updates=0",), "argument --max_updates: must be an int >= 1, but got '0'"),
        (("--model=gpt", "--download"), "argument --dataset: sentences are embedded; --data_path is for text"),
    ],
)
def test_contradictory_flags_are_rejected(argv, message, capfd, here):
    assert rejected(capfd, train, *argv, code=USAGE) == message


@pytest.mark.slow
def test_resumed_run_keeps_its_vocabulary(here, capfd):
    """The tokens of another vocabulary of the same size would be other characters, without an error."""
    assert train(*TINY) == OK
    (here / "text.txt").write_text((WORDS * 30).replace("a", "é"))
    argv = ("--resume", "--output_dir=out", "--max_updates=8", "--allow_config_change")
    message = rejected(capfd, train, *argv, code=DATA)
    assert message == "'text.txt' can't be read by a trained network: a character is not in the vocabulary of 16: 'é'."
    (here / "text.txt").write_text((WORDS * 30).replace("cat", "dog"))  # which has no "c" any more
    assert train(*argv) == OK
    assert read_record(MODEL)["vocabulary"] == "".join(sorted(set(WORDS)))


def test_width_that_heads_do_not_divide_is_rejected(here, capfd):
    message = rejected(capfd, train, *TINY, "--heads=3", code=USAGE)
    assert message == "argument --width: must be a multiple of 3 heads, but got 8."


def test_model_alone_trains_on_embedded_sentences():
    settings = settings_of("--model=gpt")
    assert (settings.dataset, settings.data_path, settings.layers, settings.width) == ("sentences", None, 2, 64)


def test_missing_text_exits_with_data_code(here, capfd):
    message = rejected(capfd, train, "--dataset=text", "--data_path=no.txt", code=DATA)
    assert message.startswith("'no.txt' does not exist")


def test_parameters_of_the_head_are_those_of_the_embedding(model):
    assert "head.weight" not in load_parameters(MODEL)
