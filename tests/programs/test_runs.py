"""Runs of the programs: what they write, and what becomes of them when they are stopped."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import termios
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import safetensors.numpy
from filelock import FileLock

from ms_accum.network.compiled import debugs
from ms_accum.saving.training_state import read
from programs.command import SIGNALS, Interrupted, Signals, handled_by, interrupt, run
from programs.folder import MODEL
from running import QUICK, ROOT, error_of, evaluate, metrics_of, result_of, run_python, said, start, train

LONG = (*QUICK, "--batch_size=32", "--epochs=4")  # 23 updates in an epoch


def state_of(folder):
    """Return the arrays of the newest state of a run, as bytes by name."""
    newest = max(Path(folder, "states").glob("state-*.safetensors"))
    return {name: array.tobytes() for name, array in safetensors.numpy.load_file(newest).items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which a run has finished."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(*LONG, "--output_dir=out") == 0
    return folder / "out"


def test_run_and_eval(capsys):
    assert train(*QUICK, "--epochs=2", "--eval_every=2") == 0
    result = result_of(capsys.readouterr().out)
    assert os.listdir() == ["runs"] and os.listdir("runs") == ["001"]
    assert set(os.listdir("runs/001")) >= {"config.json", "metrics.jsonl", "states", "gradient_accumulation.ckpt"}
    lines = metrics_of("runs/001")
    assert [line["update"] for line in lines if "update" in line] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["updates"] == 6 and lines[-1]["acc"] == pytest.approx(result["Accuracy"])
    assert evaluate("--ckpt_path=./gradient_accumulation.ckpt") == 0  # the command of README, after a run
    out = capsys.readouterr().out
    assert result_of(out) == result and "runs/001/gradient_accumulation.ckpt" in out
    assert train(*QUICK, "--epochs=1", "--output_dir=out 中文") == 0
    assert [line.get("update") for line in metrics_of("out 中文")] == [1, 2, 3, None]


@pytest.mark.slow
def test_text_is_trained_and_evaluated(capsys):
    Path("small.yaml").write_text("model: gpt\nlayers: 1\nheads: 1\nwidth: 8\ncontext: 16\nbatch_size: 64\n")
    assert train("--config=small.yaml", "--max_updates=3", "--ckpt_path=model.safetensors") == 0
    result = result_of(capsys.readouterr().out)
    assert evaluate("--ckpt_path=model.safetensors") == 0
    assert result_of(capsys.readouterr().out) == pytest.approx(result, rel=1e-6)
    assert evaluate("--ckpt_path=model.safetensors", "--report=out") == 2
    assert "argument --report: is for networks that classify images" in error_of(capsys)


@pytest.mark.slow
def test_lines_of_different_lengths_are_trained_resumed_and_evaluated(capsys):
    sizes = "layers: 1\nheads: 1\nwidth: 8\ncontext: 80\n"
    Path("lines.yaml").write_text(f"model: gpt\n{sizes}tokens: 512\nwindow_weight: 1000\n")
    config, rate = "--config=lines.yaml", "--lr_decay=linear"
    assert train(config, rate, "--max_updates=5", "--output_dir=whole") == 0
    result, lines = result_of(capsys.readouterr().out), metrics_of("whole")
    assert [line["update"] for line in lines if "update" in line] == [1, 2, 3, 4, 5]
    assert evaluate("--ckpt_path=whole/gradient_accumulation.ckpt") == 0
    assert result_of(capsys.readouterr().out) == pytest.approx(result, rel=1e-6)
    assert train(config, "--max_updates=3", "--output_dir=short") == 0
    assert "updates 3, in short" in capsys.readouterr().out
    assert train("--resume", "--output_dir=short", "--max_updates=5") == 0
    assert train(config, "--max_updates=5", "--output_dir=constant") == 0
    assert state_of("short") == state_of("constant") != state_of("whole")


@pytest.mark.slow
def test_average_is_evaluated_and_saved(capsys):
    assert train(*QUICK, "--epochs=2", "--ema=0.5", "--amp=O2", "--lr_decay=linear", "--zero=1") == 0
    result = result_of(capsys.readouterr().out)
    assert evaluate() == 0
    assert result_of(capsys.readouterr().out) == result


# Stops


def wait_for_updates(folder, count, process):
    """Wait until a run has made so many updates."""
    path = Path(folder, "metrics.jsonl")
    while not path.exists() or path.read_text().count('"update"') < count:
        assert process.poll() is None, process.communicate()
        os.sched_yield()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_equals_run_without_stop(number, finished, tmp_path, capsys):
    process = start("train.py", *LONG, "--output_dir=out", "--save_every=10", cwd=tmp_path)
    wait_for_updates("out", 30, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode in (128 + number, 143), err  # MindSpore turns SIGINT into SIGTERM inside a graph
        assert "--resume continues from there" in said(err) and said(err).count("\n") == 1, err
    assert train("--resume", "--output_dir=out") == 0
    assert state_of("out") == state_of(finished)
    mine, expected = metrics_of("out"), metrics_of(finished)
    assert [(line.get("update"), line.get("loss")) for line in mine] == [
        (line.get("update"), line.get("loss")) for line in expected
    ]


@pytest.mark.slow
@pytest.mark.ranks
def test_run_that_is_ended_again_and_again_goes_on(tmp_path):
    """Each start resumes the one before, and is ended by a random signal after random many updates."""
    draw, updates, codes = random.Random(1), [0], set()
    for _ in range(8):
        flags = ("--resume",)
        if not updates[-1]:
            shutil.rmtree("out", ignore_errors=True)
            flags = (*QUICK, "--epochs=100000", "--save_every=2", "--eval_every=5")
        process = start("train.py", "--output_dir=out", *flags, cwd=tmp_path)
        wait_for_updates("out", updates[-1] + draw.randrange(1, 9), process)
        number = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        process.send_signal(number)
        _, err = process.communicate(timeout=100)
        codes.add(process.returncode)
        assert process.returncode in (-number, 128 + number, 143) and said(err).count("\n") <= 1, err
        saved = list(Path("out").glob("states/state-*"))
        updates.append(read(str(max(saved))).metadata["updates"] if saved else 0)
        assert updates[-1] >= updates[-2]
    assert updates[-1] > 0 and {-9, 143} <= codes


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_stop_and_resume_to_the_same_bytes(tmp_path):
    """Each has its shard of the rows; rank 0 writes, and a signal to the launcher stops both with one saved state."""
    command = ("-m", "ms_accum.launch", "--nproc", "2", str(ROOT / "train.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def launched(*flags):
        return start(*command, *flags, cwd=tmp_path, env=environment)

    process = launched(*LONG, "--output_dir=complete")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0 and "'Accuracy'" in out, err
    assert [(line["update"], line["samples"]) for line in metrics_of("complete")[:2]] == [(1, 128), (2, 128)]
    process = launched(*LONG, "--output_dir=out")
    wait_for_updates("out", 15, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 143, err
    process = launched("--resume", "--output_dir=out")
    assert process.communicate(timeout=200) and process.returncode == 0
    assert state_of("out") == state_of("complete")


def test_second_signal_ends_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(Interrupted, match="SIGTERM") as caught, Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        for number in (signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.received() and not ended  # they came together
        signals._came -= 2
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130] and caught.value.code == 143
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


def test_closed_terminal_is_a_signal_that_may_come_twice(monkeypatch):
    """From the system, and from the shell. Under nohup it is none."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(Interrupted, match="SIGHUP") as caught, Signals() as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received()
    assert not ended and caught.value.code == 129
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.received()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.ranks
def test_run_in_a_terminal_that_is_closed_saves_its_state(tmp_path):
    ours, its = os.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    terminal = {"stdin": its, "stdout": its, "stderr": its, "preexec_fn": take_terminal}
    process = start("train.py", *QUICK, "--epochs=900", "--output_dir=out", cwd=tmp_path, **terminal)
    os.close(its)
    printed = b""
    while b"epoch 1" not in printed.replace(b"epochs", b""):  # its bar
        printed += os.read(ours, 2**16)
    os.close(ours)
    assert process.wait(timeout=100) == 129
    assert len(list(Path("out").glob("states/state-*"))) == 1


