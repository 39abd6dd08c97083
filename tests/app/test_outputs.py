"""A run replaces no files of another run, except with --overwrite."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import shutil
from pathlib import Path

import pytest

import train as training
from ms_accum import Group
from ms_accum.app import outputs, steps, tasks
from ms_accum.app.process import CHECKPOINT, DISK, OK, TERMINATED, USAGE, Failure
from ms_accum.app.tasks import Accuracy, task_of
from ms_accum.saving import training_state
from ms_accum.saving.model_file import DEFAULT, read_record, sidecar
from programs import closing, evaluate, metrics, one_line, plan, settings_of, train

RUN = ("--model=mlp", "--epochs=1", "--batch_size=512", "--mini_steps=3")  # one update
OUT = (*RUN, "--output_dir=out")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder in which a run without flags for its output has written."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(*RUN) == OK
    return folder


@pytest.fixture
def here(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def out(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run / "runs" / "001", tmp_path / "out"))


def contents_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def rejected(capfd, *argv, code=USAGE):
    capfd.readouterr()
    before = contents_of(".")
    assert train(*argv) == code
    out, err = capfd.readouterr()
    assert out == "" and contents_of(".") == before
    return one_line(err)


# A folder that holds another run


WAYS = "; give --resume to continue that run, another folder, or --overwrite to replace it"


def test_folder_with_another_run_is_rejected(out, capfd):
    message = f"argument --output_dir: 'out' holds another run ({DEFAULT}, metrics.jsonl, 1 training state){WAYS}"
    assert rejected(capfd, *OUT) == message


@pytest.mark.parametrize(
    ("left", "mentioned"),
    [(DEFAULT, DEFAULT), ("metrics.jsonl", "metrics.jsonl"), ("states", "1 training state")],
)
def test_any_file_of_another_run_is_rejected(out, capfd, left, mentioned):
    for path in out.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert rejected(capfd, *OUT) == f"argument --output_dir: 'out' holds another run ({mentioned}){WAYS}"


def test_best_model_of_another_run_is_rejected(tmp_path, capfd):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gradient_accumulation.best.ckpt").touch()
    assert "holds another run (gradient_accumulation.best.ckpt)" in rejected(capfd, *OUT)


def test_model_written_by_concurrent_run_is_kept(finished_run, tmp_path, capfd, monkeypatch):
    write_last = steps.Models.write_last

    def after_another_run(models):
        shutil.copy(finished_run / DEFAULT, "m.ckpt")
        write_last(models)

    monkeypatch.setattr(steps.Models, "write_last", after_another_run)
    assert train(*RUN, "--ckpt_path=m.ckpt", "--seed=2", "--save_every=1", "--keep_best") == OK
    assert "'m.ckpt' was written by another run; its model is kept as 'm.previous.ckpt'" in capfd.readouterr().out
    assert Path("m.previous.ckpt").read_bytes() == Path(finished_run / DEFAULT).read_bytes()
    assert read_record("m.ckpt")["seed"] == 2 and not os.path.exists("m.best.previous.ckpt")


@pytest.mark.slow
def test_overwrite_replaces_complete_run(out, capfd):
    (out / "gradient_accumulation.best.ckpt").touch()
    (out / "notes.txt").write_text("mine")
    (out / "tensorboard").mkdir()
    for name in ("metrics.png", "metrics.svg", "metrics.csv", "tensorboard/events.out.tfevents.1.host"):
        (out / name).touch()  # they show the run that is replaced
    assert train(*OUT, "--overwrite", "--seed=2") == OK
    assert not os.listdir(out / "tensorboard")
    (out / "tensorboard").rmdir()
    names = [DEFAULT, f"{DEFAULT}.json", "metrics.jsonl", "notes.txt", "states"]
    assert sorted(os.listdir(out)) == names and read_record(out / DEFAULT)["seed"] == 2
    assert sorted(os.listdir(out / "states")) == [".lock", "state-00000001.safetensors"]


def test_overwrite_removes_nothing_before_flags_and_data_are_valid(out, capfd):
    assert "--data_path" in rejected(capfd, *OUT, "--overwrite", "--dataset=mnist")
    assert "--batch_size" in rejected(capfd, *OUT, "--overwrite", "--batch_size=9999")


def test_overwrite_with_resume_is_rejected(out, capfd):
    assert rejected(capfd, *OUT, "--overwrite", "--resume").startswith("argument --overwrite: can't be combined with")


def test_active_run_is_not_resumed(out, capfd):
    with steps.Checkpointer(out / "states"):
        assert train(*OUT, "--resume") == USAGE
    assert "another run is using the folder 'out/states'" in one_line(capfd.readouterr().err)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_unwritable_copy_is_rejected_before_run(make, capfd):
    make("gradient_accumulation.ckpt")
    assert train(*RUN) == USAGE
    assert "must name a file, but got the" in one_line(capfd.readouterr().err)
    assert os.listdir() == ["gradient_accumulation.ckpt"]


def test_overwrite_does_not_touch_active_run(out, capfd):
    with steps.Checkpointer(out / "states"):
        assert "another run is using the folder 'out/states'" in rejected(capfd, *OUT, "--overwrite")


@pytest.mark.slow
def test_resume_continues_in_folder(out):
    assert train(*OUT, "--resume", "--epochs=2") == OK
    assert [row["epoch"] for row in metrics("out")] == [1, 2]


@pytest.mark.slow
def test_resume_starts_new_run_where_nothing_is_lost(out, capfd):
    """A run that was killed before its first state leaves metrics."""
    shutil.rmtree(out / "states")
    assert "out' holds another run" in rejected(capfd, *OUT, "--resume")
    os.unlink(out / DEFAULT)
    assert train(*OUT, "--resume") == OK
    assert plan(capfd.readouterr().out)["resumed"] == "nothing: no state in 'out/states'"


@pytest.mark.slow
def test_best_model_without_state_does_not_block_folder(tmp_path, capfd, monkeypatch):
    """It is written before the state; a run that ended between the two begins again, and keeps it."""

    def full(*arguments, **options):
        raise OSError("No space left on device")

    flags = (*OUT, "--save_every=1", "--keep_best")
    with monkeypatch.context() as patch:
        patch.setattr(training_state, "save_file", full)
        assert train(*flags) == DISK
    best = "out/gradient_accumulation.best.ckpt"
    first = Path(best).read_bytes()
    assert not outputs._states_in("out") and not os.path.exists(f"out/{DEFAULT}")
    assert "holds another run (gradient_accumulation.best.ckpt" in rejected(capfd, *flags)  # without --resume it is
    assert train(*flags, "--resume", "--seed=2") == OK
    out = capfd.readouterr().out
    kept = "out/gradient_accumulation.best.previous.ckpt"
    assert f"'{best}' is of a run without a state, which begins again; it is kept as '{kept}'\n" in out
    assert Path(kept).read_bytes() == first and read_record(best)["seed"] == 2 and read_record(kept)["seed"] == 1
    os.unlink(kept)
    assert train(*flags, "--resume", "--seed=2", "--epochs=2") == OK and not os.path.exists(kept)


@pytest.mark.slow
def test_state_of_other_folder_does_not_allow_replacing_a_run(here, out, capfd):
    state = "runs/001/states/state-00000001.safetensors"
    message = rejected(capfd, *OUT, f"--resume={state}", "--epochs=2")
    assert message.endswith("no state to resume from: give another folder, or --overwrite instead of --resume")
    assert train(*RUN, "--output_dir=new", f"--resume={state}", "--epochs=2") == OK


@pytest.mark.slow
def test_existing_model_path_is_rejected(tmp_path, capfd):
    (tmp_path / "a.ckpt").write_bytes(b"precious")
    message = "argument --ckpt_path: 'a.ckpt' exists; give --resume to continue that run, another name, or --overwrite"
    assert rejected(capfd, *RUN, "--ckpt_path=a.ckpt").startswith(message)
    assert train(*RUN, "--ckpt_path=a.ckpt", "--overwrite") == OK
    assert read_record("a.ckpt")["updates"] == 1 and sorted(os.listdir()) == ["a.ckpt", "a.ckpt.json", "runs"]
    assert not os.path.exists(f"runs/001/{DEFAULT}")


# A folder of its own


def test_first_command_can_be_repeated(here, capfd):
    first = contents_of("runs/001")
    assert train(*RUN, "--seed=2") == OK
    out, err = capfd.readouterr()
    assert err == "" and plan(out)["output"] == "runs/002" and plan(out)["copied to"] == DEFAULT
    assert contents_of("runs/001") == first
    for name in (DEFAULT, sidecar(DEFAULT)):
        assert Path(name).read_bytes() == Path("runs/002", name).read_bytes() != first[name]
    assert sorted(os.listdir()) == [DEFAULT, sidecar(DEFAULT), "runs"]
    assert evaluate() == OK
    assert closing(capfd.readouterr().out) == closing(out)


@pytest.mark.slow
def test_model_of_no_run_is_kept(here, capfd):
    Path(DEFAULT).write_bytes(b"precious")
    assert train(*RUN) == OK
    kept = "gradient_accumulation.previous.ckpt"
    shown = plan(capfd.readouterr().out)
    assert (shown["copied to"], shown["kept"]) == (DEFAULT, f"{kept}, the former file")
    assert Path(kept).read_bytes() == b"precious" and read_record(DEFAULT)["updates"] == 1


@pytest.mark.slow
def test_resume_uses_newest_run_with_state(here, capfd):
    os.rename("runs/001", "runs/003")  # so that the file here is a copy of the model that is replaced
    for name in ("002", "010", "1.txt", "notes"):
        os.mkdir(f"runs/{name}")
    assert settings_of("--resume").output_dir == "runs/003"
    assert settings_of().output_dir is None and outputs.new_run() == 11
    assert train(*RUN, "--resume", "--epochs=2") == OK
    shown = plan(capfd.readouterr().out)
    assert shown["copied to"] == DEFAULT and not os.path.exists("gradient_accumulation.previous.ckpt")
    assert shown["output"] == "runs/003" and shown["resumed"].startswith("runs/003/states/state-00000001.safetensors: ")
    assert read_record(DEFAULT)["updates"] == 2


def test_resume_of_run_killed_before_saving_is_an_error(here, capfd):
    for number in ("002", "003"):  # the last had not trained either
        os.mkdir(f"runs/{number}")
        Path(f"runs/{number}/metrics.jsonl").write_text("{}\n" if number == "002" else "")
    line = rejected(capfd, *RUN, "--resume")
    assert "argument --resume: the newest run, 'runs/002', ended before it saved a state; start it again, with" in line


@pytest.mark.slow
def test_resume_without_run_starts_new_one(capfd):
    os.mkdir("states")
    Path("states/state-00000001.safetensors").touch()  # of another version, which wrote here
    assert train(*RUN, "--resume") == OK
    assert plan(capfd.readouterr().out)["resumed"] == "nothing: no state in 'runs/001/states'"


@pytest.mark.parametrize(
    ("state", "folder"),
    [("runs/001/states/state-00000001.safetensors", "runs/001"), ("states/x.safetensors", "."), ("x", None)],
)
def test_state_is_resumed_in_its_own_folder(state, folder, here):
    assert settings_of(f"--resume={state}").output_dir == folder


def test_run_that_fails_before_writing_leaves_no_folder(capfd, monkeypatch):
    monkeypatch.setattr(steps, "reporters", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.main(settings_of(*RUN))
    assert os.listdir() == ["runs"] and os.listdir("runs") == []


def test_folder_with_nonempty_files_is_not_removed(monkeypatch):
    """The lock of a run that has metrics stays, and its folder of states, in which it may be saving."""
    settings = settings_of(*RUN).in_folder("runs/001")
    os.makedirs("runs/001/states")
    Path("runs/001/states/.lock").touch()
    Path("runs/001/metrics.jsonl").write_text("{}")
    with pytest.raises(KeyboardInterrupt), outputs.no_empty_folder(settings):
        raise KeyboardInterrupt
    assert os.path.exists("runs/001/states/.lock")
    Path("runs/001/metrics.jsonl").write_text("")
    with pytest.raises(KeyboardInterrupt), outputs.no_empty_folder(settings):
        raise KeyboardInterrupt
    assert os.listdir("runs") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_only_writing_rank_removes_folder(rank, monkeypatch, capfd):
    """Another one may end while rank 0 is making its first file."""
    monkeypatch.setattr(steps, "reporters", lambda *arguments: 1 / 0)
    settings = settings_of(*RUN).in_folder("runs/001")
    os.makedirs("runs/001/states")
    task = task_of(settings)
    train, test = training.datasets(settings, task, None)
    model, network, _ = training.build(settings, task, train)
    models = steps.Models(network, model, settings, task, steps.facts_of("0", train, test), Group(rank, 2))
    with pytest.raises(ZeroDivisionError):
        steps.train(model, settings, train, models=models, evaluate=lambda stop: Accuracy(1, 1))
    assert os.path.isdir("runs/001/states") == (rank == 1)


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_too_long_path_is_one_line_error(resume, capfd):
    assert train(*RUN, f"--output_dir={'a' * 300}", *resume) == USAGE
    assert "File name too long" in one_line(capfd.readouterr().err)


def test_missing_state_leaves_no_folder(capfd):
    assert train(*RUN, "--resume=nope") == CHECKPOINT
    assert "'nope'" in one_line(capfd.readouterr().err) and os.listdir("runs") == []


def test_failed_resume_keeps_lock_of_active_run(here, capfd):
    with steps.Checkpointer("runs/001/states"):
        assert train(*RUN, "--resume", "--epochs=2") != OK
        assert os.path.exists("runs/001/states/.lock")


def test_stopped_run_keeps_its_folder(capfd, monkeypatch):
    asked = itertools.count(1)
    monkeypatch.setattr(steps.SIGNALS, "pending", lambda: next(asked) >= 2)
    assert train(*RUN) == TERMINATED
    assert os.listdir("runs/001/states") and not os.path.exists(DEFAULT)


def test_unwritable_runs_folder_exits_with_disk_code(tmp_path, capfd):
    (tmp_path / "runs").touch()
    assert "argument --output_dir: a folder in 'runs' can't be made: " in rejected(capfd, *RUN, code=DISK)


def _make(folder, barrier, numbers):
    os.chdir(folder)
    barrier.wait(timeout=60)
    numbers.put([outputs.new_run() for _ in range(20)])


def test_concurrent_runs_get_different_folders(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, numbers = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_make, args=(tmp_path, barrier, numbers)) for _ in range(4)]
    for process in processes:
        process.start()
    run_numbers = [number for _ in processes for number in numbers.get(timeout=60)]
    for process in processes:
        process.join()
    assert sorted(run_numbers) == list(range(1, 81)) and len(os.listdir("runs")) == 80


def test_ranks_use_the_folder_of_rank_0(monkeypatch):
    """Also if it can't: the others must not wait."""
    sent = []
    monkeypatch.setattr(steps, "total", lambda counts, group: sent.append(counts) or [7])
    assert steps.make_folders(settings_of(), Group(1, 2)).output_dir == "runs/007" and sent == [[0]]
    assert not os.path.exists("runs")
    monkeypatch.setattr(steps, "total", lambda counts, group: sent.append(counts) or [0])
    Path("runs").touch()
    for rank, message in ((0, "a folder in 'runs' can't be made"), (1, "rank 0 can't make the folder of the run")):
        with pytest.raises(Failure, match=message) as failure:
            steps.make_folders(settings_of(), Group(rank, 2))
        assert failure.value.code == DISK
    assert sent[1:] == [[0], [0]]


