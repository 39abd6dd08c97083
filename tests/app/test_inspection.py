"""`python -m ms_accum.inspect` shows checkpoints and states, and rejects other files in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import nn
from safetensors.numpy import save_file

from ms_accum.app import inspection
from ms_accum.app.process import CHECKPOINT, OK, USAGE, run
from ms_accum.saving.model_file import save_model
from ms_accum.saving.training_state import VERSION, state_digest
from programs import one_line, train

pytestmark = pytest.mark.host
ROOT = Path(__file__).resolve().parents[2]


def inspect(*argv):
    return run(inspection.main, inspection.flags(), argv)


def shown(capfd, *argv):
    capfd.readouterr()
    assert inspect(*argv) == OK
    out, err = capfd.readouterr()
    assert err == ""
    return out.splitlines()


def facts(lines):
    return {line[:20].rstrip(): line[21:] for line in lines if not line.startswith("  ")}


def parameters(lines):
    return [line.split() for line in lines if line.startswith("  ")]


def save_state(path, arrays, content):
    text = json.dumps({"version": VERSION, **content})
    save_file(arrays, path, metadata={"facts": text, "sha256": state_digest(arrays, text)})


@pytest.mark.graph
def test_models_and_state_of_run_are_shown(capfd):
    argv = ("--model=mlp", "--epochs=1", "--batch_size=512", "--output_dir=out", "--ckpt_path=out/model.safetensors")
    assert train(*argv) == OK
    lines = shown(capfd, "out/model.safetensors")
    shown_facts = facts(lines)
    assert (
        shown_facts["kind"] == "model" and shown_facts["size"] == f"{os.path.getsize('out/model.safetensors'):,} bytes"
    )
    expected = {"model": "mlp", "dataset": "digits", "rows": "1437", "batch_size": "512", "seed": "1", "total": "360"}
    assert {name: shown_facts[name] for name in expected} == expected
    assert shown_facts["parameters"] == "6 with 669,706 elements"
    assert ["dense_relu_sequential.0.weight", "F32", "(512,", "784)"] in parameters(lines)
    lines = shown(capfd, "out/states/state-00000001.safetensors")
    shown_facts = facts(lines)
    expected = {"kind": "training state", "updates": "1", "position.epoch": "2", "model": "mlp", "classes": "10"}
    assert {name: shown_facts[name] for name in expected} == expected
    assert shown_facts["mini_steps"] == "4" and shown_facts["optimizer"] == "Momentum"
    assert ["optimizer.global_step", "int32", "(1,)"] in parameters(lines)


def test_model_without_record_is_shown(capfd, tmp_path):
    save_model(nn.Dense(2, 3), "a.ckpt")
    lines = shown(capfd, "a.ckpt")
    assert facts(lines)["record"] == "none" and facts(lines)["parameters"] == "2 with 9 elements"
    assert parameters(lines) == [["weight", "Float32", "(3,", "2)"], ["bias", "Float32", "(3,)"]]


def test_long_parameter_list_is_cut(capfd):
    save_file({f"p{number}": np.zeros(1, np.float32) for number in range(43)}, "many.safetensors")
    lines = shown(capfd, "many.safetensors")
    assert lines[-1] == "  ... and 3 more (--all shows them)" and len(parameters(lines)) == 41
    assert len(parameters(shown(capfd, "many.safetensors", "--all"))) == 43


def test_safetensors_of_other_programs_are_shown(capfd):
    """Types that NumPy has not, and characters that a terminal would obey."""
    header = {"\x1b[2Jweight\n": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    header["__metadata__"] = {"format": "pt", "record": "{}"}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    Path("other.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    lines = shown(capfd, "other.safetensors")
    assert parameters(lines) == [[r"\x1b[2Jweight\n", "BF16", "(2,", "2)"]]


@pytest.mark.parametrize(
    "content",
    [
        {"config": 3, "at": [1], "window": None, "updates": {"a": [1]}},
        {"config": {"notes": 7, "name\n": "x" * 10**6}},
        {"at": {"epoch\x1b": "\x07"}},
        {},
    ],
    ids=lambda content: ",".join(content),
)
def test_crafted_state_is_shown_in_short_printable_lines(content, capfd):
    save_state("strange.safetensors", {"a": np.zeros(2, np.float32)}, content)
    lines = shown(capfd, "strange.safetensors")
    assert facts(lines)["kind"] == "training state"
    assert all(line.isprintable() and len(line) < 500 for line in lines)


def damaged(path):
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    return bytes(content)


@pytest.mark.parametrize("name", ["a.ckpt", "a.safetensors", "state.safetensors"])
@pytest.mark.parametrize(
    "change",
    [lambda path: b"", lambda path: b"garbage\n" * 100, lambda path: path.read_bytes()[:-30], damaged],
    ids=["empty", "garbage", "cut", "damaged"],
)
def test_damaged_file_is_one_line_error(name, change, capfd, tmp_path):
    path = tmp_path / name
    if name.startswith("state"):
        save_state(path, {"a": np.arange(9, dtype=np.float32)}, {"config": {}})
    else:
        save_model(nn.Dense(2, 3), path)
    path.write_bytes(change(path))
    assert inspect(name) == CHECKPOINT
    out, err = capfd.readouterr()
    assert out == "" and name in one_line(err)


@pytest.mark.parametrize("text", [b"weight", b"Float32"], ids=["name", "type"])
def test_checkpoint_with_invalid_text_is_one_line_error(text, capfd):
    save_model(nn.Dense(2, 3), "whole.ckpt")
    content = Path("whole.ckpt").read_bytes()[: -len(b"crc_num") - 10]
    assert text in content
    Path("a.ckpt").write_bytes(content.replace(text, b"\xff" * len(text), 1))
    assert inspect("a.ckpt") == CHECKPOINT
    assert one_line(capfd.readouterr().err) == "'a.ckpt' is not a valid checkpoint: it can't be parsed."


@pytest.mark.parametrize("name", ["none.ckpt", "folder.ckpt", "notes.txt", "pipe.ckpt"])
def test_other_kind_of_file_is_one_line_error(name, capfd):
    os.mkdir("folder.ckpt")
    Path("notes.txt").touch()
    os.mkfifo("pipe.ckpt")
    assert inspect(name) == CHECKPOINT
    assert f"'{name}' is " in one_line(capfd.readouterr().err)


def test_wrong_flags_exit_with_usage_code(capfd):
    assert inspect() == USAGE and "FILE" in one_line(capfd.readouterr().err)


def test_safetensors_need_no_mindspore_and_closed_pipe_is_ignored(tmp_path):
    save_state(tmp_path / "state.safetensors", {f"p{n}": np.zeros(1, np.float32) for n in range(9999)}, {"config": {}})
    (tmp_path / "mindspore.py").write_text("raise ImportError('it is imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "ms_accum.inspect", "state.safetensors", "--all"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as program:
        assert program.stdout.readline() == f"{'file':20} state.safetensors\n"
        program.stdout.close()
        assert program.stderr.read() == "" and program.wait(timeout=60) == OK