@pytest.mark.ranks
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_rank_that_waits_for_its_scheduler_ends(number, tmp_path):
    environment = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "9"}
    process = start("train.py", *QUICK, cwd=tmp_path, env={**os.environ, **environment, "GLOG_v": "1"})
    for line in process.stderr:
        if "9" in line and "onnect" in line:
            break
    process.send_signal(number)
    assert process.wait(timeout=100) == -number
    process.stderr.close()
    process.stdout.close()


def test_run_begins_with_the_weights_of_a_model(finished, capsys):
    model = shutil.copy(finished / "gradient_accumulation.ckpt", "begin.ckpt")
    flags = (*LONG, "--output_dir=out", "--lr=1e-9", "--momentum=0")
    assert train(*flags, "--init_from=begin.ckpt", "--max_updates=1") == 0
    out = capsys.readouterr().out
    assert "init_from        begin.ckpt, 6 of 6 parameters\n" in out
    assert "window           64 rows per update (2 micro-batches of 32)\n" in out
    before, after = (ms.load_checkpoint(path) for path in (model, "out/gradient_accumulation.ckpt"))
    for name, value in before.items():
        np.testing.assert_allclose(after[name].asnumpy(), value.asnumpy(), atol=1e-6)
    assert json.loads(Path("out/config.json").read_text())["init_from"] == "begin.ckpt"
    os.remove(model)
    assert train("--resume", "--output_dir=out", "--max_updates=2") == 0  # which does not read it again
    assert "init_from" not in capsys.readouterr().out
    assert train("--resume", "--output_dir=out", "--init_from=other.ckpt") == 1
    assert "init_from was begin.ckpt and is other.ckpt" in error_of(capsys)