# The end of a run


def test_complete_run_is_reported_and_evaluated(here, capfd, monkeypatch):
    before = contents_of("runs/001")
    os.unlink(f"runs/001/{DEFAULT}")  # lost, for example because the disk was full
    assert train(*RUN, "--resume") == OK
    out = capfd.readouterr().out
    assert "resumed          runs/001/states/state-00000001.safetensors: 1 update, 1 epoch done\n" in out
    assert plan(out)["resumed"] == "nothing left to train: 1 of 1 epoch done (see --epochs)"
    assert closing(out)[2] == 360 and contents_of("runs/001") == before
    assert train(*RUN, "--resume", "--lr=0.5") == CHECKPOINT
    out, err = capfd.readouterr()
    assert "nothing left" not in out and one_line(err).endswith("Give --allow_config_change to resume anyway.")


@pytest.mark.slow
def test_keep_best_evaluates_last_model_once(capfd, monkeypatch):
    calls, evaluated = [], tasks.evaluate_together
    monkeypatch.setattr(tasks, "evaluate_together", lambda *arguments: calls.append(1) or evaluated(*arguments))
    assert train(*RUN, "--epochs=3", "--keep_best", "--save_every=2", "--eval_every=end") == OK
    out = capfd.readouterr().out
    assert len(re.findall("^the best so far: accuracy ", out, re.MULTILINE)) in (1, 2) and len(calls) == 2
    best = "runs/001/gradient_accumulation.best.ckpt"
    records = [read_record(path) for path in (f"runs/001/{DEFAULT}", best)]
    assert records[0]["correct"] == closing(out)[1] and records[1]["updates"] in (2, 3)


@pytest.mark.slow
def test_crash_in_last_evaluation_leaves_the_model(monkeypatch, capfd):
    monkeypatch.setattr(tasks, "evaluate_together", lambda *arguments: 1 / 0)
    assert train(*RUN) == 1
    record = read_record(DEFAULT)
    assert (record["updates"], record["correct"]) == (1, None) and record == read_record(f"runs/001/{DEFAULT}")


# Links in the folder of a run, which may be crafted


LINKS = ["metrics.jsonl", "states", "states/.lock", "tensorboard", "micro_batches.json", "mindspore.log", DEFAULT]
LINKS += [sidecar(DEFAULT), "gradient_accumulation.best.ckpt", "gradient_accumulation.previous.ckpt"]


@pytest.mark.host
@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_link_out_of_run_folder_is_rejected_before_writing(out, capfd, name, flag):
    target = Path("precious", name)
    target.parent.mkdir(parents=True)
    if (out / name).exists():
        shutil.move(out / name, target)
    else:
        target.write_text("mine")
    (out / name).symlink_to(target.absolute())
    message = rejected(capfd, *OUT, "--epochs=2", flag, code=DISK)
    path = f"out/{name}"
    assert (
        message == f"'{path}' can't be written: it leads to '{target.absolute()}', out of its folder. Remove the link."
    )