# Folders


def test_folder_of_another_run_is_not_touched(finished, capsys):
    # Older versions of filelock set the time of a lock that they do not get.
    files = [path for path in finished.rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert train(*QUICK, f"--output_dir={finished}") == 2
    assert f"'{finished / 'config.json'}' is of another run: give --resume to continue it" in error_of(capsys)
    model = finished / "gradient_accumulation.ckpt"
    assert train(*QUICK, f"--ckpt_path={model}") == 2
    message = error_of(capsys)
    assert f"'{model}' is of another run" in message and "did you mean --init_from, to begin with its wei" in message
    assert train("--resume", f"--output_dir={finished}", "--lr=0.5") == 1
    message = error_of(capsys)
    assert "belongs to a run with other settings: lr was 0.04 and is 0.5. Give them as they were, or begin a" in message
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_resumed_run_replaces_no_model_but_its_own(finished, capsys):
    shutil.copytree(finished, "out")
    Path("other.ckpt").write_text("precious")
    assert train("--resume", "--output_dir=out", "--epochs=5", "--ckpt_path=other.ckpt") == 2
    message = "argument --ckpt_path: 'other.ckpt' is not the model of the run in 'out'; give another path, or remove it"
    assert error_of(capsys) == message and Path("other.ckpt").read_text() == "precious"
    resume = ("--resume", "--output_dir=out", "--ckpt_path=new.ckpt")
    assert train(*resume) == 0  # where no file is
    assert train(*resume) == 0  # and now it is the run's own


def test_run_without_a_state_is_not_begun_anew(finished, capsys):
    """What is called best is no state of a run."""
    shutil.copytree(finished, "out")
    for state in Path("out/states").glob("state-*"):
        state.rename(state.with_name("state-best.safetensors"))
    before = Path("out", MODEL).read_bytes()
    assert train("--resume", "--output_dir=out") == 2
    message = "argument --resume: 'out' has no training state: its run ended before the first; give "
    message += "the --output_dir of another run"
    assert error_of(capsys) == message and Path("out", MODEL).read_bytes() == before


NAMES = ("config.json", "metrics.jsonl", "gradient_accumulation.ckpt", "gradient_accumulation.ckpt.json", ".lock")


@pytest.mark.parametrize("name", [*NAMES, "states"])
def test_nothing_is_written_through_a_link(name, capsys):
    """In a stranger's folder it may lead to any file."""
    os.makedirs("mine/states")
    os.makedirs("out")
    for each in NAMES:
        Path("mine", each).write_text("precious")
    Path("out", name).symlink_to(f"../mine/{name}")
    assert train(*QUICK, "--output_dir=out") == 1
    assert error_of(capsys) == f"'out/{name}': a link, to which nothing is written. Remove it"
    assert [Path("mine", each).read_text() for each in NAMES] == ["precious"] * len(NAMES)
    assert os.listdir("out") == [name] and not os.listdir("mine/states")


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock"])
def test_nothing_is_written_to_a_file_with_other_names(name, capsys):
    os.mkdir("out")
    Path("mine").write_text("precious")
    os.link("mine", f"out/{name}")
    assert train(*QUICK, "--output_dir=out") == 1
    message = f"'out/{name}': has other names (hard links), to which nothing is written. Remove it"
    assert error_of(capsys) == message and Path("mine").read_text() == "precious"


def test_model_elsewhere_is_that_of_one_run(capsys):
    """The second is refused while the first trains; what a killed one left beside the model is removed."""
    os.makedirs("models/.saving-m.ckpt-01234567")
    os.makedirs("models/.saving-other.ckpt-01234567")
    lock = FileLock("models/.m.ckpt.lock")
    with lock:
        assert train(*QUICK, "--epochs=1", "--ckpt_path=models/m.ckpt") == 1
    assert error_of(capsys) == "another run is using 'models/m.ckpt'; give another --ckpt_path"
    assert train(*QUICK, "--epochs=1", "--ckpt_path=models/m.ckpt") == 0
    assert {*os.listdir("models")} - {".m.ckpt.lock"} == {"m.ckpt", "m.ckpt.json", ".saving-other.ckpt-01234567"}


def test_model_has_its_record_before_it_is_evaluated(monkeypatch, capsys):
    """Or a run that is ended then would leave a model that eval.py takes for another."""
    monkeypatch.setattr("programs.tasks.evaluate", lambda *arguments: 1 / 0)
    assert train(*QUICK, "--epochs=1", "--output_dir=out") == 1
    assert error_of(capsys) == "division by zero"
    assert {f"{MODEL}", f"{MODEL}.json"} <= {*os.listdir("out")}


def test_model_in_its_folder_is_that_of_one_run(capsys):
    """Another run may have its --ckpt_path there."""
    os.makedirs("out")
    with FileLock("out/.gradient_accumulation.ckpt.lock"):
        assert train(*QUICK, "--output_dir=out") == 1
    assert "another run is using 'out/gradient_accumulation.ckpt'" in error_of(capsys)


# Disks and streams


@pytest.mark.slow
@pytest.mark.ranks
def test_full_disk_keeps_what_is_there(tmp_path):
    assert train(*QUICK, "--epochs=1", "--output_dir=out") == 0
    before = state_of("out")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start("train.py", "--resume", "--output_dir=out", "--epochs=2", cwd=tmp_path, preexec_fn=limit)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1 and "can't be written" in err.splitlines()[-1], err
    assert state_of("out") == before and not list(Path("out").rglob(".saving-*"))


@pytest.mark.slow
def test_metrics_that_cannot_be_written_are_a_warning(capsys):
    os.makedirs("out/metrics.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # in tests a warning is an error
        assert train(*QUICK, "--epochs=1", "--output_dir=out") == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: metrics are no longer written to ") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.ranks
def test_closed_stdout_loses_no_work(tmp_path):
    process = start("train.py", *LONG, "--output_dir=out", cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("epoch: 1 step"):
            break
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=100)
    process.stderr.close()
    assert process.returncode in (0, 1) and "Traceback" not in err and "Exception ignored" not in err, err
    assert train("--resume", "--output_dir=out") == 0
    without = start(
        "train.py", *QUICK, "--epochs=1", "--output_dir=closed", cwd=tmp_path, preexec_fn=lambda: os.close(1)
    )
    assert without.communicate(timeout=100)[1] == "" and without.returncode == 0


def test_full_disk_below_stdout_is_named(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(lambda argv: print("line", flush=True), []) == 1
        os.dup2(1, full.fileno())  # or what waits in its buffer would fail again
        sys.stdout.close()
    assert error_of(capsys) == "stdout can't be written: No space left on device"


def test_resumed_run_takes_no_file_of_flags(finished, capsys):
    Path("flags.yaml").write_text("lr: 0.5\n")
    assert train("--resume", f"--output_dir={finished}", "--config=flags.yaml") == 2
    assert "argument --config: the run in" in error_of(capsys)


def test_signal_is_no_error_of_what_it_interrupts(capsys):
    """The package `download` takes an Exception for a failed download."""

    def main(argv):
        with handled_by(interrupt):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Exception as error:
                raise RuntimeError("failed") from error

    assert run(main, []) == 143 and error_of(capsys) == "SIGTERM: nothing is changed"


def test_signal_after_the_last_window_comes_after_the_record_of_the_model(tmp_path):
    """Of the model that has the average of the weights."""
    program = """if True:
        import os, signal, sys
        import train
        from programs import command, folder
        from ms_accum.saving import model_file

        save = model_file.save_model

        def interrupted(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            save(*arguments)

        model_file.save_model = interrupted  # the one of train.py
        sys.exit(command.run(train.main, sys.argv[1:]))
    """
    done = run_python("-c", program, *QUICK, "--epochs=1", "--ema=0.5", cwd=tmp_path)
    assert done.returncode == 143 and "the training is complete and saved" in done.stderr, done.stderr
    folder = tmp_path / "runs/001"
    assert Path(folder, f"{MODEL}.json").exists()
    finished = Path(folder, MODEL).read_bytes()
    assert run_python(ROOT / "train.py", "--resume", cwd=tmp_path).returncode == 0
    assert Path(folder, MODEL).read_bytes() == finished


def test_full_disk_below_stderr_does_not_change_the_exit_code(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert train("--batch_size=0") == 2
        os.dup2(2, full.fileno())  # or what waits in its buffer would fail again
        sys.stderr.close()


def test_debug_adds_a_traceback(capsys, monkeypatch):
    monkeypatch.setenv("MS_ACCUM_DEBUG", "")
    assert train("--data_path=none", "--debug") == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.splitlines()[-1].startswith("error: ")
    assert debugs()


@pytest.mark.slow
def test_copied_program_trains_another_network(tmp_path):
    """What the first lines of train.py say: copied, with the lines replaced that are yours, it runs."""
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    for old, new in {
        "training_flags(argv)": "training_flags(argv, own=True)",
        "    download(args)  # yours: take it out\n": "",
        "    task = task_of(args)  # yours: take it out\n": "    import numpy as np\n"
        "    from mindspore import nn\n"
        "    from ms_accum import evaluate\n\n"
        "    def rows(seed):\n"
        "        x = np.random.RandomState(seed).randn(640, 20).astype(np.float32)\n"
        "        columns = (x, x[:, :3].argmax(1).astype(np.int32))\n"
        '        return ms.dataset.NumpySlicesDataset(columns, ["x", "y"], shuffle=False).batch(args.batch_size)\n\n'
        "    def accuracy(correct, rows):\n"
        '        return {"Accuracy": correct / rows}\n',
        'task.data("train", args.batch_size, group), task.data("test")': "rows(1), rows(2)",
        "task.network()": "nn.SequentialCell(nn.Dense(20, 3))",
        "task.loss,": "nn.CrossEntropyLoss(),",
        "weight=task.weight": "weight=None",
        "metrics=task.metrics": 'metrics={"acc"}',
        "make_optimizer(args.optimizer, parameters, lr=rate, **options)": "nn.Adam(parameters, 0.05)",
        "task.title": '"stripes"',
        "task.evaluate(network, test)": "accuracy(*evaluate(network, test))",
        'write_json(f"{folder.model}.json", task.record)': "pass",
    }.items():
        assert old in source
        source = source.replace(old, new)
    assert "task." not in source
    Path("mine.py").write_text(source)
    process = start(str(tmp_path / "mine.py"), "--epochs=9", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert result_of(out)["Accuracy"] > 0.8
    for line in (
        "task             stripes",
        "model            63 parameters, on ",
        "optimizer        Adam, learning rate at first 0.05",
    ):
        assert line in out
    config = Path("runs/001/config.json").read_text()
    assert not re.search("lenet|digits|dataset", out + config, re.IGNORECASE) and "momentum" not in out, out + config
    done = start(str(tmp_path / "mine.py"), "--resume", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result_of(done.communicate(timeout=100)[0]) == result_of(out)
    wrong = start(str(tmp_path / "mine.py"), "--model=mlp", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "unrecognized arguments: --model" in wrong.communicate(timeout=100)[1] and wrong.returncode == 2


@pytest.mark.ranks
def test_run_whose_folder_was_moved_writes_nothing_into_another(tmp_path):
    """Another run has finished there in the meantime."""
    process = start("train.py", "--output_dir=out", *QUICK, "--epochs=300", cwd=tmp_path)
    wait_for_updates("out", 3, process)
    os.rename("out", "moved")
    assert train("--output_dir=out", *QUICK, "--seed=7") == 0
    model = Path("out", MODEL).read_bytes()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1 and "out' was moved or removed while the run was using it" in err, err
    assert Path("out", MODEL).read_bytes() == model