@pytest.mark.host
def test_dangling_link_is_rejected(tmp_path, capfd):
    (tmp_path / "out").mkdir()
    os.symlink("../new", "out/metrics.jsonl")
    assert "'out/metrics.jsonl' can't be written: it leads to" in rejected(capfd, *OUT, code=DISK)


@pytest.mark.slow
def test_links_chosen_by_user_are_followed(finished_run, out):
    """The folder itself, one within it, and the path that a flag names."""
    shutil.move("out", "elsewhere")
    os.symlink("elsewhere", "out")
    shutil.move("elsewhere/metrics.jsonl", "elsewhere/lines")
    os.symlink("lines", "elsewhere/metrics.jsonl")
    os.symlink("../model.ckpt", "elsewhere/named.ckpt")
    assert train(*OUT, "--epochs=2", "--resume", "--ckpt_path=out/named.ckpt") == OK
    assert os.path.islink("elsewhere/metrics.jsonl") and len(metrics("out")) == 2
    assert os.path.islink("elsewhere/named.ckpt") and read_record("model.ckpt") is None and os.path.isfile("model.ckpt")


@pytest.mark.slow
def test_hard_linked_file_is_not_changed(out):
    """A copy of a run by hard links: the other run keeps its lines."""
    shutil.copytree("out", "copy", copy_function=os.link)
    before = contents_of("copy")
    assert train(*OUT, "--epochs=2", "--resume") == OK
    assert contents_of("copy") == before and len(metrics("out")) == 2


@pytest.mark.host
def test_file_that_is_not_a_lock_is_not_emptied(out, capfd):
    Path("precious").write_text("mine")
    os.unlink("out/states/.lock")
    os.link("precious", "out/states/.lock")
    assert train(*OUT, "--epochs=2", "--resume") != OK
    assert "must be the empty file of a lock, but got 4 bytes. Remove it." in one_line(capfd.readouterr().err)
    assert Path("precious").read_text() == "mine"
